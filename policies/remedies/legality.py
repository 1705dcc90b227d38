"""Check which knobs a framework accepts, by the profile's grids and constraints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import assert_never

from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.formatting import show_value
from autotune.policies.values.knobs import Knobs, Setting, changed, is_number
from autotune.policies.values.profile import (
    AtLeast,
    AtMost,
    Constraint,
    Divides,
    FixedDuringRun,
    Grid,
    Profile,
    Requires,
)

# Knobs that split a model or a sequence over ranks. Megatron's sequence parallelism needs no own ranks.
_MEGATRON_SPLITS = ("tensor_parallel", "context_parallel")
_SPLITS = (*_MEGATRON_SPLITS, "sequence_parallel")
_TOLERANCE = 1e-6  # of a step: shares such as 0.07 are not exact in binary


def objections(profile: Profile, before: Knobs, after: Knobs, *, started: bool) -> tuple[str, ...]:
    """Return the reasons why `after` may not replace `before`; empty if it may.

    Only changes are checked, because the job's own values are the user's decision. `started`: a checkpoint
    may exist, so knobs that it depends on must not change.
    """
    names = changed(before, after)
    result = [text for name in names if (text := _support(profile, name, getattr(after, name)))]
    for constraint in profile.constraints:
        text = _constraint(constraint, before, after, frozenset(names), started=started)
        if text:
            result.append(text)
    if text := _layout(profile, before, after):
        result.append(text)
    return tuple(result)


def interlock(profile: Profile, knobs: Iterable[str]) -> bool:
    """Return whether the legal values of one of these knobs depend on another of them."""
    sizes = {*_splits(profile), "pipeline_parallel", "microbatch_size", "dynamic_batching"}
    bound = sizes & set(knobs)
    return len(bound) > 1 or any(isinstance(constraint, Requires) for constraint in profile.constraints)


def _splits(profile: Profile) -> tuple[str, ...]:
    return _MEGATRON_SPLITS if profile.layout.strategy == "megatron" else _SPLITS


def _layout(profile: Profile, before: Knobs, after: Knobs) -> str:
    """Return why the trainer's parallel sizes do not fit its devices and its batch; empty if they do."""
    layout = profile.layout
    splits = _splits(profile)

    def ranks(knobs: Knobs) -> int:
        return math.prod(int(getattr(knobs, knob) or 1) for knob in splits) * _pipeline(layout, knobs)

    # If the running job does not fit either, its layout differs from the profile's.
    if layout.ranks < 2 or layout.ranks % ranks(before):
        return ""
    if layout.ranks % ranks(after) == 0:
        return _experts(layout, before, after) or _batch(
            layout, before, layout.ranks // ranks(before), after, layout.ranks // ranks(after)
        )
    sizes = {knob: int(getattr(after, knob) or 1) for knob in splits}
    parts = [f"{knob} {size}" for knob, size in sizes.items() if size > 1]
    if _pipeline(layout, after) > 1:
        parts.append(f"pipeline_parallel {_pipeline(layout, after)}")
    return f"{' × '.join(parts)} does not divide the trainer's {layout.ranks} devices"


def _pipeline(layout: Layout, knobs: Knobs) -> int:
    return knobs.pipeline_parallel or layout.pipeline_parallel


def _experts(layout: Layout, before: Knobs, after: Knobs) -> str:
    """Return why other stages of a pipeline have no room for the ranks of experts; empty if they have.

    A size of experts' tensor parallelism that is the model's is taken to follow it.
    """
    if _pipeline(layout, before) == _pipeline(layout, after):
        return ""
    tensor = layout.expert_tensor_parallel
    if tensor == (before.tensor_parallel or 1):
        tensor = after.tensor_parallel or 1
    experts, stage = after.expert_parallel or layout.expert_parallel, layout.ranks // _pipeline(layout, after)
    if stage % (experts * tensor) == 0:
        return ""
    return f"expert_parallel {experts} × {tensor} does not divide the {stage} devices of a stage"


def _batch(layout: Layout, before: Knobs, replicas_before: int, after: Knobs, replicas: int) -> str:
    """Return why an update's samples no longer divide into equal micro-batches of all data-parallel ranks.

    Empty if they do. Megatron (core/num_microbatches_calculator.py) and DeepSpeed (runtime/config.py) assert
    it at the start.
    """
    samples = layout.mini_batch or layout.sequences
    size = _fixed_size(after)
    if samples % (replicas_before * _fixed_size(before)):
        return ""
    if samples % (replicas * size):
        passes = f" in micro-batches of {size}" if size > 1 else ""
        return (
            f"{samples} samples of an update do not divide evenly over {replicas} data-parallel ranks{passes}"
        )
    # The running job's micro-batches fill the groups, or its layout differs from the profile's.
    old, new = _group(layout, before), _group(layout, after)
    if new and samples // (replicas * size) % new:
        if old and samples // (replicas_before * _fixed_size(before)) % old:
            return ""
        left = f"{samples // (replicas * size)} micro-batches of a rank do not fill"
        return f"{left} the interleaved pipeline's groups of {new}"
    return ""


