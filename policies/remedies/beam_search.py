"""A beam search: every candidate is scored, and the best by several weights are expanded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autotune.policies.estimate.belief.gaussian import Floats

_T = TypeVar("_T", bound=Hashable)
_ROUNDS = 6


def beam(
    starts: Sequence[_T],
    moves: Callable[[_T], Iterable[_T]],
    score: Callable[[list[_T]], tuple[Floats, Floats]],
    *,
    weights: Sequence[float],
    kept: int,
) -> tuple[list[_T], Floats, Floats]:
    """Return the scored candidates with their cost and their excess, as given by `score`.

    In each of at most _ROUNDS rounds, the `kept` best by each weight of excess against cost are expanded.
    """
    visited: dict[_T, None] = {}
    slow, over = np.zeros(0), np.zeros(0)
    front, moved = list(starts), set[_T]()
    for _ in range(_ROUNDS):
        new = list(dict.fromkeys(n for one in front for n in (one, *moves(one)) if n not in visited))
        moved.update(front)
        if new:
            more_slow, more_over = score(new)
            slow, over = np.concatenate([slow, more_slow]), np.concatenate([over, more_over])
            visited |= dict.fromkeys(new)
        every = list(visited)
        best = dict.fromkeys(every[i] for weight in weights for i in in_order(slow + weight * over)[:kept])
        front = [one for one in best if one not in moved]
        if not front:
            break
    return list(visited), slow, over


def in_order(cost: Floats) -> NDArray[np.intp]:
    """Return the indices of the costs in ascending order; stable, and equal on every machine."""
    return np.argsort(np.round(cost, 9), kind="stable")
