"""How Megatron spreads a job: its parallel sizes, and what TransformerConfig says of stages and experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from autotune.policies.values.architecture.model import Layout

_FP8 = ("e4m3", "hybrid")


def spread(
    *,
    ranks: int,
    tensor: int,
    pipeline: int = 1,
    expert: int = 1,
    expert_tensor: int = 0,
    chunks: int = 1,
    distributed: bool = True,
) -> dict[str, Any]:
    """Return the fields of Layout that say how Megatron spreads a job (megatron/core/parallel_state.py).

    Sizes are numbers of ranks; `chunks`: parts of a stage; `expert_tensor`: 0 for Megatron's default, that of
    `tensor`. Without the distributed optimizer every rank has the state of all its weights.
    """
    expert_tensor = expert_tensor or tensor
    return {
        "strategy": "megatron",
        "ranks": ranks,
        "shards": max(1, ranks // (tensor * pipeline)) if distributed else 1,
        "pipeline_parallel": pipeline,
        "pipeline_chunks": chunks,
        "expert_parallel": expert,
        "expert_tensor_parallel": expert_tensor,
        # Experts take their ranks from data parallelism.
        "expert_shards": max(1, ranks // (expert_tensor * expert * pipeline)) if distributed else 1,
    }


_DISPATCHERS = ("alltoall", "allgather", "flex")


def with_transformer(layout: Layout, value_of: Callable[[str], object]) -> Layout:
    """Return a layout with the stages, the experts and the type of the products that a job's settings say.

    `value_of` returns the value of a field of TransformerConfig, None where the job leaves it out; what is no
    number or no switch counts as left out.
    """

    def count(name: str) -> int:
        value = value_of(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    dispatcher = value_of("moe_token_dispatcher_type")
    stages = _stages(value_of("pipeline_model_parallel_layout"), layout.pipeline_parallel)
    if stages:
        layout = replace(
            layout,
            stage_layers=tuple(stage.count("t") for stage in stages),
            pipeline_chunks=stages[0].count("|") + 1,
            predicting_after=next((after for after, stage in enumerate(reversed(stages)) if "m" in stage), 0),
        )
    return replace(
        layout,
        predicting_layers=count("mtp_num_layers") or layout.predicting_layers,
        dispatcher=dispatcher if dispatcher in _DISPATCHERS else layout.dispatcher,
        recompute_modules=_modules(value_of("recompute_modules")),
        pipeline_group=count("microbatch_group_size_per_vp_stage"),
        # Interleaved experts' communication begins one micro-batch ahead (combined_1f1b).
        pipeline_ahead=int(value_of("overlap_moe_expert_parallel_comm") is True),
        first_stage_layers=count("num_layers_in_first_pipeline_stage"),
        last_stage_layers=count("num_layers_in_last_pipeline_stage"),
        embedding_is_layer=value_of("account_for_embedding_in_pipeline_split") is True,
        loss_is_layer=value_of("account_for_loss_in_pipeline_split") is True,
        fp8=value_of("fp8") in _FP8,
        fp8_weights=value_of("fp8_param") is True,
    )


_KINDS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_LONGEST = 10_000  # letters of a pipeline's layout, more than any model has layers


def _stages(written: object, ranks: int) -> list[str]:
    """Return each rank's layers by their letters, its chunks apart by `|`; empty where the layout is no one.

    The text is that of Megatron's pipeline_parallel_layer_layout.py: `Ett|(tt|)*6t|mL`. A list of lists holds
    names.
    """
    if isinstance(written, str):
        chunks = _unrolled(re.sub(r"[\s,'\"]", "", written)).split("|")
    elif isinstance(written, list) and all(isinstance(row, list) for row in written):
        chunks = ["".join(_KINDS.get(str(kind).strip().lower(), "?") for kind in row) for row in written]
    else:
        return []
    if ranks < 2 or len(chunks) % ranks or not set("".join(chunks)) <= set("EtmL"):
        return []
    return ["|".join(chunks[rank::ranks]) for rank in range(ranks)]


def _unrolled(text: str) -> str:
    """Return a layout with its repetitions written out; empty where it is too long for one."""
    for pattern in (r"\(([^()]+)\)\*(\d{1,4})", r"([^()*])\*(\d{1,4})"):
        if len(text) > _LONGEST:
            return ""
        longest = _LONGEST // max(1, text.count("*"))
        text = re.sub(pattern, partial(_repeated, longest=longest), text)
    return text


def _repeated(found: re.Match[str], *, longest: int) -> str:
    return found[1] * min(int(found[2]), longest // len(found[1]))


def _modules(written: object) -> tuple[str, ...]:
    """Return the modules that a list, or the words of a flag, name."""
    words = written if isinstance(written, list) else [written]
    return tuple(name for word in words if isinstance(word, str) for name in re.findall(r"\w+", word))