def _group(layout: Layout, knobs: Knobs) -> int:
    """Return the number of which a rank's micro-batches must be a multiple; 0: any number is legal.

    Otherwise Megatron (core/pipeline_parallel/schedules.py) raises at the first step of an interleaved
    pipeline. Frameworks that pack micro-batches round them to whole groups.
    """
    if layout.pipeline_chunks < 2 or knobs.dynamic_batching:
        return 0
    return layout.pipeline_group or layout.pipeline_parallel


def _fixed_size(knobs: Knobs) -> int:
    """Return the samples of every micro-batch; 1 if micro-batches are packed by tokens."""
    return 1 if knobs.dynamic_batching else int(knobs.microbatch_size or 1)


def on_grid(grid: Grid, value: Setting) -> bool:
    """Return whether `value` is on the grid; None, the framework's default, always is."""
    if value is None:
        return True
    if grid.values:
        return any(
            value == legal and isinstance(value, bool) == isinstance(legal, bool) for legal in grid.values
        )
    if isinstance(value, bool | str):
        return grid.minimum is None and grid.maximum is None and grid.multiple is None
    if grid.minimum is not None and value < grid.minimum - _TOLERANCE:
        return False
    if grid.maximum is not None and value > grid.maximum + _TOLERANCE:
        return False
    if grid.multiple is None:
        return True
    steps = value / grid.multiple
    return abs(steps - round(steps)) < _TOLERANCE * max(1.0, abs(steps))


def lowest(profile: Profile, knob: str) -> float | None:
    """Return the smallest number that grid and constraints allow for a knob; None if there is no bound."""
    bounds = [c.value for c in profile.constraints if isinstance(c, AtLeast) and c.knob == knob]
    support = profile.supported.get(knob)
    if support is not None:
        bounds += numbers(support.grid)[:1] or _given(support.grid.minimum)
    return max(bounds, default=None)


def at_their_least(profile: Profile, values: Mapping[str, Setting]) -> tuple[str, ...]:
    """Return the reason, as a sentence, for each value that is at a lower bound of the job."""
    return tuple(
        f"{show_value(value)} is the least: {bound.why}"
        for knob, value in values.items()
        for bound in profile.constraints
        if isinstance(bound, AtLeast) and bound.knob == knob and bound.value == value
    )


def highest(profile: Profile, knob: str) -> float | None:
    """Return the largest number that grid and constraints allow for a knob; None if there is no bound."""
    bounds = [c.value for c in profile.constraints if isinstance(c, AtMost) and c.knob == knob]
    support = profile.supported.get(knob)
    if support is not None:
        bounds += numbers(support.grid)[-1:] or _given(support.grid.maximum)
    return min(bounds, default=None)


def completed(profile: Profile, knobs: Knobs, changes: dict[str, Setting]) -> dict[str, Setting]:
    """Return `changes` and the further changes that constraints require with them."""
    full = dict(changes)
    for constraint in profile.constraints:
        if (
            isinstance(constraint, Requires)
            and constraint.knob in full
            and constraint.other not in full
            and full[constraint.knob] == constraint.value
            and getattr(knobs, constraint.other) not in constraint.values
            and constraint.values
        ):
            full[constraint.other] = constraint.values[0]
    return full


def numbers(grid: Grid) -> list[float]:
    """Return the numbers among the values of a grid, in ascending order."""
    return sorted(float(value) for value in grid.values if is_number(value))


def _given(bound: float | None) -> list[float]:
    return [] if bound is None else [bound]


def _support(profile: Profile, name: str, value: Setting) -> str:
    support = profile.supported.get(name)
    if support is None:
        why = profile.unsupported.get(name, "the framework does not offer it")
        return f"{name} is not supported: {why}"
    if not on_grid(support.grid, value):
        return f"{name} = {value} is not a legal value of {support.setting}"
    return ""


def _constraint(
    constraint: Constraint, before: Knobs, after: Knobs, names: frozenset[str], *, started: bool
) -> str:
    match constraint:
        case AtLeast(knob=knob, value=bound, why=why):
            value = getattr(after, knob)
            if knob in names and is_number(value) and value < bound - _TOLERANCE:
                return f"{knob} = {value} is below {bound:g}: {why}"
        case AtMost(knob=knob, value=bound, why=why):
            value = getattr(after, knob)
            if knob in names and is_number(value) and value > bound + _TOLERANCE:
                return f"{knob} = {value} is above {bound:g}: {why}"
        case Divides(knob=knob, of=of, why=why):
            value = getattr(after, knob)
            if knob in names and is_number(value) and (value <= 0 or of % value != 0):
                return f"{knob} = {value} does not divide {of}: {why}"
        case Requires(knob=knob, value=value, other=other, values=values, why=why):
            touched = knob in names or other in names
            if touched and getattr(after, knob) == value and getattr(after, other) not in values:
                return f"{knob} = {value} is not possible with {other} = {getattr(after, other)}: {why}"
        case FixedDuringRun(knob=knob, why=why):
            if started and knob in names:
                return f"{knob} stays {getattr(before, knob)} during a run: {why}"
        case _:
            assert_never(constraint)
    return ""
