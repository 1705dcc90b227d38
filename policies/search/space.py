"""What a search may vary: the legal values of the knobs that a job leaves open."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping

import msgspec

from autotune.policies.remedies.legality import completed, highest, lowest, objections, on_grid
from autotune.policies.values.types import (
    KNOBS,
    FixedDuringRun,
    Job,
    Knobs,
    Profile,
    Requires,
    Setting,
    Value,
)

# They change no throughput that a search could find, or only record.
_NEVER = frozenset(
    {"memory_snapshot", "nccl_memory_check", "memory_profile", "restart_every", "host_allocator", "sharding"}
)
_SHARES = frozenset({"memory_fraction", "optimizer_offload_fraction"})
_TOKENS = frozenset({"tokens_per_microbatch", "logprob_tokens", "max_batched_tokens"})
_LEAST_FRACTION, _MOST_FRACTION, _FRACTION_STEP = 0.1, 0.95, 0.01
_GROWTH = 8  # times the present value, where nothing else bounds a number
_SMALLEST = {"sync_buffer": 1 << 20, "logprob_chunk": 256, "memory_margin": 1 << 28}
_WORKERS = (0, 1, 2, 4, 8)
_FEW = 10  # values of one knob that a move may lead to
# A knob that only matters while another has one of these values: otherwise it keeps its present one.
_ONLY_WITH: Mapping[str, tuple[str, tuple[Setting, ...]]] = {
    "sync_buffer": ("sync_mode", ("memory", None)),
    "optimizer_offload_fraction": ("optimizer_offload", (True,)),
    "optimizer_offload_overlap": ("optimizer_offload", (True,)),
    "microbatch_size": ("dynamic_batching", (False, None)),
    "tokens_per_microbatch": ("dynamic_batching", (True, None)),
}


class Dimension(Value, frozen=True, kw_only=True):
    """A knob and the values that a search may give it, numbers in ascending order."""

    knob: str
    values: tuple[Setting, ...]
    ordered: bool  # numbers, whose neighbours behave alike

    def nearest(self, value: Setting) -> Setting:
        """Return the largest value not above `value`, or the smallest there is."""
        if not self.ordered or not isinstance(value, int | float):
            return value
        above = bisect_right(self.values, value * (1 + 1e-9))  # type: ignore[type-var]  # all are numbers
        return self.values[max(0, above - 1)]

    def few(self, present: Setting) -> tuple[Setting, ...]:
        """Return some values other than the present one: all of a few, of many the near and the far."""
        if len(self.values) <= _FEW:
            return tuple(v for v in self.values if v != present)
        every = range(0, len(self.values), -(-len(self.values) // _FEW))
        here = self.values.index(present) if present in self.values else 0
        near = (here + offset for offset in (-5, -2, -1, 1, 2, 5))
        chosen = {*every, len(self.values) - 1, *(n for n in near if 0 <= n < len(self.values))}
        return tuple(self.values[n] for n in sorted(chosen) if self.values[n] != present)


def open_knobs(job: Job, profile: Profile) -> tuple[str, ...]:
    """Return the knobs that a search of this job varies: those it names, else those it leaves open."""
    if job.search.vary is not None:
        return tuple(name for name in dict.fromkeys(job.search.vary) if name in profile.supported)
    return tuple(name for name in KNOBS if name in profile.supported and not written(job, profile, name))


def space(job: Job, profile: Profile, knobs: Knobs) -> tuple[Dimension, ...]:
    """Return the dimensions around `knobs`; a knob without at least two legal values is none."""
    found = []
    allowed, denied = job.recovery.allow, job.recovery.deny
    kept = {c.knob for c in profile.constraints if isinstance(c, FixedDuringRun)}
    fixed = kept if job.resume else set[str]()
    for name in open_knobs(job, profile):
        if name in _NEVER or name in denied or name in fixed:
            continue
        if profile.supported[name].effect not in allowed:
            continue
        values = _values(profile, knobs, name)
        if len(values) > 1:
            ordered = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
            found.append(Dimension(knob=name, values=values, ordered=ordered))
    return tuple(found)


def assembled(
    profile: Profile, knobs: Knobs, dimensions: Iterable[Dimension], suggested: Mapping[str, Setting]
) -> Knobs:
    """Return `knobs` with suggested values on their grids; one without effect keeps its present value."""
    return _with(
        profile, knobs, {d.knob: d.nearest(suggested[d.knob]) for d in dimensions if d.knob in suggested}
    )


def neighbours(
    profile: Profile, base: Knobs, knobs: Knobs, dimensions: Iterable[Dimension]
) -> tuple[Knobs, ...]:
    """Return what one move along each dimension leads to, where the framework accepts it."""
    dimensions = tuple(dimensions)
    here = {d.knob: d.nearest(getattr(knobs, d.knob)) for d in dimensions}
    found: dict[Knobs, None] = {}
    for dimension in dimensions:
        for value in dimension.few(getattr(knobs, dimension.knob)):
            moved = _with(profile, base, here | {dimension.knob: value})
            if moved not in found and legal(profile, base, moved, started=False):
                found[moved] = None
    return tuple(found)


def legal(profile: Profile, before: Knobs, after: Knobs, *, started: bool) -> bool:
    """Return whether the framework accepts `after` in place of `before`."""
    return not objections(profile, before, after, started=started)


def written(job: Job, profile: Profile, name: str) -> bool:
    """Return whether the job itself sets a knob."""
    setting = profile.supported[name].setting
    plain = {key.lstrip("+-") for key in job.settings}
    return setting.lstrip("+-") in plain or name in plain


def _with(profile: Profile, knobs: Knobs, values: Mapping[str, Setting]) -> Knobs:
    """Return `knobs` with values of their grids, as far as they have an effect beside each other."""
    changes = dict(values)
    for knob, (other, effective) in _ONLY_WITH.items():
        if knob in changes and changes.get(other, getattr(knobs, other)) not in effective:
            changes[knob] = getattr(knobs, knob)
    changes = {name: value for name, value in changes.items() if getattr(knobs, name) != value}
    return msgspec.structs.replace(knobs, **completed(profile, knobs, changes))


def _values(profile: Profile, knobs: Knobs, name: str) -> tuple[Setting, ...]:
    grid, present = profile.supported[name].grid, getattr(knobs, name)
    values: list[Setting]
    if grid.values:
        values = list(grid.values)
    elif name in _SHARES:
        values = list(_shares(profile, name))
    elif name == "dataloader_workers":
        values = list(_WORKERS)
    else:
        values = list(_numbers(profile, knobs, name))
    if present is not None and present not in values and on_grid(grid, present):
        values.append(present)
    legal_values = [value for value in values if _stands_alone(profile, name, value)]
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in legal_values):
        legal_values.sort(key=lambda v: float(v))  # type: ignore[arg-type]  # all are numbers
    return tuple(legal_values)


def _stands_alone(profile: Profile, name: str, value: Setting) -> bool:
    """Return whether a value can be legal at all, whatever the others are."""
    before = msgspec.structs.replace(profile.knobs, **{name: None})
    free = [c for c in profile.constraints if not isinstance(c, Requires)]
    alone = msgspec.structs.replace(profile, constraints=tuple(free))
    after = msgspec.structs.replace(before, **completed(alone, before, {name: value}))
    return not objections(alone, before, after, started=False)


def _shares(profile: Profile, name: str) -> Iterable[float]:
    low = max(_LEAST_FRACTION, lowest(profile, name) or 0.0)
    high = min(_MOST_FRACTION if name == "memory_fraction" else 1.0, highest(profile, name) or 1.0)
    first, last = math.ceil(low / _FRACTION_STEP - 1e-6), math.floor(high / _FRACTION_STEP + 1e-6)
    return (round(step * _FRACTION_STEP, 2) for step in range(first, last + 1))


def _numbers(profile: Profile, knobs: Knobs, name: str) -> list[int]:
    """Return powers of two, and for tokens what lies half way between them, on the knob's own grid."""
    multiple = int(profile.supported[name].grid.multiple or 1)
    present = getattr(knobs, name)
    low = max(1.0, lowest(profile, name) or 1.0, _SMALLEST.get(name, 1))
    bound = highest(profile, name)
    high = _most(profile, name, present if isinstance(present, int) else None)
    high = min(high, bound) if bound is not None else high
    found = {math.ceil(low / multiple) * multiple}
    power = 1 << max(0, math.ceil(math.log2(low)))
    while power <= high:
        found.add(_snapped(power, multiple))
        if name in _TOKENS:
            found.add(_snapped(power * 3 // 2, multiple))
        power *= 2
    if name in _TOKENS and high >= low:
        found.add(math.floor(high / multiple) * multiple)
    return sorted(value for value in found if low <= value <= high)


def _most(profile: Profile, name: str, present: int | None) -> float:
    """Return the number above which more changes nothing, as far as the job says."""
    layout = profile.layout
    own = max(1, layout.sequences // max(1, layout.shards)) if layout.sequences else None
    if name == "concurrency" and layout.sequences:
        return layout.sequences
    if name in ("tokens_per_microbatch", "logprob_tokens") and own and profile.longest_sequence:
        return own * profile.longest_sequence
    if name == "microbatch_size" and own:
        return own
    if present is not None:
        return present * _GROWTH
    return max(1.0, lowest(profile, name) or 1.0) * _GROWTH


def _snapped(value: int, multiple: int) -> int:
    return max(multiple, round(value / multiple) * multiple)
