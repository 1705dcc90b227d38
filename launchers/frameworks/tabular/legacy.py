"""Tables of the frameworks whose rows still stand in YAML, with the condition language of those files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import msgspec

from autotune.launchers.frameworks.core.data import rows, table
from autotune.launchers.frameworks.dialects.settings import Settings
from autotune.launchers.frameworks.tabular import table as typed
from autotune.policies.values.failure import Phase
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Grid
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


@cache
def unread(package: str) -> dict[str, Unread]:
    """Return the settings of a framework's `unread.yaml`."""
    return table(package, "unread.yaml", Unread)


def _is(settings: Settings, name: str, wanted: Setting) -> bool:
    if wanted is None:
        return not settings.has(name)
    return settings.flag(name) is wanted if isinstance(wanted, bool) else settings.get(name) == wanted


def _counted(grid: Grid) -> Grid:
    """Return a grid whose whole numbers are integers, as a count of bytes or tokens is shown."""
    ends = {name: getattr(grid, name) for name in ("minimum", "maximum", "multiple")}
    whole = {name: int(end) for name, end in ends.items() if end is not None and float(end).is_integer()}
    return msgspec.structs.replace(grid, **whole)


def of_files(
    packages: tuple[str, ...],
    when: Mapping[str, Callable[[Any], bool]],
    readers: Mapping[str, Reader],
    writers: Mapping[str, Writer],
) -> typed.Table[Any]:
    """Return the table that a framework's files hold."""

    def condition(row: Conditional) -> Callable[[Any], bool]:
        return lambda config: holds(row, config, when)

    every = knob_rows(*packages)
    declined = shared_rows(packages, "unsupported.yaml", Declined)
    reasons: dict[str, dict[Any, Any]] = {}
    for each in declined:
        own = reasons.setdefault(each.knob, {})
        own[(lambda why: lambda _: why)(each.why)] = condition(each)
    with_row = {row.knob for row in every}
    absent = {
        each.knob: each.why
        for each in reversed(declined)
        if each.knob not in with_row or not (each.when or each.where)
    }
    built = []
    for row in every:
        own = reasons.get(row.knob, {})
        built.append(
            typed.Row(
                knob=row.knob,  # type: ignore[arg-type]
                key=row.setting,
                when=condition(row),
                otherwise=_first(own),
                unless=own,
                always=row.always,
                also={key: condition(Conditional(when=name)) for name, key in row.also.items()},
                read=readers[row.read] if row.read else None,
                write=writers[row.write] if row.write else None,
                writes={_setting(row, name): found for name, found in row.writes.items()},
                fills={key: _template(text) for key, text in row.fills.items()},
                default=row.default,
                grid=row.grid,
                modes=row.modes,
                states=row.states,
                unit=row.unit,
                effect=row.effect,
                phases=row.phases,
                at_least=_bounds(row.at_least),
                at_most=_bounds(row.at_most),
                divides=_bounds(row.divides),
                divides_with_tensor=_bounds(row.divides_with_tensor),
                needs=tuple(
                    typed.Needs(value=need.value, other=need.other, values=need.values, why=need.why)  # type: ignore[arg-type]
                    for need in row.needs
                ),
                fixed=row.fixed,
                stays=row.stays,
            )
        )
    return typed.Table(
        rows=tuple(built),
        absent=absent,
        refused=tuple(
            typed.Refusal(
                row.setting, condition(row), _said(row.setting, row.message), _said(row.setting, row.hint)
            )
            for row in _rows(packages, "refused.yaml", Refusal)
        ),
        warned=tuple(
            typed.Warned(condition(row), _template(row.says))
            for row in _rows(packages, "warnings.yaml", Warned)
        ),
        unread=tuple(
            typed.Unread(key, row.why, condition(row))
            for key, row in (unread(packages[-1]) if _has(packages[-1], "unread.yaml") else {}).items()
        ),
    )


def _first(reasons: Mapping[Any, Any]) -> Callable[[Any], str]:
    def why(config: Any) -> str:
        texts = (typed.text(why, config) for why, when in reasons.items() if when(config))
        return next(texts, typed.NO_SETTING)

    return why


def _rows(packages: tuple[str, ...], file: str, kind: type[T]) -> tuple[T, ...]:
    return shared_rows(packages, file, kind) if _has(packages[-1], file) else ()  # type: ignore[arg-type]


def _has(package: str, file: str) -> bool:
    return resources.files(package).joinpath(file).is_file()


def _setting(row: Row, name: str) -> Setting:
    return {"true": True, "false": False}.get(name, name)


def _bounds(sizes: Mapping[str, str]) -> typed.Bounds[Any]:
    def bound(name: str, why: str) -> tuple[Callable[[Any], str], Callable[[Any], float]]:
        return (
            lambda config: why.format(value=config.size(name), config=config),
            lambda config: config.size(name),
        )

    return dict(bound(name, why) for name, why in sizes.items())


def _template(words: str) -> Callable[[Any], str]:
    return lambda config: words.format(config=config, longest=config.longest)


def _said(setting: str, words: str) -> Callable[[Any], str]:
    return lambda config: words.format(value=config.get(setting), config=config)
