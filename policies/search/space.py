"""The search space: the legal values of the knobs that a launch may change."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

import msgspec

from autotune.policies.remedies.allow_deny import denial, legal
from autotune.policies.remedies.candidate_values import values_in_range
from autotune.policies.remedies.legality import completed, objections, on_grid
from autotune.policies.values.job import Job, Recovery
from autotune.policies.values.knob_table import KNOB_TABLE, ROWS
from autotune.policies.values.knobs import KNOBS, Knobs, Setting, is_number
from autotune.policies.values.profile import FixedDuringRun, Profile, Requires
from autotune.policies.values.value import Value

PERMIT_ALL = Recovery()  # permits everything
_FEW = 10  # values of one knob that a move may reach, roughly


class Dimension(Value, frozen=True, kw_only=True):
    """A knob and the values that a search may give it, numbers in ascending order."""

    knob: str
    values: tuple[Setting, ...]
    ordered: bool  # whether they are numbers, of which close ones behave alike

    def nearest(self, value: Setting) -> Setting:
        """Return the largest value not above `value`, or the smallest of all."""
        if not self.ordered or not isinstance(value, int | float):
            return value
        above = bisect_right(self.values, value * (1 + 1e-9))  # type: ignore[type-var]  # all are numbers
        return self.values[max(0, above - 1)]

    def few(self, present: Setting) -> tuple[Setting, ...]:
        """Return values other than the present one: all if few, otherwise near ones and an even spread."""
        if len(self.values) <= _FEW:
            return tuple(v for v in self.values if v != present)
        every = range(0, len(self.values), -(-len(self.values) // _FEW))
        here = self.values.index(present) if present in self.values else 0
        near = (here + offset for offset in (-5, -2, -1, 1, 2, 5))
        chosen = {*every, len(self.values) - 1, *(n for n in near if 0 <= n < len(self.values))}
        return tuple(self.values[n] for n in sorted(chosen) if self.values[n] != present)


def open_knobs(job: Job, profile: Profile) -> tuple[str, ...]:
    """Return the knobs that a search varies: those in `search.vary`, otherwise all that a launch may change.

    Knobs that the job file sets are included; `recovery.deny` excludes knobs.
    """
    names = KNOBS if job.search.vary is None else dict.fromkeys(job.search.vary)
    return tuple(name for name in names if name in profile.supported)


def space(job: Job, profile: Profile, knobs: Knobs) -> tuple[Dimension, ...]:
    """Return the dimensions around `knobs`: the open knobs with at least two legal values."""
    result = []
    kept = {c.knob for c in profile.constraints if isinstance(c, FixedDuringRun)}
    fixed = kept if job.resume else set[str]()
    for name in open_knobs(job, profile):
        if not KNOB_TABLE[name].searched or name in fixed:
            continue
        values = tuple(
            value
            for value in _values(profile, knobs, name)
            if not denial(job.recovery, profile, knobs, msgspec.structs.replace(knobs, **{name: value}))
        )
        if len(values) > 1:
            ordered = all(map(is_number, values))
            result.append(Dimension(knob=name, values=values, ordered=ordered))
    return tuple(result)


def assembled(
    profile: Profile, knobs: Knobs, dimensions: Iterable[Dimension], suggested: Mapping[str, Setting]
) -> Knobs:
    """Return `knobs` with the suggested values on their grids, without those that have no effect."""
    return _with(
        profile, knobs, {d.knob: d.nearest(suggested[d.knob]) for d in dimensions if d.knob in suggested}
    )


def neighbours(
    profile: Profile,
    base: Knobs,
    knobs: Knobs,
    dimensions: Iterable[Dimension],
    *,
    recovery: Recovery = PERMIT_ALL,
) -> tuple[Knobs, ...]:
    """Return the legal configurations that one move along one dimension reaches."""
    dimensions = tuple(dimensions)
    here = {d.knob: d.nearest(getattr(knobs, d.knob)) for d in dimensions}
    result: dict[Knobs, None] = {}
    for dimension in dimensions:
        for value in dimension.few(getattr(knobs, dimension.knob)):
            moved = _with(profile, base, here | {dimension.knob: value})
            if moved not in result and legal(profile, recovery, base, moved, started=False):
                result[moved] = None
    return tuple(result)


def _with(profile: Profile, knobs: Knobs, values: Mapping[str, Setting]) -> Knobs:
    """Return `knobs` with values from their grids, without those that have no effect in combination."""
    changes = dict(values)
    for row in ROWS:
        needs = row.only_with
        if needs is None or row.name not in changes:
            continue
        if changes.get(needs.knob, getattr(knobs, needs.knob)) not in needs.values:
            changes[row.name] = getattr(knobs, row.name)
    changes = {name: value for name, value in changes.items() if getattr(knobs, name) != value}
    return msgspec.structs.replace(knobs, **completed(profile, knobs, changes))


def _values(profile: Profile, knobs: Knobs, name: str) -> tuple[Setting, ...]:
    grid, present = profile.supported[name].grid, getattr(knobs, name)
    values = values_in_range(profile, knobs, name)
    if present is not None and present not in values and on_grid(grid, present):
        values.append(present)
    legal_values = [value for value in values if _stands_alone(profile, name, value)]
    if all(map(is_number, legal_values)):
        legal_values.sort(key=lambda v: float(v))  # type: ignore[arg-type]  # all are numbers
    return tuple(legal_values)


def _stands_alone(profile: Profile, name: str, value: Setting) -> bool:
    """Return whether a value can be legal at all, regardless of other knobs' values."""
    before = msgspec.structs.replace(profile.knobs, **{name: None})
    free = [c for c in profile.constraints if not isinstance(c, Requires)]
    alone = msgspec.structs.replace(profile, constraints=tuple(free))
    after = msgspec.structs.replace(before, **completed(alone, before, {name: value}))
    return not objections(alone, before, after, started=False)
