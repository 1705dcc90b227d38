"""What a remedy changes, by how much, and why it frees the memory that failed: one function per remedy.

What a proposal does not say with its own figures is said in the words of `MOVES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from autotune.policies.remedies.catalogue import MOVES
from autotune.policies.remedies.legality import completed
from autotune.policies.remedies.step_size import next_values
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Profile
from autotune.policies.values.remedy import Effect, Remedy

Propose: TypeAlias = Callable[[Profile, Knobs, Diagnosis], Iterable[Remedy]]

GIB = 1 << 30


def change(
    name: str,
    profile: Profile,
    knobs: Knobs,
    changes: dict[str, Setting],
    *,
    reason: str = "",
    frees: str = "",
    slows: str = "",
) -> Iterator[Remedy]:
    """Yield the remedy where its knobs are offered, have a value and differ from the present ones."""
    if any(value is None or knob not in profile.supported for knob, value in changes.items()):
        return
    full = completed(profile, knobs, changes)
    full = {knob: value for knob, value in full.items() if getattr(knobs, knob) != value}
    if any(knob not in full for knob in changes):
        return
    numeric = any(profile.supported[k].effect is Effect.NUMERIC for k in full if k in profile.supported)
    move = MOVES[name]
    turn = move.turns[next(iter(changes))]
    yield Remedy(
        name=name,
        changes=full,
        reason=reason or turn.reason,
        frees=frees or move.frees,
        slows=slows or turn.slows or move.slows,
        effect=Effect.NUMERIC if numeric else Effect.EXACT,
    )


def stepped(
    name: str,
    profile: Profile,
    knobs: Knobs,
    knob: str,
    diagnosis: Diagnosis,
    *,
    reason: str = "",
    frees: str = "",
) -> Iterator[Remedy]:
    """Yield the remedy that moves a knob by its next steps the way that saves the remedy's memory."""
    for value in next_values(profile, knobs, knob, diagnosis, MOVES[name].memory):
        yield from change(name, profile, knobs, {knob: value}, reason=reason, frees=frees)


def stepping(name: str, knob: str, *, reason: str = "", frees: str = "") -> Propose:
    """Return the proposal of a remedy that does nothing but move one knob by its next steps."""

    def propose(profile: Profile, knobs: Knobs, diagnosis: Diagnosis) -> Iterator[Remedy]:
        return stepped(name, profile, knobs, knob, diagnosis, reason=reason, frees=frees)

    propose.__name__ = name
    return propose


def doubled(name: str, profile: Profile, knobs: Knobs, knob: str, diagnosis: Diagnosis) -> Iterator[Remedy]:
    """Yield the remedy that spreads the work over twice as many ranks, where that is offered."""
    move, present = MOVES[name], getattr(knobs, knob)
    why = next(iter(move.turns.values())).reason
    for ranks in next_values(profile, knobs, knob, diagnosis, move.memory):
        yield from change(
            name,
            profile,
            knobs,
            {knob: ranks},
            reason=f"{why}: {ranks} ranks instead of {present}",
            frees="about half of it",
            slows=move.slows,
        )
