"""Compute a knob's next values: steps on its grid, and targets from the figures of a failure message."""

from __future__ import annotations

import math

from autotune.policies.remedies.legality import highest, lowest, numbers
from autotune.policies.values.diagnosis import Diagnosis, Facts
from autotune.policies.values.knob_table import KNOB_TABLE, Memory, Unit, Way
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Profile

# Share of the limit to use by the figures of the message: the failed request is seldom the last of its phase.
MARGIN = 0.9
# The least share that the caching allocator loses in a micro-batch (`fragmentation` in estimate/constants.py,
# 3 to 12 %). With the 1.3 % of an H200 that expandable segments returned, the same micro-batch failed again:
# benchmarks/gpu/measurements/h200-real-failures/trl-forward.log and trl-expandable.log.
_NOTABLE = 0.03
# The least reduction of an engine's share of the GPU and its least step upwards; the reduction without
# figures.
FRACTION_STEP = 0.05
FRACTION_STEP_BLIND = 0.1
FRACTION_MULTIPLE = 0.01
_FOURFOLD = 3  # failures in a row from which on ranks may also grow fourfold
UNSET_SHARE = 0.9  # of an engine whose job sets none: vLLM's default, SGLang's is no larger
_SNAP = 1e-9  # keeps 0.7 / 0.01 from being rounded down to 69 steps


def missing_bytes(facts: Facts) -> int | None:
    """Return the bytes of the failed request that were not free; None if the message lacks a figure."""
    if facts.requested_bytes is None or facts.room_bytes is None:
        return None
    return max(0, facts.requested_bytes - facts.room_bytes)


def fragmentation_prevails(diagnosis: Diagnosis) -> bool:
    """Return whether fragmentation is above that of a usual micro-batch: the allocator is then changed first.

    The idle memory that it would return must cover the failed request with a margin, and be a notable share
    of the device. Without figures, the diagnosis decides.
    """
    facts = diagnosis.facts
    requested, idle, limit = facts.requested_bytes, facts.reserved_unallocated_bytes, facts.limit_bytes
    if not diagnosis.fragmentation or requested is None or idle is None or limit is None:
        return diagnosis.fragmentation
    return idle >= _NOTABLE * limit and MARGIN * (idle + (facts.room_bytes or 0)) >= requested


def needed_bytes(facts: Facts) -> int | None:
    """Return the bytes in use plus those of the failed request; None if the message lacks a figure.

    Memory that the allocator reserved and nothing uses does not count.
    """
    used, idle = _used_bytes(facts), facts.reserved_unallocated_bytes or 0
    if used is None or facts.requested_bytes is None:
        return None
    return max(0, used - idle) + facts.requested_bytes


def shrink_share(diagnosis: Diagnosis) -> float:
    """Return the share to which the load should shrink: a half, or less by the figures or a streak.

    The second failure in a row quarters, the third divides by eight: a message names the failed request, not
    those that would have followed, and a relaunch costs more than a few smaller micro-batches.
    """
    facts, blind = diagnosis.facts, 0.5**diagnosis.streak
    needed = needed_bytes(facts)
    if needed is None or facts.limit_bytes is None:
        return blind
    return min(blind, MARGIN * facts.limit_bytes / max(1, needed))


def next_values(
    profile: Profile, knobs: Knobs, knob: str, diagnosis: Diagnosis, memory: Memory
) -> tuple[Setting, ...]:
    """Return the next values of a knob that save a memory, mildest first; empty if none is legal."""
    row = KNOB_TABLE[knob]
    if row.order:
        return stronger(profile, knobs, knob, memory)
    value: Setting
    if row.unit is Unit.RANKS:
        present = getattr(knobs, knob)
        # Twice as many; after several failures in a row, also four times as many.
        times = (2,) if diagnosis.streak < _FOURFOLD else (2, 4)
        return tuple(present * more for more in times) if isinstance(present, int) else ()
    if row.unit is Unit.SHARE:
        step = lower_fraction if row.saves.get(memory) is Way.DOWN else higher_fraction
        value = step(profile, knobs, knob, diagnosis)
    else:
        value = smaller(profile, knobs, knob, share=shrink_share(diagnosis))
    return () if value is None else (value,)


