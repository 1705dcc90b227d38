"""The configurations near a given one: the values that each knob may take, and a search of combinations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeAlias

import msgspec

from autotune.policies.estimate.belief.gaussian import Floats
from autotune.policies.remedies.allow_deny import legal
from autotune.policies.remedies.beam_search import beam
from autotune.policies.remedies.candidate_values import values_near
from autotune.policies.remedies.catalogue import SAVING
from autotune.policies.remedies.legality import completed, interlock
from autotune.policies.values.job import Recovery
from autotune.policies.values.knob_table import ROWS
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Profile, Requires

Score: TypeAlias = Callable[[Sequence[Knobs]], tuple[Floats, Floats]]

# The varied knobs, each with the name of the remedy that saves memory with it.
REMEDY_OF: dict[str, str] = {
    row.name: SAVING[row.name] for row in ROWS if row.name in SAVING and row.estimated
}
_WEIGHTS = (0.5, 3.0, 12.0, 1e3)  # of the shortfall against the logarithm of the step's seconds
_KEPT = 5  # candidates kept for each weight and round


def choices(
    profile: Profile, present: Knobs, *, recovery: Recovery, started: bool
) -> dict[str, tuple[Setting, ...]]:
    """Return the values that each knob may take by itself, its present value first."""
    simple = tuple(c for c in profile.constraints if not isinstance(c, Requires))
    alone = msgspec.structs.replace(profile, constraints=simple)
    result: dict[str, tuple[Setting, ...]] = {}
    for knob in REMEDY_OF:
        if knob not in profile.supported:
            continue
        own = getattr(present, knob)
        values = []
        for value in dict.fromkeys(values_near(profile, present, knob)):
            moved = msgspec.structs.replace(present, **{knob: value})
            if value != own and legal(alone, recovery, present, moved, started=started):
                values.append(value)
        if values:
            result[knob] = (own, *values)
    return result


def search(
    profile: Profile,
    present: Knobs,
    options: dict[str, tuple[Setting, ...]],
    score: Score,
    *,
    recovery: Recovery,
    started: bool,
) -> tuple[list[Knobs], Floats, Floats]:
    """Return candidates with the logarithm of their step time and their predicted shortfall.

    A beam search scores every single change of the present configuration and continues from the best by
    several weights of fit against speed, until nothing new is found.
    """
    names = tuple(options)
    linked = interlock(profile, names)

    @cache
    def at(place: tuple[int, ...]) -> Knobs:
        changes = {name: options[name][index] for name, index in zip(names, place, strict=True) if index}
        if linked and changes:
            changes = completed(profile, present, changes)
        return msgspec.structs.replace(present, **changes)

    @cache
    def possible(place: tuple[int, ...]) -> bool:
        return not linked or legal(profile, recovery, present, at(place), started=started)

    def moves(place: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for position, name in enumerate(names):
            for value in range(len(options[name])):
                moved = (*place[:position], value, *place[position + 1 :])
                if moved != place and possible(moved):
                    yield moved

    places, slow, over = beam(
        [(0,) * len(names)],
        moves,
        lambda some: score([at(place) for place in some]),
        weights=_WEIGHTS,
        kept=_KEPT,
    )
    return [at(place) for place in places], slow, over
