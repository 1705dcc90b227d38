"""A framework's settings as typed rows, which a type checker verifies.

Each framework has a module `rows.py` with a `Table`: its knobs, refusals and warnings. A condition is a
function of the job's resolved settings; a text may be one as well: `lambda c: f"{c.world} GPUs"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from autotune.launchers.base import Advice
from autotune.launchers.frameworks.core.rehearsals import Rehearsal
from autotune.launchers.frameworks.core.renames import Renamed
from autotune.launchers.frameworks.core.trackers import TrackerRow
from autotune.policies.values.failure import Phase
from autotune.policies.values.knobs import KnobName, Knobs, Setting
from autotune.policies.values.profile import Grid
from autotune.policies.values.value import Value

C = TypeVar("C", contravariant=True)
Condition: TypeAlias = Callable[[C], object]  # true of some jobs
Text: TypeAlias = str | Callable[[C], str]
# Reason -> the job's number that bounds a knob (`{value}` in a plain text); 0 and None bound nothing.
Bounds: TypeAlias = Mapping[Text[C], Callable[[C], float | None]]
Versions: TypeAlias = Mapping[str, str]  # a release by the name of a framework or of its engine

NO_SETTING = "there is no setting for it"  # the reason for knobs without a row and a reason of their own
SAVES_FIRST = "a checkpoint is written before the training goes on"  # why no save is to be made synchronous
SWITCH = Grid(values=(False, True))
OFF = Grid(values=(False,))  # a switch that is never turned on
ON = Grid(values=(True,))  # a switch that is never turned off
PASS = Grid(minimum=64, multiple=64)  # tokens of a micro-batch; a multiple of common sequence-parallel sizes


def always(_: Any) -> bool:
    """Return true: the condition of every job."""
    return True


class Reason(NamedTuple, Generic[C]):
    """The jobs and releases for which a knob is not offered.

    `since`, `until`: the first release, of the framework or of an engine, to which the reason applies, and
    the first to which it no longer does. A test fails if no supported release lies between them.
    """

    when: Condition[C] = always
    since: Versions = {}
    until: Versions = {}


# Reason why a knob is not offered -> in which jobs; the first that applies counts.
Reasons: TypeAlias = Mapping[Text[C], Condition[C] | Reason[C]]


class Needs(Value, frozen=True, kw_only=True):
    """A knob value that requires certain values of another knob."""

    value: int | float | bool | str
    other: KnobName
    values: tuple[int | float | bool | str, ...]
    why: str


class Row(Value, Generic[C], frozen=True, kw_only=True, gc=True):
    """A knob and the setting behind it.

    If several rows of a knob apply to a job, the first is read and all are written. If none applies, the knob
    is not offered, for the reason `otherwise`. A row that applies is still not offered in the jobs of
    `unless`.
    """

    knob: KnobName
    key: str = ""  # the setting; empty for a knob that is `always` the same, or that is `read` and `stays`
    when: Condition[C] = always  # the jobs to which the setting applies
    otherwise: Text[C] = ""  # why the knob is not offered if none of its rows applies
    unless: Reasons[C] = {}
    always: Setting = None  # the knob's value in every job
    also: Mapping[str, Condition[C]] = {}  # the setting of an auxiliary model -> the jobs with that model
    read: Callable[[C], Setting] | None = None  # for a knob that depends on more than the setting
    # For a knob that needs several settings: returns them for the job's resolved settings, its present knobs
    # and the wanted ones.
    write: Callable[[C, Knobs, Knobs], Mapping[str, Any]] | None = None
    writes: Mapping[Setting, Mapping[str, Any]] = {}  # a value of the knob -> every setting that makes it so
    fills: Mapping[str, Callable[[C], str]] = {}  # settings that an enabled knob needs, if the job lacks them
    default: Any = None  # the value if neither the job nor the release has the setting
    grid: Grid = Grid()  # legal values, unless the adapter's `sizes` derives them from the job
    modes: Mapping[str, Any] = {}  # a mode of the knob -> the setting's value, from more memory to less
    states: tuple[Any, ...] = ()  # the setting's values for off and on, if it is no bool
    unit: int = 0  # bytes per unit of the setting, if it differs from the knob's unit
    numeric: str = ""  # why a change alters rounding; empty: results are bitwise equal
    phases: tuple[Phase, ...] = ()  # in which it changes device memory; empty: those of the knob
    at_least: Bounds[C] = {}
    at_most: Bounds[C] = {}
    divides: Bounds[C] = {}
    divides_with_tensor: Bounds[C] = {}  # its product with `tensor_parallel` divides the size
    needs: tuple[Needs, ...] = ()
    fixed: str = ""  # why it must not change once there is a checkpoint; empty: it may
    stays: str = ""  # why it is never offered, only read for the estimate
    since: Versions = {}  # the first release that has the setting
    until: Versions = {}  # the first release that no longer has it
    read_at: str = ""  # the line of the newest release on record that reads it: `path/in/package.py:12`

    @property
    def keys(self) -> tuple[str, ...]:
        """The setting and those of auxiliary models."""
        return (self.key, *self.also)


class Refusal(NamedTuple, Generic[C]):
    """A setting that the framework refuses in some jobs: when, why, and what to write instead."""

    key: str
    when: Condition[C]
    message: Text[C]
    hint: Text[C] = ""


class Warned(NamedTuple, Generic[C]):
    """A warning before the launch of some jobs, in one sentence."""

    when: Condition[C]
    says: Text[C]


class Unread(NamedTuple, Generic[C]):
    """A setting that the framework accepts but ignores in some jobs; why, and what to write instead."""

    key: str
    why: str
    when: Condition[C] = always


class Table(NamedTuple, Generic[C]):
    """Everything that autotune knows about a framework's settings."""

    rows: tuple[Row[C], ...]
    absent: Mapping[KnobName, str] = {}  # knobs that no job offers, if the reason is not NO_SETTING
    unless: Mapping[KnobName, Reasons[C]] = {}  # a dialect's own reasons for knobs with shared rows
    refused: tuple[Refusal[C], ...] = ()
    warned: tuple[Warned[C], ...] = ()
    unread: tuple[Unread[C], ...] = ()
    renamed: tuple[Renamed, ...] = ()
    rehearsal: Rehearsal = Rehearsal()
    trackers: tuple[TrackerRow, ...] = ()
    advice: tuple[Advice, ...] = ()  # of public guides, beyond or against the knobs
    scoring: Mapping[str, str] = {}  # knob -> the setting of passes that compute log-probs

    def over(self, shared: Table[C]) -> Table[C]:
        """Return the table with the rows that dialects share appended."""
        further = (
            msgspec.structs.replace(row, unless={**self.unless.get(row.knob, {}), **row.unless})
            for row in shared.rows
        )
        return Table(
            rows=(*self.rows, *further),
            absent={**shared.absent, **self.absent},
            refused=(*self.refused, *shared.refused),
            warned=(*self.warned, *shared.warned),
            unread=(*self.unread, *shared.unread),
            renamed=self.renamed,
            rehearsal=shared.rehearsal,
            trackers=(*self.trackers, *shared.trackers),
            advice=(*shared.advice, *self.advice),
            scoring=self.scoring,
        )


def text(words: Text[C], config: C) -> str:
    """Return a text, with the job's own values filled in if it is a function."""
    return words if isinstance(words, str) else words(config)