def smaller(
    profile: Profile, knobs: Knobs, knob: str, *, share: float, base: int | None = None, least: float = 1.0
) -> int | None:
    """Return the largest legal number of at most `share` times the present one, or the smallest legal one.

    If the knob is unset, the present value is that of the knob that it follows, otherwise `base`, otherwise
    the largest legal one. None if nothing smaller is legal and at least `least`.
    """
    if knob not in profile.supported:
        return None
    present, follows = getattr(knobs, knob), KNOB_TABLE[knob].follows
    if present is None:
        present = getattr(knobs, follows) if follows else base
    if present is None:
        present = highest(profile, knob)
    if present is None:
        return None
    floor = lowest(profile, knob)
    floor = least if floor is None else max(least, floor)
    value = _snapped(profile, knob, max(floor, present * share), down=True, floor=floor)
    return int(value) if value is not None and value < present else None


def lower_fraction(profile: Profile, knobs: Knobs, knob: str, diagnosis: Diagnosis) -> float | None:
    """Return a smaller GPU memory share for an engine, reduced by the missing amount in the message."""
    present = _share(profile, knobs, knob)
    if present is None:
        return None
    missing, capacity = missing_bytes(diagnosis.facts), diagnosis.facts.limit_bytes
    step, needed = FRACTION_STEP_BLIND, 0.0
    if missing is not None and capacity:
        needed = 1.1 * missing / capacity + FRACTION_MULTIPLE
        # An engine that runs out alone will need more later: its batches fill, and before the first update
        # the trainer beside it has no optimizer state. A pool that is too small costs less than another
        # relaunch.
        by_itself = diagnosis.phase.is_engine
        step = max(FRACTION_STEP_BLIND, 2 * needed) if by_itself else max(FRACTION_STEP, needed)
    step *= 2 ** (diagnosis.streak - 1)
    # At most half of the share, unless the message asks for more: a tiny pool does not show what suffices.
    step = min(step, max(needed, present / 2))
    floor = lowest(profile, knob)
    floor = FRACTION_STEP_BLIND if floor is None else floor
    value = _snapped(profile, knob, max(floor, present - step), down=True, floor=floor)
    return value if value is not None and value < present - _SNAP else None


def higher_fraction(profile: Profile, knobs: Knobs, knob: str, diagnosis: Diagnosis) -> float | None:
    """Return a larger GPU memory share for an engine, raised by the missing amount in the message."""
    present = _share(profile, knobs, knob)
    if present is None:
        return None
    missing, capacity = missing_bytes(diagnosis.facts), diagnosis.facts.limit_bytes
    step = FRACTION_STEP
    if missing is not None and capacity:
        step = max(FRACTION_STEP, missing / capacity + FRACTION_MULTIPLE)
    step *= 2 ** (diagnosis.streak - 1)
    ceiling = highest(profile, knob)
    ceiling = 0.95 if ceiling is None else ceiling
    value = _snapped(profile, knob, min(ceiling, present + step), down=False, floor=present)
    return value if value is not None and value > present + _SNAP else None


def stronger(profile: Profile, knobs: Knobs, knob: str, memory: Memory) -> tuple[Setting, ...]:
    """Return the legal values of a switch or mode that save more than the present one, mildest first."""
    support = profile.supported.get(knob)
    if support is None:
        return ()
    present: Setting = getattr(knobs, knob)
    order = KNOB_TABLE[knob].towards(memory)
    after = order.index(present) + 1 if present in order else 1
    return tuple(mode for mode in order[after:] if not support.grid.values or mode in support.grid.values)


def _share(profile: Profile, knobs: Knobs, knob: str) -> float | None:
    """Return the present share of an engine, its default if the job sets none; None if unsupported."""
    if knob not in profile.supported:
        return None
    present: float | None = getattr(knobs, knob)
    return min(UNSET_SHARE, highest(profile, knob) or UNSET_SHARE) if present is None else present


def _used_bytes(facts: Facts) -> int | None:
    if facts.limit_bytes is not None and facts.room_bytes is not None:
        return facts.limit_bytes - facts.room_bytes
    return facts.allocated_bytes


def _snapped(profile: Profile, knob: str, target: float, *, down: bool, floor: float) -> float | None:
    """Return the legal number nearest to `target` on its safe side, otherwise on the other; None if none."""
    grid = profile.supported[knob].grid
    if every := numbers(grid):
        below = [n for n in every if floor - _SNAP <= n <= target + _SNAP]
        above = [n for n in every if n >= max(floor, target) - _SNAP]
        ordered = (below[-1:] or above[:1]) if down else (above[:1] or below[-1:])
        return ordered[0] if ordered else None
    multiple = grid.multiple or (FRACTION_MULTIPLE if target < 1 else 1.0)
    steps = target / multiple
    whole = math.floor(steps + _SNAP * 1e3) if down else math.ceil(steps - _SNAP * 1e3)
    if whole * multiple < floor - _SNAP:
        whole = math.ceil(floor / multiple - _SNAP * 1e3)
    return round(whole * multiple, 6)
