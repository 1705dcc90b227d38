"""What the policies need to know of a job: grids, constraints, residency, layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autotune.launchers.frameworks.core import residency, splits
from autotune.launchers.frameworks.core.declined import declined
from autotune.launchers.frameworks.core.host_allocators import SONAMES
from autotune.launchers.frameworks.core.optimizer_state import megatron_state_bytes
from autotune.launchers.frameworks.dialects.flags import Flags
from autotune.launchers.frameworks.megatron.job import (
    Dialect,
    Shape,
    can_rebuild_weights,
    needs_weights_backup,
)
from autotune.launchers.frameworks.megatron.knobs import most_concurrent
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import (
    AtLeast,
    AtMost,
    Constraint,
    Divides,
    FixedDuringRun,
    Grid,
    Placement,
    Requires,
    Support,
)
from autotune.policies.values.remedy import Effect

_MIB = 1 << 20
_TWO = (False, True)
# Bytes of a weight, by words in an engine's quantization or in its checkpoint's name; four bits carry scales
# and leave embeddings and head as they are (Qwen3-30B-A3B-INT4: 17 GB, Kimi-K2-Thinking: 594 GB).
_ENGINE_BYTES = (
    (("int4", "w4a", "awq", "gptq", "mxfp4", "nvfp4", "fp4"), 0.6),
    (("fp8", "w8a8", "int8", "mxfp"), 1.0),
)


# --------------------------------------------------------------------------- knobs on offer


def supported_of(flags: Flags, shape: Shape, dialect: Dialect) -> dict[str, Support]:
    """Return how the framework offers the knobs that mean something to this job."""
    context_sizes = splits.sizes(shape.context, shape.trainer_gpus // max(1, shape.tensor * shape.pipeline))
    result = {
        "concurrency": _support("sglang-max-running-requests", Grid(minimum=1)),
        "memory_fraction": _support(
            "sglang-mem-fraction-static", Grid(minimum=0.1, maximum=0.95, multiple=0.01)
        ),
        "rollout_tensor_parallel": _support(
            "rollout-num-gpus-per-engine", Grid(values=splits.sizes(shape.engine_size, shape.engine_gpus))
        ),
        "cuda_graphs": _support(dialect.graph_limit, Grid(values=("full", "limited", "off"))),
        "max_batched_tokens": _support("sglang-chunked-prefill-size", Grid(minimum=256, multiple=256)),
        "recompute": _support("recompute-granularity", Grid(values=("off", "selective", "full"))),
        "context_parallel": _support("context-parallel-size", Grid(values=context_sizes)),
        "tensor_parallel": _support("tensor-model-parallel-size", Grid(values=_tensor_sizes(flags, shape))),
        "loss_recompute": _support("recompute-loss-function", Grid(values=_TWO)),
        "logprob_chunk": _support("log-probs-chunk-size", Grid(minimum=64, multiple=64)),
        "sync_buffer": _support("update-weight-buffer-size", Grid(minimum=16 * _MIB, multiple=_MIB)),
        "memory_snapshot": _support("record-memory-history", Grid(values=_TWO)),
        "memory_profile": _support("use-pytorch-profiler", Grid(values=_TWO)),
        "optimizer_offload": _support("optimizer-cpu-offload", Grid(values=_TWO), numeric=True),
        "optimizer_offload_fraction": _support(
            "optimizer-offload-fraction", Grid(minimum=0.1, maximum=1.0, multiple=0.1), numeric=True
        ),
        "optimizer_offload_overlap": _support("overlap-cpu-optimizer-d2h-h2d", Grid(values=_TWO)),
        "dynamic_batching": _support("use-dynamic-batch-size", Grid(values=_TWO)),
        "tokens_per_microbatch": _support("max-tokens-per-gpu", Grid(minimum=64, multiple=64)),
        "microbatch_size": _support("micro-batch-size", Grid(minimum=1)),
        "logprob_tokens": _support("log-probs-max-tokens-per-gpu", Grid(minimum=64, multiple=64)),
        "param_offload": _support("offload-train", Grid(values=_TWO)),
        "sync_mode": _support("update-weight-transport", Grid(values=("memory", "disk"))),
        "host_allocator": _support("train-env-vars", Grid(values=("default", *SONAMES))),
        "allocator": _support("train-env-vars", Grid(values=("default", "expandable"))),
        "weights_backup": _support(dialect.weights_backup, Grid(values=(True, False))),
        "memory_margin": _support(
            "train-memory-margin-bytes", Grid(minimum=0, maximum=8 << 30, multiple=64 * _MIB)
        ),
        "dataloader_workers": _support(dialect.worker_pool, Grid(minimum=0)),
        "nccl_memory_check": _support("enable-cuda-memory-check", Grid(values=_TWO)),
    }
    refused = unsupported_of(flags, shape, dialect)
    return {name: support for name, support in result.items() if name not in refused}


def _scores_within_the_training_budget(flags: Flags, shape: Shape, dialect: Dialect) -> bool:
    apart = shape.reference and flags.has("log-probs-max-tokens-per-gpu")
    return shape.placement is not Placement.ASYNCHRONOUS and not apart


# The predicates that unsupported.yaml names.
UNSUPPORTED_WHEN: dict[str, Callable[[Flags, Shape, Dialect], bool]] = {
    "packs_by_tokens": lambda _, shape, __: shape.dynamic,
    "counts_sequences": lambda _, shape, __: not shape.dynamic,
    "pads": lambda flags, _, __: flags.text("qkv-format") == "bshd",
    "ignores_the_scoring_budget": lambda _, __, dialect: not dialect.logprob_budget,
    "scores_within_the_training_budget": _scores_within_the_training_budget,
    "has_no_loader": lambda flags, _, dialect: (
        not dialect.worker_pool or flags.count(dialect.worker_pool) == 0
    ),
    "optimizer_is_not_adam": lambda flags, _, __: (
        flags.text("optimizer", "adam") != "adam" or flags.on("use-stateless-adam")
    ),
    "devices_are_apart": lambda _, shape, __: shape.placement is not Placement.COLOCATED,
    "trains_a_critic": lambda _, shape, __: shape.critic,
    "trainer_sleeps": lambda _, shape, __: shape.offload_train,
    "trainer_stays": lambda _, shape, __: not shape.offload_train,
    "cannot_sync_by_disk": lambda _, __, dialect: dialect.disk_sync == "never",
    "syncs_changes_only": lambda _, __, dialect: dialect.disk_sync == "delta",
    "has_no_backup_switch": lambda _, __, dialect: not dialect.weights_backup,
    "needs_the_backup": lambda flags, _, dialect: (
        not dialect.rebuilds_weights and needs_weights_backup(flags)
    ),
    "cannot_rebuild_weights": lambda flags, shape, dialect: (
        dialect.rebuilds_weights and not can_rebuild_weights(flags, shape)
    ),
    "has_no_margin": lambda _, __, dialect: not dialect.memory_margin,
    "always_checks_nccl": lambda _, __, dialect: dialect.nccl_check == "always",
    "never_checks_nccl": lambda _, __, dialect: dialect.nccl_check == "never",
    "would_normalise_otherwise": lambda flags, shape, dialect: (
        dialect.per_token_context and shape.context == 1 and not flags.on("calculate-per-token-loss")
    ),
}


def unsupported_of(flags: Flags, shape: Shape, dialect: Dialect) -> dict[str, str]:
    """Return why the other knobs cannot be turned for this job."""
    return declined(__package__, UNSUPPORTED_WHEN, flags, shape, dialect)


def _support(setting: str, grid: Grid, *, numeric: bool = False) -> Support:
    return Support(setting=setting, grid=grid, effect=Effect.NUMERIC if numeric else Effect.EXACT)


def _tensor_sizes(flags: Flags, shape: Shape) -> tuple[int, ...]:
    """Return sizes that leave whole copies of the model, of its experts too."""
    sizes = splits.sizes(shape.tensor, shape.trainer_gpus // max(1, shape.pipeline * shape.context))
    fixed = flags.count("expert-tensor-parallel-size")
    return tuple(
        size
        for size in sizes
        if size == shape.tensor or shape.trainer_gpus % ((fixed or size) * shape.expert * shape.pipeline) == 0
    )


# --------------------------------------------------------------------------- constraints


def constraints_of(
    flags: Flags, shape: Shape, dialect: Dialect, knobs: Knobs, supported: Mapping[str, Support]
) -> Iterator[Constraint]:
    """Yield what limits the knobs, as data."""
    length = f"longest sequence {shape.longest}" if shape.longest else f"longest answer {shape.response}"
    for name in ("tokens_per_microbatch", "logprob_tokens"):
        yield AtLeast(
            knob=name,
            value=shape.floor,
            why=f"budget x context parallelism ({shape.context}) must hold the {length}: "
            "a longer one fills a micro-batch of its own",
        )
    yield AtMost(
        knob="concurrency", value=most_concurrent(shape), why="no engine is given more requests of a rollout"
    )
    yield AtMost(knob="sync_buffer", value=knobs.sync_buffer or 0, why="a larger bucket frees nothing")
    for knob, of, what in (
        ("tensor_parallel", shape.heads, "attention heads"),
        ("tensor_parallel", shape.kv_heads, "key-value heads"),
        ("tensor_parallel", shape.trainer_gpus // max(1, shape.pipeline * shape.context), "GPUs of a stage"),
        ("context_parallel", shape.trainer_gpus // max(1, shape.tensor * shape.pipeline), "GPUs of a stage"),
        ("rollout_tensor_parallel", shape.heads, "attention heads"),
        ("rollout_tensor_parallel", shape.engine_gpus, "GPUs of all engines"),
        (
            "microbatch_size",
            flags.count("global-batch-size") // shape.data_parallel,
            "samples of a rank",
        ),
    ):
        if of > 0:
            yield Divides(knob=knob, of=of, why=f"{of} {what} are split evenly")
    yield from splits.together(
        supported,
        "context_parallel",
        devices=shape.trainer_gpus // max(1, shape.pipeline),
        why=f"tensor x context parallelism divides the {shape.trainer_gpus} GPUs of the trainer",
    )
    yield Requires(
        knob="optimizer_offload_overlap",
        value=True,
        other="optimizer_offload",
        values=(True,),
        why="only an offloaded optimizer has copies to overlap",
    )
    if dialect.rebuilds_weights and "weights_backup" in supported:
        others = ("optimizer_offload",) if flags.on("use-precision-aware-optimizer") else ()
        for other in ("param_offload", *others):
            yield Requires(
                knob="weights_backup",
                value=False,
                other=other,
                values=(True,),
                why="the weights of a sleeping trainer are rebuilt from fp32 master weights of its own",
            )
    for knob in ("optimizer_offload", "optimizer_offload_fraction"):
        yield FixedDuringRun(knob=knob, why="the checkpoint holds the optimizer's state in another layout")
    for knob in ("tensor_parallel", "context_parallel"):
        yield FixedDuringRun(knob=knob, why="the checkpoint is sharded by the parallel sizes")


# --------------------------------------------------------------------------- memory


def resident_of(shape: Shape, dialect: Dialect) -> dict[str, tuple[str, ...]]:
    """Return who holds device memory in which phase of a colocated job; empty where they are apart."""
    if shape.placement is not Placement.COLOCATED:
        return {}
    return residency.colocated(
        reference=shape.reference,
        critic=shape.critic,
        engine_sleeps=shape.offload_rollout,
        trainer_sleeps=shape.offload_train,
        trainer_first=dialect.trainer_first,
    )


def layout_of(flags: Flags, shape: Shape) -> Layout:
    """Return how the job is spread and what it holds."""
    expert_tensor = flags.count("expert-tensor-parallel-size") or shape.tensor  # Megatron's default
    return Layout(
        strategy="megatron",
        ranks=shape.trainer_gpus,
        shards=shape.data_parallel * shape.context,
        pipeline_parallel=shape.pipeline,
        pipeline_chunks=_pipeline_chunks(flags, shape),
        expert_parallel=shape.expert,
        expert_tensor_parallel=expert_tensor,
        expert_shards=max(1, shape.trainer_gpus // (expert_tensor * shape.expert * shape.pipeline)),
        engine_ranks=shape.engine_gpus,
        parameter_bytes=2,
        compute_bytes=2,
        gradient_bytes=2 if flags.on("grad-reduce-in-bf16") else 4,
        optimizer_bytes=_optimizer_bytes(flags),
        logits_bytes=4,
        engine_bytes=_engine_bytes(flags),
        kv_bytes=1 if flags.text("sglang-kv-cache-dtype").startswith("fp8") else 2,
        reference=shape.reference,
        # Its weights lie in host memory and take the place of the actor's for their own pass.
        reference_offload=shape.reference,
        critic=shape.critic,
        critic_offload=shape.critic and shape.offload_train,
        lora_rank=0,
        entropy=True,  # a metric of every update, with or without its coefficient
        engine_sleeps=shape.offload_rollout,
        engine_weights_on_host=flags.on("sglang-enable-weights-cpu-backup"),
        trainer_sleeps=shape.offload_train,
        optimizer_stays_offloaded=True,
        parameters_stay_offloaded=False,
        tokens_before_split=False,
        padded=flags.text("qkv-format") == "bshd",
        logits_share=1.0,
        chunked_head=False,
        # Adam runs fused and in place on the buffers of gradients and weights.
        per_tensor_optimizer=True,
        optimizer_temporary_bytes=0,
        sync_buckets=2,
        sequences=shape.batch * shape.samples,
        mini_batch=min(flags.count("global-batch-size"), shape.batch * shape.samples),
        prompt_tokens=shape.prompt,
        response_tokens=shape.response,
    )


def _pipeline_chunks(flags: Flags, shape: Shape) -> int:
    """Return into how many chunks a stage's layers are cut; Megatron takes their number or their size."""
    layers = flags.count("num-layers-per-virtual-pipeline-stage")
    of_size = flags.count("num-layers") // (shape.pipeline * layers) if layers else 1
    return max(1, flags.count("num-virtual-stages-per-pipeline-rank") or of_size)


def _optimizer_bytes(flags: Flags) -> int:
    if flags.on("use-stateless-adam"):
        return 4  # the master weights: moments live for one step (stateless_adam.py)
    return megatron_state_bytes(
        flags.text("optimizer", "adam"),
        parameter_bytes=2,
        precise=flags.on("use-precision-aware-optimizer"),
        on_host=flags.on("optimizer-cpu-offload"),
        master=flags.text("main-params-dtype", "fp32"),
        moments=(flags.text("exp-avg-dtype", "fp32"), flags.text("exp-avg-sq-dtype", "fp32")),
    )


def _engine_bytes(flags: Flags) -> float:
    """Return the bytes of a weight in the engines, which load the checkpoint and may quantize it."""
    checkpoint = flags.text("hf-checkpoint").rstrip("/").rpartition("/")[2]
    words = f"{flags.text('sglang-quantization')} {checkpoint}".lower()
    return next((size for names, size in _ENGINE_BYTES if any(name in words for name in names)), 2.0)
