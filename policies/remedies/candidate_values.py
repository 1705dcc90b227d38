"""The values of a knob worth trying: near its present one for a remedy, over its range for a search."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autotune.policies.remedies.legality import highest, lowest
from autotune.policies.values.knob_table import KNOB_TABLE, Part, Unit
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Grid, Profile

# Near: numbers at these shares of the larger of the job's and the present value, and the least legal one.
_SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
_FRACTIONS = tuple(share / 100 for share in range(10, 96, 5))
_CHUNKS = (8192, 4096, 2048, 1024, 512, 256)
# Over the whole range: hundredths, few processes, powers of two.
_FRACTION_STEP = 0.01
_PROCESSES = (0, 1, 2, 4, 8)
_GROWTH = 8  # times the present value, if nothing else bounds a number
_TOLERANCE = 1e-6


def values_near(profile: Profile, knobs: Knobs, knob: str) -> Iterator[Setting]:
    """Yield values around the present one, legal or not; numbers up to the job's or the present value."""
    row, grid = KNOB_TABLE[knob], profile.supported[knob].grid
    own, written = getattr(knobs, knob), getattr(profile.knobs, knob)
    if grid.values:
        yield from grid.values
        return
    if row.unit is Unit.SHARE:
        yield from (_rounded(grid, share) for share in _FRACTIONS)
        return
    if row.unit is Unit.CHUNK_TOKENS:
        yield from (_rounded(grid, float(chunk)) for chunk in _CHUNKS if own is None or chunk < own)
        return
    if row.unit is Unit.RANKS:
        ranks = own or 1
        yield from (ranks * 2, ranks * 4, max(1, ranks // 2), max(1, ranks // 4))
        return
    if row.follows and own is None:
        written = written or getattr(profile.knobs, row.follows)
    base = max((v for v in (own, written) if isinstance(v, int | float)), default=None)
    if base is None:
        base = highest(profile, knob)
    if base is None:
        return
    floor = max(0.0 if row.unit is Unit.PROCESSES else 1.0, lowest(profile, knob) or 0.0)
    yield from (_rounded(grid, base * share) for share in _SHARES if base * share >= floor)
    yield _rounded(grid, floor, up=True)
    if row.unit is Unit.PROCESSES:
        yield 0


def values_in_range(profile: Profile, knobs: Knobs, knob: str) -> list[Setting]:
    """Return values from the smallest to the largest that may be useful, legal or not."""
    grid, unit = profile.supported[knob].grid, KNOB_TABLE[knob].unit
    if grid.values:
        return list(grid.values)
    if unit is Unit.SHARE:
        return list(_hundredths(profile, knob))
    if unit is Unit.PROCESSES:
        return list(_PROCESSES)
    return list(_powers(profile, knobs, knob))


def _hundredths(profile: Profile, knob: str) -> Iterator[float]:
    row = KNOB_TABLE[knob]
    low = max(row.smallest or 0.0, lowest(profile, knob) or 0.0)
    high = min(row.largest or 1.0, highest(profile, knob) or 1.0)
    first, last = math.ceil(low / _FRACTION_STEP - _TOLERANCE), math.floor(high / _FRACTION_STEP + _TOLERANCE)
    return (round(step * _FRACTION_STEP, 2) for step in range(first, last + 1))


def _powers(profile: Profile, knobs: Knobs, knob: str) -> list[int]:
    """Return powers of two, for tokens of a micro-batch also their midpoints, on the knob's own grid."""
    row = KNOB_TABLE[knob]
    in_pass = row.unit is Unit.PASS_TOKENS
    multiple = int(profile.supported[knob].grid.multiple or 1)
    low = max(1.0, lowest(profile, knob) or 1.0, row.smallest or 1.0)
    bound = highest(profile, knob)
    high = _most_useful(profile, knobs, knob)
    high = min(high, bound) if bound is not None else high
    values = {math.ceil(low / multiple) * multiple}
    power = 1 << max(0, math.ceil(math.log2(low)))
    while power <= high:
        values.add(_nearest(power, multiple))
        if in_pass:
            values.add(_nearest(power * 3 // 2, multiple))
        power *= 2
    if in_pass and high >= low:
        values.add(math.floor(high / multiple) * multiple)
    return sorted(value for value in values if low <= value <= high)


def _most_useful(profile: Profile, knobs: Knobs, knob: str) -> float:
    """Return the largest useful value of a knob for this job."""
    row, layout, present = KNOB_TABLE[knob], profile.layout, getattr(knobs, knob)
    rows = max(1, layout.sequences // max(1, layout.shards)) if layout.sequences else None
    match row.unit:
        case Unit.REQUESTS if layout.sequences:
            return layout.sequences
        case Unit.SEQUENCES if rows:
            return rows
        case Unit.PASS_TOKENS if rows and profile.longest_sequence and row.part is Part.TRAINER:
            return rows * profile.longest_sequence
    least = present if isinstance(present, int) else max(1.0, lowest(profile, knob) or 1.0)
    return least * _GROWTH


def _nearest(value: int, multiple: int) -> int:
    return max(multiple, round(value / multiple) * multiple)


def _rounded(grid: Grid, value: float, *, up: bool = False) -> int | float:
    multiple = grid.multiple or (_FRACTION_STEP if value < 1 else 1.0)
    steps = value / multiple
    whole = math.ceil(steps - _TOLERANCE) if up else math.floor(steps + _TOLERANCE)
    number = max(round(whole * multiple, 6), grid.minimum or 0.0)
    return int(number) if float(number).is_integer() and multiple >= 1 else float(number)
