"""Rows for the sharding of trainers, which frameworks share but for the settings' names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.launchers.frameworks.core import transformer
from autotune.launchers.frameworks.tabular.table import ON, Row

_ALL_RANKS = "the state is spread over all ranks"
_SHARDS = "a checkpoint has a file for each rank's shards"


def shard_group(key: str, **more: Any) -> Row[Any]:
    """Return the row of FSDP's shard group size: ranks, out of the job's `world`, that share one copy."""
    unless = {**more.pop("unless", {}), _ALL_RANKS: lambda c: c.shard_group == c.world}
    return Row(
        knob="shard_group", key=key, read=lambda c: c.shard_group, fixed=_SHARDS, unless=unless, **more
    )


def resharding(key: str, **more: Any) -> Row[Any]:
    """Return the row of the switch that frees gathered weights after forward; it is never turned off."""
    return Row(knob="reshard_after_forward", key=key, grid=ON, **more)


def experts(
    key: str, *, stage: Callable[[Any], int], split: Callable[[Any], int] = lambda c: 0, **more: Any
) -> Row[Any]:
    """Return the row of Megatron's expert parallelism.

    `stage`: GPUs of a pipeline stage; `split`: expert tensor-parallel size, 0 for Megatron's default.
    """
    return Row(
        knob="expert_parallel",
        key=key,
        unless={"the model has no experts": lambda c: not c.experts},
        divides={"it divides the {value} experts": lambda c: c.experts},
        divides_with_tensor={
            "expert x tensor parallelism divides the {value} GPUs of a stage": lambda c: (
                0 if split(c) else stage(c)
            )
        },
        **more,
    )


def stages(key: str, *, chunks: Callable[[Any], int] = lambda c: 1, **more: Any) -> Row[Any]:
    """Return the row of Megatron's pipeline parallelism; `chunks`: virtual stages of a rank."""
    unless = {
        **more.pop("unless", {}),
        "the job writes which layers each stage has": lambda c: transformer.own_stages(c.field),
        "its stages are interleaved: their number is the job's": lambda c: chunks(c) > 1,
    }
    return Row(knob="pipeline_parallel", key=key, unless=unless, **more)
