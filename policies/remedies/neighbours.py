"""Configurations near a given one: what each knob may become, and a search through their combinations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from autotune.policies.estimate.gaussian import Floats
from autotune.policies.remedies.candidate_values import values_near
from autotune.policies.remedies.catalogue import SAVING
from autotune.policies.remedies.legality import completed, objections
from autotune.policies.values.job import Recovery
from autotune.policies.values.knob_table import ROWS
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Profile, Requires
from autotune.policies.values.remedy import Effect

Score: TypeAlias = Callable[[Sequence[Knobs]], tuple[Floats, Floats]]

# The knobs that are varied, and what a move towards less memory is called on the ladder.
REMEDY_OF: dict[str, str] = {
    row.name: SAVING[row.name] for row in ROWS if row.name in SAVING and row.estimated
}
_ROUNDS = 6
_WEIGHTS = (0.5, 3.0, 12.0, 1e3)  # of what does not fit against the logarithm of the step's seconds
_KEPT = 5  # by each weight, from round to round


def choices(
    profile: Profile, present: Knobs, *, recovery: Recovery, started: bool
) -> dict[str, tuple[Setting, ...]]:
    """Return what each knob may become by itself, its present value first."""
    simple = tuple(c for c in profile.constraints if not isinstance(c, Requires))
    alone = msgspec.structs.replace(profile, constraints=simple)
    found: dict[str, tuple[Setting, ...]] = {}
    for knob, remedy in REMEDY_OF.items():
        support = profile.supported.get(knob)
        if support is None or knob in recovery.deny or remedy in recovery.deny:
            continue
        if support.effect not in recovery.allow or support.effect.value in recovery.deny:
            continue
        own = getattr(present, knob)
        legal = [
            value
            for value in dict.fromkeys(values_near(profile, present, knob))
            if value != own
            and not objections(
                alone, present, msgspec.structs.replace(present, **{knob: value}), started=started
            )
        ]
        if legal:
            found[knob] = (own, *legal)
    return found


def search(
    profile: Profile, present: Knobs, options: dict[str, tuple[Setting, ...]], score: Score, *, started: bool
) -> tuple[list[Knobs], Floats, Floats]:
    """Return the configurations looked at, the logarithm of their seconds and what of them does not fit.

    From the present configuration every single change is scored; the best by several weights of fit
    against speed are changed again, until nothing new is found.
    """
    names = tuple(options)
    linked = any(isinstance(c, Requires) for c in profile.constraints)
    start = (0,) * len(names)
    seen: dict[tuple[int, ...], int] = {}
    knobs: list[Knobs] = []
    slow, over = np.zeros(0), np.zeros(0)
    front = [start]
    for _ in range(_ROUNDS):
        new = list(
            dict.fromkeys(
                p for place in front for p in (place, *_moves(place, names, options)) if p not in seen
            )
        )
        made = [(p, _at(profile, present, p, names, options, linked=linked)) for p in new]
        if linked:
            made = [(p, k) for p, k in made if not objections(profile, present, k, started=started)]
        if not made:
            break
        for place, _knobs in made:
            seen[place] = len(seen)
        knobs += [k for _, k in made]
        seconds, misses = score([k for _, k in made])
        slow, over = np.concatenate([slow, seconds]), np.concatenate([over, misses])
        places = list(seen)
        front = [places[i] for i in _front(slow, over)]
    return knobs, slow, over


def effect_of(profile: Profile, changes: dict[str, Setting]) -> Effect:
    """Return the strongest effect among the changes."""
    numeric = any(profile.supported[k].effect is Effect.NUMERIC for k in changes if k in profile.supported)
    return Effect.NUMERIC if numeric else Effect.EXACT


def _front(slow: Floats, over: Floats) -> list[int]:
    chosen: dict[int, None] = {}
    for weight in _WEIGHTS:
        chosen |= dict.fromkeys(int(i) for i in np.argsort(slow + weight * over, kind="stable")[:_KEPT])
    return list(chosen)


def _moves(
    place: tuple[int, ...], names: tuple[str, ...], options: dict[str, tuple[Setting, ...]]
) -> Iterator[tuple[int, ...]]:
    for position, name in enumerate(names):
        for value in range(len(options[name])):
            if value != place[position]:
                yield (*place[:position], value, *place[position + 1 :])


def _at(
    profile: Profile,
    present: Knobs,
    place: tuple[int, ...],
    names: tuple[str, ...],
    options: dict[str, tuple[Setting, ...]],
    *,
    linked: bool,
) -> Knobs:
    changes = {name: options[name][index] for name, index in zip(names, place, strict=True) if index}
    if linked and changes:
        changes = completed(profile, present, changes)
    return msgspec.structs.replace(present, **changes)
