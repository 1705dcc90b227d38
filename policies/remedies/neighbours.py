"""Configurations near a given one: what each knob may become, and a search through their combinations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from autotune.policies.estimate.gaussian import Floats
from autotune.policies.remedies.catalogue import SAVING
from autotune.policies.remedies.legality import completed, highest, lowest, objections
from autotune.policies.values.types import (
    KNOBS,
    Effect,
    Grid,
    Knobs,
    Profile,
    Recovery,
    Requires,
    Setting,
    Together,
)

Score: TypeAlias = Callable[[Sequence[Knobs]], tuple[Floats, Floats]]

# The ladder alone turns these: a degree of another knob, and what the estimate cannot rank.
_BY_LADDER = frozenset(
    {"optimizer_offload_fraction", "host_allocator", "memory_margin", "restart_every", "memory_snapshot"}
)
# The knobs that are varied, and what a move towards less memory is called on the ladder.
REMEDY_OF: dict[str, str] = {
    knob: SAVING[knob][0] for knob in KNOBS if knob in SAVING and knob not in _BY_LADDER
}
# Numbers are tried at these shares of the written value and of the present one, and at the least legal one.
_SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
_FRACTIONS = tuple(share / 100 for share in range(10, 96, 5))
_CHUNKS = (8192, 4096, 2048, 1024, 512, 256)
_ROUNDS = 6
_WEIGHTS = (0.5, 3.0, 12.0, 1e3)  # of what does not fit against the logarithm of the step's seconds
_KEPT = 5  # by each weight, from round to round


def choices(
    profile: Profile, present: Knobs, *, recovery: Recovery, started: bool
) -> dict[str, tuple[Setting, ...]]:
    """Return what each knob may become by itself, its present value first."""
    simple = tuple(c for c in profile.constraints if not isinstance(c, Requires | Together))
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
            for value in dict.fromkeys(_values(profile, present, knob))
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
    linked = any(isinstance(c, Requires | Together) for c in profile.constraints)
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


def _values(profile: Profile, present: Knobs, knob: str) -> Iterator[Setting]:
    """Yield values worth trying, legal or not; numbers never exceed what the job itself wrote."""
    grid = profile.supported[knob].grid
    own, written = getattr(present, knob), getattr(profile.knobs, knob)
    if grid.values:
        yield from grid.values
        return
    if knob == "memory_fraction":
        yield from (_snapped(grid, share) for share in _FRACTIONS)
        return
    if knob == "logprob_chunk":
        yield from (_snapped(grid, float(chunk)) for chunk in _CHUNKS if own is None or chunk < own)
        return
    if knob == "logprob_tokens" and own is None:
        written = written or profile.knobs.tokens_per_microbatch
    if knob in ("sequence_parallel", "context_parallel", "tensor_parallel", "rollout_tensor_parallel"):
        base = own or 1
        yield from (base * 2, base * 4, max(1, base // 2), max(1, base // 4))
        return
    base = max((v for v in (own, written) if isinstance(v, int | float)), default=None)
    if base is None:
        base = highest(profile, knob)
    if base is None:
        return
    least = lowest(profile, knob)
    floor = max(0.0 if knob == "dataloader_workers" else 1.0, least or 0.0)
    yield from (_snapped(grid, base * share) for share in _SHARES if base * share >= floor)
    yield _snapped(grid, floor, up=True)
    if knob == "dataloader_workers":
        yield 0


def _snapped(grid: Grid, value: float, *, up: bool = False) -> int | float:
    multiple = grid.multiple or (0.01 if value < 1 else 1.0)
    steps = value / multiple
    whole = math.ceil(steps - 1e-6) if up else math.floor(steps + 1e-6)
    found = max(round(whole * multiple, 6), grid.minimum or 0.0)
    return int(found) if float(found).is_integer() and multiple >= 1 else float(found)
