"""Check changes of knobs, whatever their origin, against a job's `recovery.allow` and `recovery.deny`."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.policies.remedies.catalogue import MOVES
from autotune.policies.remedies.legality import objections
from autotune.policies.values.job import Recovery
from autotune.policies.values.knob_table import KNOB_TABLE
from autotune.policies.values.knobs import Knobs, Setting, changed
from autotune.policies.values.profile import Profile
from autotune.policies.values.remedy import Effect, Remedy


def denial(recovery: Recovery, profile: Profile, before: Knobs, after: Knobs, *, name: str = "") -> str:
    """Return the knob, remedy or effect because of which a change is not permitted; empty if it is permitted.

    A remedy in `deny` excludes changes with this `name`, and the same changes under any other name, as from
    the estimate, the check before the first launch, a climb or a search.
    """
    if name in recovery.deny:
        return name
    for knob, (old, new) in changed(before, after).items():
        support = profile.supported.get(knob)
        effect = Effect.EXACT if support is None else support.effect
        if effect not in recovery.allow:
            return effect.value
        names = (knob, effect.value, *remedies_of(knob, old, new)) if recovery.deny else ()
        for own in names:
            if own in recovery.deny:
                return own
    return ""


def legal(profile: Profile, recovery: Recovery, before: Knobs, after: Knobs, *, started: bool) -> bool:
    """Return whether the framework accepts `after` in place of `before`, and `recovery` permits it."""
    return not (
        denial(recovery, profile, before, after) or objections(profile, before, after, started=started)
    )


def denied(recovery: Recovery, profile: Profile, knobs: Knobs, remedy: Remedy) -> bool:
    """Return whether a remedy is not permitted, because of its name, its effect or its changes."""
    return bool(denial(recovery, profile, knobs, remedy.apply(knobs), name=remedy.name))


def remedies_of(knob: str, before: Setting, after: Setting) -> Iterator[str]:
    """Yield the names of the remedies that change a knob from `before` towards `after`."""
    row = KNOB_TABLE.get(knob)
    for name, move in MOVES.items():
        if row is not None and knob in move.turns and row.asks_less(move.memory, before, after):
            yield name
