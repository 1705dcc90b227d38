"""What the policies need to know of an OpenRLHF job: grids, constraints, residency, layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from autotune.launchers.frameworks.core import splits
from autotune.launchers.frameworks.dialects.flags import Flags
from autotune.launchers.frameworks.openrlhf.job import Shape
from autotune.launchers.frameworks.openrlhf.knobs import FLAGS
from autotune.launchers.frameworks.tabular.rows import declined, declined_rows
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.profile import (
    AtLeast,
    Constraint,
    Divides,
    FixedDuringRun,
    Grid,
    Placement,
    Requires,
    Support,
)
from autotune.policies.values.remedy import Effect

_TWO = (False, True)
_NUMERIC = ("optimizer_offload", "fused_kernels")
_TOKENS = Grid(minimum=64, multiple=64)
# The predicates that unsupported.yaml names.
UNSUPPORTED_WHEN: dict[str, Callable[[Flags, Shape], bool]] = {
    "packs_by_tokens": lambda _, shape: shape.dynamic,
    "counts_sequences": lambda _, shape: not shape.dynamic,
    "devices_are_apart": lambda _, shape: shape.placement is not Placement.COLOCATED,
    "optimizer_is_on_the_host": lambda flags, _: flags.on("ds.adam_offload"),
    "optimizer_is_not_adam": lambda flags, _: flags.text("actor.optim", "adam") != "adam",
    "has_no_ring": lambda _, shape: shape.ring == 1,
    "shards_parameters": lambda _, shape: shape.stage == 3,
    "balances_experts_by_pass": lambda flags, _: flags.number("actor.aux_loss_coef") > 0,
    "has_no_loader": lambda flags, _: flags.count("data.dataloader_num_workers") == 0,
}


def unsupported_of(flags: Flags, shape: Shape) -> dict[str, str]:
    """Return why the other knobs cannot be turned for this job."""
    return declined(
        declined_rows(__package__), lambda row: not row.when or UNSUPPORTED_WHEN[row.when](flags, shape)
    )


def supported_of(flags: Flags, shape: Shape) -> dict[str, Support]:
    """Return how OpenRLHF offers the knobs that mean something to this job."""
    grids = {
        "memory_fraction": Grid(minimum=0.1, maximum=0.98, multiple=0.01),
        "rollout_tensor_parallel": Grid(values=splits.sizes(shape.engine_size, shape.engine_gpus)),
        "cuda_graphs": Grid(values=("full", "off")),
        "tokens_per_microbatch": _TOKENS,
        "logprob_tokens": _TOKENS,
        "microbatch_size": Grid(minimum=1),
        "recompute": Grid(values=("off", "full")),
        "grad_offload": Grid(values=_TWO),
        "optimizer_offload": Grid(values=_TWO),
        "context_parallel": Grid(values=splits.sizes(shape.ring, shape.actors // shape.tensor)),
        "tensor_parallel": Grid(values=splits.sizes(shape.tensor, shape.actors // shape.ring)),
        "fused_kernels": Grid(values=_TWO),
        "dataloader_workers": Grid(minimum=0),
    }
    refused = unsupported_of(flags, shape)
    return {
        name: Support(
            setting=FLAGS[name], grid=grid, effect=Effect.NUMERIC if name in _NUMERIC else Effect.EXACT
        )
        for name, grid in grids.items()
        if name not in refused
    }


def constraints_of(shape: Shape, supported: Mapping[str, Support]) -> Iterator[Constraint]:
    """Yield what limits the knobs, as data."""
    split = shape.ring * shape.tensor
    why = f"budget x ring x tensor parallelism ({split}) must hold the longest sequence {shape.longest}"
    for name in ("tokens_per_microbatch", "logprob_tokens"):
        yield AtLeast(knob=name, value=shape.floor, why=why)
    for knob, of, what in (
        ("microbatch_size", shape.update // shape.data_parallel, "samples of a rank"),
        ("tensor_parallel", shape.heads, "attention heads"),
        ("rollout_tensor_parallel", shape.heads, "attention heads"),
        ("rollout_tensor_parallel", shape.engine_gpus, "GPUs of all engines"),
    ):
        if of > 0:
            yield Divides(knob=knob, of=of, why=f"{of} {what} are split evenly")
    yield from splits.together(
        supported,
        "context_parallel",
        devices=shape.actors,
        why=f"ring x tensor parallelism divides the {shape.actors} GPUs of the trainer",
    )
    yield Requires(
        knob="grad_offload",
        value=True,
        other="optimizer_offload",
        values=(False,),
        why="an optimizer on the host leaves nothing to move",
    )
    yield FixedDuringRun(knob="optimizer_offload", why="the checkpoint holds the other optimizer's state")
    for knob in ("tensor_parallel", "context_parallel"):
        yield FixedDuringRun(knob=knob, why="the checkpoint is sharded over the ranks")


def layout_of(flags: Flags, shape: Shape) -> Layout:
    """Return how the job is spread and what it holds.

    ZeRO-3 shards as FSDP does; below it every rank holds the weights, as with Megatron's optimizer. Adam's
    state counts outside the update too, where --ds.enable_sleep moves it: too much rather than too little.
    """
    sharded = shape.stage == 3
    return Layout(
        strategy="fsdp2" if sharded else "megatron",
        ranks=shape.actors,
        shards=shape.actors // shape.tensor,
        engine_ranks=shape.engine_gpus,
        parameter_bytes=2,
        compute_bytes=2,
        gradient_bytes=4 if flags.text("ds.grad_accum_dtype") in ("fp32", "float32") else 2,
        optimizer_bytes=12,  # fp32 master weights and moments
        logits_bytes=4,
        reference=shape.reference,
        reference_bytes=2,
        reference_offload=flags.on("ref.offload"),
        critic=shape.critic,
        critic_offload=False,
        lora_rank=flags.count("ds.lora.rank"),
        entropy=flags.has("actor.entropy_coef"),
        engine_sleeps=shape.sleeps,
        optimizer_stays_offloaded=True,
        padded=not shape.packed,
        sync_buckets=1,
        sequences=shape.batch,
        mini_batch=min(shape.update, shape.batch),
        prompt_tokens=shape.longest - shape.response,
        response_tokens=shape.response,
    )
