"""Knobs that stand in a framework's settings one to one: rows of a data file, read, offered and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import msgspec

from autotune.launchers.frameworks.core.data import rows
from autotune.launchers.frameworks.dialects.settings import Settings
from autotune.policies.values.failure import Phase
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import FixedDuringRun, Grid, Support
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value

Holds = Callable[[str], bool]  # whether a predicate of the data files is true of a job


class Row(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A knob and the setting behind it; of several rows of one knob the first is read, all are written."""

    knob: str
    setting: str
    grid: Grid = Grid()
    modes: dict[str, Any] = {}  # a mode of the knob -> the setting's value, from more memory to less
    states: tuple[Any, ...] = ()  # the setting's value where the knob is off and where it is on, if no switch
    unit: int = 0  # bytes of one of the setting, where it does not count the knob's own unit
    effect: Effect = Effect.EXACT
    phases: tuple[Phase, ...] = ()
    when: str = ""  # empty: in all
    fixed: str = ""  # why it stays as it is once a checkpoint is there; empty: it may change
    stays: str = ""  # why it always stays as it is: it is read, for estimates, and never offered


class Declined(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a knob is not offered, and in which jobs."""

    knob: str
    why: str
    when: str = ""  # empty: in all


@cache
def knob_rows(package: str) -> tuple[Row, ...]:
    """Return the rows of a framework's `knobs.yaml`."""
    return rows(package, "knobs.yaml", Row)


@cache
def declined_rows(package: str) -> tuple[Declined, ...]:
    """Return the rows of a framework's `unsupported.yaml`."""
    return rows(package, "unsupported.yaml", Declined)


def applying(package: str, holds: Holds) -> tuple[Row, ...]:
    """Return the rows of the knobs that a job offers."""
    refused = declined(package, holds)
    return tuple(row for row in knob_rows(package) if row.knob not in refused and holds(row.when))


def declined(package: str, holds: Holds) -> dict[str, str]:
    """Return the knobs that a job does not offer, each with the first reason that holds."""
    found: dict[str, str] = {}
    for row in declined_rows(package):
        if row.knob not in found and holds(row.when):
            found[row.knob] = row.why
    return found


def read(present: Iterable[Row], settings: Settings) -> Knobs:
    """Return the knobs that a job's settings come to."""
    found: dict[str, Setting] = {}
    for row in present:
        if row.knob not in found:
            found[row.knob] = _knob(row, settings.get(row.setting))
    return msgspec.structs.replace(Knobs(), **found)


def offered(present: Iterable[Row], grids: Mapping[str, tuple[int, ...]]) -> dict[str, Support]:
    """Return how the knobs may change; `grids` has the values that follow from the job itself."""
    result: dict[str, Support] = {}
    for row in present:
        if row.stays:
            continue
        values = tuple(row.modes) or grids.get(row.knob, ()) or ((False, True) if row.states else ())
        grid = Grid(values=values) if values else row.grid
        support = Support(setting=row.setting, grid=grid, effect=row.effect, phases=row.phases)
        result.setdefault(row.knob, support)
    return result


def fixed(present: Iterable[Row]) -> tuple[FixedDuringRun, ...]:
    """Return the constraints of the knobs that a checkpoint binds."""
    return tuple(FixedDuringRun(knob=row.knob, why=row.fixed) for row in present if row.fixed)


def staying(present: Iterable[Row]) -> dict[str, str]:
    """Return the knobs that are read and never offered, each with the reason."""
    return {row.knob: row.stays for row in present if row.stays}


def written(present: Iterable[Row], settings: Settings, knobs: Knobs) -> dict[str, Any]:
    """Return the settings that make a job use `knobs`, of those that it does not use already."""
    result: dict[str, Any] = {}
    for row in present:
        wanted = getattr(knobs, row.knob)
        if wanted is None or row.stays or _knob(row, settings.get(row.setting)) == wanted:
            continue
        result[row.setting] = _value(row, wanted)
    return result


def _knob(row: Row, value: Any) -> Setting:
    if row.modes:
        return next((mode for mode, own in row.modes.items() if _same(own, value)), None)
    if row.states:
        return _same(row.states[1], value)
    if row.unit and isinstance(value, int | float) and not isinstance(value, bool):
        return round(value * row.unit)
    return value if isinstance(value, int | float) else None


def _value(row: Row, wanted: Setting) -> Any:
    if row.modes:
        return row.modes[str(wanted)]
    if row.states:
        return row.states[bool(wanted)]
    if row.unit and isinstance(wanted, int | float):
        share = wanted / row.unit
        return int(share) if share.is_integer() else round(share, 4)
    return wanted


def _same(first: Any, second: Any) -> bool:
    return isinstance(first, bool) == isinstance(second, bool) and first == second
