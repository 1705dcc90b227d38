"""Reads, offers and writes knobs through the rows of a framework's table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from autotune.launchers.frameworks.core import splits
from autotune.launchers.frameworks.core.versions import within
from autotune.launchers.frameworks.dialects.settings import Settings
from autotune.launchers.frameworks.tabular.declared import DeclaredSettings
from autotune.launchers.frameworks.tabular.table import (
    NO_SETTING,
    Bounds,
    Condition,
    Reason,
    Row,
    Table,
    text,
)
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Job
from autotune.policies.values.knob_table import KNOB_TABLE, Unit
from autotune.policies.values.knobs import KNOBS, Knobs, Setting
from autotune.policies.values.profile import (
    AtLeast,
    AtMost,
    Constraint,
    Divides,
    FixedDuringRun,
    Grid,
    Requires,
    Support,
)
from autotune.policies.values.remedy import Effect

C = TypeVar("C", bound=Settings)
T = TypeVar("T")

# Knobs that autotune applies itself for every framework.
_BY_AUTOTUNE = {
    "restart_every": "no setting is needed: where memory grows, autotune restarts the job at a checkpoint"
}


def applicable(table: Table[T], config: T, versions: Mapping[str, str]) -> tuple[Row[T], ...]:
    """Return the rows that apply to a job and to its auxiliary models.

    `versions`: the job's releases of the framework and its engines, by name.
    """
    return tuple(
        msgspec.structs.replace(row, also={key: when for key, when in row.also.items() if when(config)})
        if row.also
        else row
        for row in table.rows
        if row.when(config) and within(versions, row.since, row.until)
    )


def declined(table: Table[T], config: T, versions: Mapping[str, str]) -> dict[str, str]:
    """Return the knobs that a job does not offer, each with the first reason that holds."""
    result: dict[str, str] = {}
    holding: dict[str, list[Row[T]]] = {row.knob: [] for row in table.rows}
    for row in applicable(table, config, versions):
        holding[row.knob].append(row)
    for knob in KNOBS:
        if knob in table.absent or knob not in holding:
            result[knob] = table.absent.get(knob, _BY_AUTOTUNE.get(knob, NO_SETTING))
        elif not holding[knob]:
            reasons = (row.otherwise for row in table.rows if row.knob == knob and row.otherwise)
            result[knob] = text(next(reasons, NO_SETTING), config)
        else:
            unless = (each for row in holding[knob] for each in row.unless.items())
            why = next((why for why, reason in unless if _is_true(reason, config, versions)), "")
            if why:
                result[knob] = text(why, config)
    return result


def lacking(held: Iterable[Row[Any]], config: DeclaredSettings, name: str) -> dict[str, str]:
    """Return the knobs whose setting an older release, without rules on record, does not have."""
    release = config.release.version
    return {
        row.knob: f"{name} {release} has no {row.key}"
        for row in held
        if row.key
        and not row.key.isupper()
        and release in config.older
        and config.named(row.key) not in config.facts
    }


def _is_true(reason: Condition[T] | Reason[T], config: T, versions: Mapping[str, str]) -> bool:
    if isinstance(reason, Reason):
        return within(versions, reason.since, reason.until) and bool(reason.when(config))
    return bool(reason(config))


def numbers(table: Table[Any]) -> frozenset[str]:
    """Return the settings whose value is the number of a knob."""
    every = (row for row in table.rows if not (row.modes or row.states or row.read or row.write))
    counted = (row for row in every if KNOB_TABLE[row.knob].unit not in (Unit.SWITCH, Unit.MODE))
    return frozenset(name for row in counted for name in row.keys if name)


def read(present: Iterable[Row[C]], config: C) -> Knobs:
    """Return the knobs that a job's settings resolve to."""
    result: dict[str, Setting] = {}
    for row in present:
        if row.knob not in result:
            result[row.knob] = row.read(config) if row.read else _shared(row, config)
    return msgspec.structs.replace(Knobs(), **result)


def supports(
    present: Iterable[Row[Any]],
    grids: Mapping[str, tuple[int, ...] | Grid],
    phases: Mapping[str, tuple[Phase, ...]] | None = None,
    spell: Callable[[str], str] = str,
    has: Callable[[str], bool] = lambda _: False,
) -> dict[str, Support]:
    """Return how the knobs may change; `grids` and `phases` are those that depend on the job.

    `spell` returns a setting as the job's command line needs it, `has` whether the job sets it.
    """
    result: dict[str, Support] = {}
    for row in present:
        if row.stays:
            continue
        own = grids.get(row.knob, ())
        values = tuple(row.modes) or (() if isinstance(own, Grid) else own)
        values = values or ((False, True) if row.states and not row.grid.values else ())
        grid = own if isinstance(own, Grid) else Grid(values=values) if values else row.grid
        where = (phases or {}).get(row.knob, row.phases)
        effect = Effect.NUMERIC if row.numeric else Effect.EXACT
        support = Support(setting=spell(row.key), grid=grid, effect=effect, phases=where, is_set=has(row.key))
        result.setdefault(row.knob, support)
    return result


