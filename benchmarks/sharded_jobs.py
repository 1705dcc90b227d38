"""The jobs of benchmarks.estimate_sharded: models, sharding, precisions, and which models are held out."""

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks.architectures import ARCHITECTURES


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """How one model is spread and trained; sizes in bytes an element, one sequence a micro-batch."""

    name: str  # in MODELS
    layers: int = 0  # 0: as many as the model has
    shards: int = 8
    copies: int = 1  # of the shards: hybrid sharding
    tensor: int = 1
    sequence_parallel: bool = False
    # areal: the head in the root | verl: the head a unit | plain: both ends in the root
    # stage: no FSDP and no head, as a pipeline's first stage
    wrapping: str = "areal"
    tokens: int = 8192
    logits: bool = True  # else of one token, as a fused loss leaves them
    loss_bytes: int = 4
    recompute: bool = True
    parameter_bytes: int = 4
    reduce_bytes: int = 4
    reshard: bool = True  # after forward
    keeps_root: bool = False  # torch's own default, which reshards all but the root
    offload: bool = False
    passes: int = 1
    deferred: bool = False  # gradients are reduced with the last pass
    optimizer: str = "foreach"  # | fused | single


MODELS: dict[str, dict[str, Any]] = ARCHITECTURES | {
    "Qwen2.5-14B": ARCHITECTURES["Qwen2.5-32B"] | {"num_hidden_layers": 48, "intermediate_size": 13824}
}
# No formula was settled on these (docs/measured/estimate.md, section 5).
HELD_OUT = (
    "Qwen3-0.6B",
    "Phi-3-mini (3.8B)",
    "Gemma-7B (8.5B)",
    "OLMo-2-7B",
    "Mistral-7B-v0.3",
    "Qwen3-30B-A3B",
    "Llama-3.1-70B",
)

_SMALL, _SEVEN, _FOURTEEN, _LARGE = "Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B"
_UNTIED, _TIED, _WIDE, _PLAIN, _SPARSE = (
    "Llama-3.1-8B",
    "Qwen3-0.6B",
    "Gemma-7B (8.5B)",
    "Mistral-7B-v0.3",
    "Qwen3-30B-A3B",
)


def _cut(**changes: object) -> tuple[Job, ...]:
    """Return a change of the 7B cut to 8 layers, with few logits and with all."""
    base = Job(name=_SEVEN, layers=8)
    return tuple(msgspec.structs.replace(base, logits=logits, **changes) for logits in (False, True))


_WHOLE = (
    Job(name=_SMALL, shards=2),
    Job(name=_SMALL, recompute=False),
    Job(name=_SMALL, logits=False),
    Job(name=_SEVEN),
    Job(name=_SEVEN, wrapping="verl"),
    Job(name=_SEVEN, shards=64),
    Job(name=_SEVEN, shards=2, logits=False),
    Job(name=_SEVEN, logits=False),
    Job(name=_SEVEN, shards=256, logits=False),
    Job(name=_SEVEN, recompute=False),
    Job(name=_SEVEN, recompute=False, tokens=4096, logits=False),
    Job(name=_FOURTEEN, logits=False),
    Job(name=_FOURTEEN, shards=16),
    Job(name=_LARGE, shards=16),
    Job(name=_LARGE, shards=64, logits=False),
)
_VARIED = (
    *_cut(),
    *_cut(wrapping="verl"),
    *_cut(wrapping="plain"),
    *_cut(reshard=False),
    *_cut(wrapping="verl", reshard=False),
    *_cut(keeps_root=True),
    *_cut(offload=True),
    *_cut(wrapping="verl", offload=True),
    *_cut(passes=3),
    *_cut(passes=3, deferred=True),
    *_cut(copies=2),
    *_cut(parameter_bytes=2),
    *_cut(parameter_bytes=2, reduce_bytes=2),
    *_cut(reduce_bytes=2),
    *_cut(loss_bytes=2)[1:],
    *_cut(optimizer="fused")[:1],
    *_cut(optimizer="single")[:1],
    *_cut(shards=1)[:1],
    *_cut(tokens=1024)[:1],
    *_cut(tokens=1024, wrapping="verl")[:1],
    *_cut(tokens=2048, recompute=False)[:1],
)
_SPLIT = tuple(
    Job(
        name=_SEVEN,
        layers=4,
        shards=4,
        tensor=2,
        sequence_parallel=sequence,
        recompute=recompute,
        logits=recompute,
    )
    for sequence in (False, True)
    for recompute in (False, True)
)
_UNSEEN = (
    Job(name=_TIED),
    Job(name=_TIED, shards=2, logits=False),
    Job(name=_TIED, wrapping="verl", tokens=16384, recompute=False, logits=False),
    Job(name="Phi-3-mini (3.8B)", wrapping="verl"),
    Job(name="Phi-3-mini (3.8B)", wrapping="verl", reshard=False, logits=False),
    Job(name=_UNTIED),
    Job(name=_UNTIED, shards=16, wrapping="verl", logits=False),
    Job(name=_UNTIED, wrapping="verl", recompute=False, tokens=4096),
    Job(name=_UNTIED, shards=2, tensor=4, sequence_parallel=True),
    Job(name=_UNTIED, wrapping="verl", parameter_bytes=2, reduce_bytes=2, offload=True),
    Job(name=_WIDE, shards=16),
    Job(name=_WIDE, wrapping="verl", passes=2, logits=False),
    Job(name="OLMo-2-7B", shards=4, optimizer="fused"),
    Job(name="OLMo-2-7B", wrapping="verl", recompute=False, tokens=2048, logits=False),
    Job(name=_PLAIN, shards=4, tensor=2, sequence_parallel=True),
    Job(name=_PLAIN, shards=2, tensor=8, sequence_parallel=True, tokens=16384, recompute=False),
    Job(name=_PLAIN, shards=8, wrapping="verl", tokens=1024, logits=False),
    Job(name=_SPARSE, shards=16, logits=False),
    Job(name=_SPARSE, shards=32, wrapping="verl", tokens=4096),
    Job(name="Llama-3.1-70B", shards=64, logits=False),
)
JOBS = (*_VARIED, *_SPLIT, *_WHOLE, *_UNSEEN)
