"""A framework's view of one job: legal values and constraints, as data."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeAlias

import msgspec

from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.failure import TRAINER_PHASES, Component, Phase
from autotune.policies.values.knobs import KnobName, Knobs
from autotune.policies.values.provenance import Fact
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value


class Placement(StrEnum):
    """Whether training and generation share the devices."""

    COLOCATED = "colocated"
    SEPARATE = "separate"
    ASYNCHRONOUS = "asynchronous"


class Grid(Value, frozen=True, kw_only=True):
    """Legal values of a knob: an explicit list, or a range with a step (`multiple`)."""

    values: tuple[int | float | bool | str, ...] = ()  # ordered from more memory to less memory
    minimum: float | None = None  # smallest legal value of a range; None: no limit
    maximum: float | None = None  # largest legal value of a range; None: no limit
    multiple: float | None = None  # legal values are multiples of it; None: any number


class Support(Value, frozen=True, kw_only=True):
    """How a framework offers a knob."""

    setting: str  # the framework's own name of it
    grid: Grid
    effect: Effect = Effect.EXACT
    phases: tuple[Phase, ...] = ()  # in which it changes the device memory in use; empty: in all
    is_set: bool = False  # by the job, under this or another name of the setting


class AtLeast(Value, frozen=True, kw_only=True, tag="at_least", tag_field="kind"):
    """`knob` may not go below `value`."""

    knob: str  # name of the limited knob
    value: float  # smallest legal value, in the unit of the knob
    why: str  # why it holds, in words


class AtMost(Value, frozen=True, kw_only=True, tag="at_most", tag_field="kind"):
    """`knob` may not go above `value`."""

    knob: str  # name of the limited knob
    value: float  # largest legal value, in the unit of the knob
    why: str  # why it holds, in words


class Divides(Value, frozen=True, kw_only=True, tag="divides", tag_field="kind"):
    """The value of `knob` must divide `of`."""

    knob: str  # name of the limited knob
    of: int  # number that every legal value divides without a remainder
    why: str  # why it holds, in words


class Requires(Value, frozen=True, kw_only=True, tag="requires", tag_field="kind"):
    """`knob` = `value` is legal only while `other` is one of `values`."""

    knob: str  # name of the knob that is restricted
    value: int | float | bool | str  # the value of `knob` that has a condition
    other: str  # name of the knob on which it depends
    # values of `other` that make it legal; null: the framework's default
    values: tuple[int | float | bool | str | None, ...]
    why: str  # why it holds, in words


class FixedDuringRun(Value, frozen=True, kw_only=True, tag="fixed_during_run", tag_field="kind"):
    """Changing `knob` would break resuming from a checkpoint."""

    knob: str  # name of the limited knob
    why: str  # why it holds, in words


Constraint: TypeAlias = AtLeast | AtMost | Divides | Requires | FixedDuringRun


class Alternative(Value, frozen=True, kw_only=True):
    """What a profile would be with another plausible value of a fact that is assumed."""

    fact: str  # its name
    knobs: Knobs
    placement: Placement
    layout: Layout


class Profile(Value, frozen=True, kw_only=True):
    """A framework's description of one job for the policies: a pure value."""

    framework: str  # name of the framework, as in the job, such as `verl`
    knobs: Knobs  # the job's own, with the framework's defaults filled in
    supported: dict[str, Support]  # by knob: the knobs that the framework offers for this job
    unsupported: dict[str, str] = {}  # knob -> why not
    constraints: tuple[Constraint, ...] = ()  # limits in addition to the grids of the knobs
    placement: Placement = Placement.COLOCATED
    resident: dict[str, tuple[str, ...]] = {}  # phase -> components that hold device memory in it
    engine: str = "sglang"  # inference engine, such as `sglang` or `vllm`; `none`: the job has none
    engine_version: str = ""  # as installed, otherwise as the framework's release needs; empty: unknown
    longest_sequence: int | None = None  # tokens
    trainer_budget_bytes: int | None = None  # device budget of a trainer rank without a GPU
    engine_budget_bytes: int | None = None  # device budget of a rollout engine without a GPU; None: none
    # whether a relaunched attempt continues from a checkpoint; False: it starts at step 0
    resumable: bool = True
    cures_in_place: bool = False  # the job itself can continue in smaller micro-batches
    not_in_place: str = ""  # why it cannot, if other jobs of the framework can
    layout: Layout = Layout()
    facts: tuple[Fact, ...] = ()  # from which the rest follows, in addition to the job's settings
    alternatives: tuple[Alternative, ...] = ()  # for other values of its assumptions, if they change it
    warnings: tuple[str, ...] = ()  # what the user should know before the launch, one sentence each

    @property
    def unknown_program(self) -> bool:
        """Whether nothing is known about the program's structure: it may have no model and no engine."""
        return self.layout == Layout()

    def may_be_any(self, phase: Phase) -> bool:
        """Return whether a failure may be of any phase, because program and phase are unknown."""
        return phase is Phase.NONE and self.unknown_program

    def held(self, phase: Phase) -> tuple[str, ...] | None:
        """Return the components that hold device memory in a phase; None if unknown."""
        held = self.resident.get(phase.value)
        if held is None and self.layout.engine_sleeps and phase in TRAINER_PHASES:
            return (Component.TRAINER.value,)
        return held

    def effect_of(self, knobs: Iterable[str]) -> Effect:
        """Return the strongest effect that changes of some knobs have."""
        effects = {self.supported[knob].effect for knob in knobs if knob in self.supported}
        return Effect.NUMERIC if Effect.NUMERIC in effects else Effect.EXACT

    def without(self, knob: KnobName, why: str) -> Profile:
        """Return the profile with `knob` unsupported for the reason `why`; unchanged if `why` is empty."""
        if not why or knob not in self.supported:
            return self
        return msgspec.structs.replace(
            self,
            supported={name: support for name, support in self.supported.items() if name != knob},
            unsupported={**self.unsupported, knob: why},
            constraints=tuple(each for each in self.constraints if each.knob != knob),
        )
