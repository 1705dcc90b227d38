"""Megatron's parallel layout of a job: stages, experts, recomputation, offloading."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

from msgspec.structs import replace

from autotune.launchers.frameworks.core.splits import divisors
from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.profile import Grid

ValueOf: TypeAlias = Callable[[str], object]

NOTHING_KEPT = "a layer that is recomputed as a whole keeps nothing to offload"  # of activation_offload
# Fine-grained offloading asserts that it is 1, with Transformer Engine 2.10 (megatron/training/arguments.py).
OFFLOAD_VARIABLE = "NVTE_CPU_OFFLOAD_V1"
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
    """Return the fields of Layout for Megatron's parallel sizes (megatron/core/parallel_state.py).

    Sizes are numbers of ranks; `chunks`: virtual stages per rank; `expert_tensor`: 0 for Megatron's default,
    which is `tensor`. Without the distributed optimizer every rank holds the state of all its weights.
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
        # Expert parallelism uses ranks of data parallelism.
        "expert_shards": max(1, ranks // (expert_tensor * expert * pipeline)) if distributed else 1,
    }


def sizes(
    world: int, shape: Model | None, ranks: Callable[[str], int], *, etp: int
) -> dict[str, tuple[int, ...]]:
    """Return the expert- and pipeline-parallel sizes that divide a model's experts or layers, and the ranks.

    Pipeline sizes are multiples of the present one. `ranks` returns the present size of a kind; `etp`: the
    expert tensor-parallel size, 0 for Megatron's default, which is the tensor-parallel size.
    """
    tensor, pipeline = ranks("tensor_model"), ranks("pipeline_model")
    layers, experts = (0, 0) if shape is None else (shape.layers, shape.experts)
    split = etp or tensor
    whole = math.gcd(layers, world // (tensor * ranks("context")), world // (ranks("expert_model") * split))
    stages = (n for n in divisors(whole) if layers and n > pipeline and n % pipeline == 0)
    return {
        "expert_parallel": tuple(n for n in divisors(experts) if world // pipeline % (n * split) == 0),
        "pipeline_parallel": (pipeline, *stages),
    }


_OWN_STAGES = (
    "pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split", "microbatch_group_size_per_vp_stage", "mtp_num_layers",
)  # fmt: skip


def own_stages(value_of: ValueOf) -> bool:
    """Return whether a job says which layers its pipeline's stages have."""
    return any(value_of(name) for name in _OWN_STAGES)


_DISPATCHERS = ("alltoall", "allgather", "flex")


def with_transformer(layout: Layout, value_of: ValueOf, shape: Model | None = None) -> Layout:
    """Return a layout with a job's settings of pipeline stages, experts, recomputation and fp8.

    `value_of` returns the value of a field of TransformerConfig, None if the job leaves it out; a value of
    the wrong type counts as left out.
    """
    own, more = _modules(value_of("recompute_modules")), modules(value_of, shape)

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
        recompute_modules=() if more and set(more) == set(own) else own,
        more_modules=more,
        offload_modules=offloaded(value_of, shape),
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


def modules(value_of: ValueOf, shape: Model | None) -> tuple[str, ...]:
    """Return the modules that the mode `modules` recomputes: the job's own and those that pay for a model.

    In MoE models these are norms, expert activations and the MLP of dense layers, but not whole experts,
    whose tokens would be dispatched again; with latent attention its up-projections. With fp8, norms and
    activations are left out, because they need a certain recipe and release of Transformer Engine
    (megatron/core/transformer/transformer_config.py). Empty if the shape is unknown, and for other models,
    whose MLP costs almost as much as recomputing the whole layer.
    """
    if shape is None or not (shape.experts or shape.kv_lora_rank):
        return ()
    sparse = shape.experts > 0
    plain = sparse and value_of("fp8") not in _FP8
    own = {
        "mlp": sparse and shape.dense_layers > 0,
        "moe_act": plain and value_of("moe_grouped_gemm") is not False,
        "layernorm": plain,
        "mla_up_proj": shape.kv_lora_rank > 0,
    }
    written = _modules(value_of("recompute_modules"))
    return tuple(dict.fromkeys((*written, *(name for name, of in own.items() if of))))


def recompute(value_of: ValueOf, shape: Model | None) -> str:
    """Return the mode of recomputation."""
    granularity = value_of("recompute_granularity")
    if granularity not in ("selective", "full"):
        return "off"
    more = modules(value_of, shape)
    every = bool(more) and set(more) <= set(_modules(value_of("recompute_modules")))
    return "modules" if granularity == "selective" and every else str(granularity)


def recompute_modes(value_of: ValueOf, shape: Model | None, *, megatron: bool = True) -> dict[str, Grid]:
    """Return the grid of the knob `recompute` for a job's model with Megatron."""
    modes = ("off", "selective", *(["modules"] if modules(value_of, shape) else []), "full")
    return {"recompute": Grid(values=modes)} if megatron else {}


def recomputing(before: str | None, mode: str | None, more: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of TransformerConfig that change a job from one mode of recomputation to another."""
    full = mode == "full"
    named = {"recompute_modules": list(more)} if mode == "modules" else {}
    if before == "modules" and mode == "selective":
        named = {"recompute_modules": ["core_attn"]}  # Megatron's default
    return {
        "recompute_granularity": {"off": None, "full": "full"}.get(str(mode), "selective"),
        "recompute_method": "uniform" if full else None,
        "recompute_num_layers": 1 if full else None,
        **named,
    }


def offloaded(value_of: ValueOf, shape: Model | None, *, tensor: int = 1) -> tuple[str, ...]:
    """Return the modules whose inputs activation offload moves to host memory.

    The job's own list if it has one, else attention and the largest expert inputs. Megatron's notes say that
    `expert_fc1` is broken with tensor parallelism.
    """
    own = _modules(value_of("offload_modules"))
    if own:
        return own
    sparse = shape is not None and shape.experts > 0
    return (
        "core_attn",
        "attn_proj",
        *(["moe_act"] if sparse else []),
        *(["expert_fc1"] if sparse and tensor == 1 else []),
    )


_KINDS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_LONGEST = 10_000  # letters of a pipeline layout; no model has so many layers


def _stages(written: object, ranks: int) -> list[str]:
    """Return each rank's layers as letters, with `|` between its chunks; empty for an invalid layout.

    The text has the syntax of Megatron's pipeline_parallel_layer_layout.py: `Ett|(tt|)*6t|mL`. A list of
    lists holds the names of layers instead.
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
    """Return a layout with its repetitions expanded; empty if it becomes too long."""
    for pattern in (r"\(([^()]+)\)\*(\d{1,4})", r"([^()*])\*(\d{1,4})"):
        if len(text) > _LONGEST:
            return ""
        longest = _LONGEST // max(1, text.count("*"))
        text = re.sub(pattern, partial(_repeated, longest=longest), text)
    return text


def _repeated(match: re.Match[str], *, longest: int) -> str:
    return match[1] * min(int(match[2]), longest // len(match[1]))


def _modules(written: object) -> tuple[str, ...]:
    """Return the module names in a list or in the words of a flag."""
    words = written if isinstance(written, list) else [written]
    return tuple(name for word in words if isinstance(word, str) for name in re.findall(r"\w+", word))
