"""A framework's knowledge of its settings as typed rows, which a type checker reads.

Each framework has one module `rows.py` with a `Table`: its knobs, what it refuses and what it warns of. A
condition is a function of the job's settings, a text may be one too: `lambda c: f"{c.world} GPUs"`.
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
# Why -> the number of the job that binds a knob, `{value}` in a plain text; 0 and None bind nothing.
Bounds: TypeAlias = Mapping[Text[C], Callable[[C], float | None]]
Versions: TypeAlias = Mapping[str, str]  # a release by the name of a framework or of its engine

NO_SETTING = (
    "there is no setting for it"  # why a knob is not offered that has no row and no reason of its own
)
SAVES_FIRST = "a checkpoint is written before the training goes on"  # why no save is to be made synchronous
SWITCH = Grid(values=(False, True))
OFF = Grid(values=(False,))  # of a switch that nobody is to turn on
ON = Grid(values=(True,))  # ... or off
PASS = Grid(minimum=64, multiple=64)  # of a pass: a multiple of every size of sequence parallelism in use


def always(_: Any) -> bool:
    """Return true: what holds of every job."""
    return True


class Reason(NamedTuple, Generic[C]):
    """In which jobs, and of which releases, a knob is not offered.

    `since`, `until`: the first release, of the framework or of an engine, of which the reason is true, and
    the first of which it no longer is. A test fails if no supported release lies between them.
    """

    when: Condition[C] = always
    since: Versions = {}
    until: Versions = {}


# Why a knob is not offered -> in which jobs; the first that holds counts.
Reasons: TypeAlias = Mapping[Text[C], Condition[C] | Reason[C]]


class Needs(Value, frozen=True, kw_only=True):
    """A value of a knob that is only taken beside some values of another one."""

    value: int | float | bool | str
    other: KnobName
    values: tuple[int | float | bool | str, ...]
    why: str


class Row(Value, Generic[C], frozen=True, kw_only=True, gc=True):
    """A knob and the setting behind it.

    Of several rows of a knob that hold of a job the first is read and all are written. Where none holds, the
    knob is not offered: `otherwise` says why. Where one holds, `unless` says in which jobs it is still not
    offered.
    """

    knob: KnobName
    key: str = (
        ""  # of the setting; empty: there is none, the knob is `always` the same, or it is `read` and `stays`
    )
    when: Condition[C] = always  # in which jobs the setting means something
    otherwise: Text[C] = ""  # why the knob is not offered where no row of it holds
    unless: Reasons[C] = {}
    always: Setting = None  # what the knob is in every job
    also: Mapping[str, Condition[C]] = {}  # the same setting of another model -> in which jobs there is one
    read: Callable[[C], Setting] | None = None  # where the setting alone does not tell the knob
    # Where other settings go with this one: they follow from the job's settings, the knobs that these
    # resolve to, and the knobs that are wanted.
    write: Callable[[C, Knobs, Knobs], Mapping[str, Any]] | None = None
    writes: Mapping[Setting, Mapping[str, Any]] = {}  # a value of the knob -> every setting that makes it so
    fills: Mapping[
        str, Callable[[C], str]
    ] = {}  # a setting that goes with a knob that is on -> where the job has none
    default: Any = None  # what counts where neither the job nor the release has the setting
    grid: Grid = Grid()  # legal values, where the adapter's `sizes` does not derive them from the job
    modes: Mapping[str, Any] = {}  # a mode of the knob -> the setting's value, from more memory to less
    states: tuple[Any, ...] = ()  # the setting's value where the knob is off and where it is on, if no switch
    unit: int = 0  # bytes of one of the setting, where it does not count the knob's own unit
    numeric: str = ""  # why a change of it rounds otherwise; empty: results are exact
    phases: tuple[Phase, ...] = ()  # in which it moves device memory; empty: those of the knob
    at_least: Bounds[C] = {}
    at_most: Bounds[C] = {}
    divides: Bounds[C] = {}
    divides_with_tensor: Bounds[C] = {}  # it divides the size together with `tensor_parallel`
    needs: tuple[Needs, ...] = ()
    fixed: str = ""  # why it stays as it is once a checkpoint is there; empty: it may change
    stays: str = ""  # why it always stays as it is: it is read, for estimates, and never offered
    since: Versions = {}  # the first release that has the setting, and the first that no longer has it
    until: Versions = {}
    read_at: str = (
        ""  # the line of the newest release on record that reads the setting: `path/in/package.py:12`
    )

    @property
    def keys(self) -> tuple[str, ...]:
        """The setting and those of the other models."""
        return (self.key, *self.also)


class Refusal(NamedTuple, Generic[C]):
    """A setting, in which jobs the framework refuses it, what is wrong and what to write instead."""

    key: str
    when: Condition[C]
    message: Text[C]
    hint: Text[C] = ""


class Warned(NamedTuple, Generic[C]):
    """What the user of some jobs should know before the launch, one sentence."""

    when: Condition[C]
    says: Text[C]


class Unread(NamedTuple, Generic[C]):
    """A setting that the framework accepts and, in some jobs, does not read; why, and what to write."""

    key: str
    why: str
    when: Condition[C] = always


class Table(NamedTuple, Generic[C]):
    """What holds of a framework's settings."""

    rows: tuple[Row[C], ...]
    absent: Mapping[KnobName, str] = {}  # knobs that no job offers, where more is known than NO_SETTING
    unless: Mapping[KnobName, Reasons[C]] = {}  # reasons of a dialect's own for knobs whose rows it shares
    refused: tuple[Refusal[C], ...] = ()
    warned: tuple[Warned[C], ...] = ()
    unread: tuple[Unread[C], ...] = ()
    renamed: tuple[Renamed, ...] = ()
    rehearsal: Rehearsal = Rehearsal()
    trackers: tuple[TrackerRow, ...] = ()
    advice: tuple[Advice, ...] = ()  # of public guides, beyond or against the knobs

    def over(self, shared: Table[C]) -> Table[C]:
        """Return the table with what it shares with its dialects behind its own."""
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
        )


def text(words: Text[C], config: C) -> str:
    """Return a text, with the job's own numbers where it has some."""
    return words if isinstance(words, str) else words(config)