def bounds(
    present: Iterable[Row[T]], config: T, supported: Mapping[str, Support] = MappingProxyType({})
) -> Iterator[Constraint]:
    """Yield the knobs' constraints beyond their grids."""

    def sized(every: Bounds[T]) -> Iterator[tuple[float, str]]:
        for why, size in every.items():
            if value := size(config):
                yield value, why.format(value=value) if isinstance(why, str) else why(config)

    for row in present:
        yield from (AtLeast(knob=row.knob, value=size, why=why) for size, why in sized(row.at_least))
        yield from (AtMost(knob=row.knob, value=size, why=why) for size, why in sized(row.at_most))
        yield from (Divides(knob=row.knob, of=int(size), why=why) for size, why in sized(row.divides))
        for need in row.needs:
            yield Requires(
                knob=row.knob, value=need.value, other=need.other, values=need.values, why=need.why
            )
        for size, why in sized(row.divides_with_tensor):
            yield from splits.together(supported, row.knob, devices=int(size), why=why)


def fixed(present: Iterable[Row[Any]]) -> tuple[FixedDuringRun, ...]:
    """Return the constraints of knobs that must not change once there is a checkpoint."""
    return tuple(FixedDuringRun(knob=row.knob, why=row.fixed) for row in present if row.fixed)


def reasons_to_stay(present: Iterable[Row[Any]]) -> dict[str, str]:
    """Return the knobs that are read but never offered, each with the reason."""
    return {row.knob: row.stays for row in present if row.stays}


def settings_for(present: Iterable[Row[C]], config: C, knobs: Knobs) -> dict[str, Any]:
    """Return the settings that apply `knobs` to a job, for knobs that the job does not already have so."""
    present = tuple(present)
    before = read(present, config)
    wanted = {name: value for name, value in msgspec.structs.asdict(knobs).items() if value is not None}
    after = msgspec.structs.replace(before, **wanted)
    result: dict[str, Any] = {}
    for row in present:
        value = wanted.get(row.knob)
        if value is None or row.stays or row.always is not None:
            continue
        follows = config.followed(row.key) in result  # its value would change with that setting
        if getattr(before, row.knob) == value and not follows:
            continue
        if row.modes and value not in row.modes:  # the framework lacks this mode
            continue
        if row.write:
            result |= row.write(config, before, after)
        elif row.writes:
            result |= row.writes.get(value, {})
        else:
            differing = (key for key in row.keys if follows or _knob(row, config.get(key)) != value)
            result |= dict.fromkeys(differing, _value(row, value))
        if row.fills and value not in (False, next(iter(row.modes), False)):
            result |= {key: fill(config) for key, fill in row.fills.items() if not config.has(key)}
    return result


def settings_in_turn(
    again: Callable[[Mapping[str, Any]], tuple[Iterable[Row[C]], C]], knobs: Knobs
) -> dict[str, Any]:
    """Return the settings of `settings_for` for a job whose unset settings follow other settings.

    Writes one knob at a time and reads the others anew: `again` returns the rows and the job's resolved
    settings after the changes so far.
    """
    wanted = {name: value for name, value in msgspec.structs.asdict(knobs).items() if value is not None}
    result: dict[str, Any] = {}
    while True:
        present, config = again(result)
        now = read(present, config)
        name = next((each for each, value in wanted.items() if getattr(now, each) != value), None)
        if name is None:
            return result
        result |= settings_for(present, config, Knobs(**{name: wanted.pop(name)}))


def filled(settings: Mapping[str, Any], job: Job, folder: str) -> dict[str, Any]:
    """Return settings of a data file with the job's name and folder filled in."""
    return {
        key: value.format(folder=folder, name=job.name) if isinstance(value, str) else value
        for key, value in settings.items()
    }


def _shared(row: Row[Any], config: Settings) -> Setting:
    """Return a knob of several models: of a switch or mode, the value that saves the least."""
    if row.always is not None:
        return row.always
    values = [_knob(row, config.get(key)) for key in row.keys]
    if row.modes:
        modes = list(row.modes)
        return None if None in values else min(values, key=lambda mode: modes.index(str(mode)))
    return all(values) if any(isinstance(value, bool) for value in values) else values[0]


def _knob(row: Row[Any], value: Any) -> Setting:
    value = row.default if value is None else value
    if row.modes:
        return next((mode for mode, own in row.modes.items() if _same(own, value)), None)
    if row.states:
        return _same(row.states[1], value)
    if row.unit and isinstance(value, int | float) and not isinstance(value, bool):
        return round(value * row.unit)
    return value if isinstance(value, int | float) else None


def _value(row: Row[Any], wanted: Setting) -> Any:
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
