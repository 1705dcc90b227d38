"""Knobs that stand in a framework's settings one to one: rows of a data file, read, offered and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from autotune.launchers.frameworks.core import splits
from autotune.launchers.frameworks.core.data import rows, table
from autotune.launchers.frameworks.dialects.settings import Settings
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Job
from autotune.policies.values.knob_table import KNOB_TABLE, Unit
from autotune.policies.values.knobs import Knobs, Setting
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
from autotune.policies.values.value import Value

T = TypeVar("T")
Reader = Callable[[Any], Setting]  # of a knob in a job's settings
# The settings to write, by a job's own, the knobs that they come to, and those that are wanted.
Writer = Callable[[Any, Knobs, Knobs], Mapping[str, Any]]


class Conditional(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is true of some jobs only."""

    # Predicates of the framework and properties of the job's settings, joined by `and`, each true or after a
    # `not` false of them; empty: all.
    when: str = ""
    where: dict[str, int | float | bool | str | None] = {}  # the values of settings; null: the job has none


Holds = Callable[[Conditional], bool]  # whether a row is true of a job


class Needs(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of a knob that is only taken beside some values of another one."""

    value: int | float | bool | str
    other: str
    values: tuple[int | float | bool | str, ...]
    why: str


class Row(Conditional, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A knob and the setting behind it; of several rows of one knob the first is read, all are written."""

    knob: str
    setting: str = ""  # empty: there is none, the knob is `always` the same, or it is `read` and `stays`
    always: Setting = None  # what the knob is in every job
    also: dict[str, str] = {}  # a predicate -> the same setting of another model, which jobs of it have too
    read: str = ""  # the name of the function that reads the knob, where the setting alone does not tell it
    write: str = ""  # the name of the function that writes it, where other settings go with this one
    writes: dict[str, dict[str, Any]] = {}  # a value of the knob -> every setting that makes it so
    # A setting that goes with a knob that is on -> what it is where the job has none, with `{config.x}`.
    fills: dict[str, str] = {}
    default: Any = None  # what counts where neither the job nor the release has the setting
    grid: Grid = Grid()
    modes: dict[str, Any] = {}  # a mode of the knob -> the setting's value, from more memory to less
    states: tuple[Any, ...] = ()  # the setting's value where the knob is off and where it is on, if no switch
    unit: int = 0  # bytes of one of the setting, where it does not count the knob's own unit
    effect: Effect = Effect.EXACT
    phases: tuple[Phase, ...] = ()
    # A size of the job (a property of its settings, or one with a dot in its name) -> why the knob is not
    # below it, not above it, or divides it, alone or times `tensor_parallel`; 0 binds nothing.
    # `{value}`: the size; `{config.x}`: another property of the job's settings.
    at_least: dict[str, str] = {}
    at_most: dict[str, str] = {}
    divides: dict[str, str] = {}
    divides_with_tensor: dict[str, str] = {}
    needs: tuple[Needs, ...] = ()
    fixed: str = ""  # why it stays as it is once a checkpoint is there; empty: it may change
    stays: str = ""  # why it always stays as it is: it is read, for estimates, and never offered

    @property
    def settings(self) -> tuple[str, ...]:
        """The setting and those of the other models."""
        return (self.setting, *self.also.values())


class Refusal(Conditional, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the framework refuses of a setting.

    `{value}` in message and hint: what the job has; `{config.x}`: a property of the job's settings.
    """

    setting: str
    message: str
    hint: str = ""


class Warned(Conditional, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user of some jobs should know.

    `{longest}`: the tokens of the longest sequence; `{config.x}`: another property of the job's settings.
    """

    says: str


class Unread(Conditional, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why the framework does not read a setting that it accepts, and in which jobs it does not."""

    why: str


class Declined(Conditional, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a knob is not offered, and in which jobs."""

    knob: str
    why: str


@cache
def shared_rows(packages: tuple[str, ...], file: str, row: type[T]) -> tuple[T, ...]:
    """Return the rows of a file, a framework's own before those that it shares; only the last must exist."""
    *own, last = packages
    having = [package for package in own if resources.files(package).joinpath(file).is_file()]
    return tuple(each for package in (*having, last) for each in rows(package, file, row))


@cache
def knob_rows(*packages: str) -> tuple[Row, ...]:
    """Return the rows of a framework's `knobs.yaml`, its own before those that it shares."""
    every = shared_rows(packages, "knobs.yaml", Row)
    return tuple(msgspec.structs.replace(row, grid=_counted(row.grid)) for row in every)


@cache
def numbers(*packages: str) -> frozenset[str]:
    """Return the settings that are the number which their knob is."""
    every = (row for row in knob_rows(*packages) if not (row.modes or row.states or row.read or row.write))
    counted = (row for row in every if KNOB_TABLE[row.knob].unit not in (Unit.SWITCH, Unit.MODE))
    return frozenset(name for row in counted for name in row.settings if name)


@cache
def terms(condition: str) -> tuple[tuple[str, bool], ...]:
    """Return the names in a condition, each with whether it has to be true."""
    words = condition.split(" and ") if condition else []
    return tuple((word.removeprefix("not "), not word.startswith("not ")) for word in words)


def holds(row: Conditional, settings: Settings, when: Mapping[str, Callable[[Any], bool]]) -> bool:
    """Return whether a row is true of a job, by the predicates of its framework and the job's settings."""

    def said(name: str) -> bool:
        return bool(when[name](settings) if name in when else getattr(settings, name))

    return all(said(name) is wanted for name, wanted in terms(row.when)) and all(
        _is(settings, name, wanted) for name, wanted in row.where.items()
    )


def known(every: Iterable[Row], holds: Holds) -> tuple[Row, ...]:
    """Return the rows that mean something for a job, with the other models that it has."""
    return tuple(
        msgspec.structs.replace(
            row, also={name: key for name, key in row.also.items() if holds(Conditional(when=name))}
        )
        if row.also
        else row
        for row in every
        if holds(row)
    )


@cache
def unread(package: str) -> dict[str, Unread]:
    """Return the settings of a framework's `unread.yaml`."""
    return table(package, "unread.yaml", Unread)


def read(present: Iterable[Row], settings: Settings, readers: Mapping[str, Reader] | None = None) -> Knobs:
    """Return the knobs that a job's settings come to."""
    found: dict[str, Setting] = {}
    for row in present:
        if row.knob not in found:
            found[row.knob] = (readers or {})[row.read](settings) if row.read else _shared(row, settings)
    return msgspec.structs.replace(Knobs(), **found)


def supports(
    present: Iterable[Row],
    grids: Mapping[str, tuple[int, ...] | Grid],
    phases: Mapping[str, tuple[Phase, ...]] | None = None,
    spell: Callable[[str], str] = str,
) -> dict[str, Support]:
    """Return how the knobs may change; `grids` and `phases` are those that follow from the job itself.

    `spell` returns how the job's own command line takes a setting.
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
        support = Support(setting=spell(row.setting), grid=grid, effect=row.effect, phases=where)
        result.setdefault(row.knob, support)
    return result


def bounds(
    present: Iterable[Row],
    sizes: Callable[[str], float],
    config: Settings | None = None,
    supported: Mapping[str, Support] = MappingProxyType({}),
) -> Iterator[Constraint]:
    """Yield what binds the knobs beyond their grids; `sizes` returns the job's by name."""

    def sized(reasons: Mapping[str, str]) -> Iterator[tuple[float, str]]:
        for name, why in reasons.items():
            if size := sizes(name):
                yield size, why.format(value=size, config=config)

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


def fixed(present: Iterable[Row]) -> tuple[FixedDuringRun, ...]:
    """Return the constraints of the knobs that a checkpoint binds."""
    return tuple(FixedDuringRun(knob=row.knob, why=row.fixed) for row in present if row.fixed)


def reasons_to_stay(present: Iterable[Row]) -> dict[str, str]:
    """Return the knobs that are read and never offered, each with the reason."""
    return {row.knob: row.stays for row in present if row.stays}


def settings_for(
    present: Iterable[Row],
    settings: Settings,
    knobs: Knobs,
    readers: Mapping[str, Reader] | None = None,
    writers: Mapping[str, Writer] | None = None,
) -> dict[str, Any]:
    """Return the settings that make a job use `knobs`, of those knobs that it does not use already."""
    present = tuple(present)
    before = read(present, settings, readers)
    wanted = {name: value for name, value in msgspec.structs.asdict(knobs).items() if value is not None}
    after = msgspec.structs.replace(before, **wanted)
    result: dict[str, Any] = {}
    for row in present:
        value = wanted.get(row.knob)
        if value is None or row.stays or row.always is not None:
            continue
        follows = settings.followed(row.setting) in result  # so that it would change with that setting
        if getattr(before, row.knob) == value and not follows:
            continue
        if row.modes and value not in row.modes:  # a mode that the framework does not have
            continue
        if row.write:
            result |= (writers or {})[row.write](settings, before, after)
        elif row.writes:
            result |= row.writes.get(str(value).lower(), {})
        else:
            differing = (key for key in row.settings if follows or _knob(row, settings.get(key)) != value)
            result |= dict.fromkeys(differing, _value(row, value))
        if row.fills and value not in (False, next(iter(row.modes), False)):
            absent = {name: text for name, text in row.fills.items() if not settings.has(name)}
            result |= {name: text.format(config=settings) for name, text in absent.items()}
    return result


def settings_in_turn(
    again: Callable[[Mapping[str, Any]], tuple[Iterable[Row], Settings]],
    knobs: Knobs,
    readers: Mapping[str, Reader] | None = None,
    writers: Mapping[str, Writer] | None = None,
) -> dict[str, Any]:
    """Return the settings of `settings_for` where what a job leaves out follows other settings of its own.

    Each knob is written once, and what is left is read anew: `again` returns the rows and the settings of the
    job with those that are found so far.
    """
    wanted = {name: value for name, value in msgspec.structs.asdict(knobs).items() if value is not None}
    found: dict[str, Any] = {}
    while True:
        present, settings = again(found)
        now = read(present, settings, readers)
        name = next((each for each, value in wanted.items() if getattr(now, each) != value), None)
        if name is None:
            return found
        found |= settings_for(present, settings, Knobs(**{name: wanted.pop(name)}), readers, writers)


def _is(settings: Settings, name: str, wanted: Setting) -> bool:
    if wanted is None:
        return not settings.has(name)
    return settings.flag(name) is wanted if isinstance(wanted, bool) else settings.get(name) == wanted


def _counted(grid: Grid) -> Grid:
    """Return a grid whose whole numbers are integers, as a count of bytes or tokens is shown."""
    ends = {name: getattr(grid, name) for name in ("minimum", "maximum", "multiple")}
    whole = {name: int(end) for name, end in ends.items() if end is not None and float(end).is_integer()}
    return msgspec.structs.replace(grid, **whole)


def _shared(row: Row, settings: Settings) -> Setting:
    """Return a knob of several models: a switch or mode is what each of them saves at least."""
    if row.always is not None:
        return row.always
    values = [_knob(row, settings.get(key)) for key in row.settings]
    if row.modes:
        modes = list(row.modes)
        return None if None in values else min(values, key=lambda mode: modes.index(str(mode)))
    return all(values) if any(isinstance(value, bool) for value in values) else values[0]


def _knob(row: Row, value: Any) -> Setting:
    value = row.default if value is None else value
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


def filled(settings: Mapping[str, Any], job: Job, folder: str) -> dict[str, Any]:
    """Return settings of a data file with the names of the job and of its folder filled in."""
    return {
        key: value.format(folder=folder, name=job.name) if isinstance(value, str) else value
        for key, value in settings.items()
    }
