"""Knobs that stand in a framework's settings one to one: rows of a data file, read, offered and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import msgspec

from autotune.launchers.frameworks.core.data import rows, table
from autotune.launchers.frameworks.dialects.settings import Settings
from autotune.policies.values.failure import Phase
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import (
    AtLeast,
    Constraint,
    Divides,
    FixedDuringRun,
    Grid,
    Requires,
    Support,
)
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value

Holds = Callable[[str], bool]  # whether a predicate of the data files is true of a job
Reader = Callable[[Any], Setting]  # of a knob in a job's settings
# The settings to write, by a job's own, the knobs that they come to, and those that are wanted.
Writer = Callable[[Any, Knobs, Knobs], Mapping[str, Any]]


class Needs(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of a knob that is only taken beside some values of another one."""

    value: int | float | bool | str
    other: str
    values: tuple[int | float | bool | str, ...]
    why: str


class Row(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A knob and the setting behind it; of several rows of one knob the first is read, all are written."""

    knob: str
    setting: str = ""  # empty: there is none, and the knob is `always` the same
    always: Setting = None  # what the knob is in every job
    also: dict[str, str] = {}  # a predicate -> the same setting of another model, which jobs of it have too
    read: str = ""  # the name of the function that reads the knob, where the setting alone does not tell it
    write: str = ""  # the name of the function that writes it, where other settings go with this one
    default: Any = None  # what counts where neither the job nor the release has the setting
    grid: Grid = Grid()
    modes: dict[str, Any] = {}  # a mode of the knob -> the setting's value, from more memory to less
    states: tuple[Any, ...] = ()  # the setting's value where the knob is off and where it is on, if no switch
    unit: int = 0  # bytes of one of the setting, where it does not count the knob's own unit
    effect: Effect = Effect.EXACT
    phases: tuple[Phase, ...] = ()
    when: str = ""  # empty: in all
    at_least: dict[str, str] = {}  # a size of the job -> why the knob is not below it; `{value}`: the size
    divides: dict[str, str] = {}  # a size of the job -> why the knob divides it; a size of 0 binds nothing
    needs: tuple[Needs, ...] = ()
    fixed: str = ""  # why it stays as it is once a checkpoint is there; empty: it may change
    stays: str = ""  # why it always stays as it is: it is read, for estimates, and never offered

    @property
    def settings(self) -> tuple[str, ...]:
        """The setting and those of the other models."""
        return (self.setting, *self.also.values())


class Refusal(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the framework refuses of a setting.

    In its message `{value}` is what the job has, `{config.x}` another property of its settings.
    """

    setting: str
    when: str
    message: str
    hint: str = ""


class Warned(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user of some jobs should know.

    `{longest}`: the tokens of the longest sequence; `{config.x}`: another property of the job's settings.
    """

    when: str
    says: str


class Unread(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why the framework does not read a setting that it accepts, and in which jobs it does not."""

    why: str
    when: str = ""  # empty: in all


class Declined(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why a knob is not offered, and in which jobs."""

    knob: str
    why: str
    when: str = ""  # empty: in all


@cache
def knob_rows(package: str) -> tuple[Row, ...]:
    """Return the rows of a framework's `knobs.yaml`."""
    every = rows(package, "knobs.yaml", Row)
    return tuple(msgspec.structs.replace(row, grid=_counted(row.grid)) for row in every)


@cache
def declined_rows(package: str) -> tuple[Declined, ...]:
    """Return the rows of a framework's `unsupported.yaml`."""
    return rows(package, "unsupported.yaml", Declined)


def known(package: str, holds: Holds) -> tuple[Row, ...]:
    """Return the rows that mean something for a job, with the other models that it has."""
    return tuple(
        msgspec.structs.replace(row, also={name: key for name, key in row.also.items() if holds(name)})
        for row in knob_rows(package)
        if holds(row.when)
    )


@cache
def refusals(package: str) -> tuple[Refusal, ...]:
    """Return the rows of a framework's `refused.yaml`."""
    return rows(package, "refused.yaml", Refusal)


@cache
def warnings(package: str) -> tuple[Warned, ...]:
    """Return the rows of a framework's `warnings.yaml`."""
    return rows(package, "warnings.yaml", Warned)


@cache
def unread(package: str) -> dict[str, Unread]:
    """Return the settings of a framework's `unread.yaml`."""
    return table(package, "unread.yaml", Unread)


def applying(package: str, holds: Holds) -> tuple[Row, ...]:
    """Return the rows of the knobs that a job offers."""
    refused = declined(package, holds)
    return tuple(row for row in known(package, holds) if row.knob not in refused)


def declined(package: str, holds: Holds) -> dict[str, str]:
    """Return the knobs that a job does not offer, each with the first reason that holds."""
    found: dict[str, str] = {}
    for row in declined_rows(package):
        if row.knob not in found and holds(row.when):
            found[row.knob] = row.why
    return found


def read(present: Iterable[Row], settings: Settings, readers: Mapping[str, Reader] | None = None) -> Knobs:
    """Return the knobs that a job's settings come to."""
    found: dict[str, Setting] = {}
    for row in present:
        if row.knob not in found:
            found[row.knob] = (readers or {})[row.read](settings) if row.read else _shared(row, settings)
    return msgspec.structs.replace(Knobs(), **found)


def offered(
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
        values = values or ((False, True) if row.states else ())
        grid = own if isinstance(own, Grid) else Grid(values=values) if values else row.grid
        where = (phases or {}).get(row.knob, row.phases)
        support = Support(setting=spell(row.setting), grid=grid, effect=row.effect, phases=where)
        result.setdefault(row.knob, support)
    return result


def bounds(present: Iterable[Row], sizes: Callable[[str], float]) -> Iterator[Constraint]:
    """Yield what binds the knobs beyond their grids; `sizes` returns the job's by name."""
    for row in present:
        for name, why in row.at_least.items():
            if size := sizes(name):
                yield AtLeast(knob=row.knob, value=size, why=why.format(value=size))
        for name, why in row.divides.items():
            if size := sizes(name):
                yield Divides(knob=row.knob, of=int(size), why=why.format(value=size))
        for need in row.needs:
            yield Requires(
                knob=row.knob, value=need.value, other=need.other, values=need.values, why=need.why
            )


def fixed(present: Iterable[Row]) -> tuple[FixedDuringRun, ...]:
    """Return the constraints of the knobs that a checkpoint binds."""
    return tuple(FixedDuringRun(knob=row.knob, why=row.fixed) for row in present if row.fixed)


def staying(present: Iterable[Row]) -> dict[str, str]:
    """Return the knobs that are read and never offered, each with the reason."""
    return {row.knob: row.stays for row in present if row.stays}


def written(
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
        if value is None or row.stays:
            continue
        follows = settings.followed(row.setting) in result  # so that it would change with that setting
        if getattr(before, row.knob) == value and not follows:
            continue
        if row.modes and value not in row.modes:  # a mode that the framework does not have
            continue
        if row.write:
            result |= (writers or {})[row.write](settings, before, after)
            continue
        differing = (key for key in row.settings if follows or _knob(row, settings.get(key)) != value)
        result |= dict.fromkeys(differing, _value(row, value))
    return result


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
