"""Profiles as the adapters give them: what each framework lets change, and within which limits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from random import Random

from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import (
    AtLeast,
    Constraint,
    Divides,
    FixedDuringRun,
    Grid,
    Placement,
    Profile,
    Requires,
    Support,
)
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value

_TWO = (False, True)
_SHARE = Grid(minimum=0.1, maximum=0.95, multiple=0.01)
_COUNT = Grid(minimum=1, multiple=1)
_TRAINING = ("log_prob", "forward", "backward", "optimizer")


class Offer(Value, frozen=True, kw_only=True):
    """What one framework is like."""

    strategies: tuple[str, ...]
    placements: tuple[Placement, ...]
    engines: tuple[str, ...]
    knobs: dict[str, Grid]
    trainer_sleeps: bool = False
    state_on_cpu: bool = False
    numeric: tuple[str, ...] = ("fused_kernels",)  # knobs that change results by rounding


_COMMON = {
    "concurrency": _COUNT,
    "memory_fraction": _SHARE,
    "tokens_per_microbatch": Grid(minimum=256, multiple=256),
    "recompute": Grid(values=("off", "full")),
    "max_batched_tokens": Grid(minimum=512, multiple=512),
}
_VERL = _COMMON | {
    "cuda_graphs": Grid(values=("full", "off")),
    "logprob_tokens": Grid(minimum=256, multiple=256),
    "param_offload": Grid(values=_TWO),
    "optimizer_offload": Grid(values=_TWO),
    "rollout_tensor_parallel": Grid(values=(1, 2, 4, 8)),
    "dataloader_workers": Grid(minimum=0, maximum=16, multiple=1),
    "entropy_chunking": Grid(values=_TWO),
    "entropy_recompute": Grid(values=_TWO),
    "sync_buffer": Grid(minimum=64 << 20, maximum=4 << 30, multiple=64 << 20),
}
_MEGATRON = _COMMON | {
    "recompute": Grid(values=("off", "selective", "full")),
    "cuda_graphs": Grid(values=("full", "limited", "off")),
    "logprob_chunk": Grid(minimum=128, multiple=128),
    "optimizer_offload": Grid(values=_TWO),
    "rollout_tensor_parallel": Grid(values=(1, 2, 4, 8)),
    "sync_buffer": Grid(minimum=64 << 20, maximum=4 << 30, multiple=64 << 20),
    "tensor_parallel": Grid(values=(1, 2, 4, 8)),
}
_APART = (Placement.SEPARATE, Placement.ASYNCHRONOUS)
OFFERS: dict[str, Offer] = {
    "verl": Offer(
        strategies=("fsdp", "fsdp2"),
        placements=(Placement.COLOCATED,),
        engines=("vllm", "sglang"),
        knobs=_VERL | {"activation_offload": Grid(values=_TWO), "fused_kernels": Grid(values=_TWO)},
    ),
    "verl-megatron": Offer(
        strategies=("megatron",),
        placements=(Placement.COLOCATED,),
        engines=("vllm", "sglang"),
        knobs=_VERL | {"recompute": Grid(values=("off", "selective", "full"))},
    ),
    "areal": Offer(
        strategies=("fsdp2",),
        placements=_APART,
        engines=("sglang", "vllm"),
        knobs=_COMMON
        | {"cuda_graphs": Grid(values=("full", "off")), "sync_mode": Grid(values=("memory", "disk"))},
    ),
    "relax": Offer(
        strategies=("megatron",),
        placements=(Placement.COLOCATED,),
        engines=("sglang",),
        knobs=_MEGATRON | {"weights_backup": Grid(values=(True, False))},
        numeric=("optimizer_offload",),
        trainer_sleeps=True,
        state_on_cpu=True,
    ),
    "slime": Offer(
        strategies=("megatron",),
        placements=(Placement.COLOCATED, Placement.SEPARATE),
        engines=("sglang",),
        knobs=_MEGATRON | {"loss_recompute": Grid(values=_TWO)},
        numeric=("optimizer_offload",),
        trainer_sleeps=True,
        state_on_cpu=True,
    ),
    "builtin": Offer(
        strategies=("fsdp2",),
        placements=(Placement.SEPARATE,),
        engines=("sglang",),
        knobs=_COMMON
        | {
            "logprob_tokens": Grid(minimum=64, multiple=64),
            "logprob_chunk": Grid(minimum=16, multiple=16),
            "activation_offload": Grid(values=_TWO),
            "param_offload": Grid(values=_TWO),
            "optimizer_offload": Grid(values=_TWO),
            "loss_recompute": Grid(values=_TWO),
            "sync_mode": Grid(values=("memory", "disk")),
            "dataloader_workers": Grid(minimum=0, multiple=1),
        },
        state_on_cpu=True,
    ),
}


def profile(
    name: str, offer: Offer, *, model: Model, layout: Layout, knobs: Knobs, placement: Placement, engine: str
) -> Profile:
    """Return the profile that an adapter of this framework would give for such a job."""
    longest = layout.prompt_tokens + layout.response_tokens
    supported = {
        knob: Support(
            setting=f"{name}.{knob}",
            grid=grid,
            effect=Effect.NUMERIC if knob in offer.numeric else Effect.EXACT,
        )
        for knob, grid in offer.knobs.items()
    }
    constraints: list[Constraint] = [
        AtLeast(knob=knob, value=longest, why=f"a pass holds at least one sequence of {longest} tokens")
        for knob in ("tokens_per_microbatch", "logprob_tokens")
        if knob in supported
    ]
    if "rollout_tensor_parallel" in supported:
        constraints.append(
            Divides(knob="rollout_tensor_parallel", of=model.kv_heads, why="each rank holds whole KV heads")
        )
        constraints.append(
            Divides(knob="rollout_tensor_parallel", of=layout.engine_ranks, why="engines fill the devices")
        )
    if "tensor_parallel" in supported:
        constraints.append(FixedDuringRun(knob="tensor_parallel", why="checkpoints are sharded by it"))
        constraints.append(
            Divides(knob="tensor_parallel", of=1 if layout.strategy == "none" else 8, why="a node")
        )
    if name == "builtin":
        constraints.append(
            Requires(
                knob="param_offload",
                value=True,
                other="optimizer_offload",
                values=(True,),
                why="the state follows the weights",
            )
        )
    if name == "areal":
        constraints += _together("param_offload", "optimizer_offload", why="one policy moves both")
    asleep = placement is Placement.COLOCATED and offer.trainer_sleeps
    resident: dict[str, tuple[str, ...]] = {}
    if placement is Placement.COLOCATED:
        resident = dict.fromkeys(_TRAINING, ("trainer",) if layout.engine_sleeps else ("trainer", "rollout"))
        both = ("rollout",) if asleep else ("trainer", "rollout")
        resident |= {"rollout": both, "rollout_init": both, "weight_sync": ("trainer", "rollout")}
    return Profile(
        framework=name.partition("-")[0],
        knobs=knobs,
        supported=supported,
        constraints=tuple(constraints),
        placement=placement,
        resident=resident,
        engine=engine,
        longest_sequence=longest,
        layout=layout,
    )


def _together(*switches: str, why: str) -> Iterator[Requires]:
    """Yield what keeps two switches in the same position."""
    for knob, other in permutations(switches, 2):
        yield Requires(knob=knob, value=True, other=other, values=(True,), why=why)
        yield Requires(knob=knob, value=False, other=other, values=(False, None), why=why)


def written(
    rng: Random, offer: Offer, *, longest: int, sequences: int, tensor: int, rollout_tp: int
) -> Knobs:
    """Return a configuration such as people write: generous, from an example of another machine."""
    tokens = max(-(-longest // 256) * 256, rng.choice((8192, 12_288, 16_384, 24_576, 32_768, 49_152)))
    offered = offer.knobs
    return Knobs(
        concurrency=rng.choice((64, 128, 256, 512)) if sequences else 64,
        memory_fraction=rng.choice((0.5, 0.6, 0.7, 0.8, 0.85, 0.9)),
        rollout_tensor_parallel=rollout_tp if "rollout_tensor_parallel" in offered else None,
        cuda_graphs="full" if "cuda_graphs" in offered else None,
        max_batched_tokens=rng.choice((8192, 16_384)),
        tokens_per_microbatch=tokens,
        dynamic_batching=True,
        recompute=rng.choice(("off", "full")),
        activation_offload=False if "activation_offload" in offered else None,
        param_offload=False if "param_offload" in offered else None,
        optimizer_offload=False if "optimizer_offload" in offered else None,
        tensor_parallel=tensor if "tensor_parallel" in offered else None,
        fused_kernels=False if "fused_kernels" in offered else None,
        loss_recompute=False if "loss_recompute" in offered else None,
        logprob_tokens=tokens * rng.choice((1, 1, 2)) if "logprob_tokens" in offered else None,
        entropy_chunking=False if "entropy_chunking" in offered else None,
        entropy_recompute=False if "entropy_recompute" in offered else None,
        sync_mode="memory" if "sync_mode" in offered else None,
        sync_buffer=rng.choice((512 << 20, 1 << 30, 2 << 30)) if "sync_buffer" in offered else None,
        weights_backup=True if "weights_backup" in offered else None,
        dataloader_workers=rng.choice((2, 8)) if "dataloader_workers" in offered else None,
        allocator="default" if "allocator" in offered else None,
    )
