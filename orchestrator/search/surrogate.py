"""What is foreseen of a search's candidates, kept up to date with what its trials showed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from autotune.orchestrator.search.results import Ledger
from autotune.policies.search import feasibility
from autotune.policies.search.space import Dimension, neighbours
from autotune.policies.values.events import Accepted, Tried
from autotune.policies.values.types import Knobs


class Guide(Protocol):
    """What is predicted of a configuration before it runs."""

    def learn(self, ledger: Ledger) -> None:
        """Take note of what has run."""

    def excess(self, knobs: Knobs) -> dict[str, float]:
        """Return the phases foreseen to overflow beyond the margin, in units of their limits."""

    def expectations(self, knobs: Knobs) -> dict[str, float]:
        """Return by how much each phase is expected to exceed what it may use; empty where unknown."""

    def much_slower(self, best: Knobs, knobs: Knobs) -> float:
        """Return by what share a candidate is surely slower than the fastest so far; 0: it may be as fast."""

    def proposal(
        self, *, best: Tried | None, gain: float, permitted: Callable[[Knobs], bool]
    ) -> Knobs | None:
        """Return the candidate most worth a run; None where none is."""


class Blind:
    """Nothing is foreseen."""

    def learn(self, ledger: Ledger) -> None:
        """Take note of nothing."""

    def excess(self, knobs: Knobs) -> dict[str, float]:
        """Return nothing."""
        return {}

    def expectations(self, knobs: Knobs) -> dict[str, float]:
        """Return nothing."""
        return {}

    def much_slower(self, best: Knobs, knobs: Knobs) -> float:
        """Return 0."""
        return 0.0

    def proposal(
        self, *, best: Tried | None, gain: float, permitted: Callable[[Knobs], bool]
    ) -> Knobs | None:
        """Return nothing."""
        return None


class Estimated:
    """The calibrated estimate; blind where no model is known."""

    def __init__(self, accepted: Accepted, *, base: Knobs, dimensions: Sequence[Dimension]) -> None:
        self._accepted, self._base, self._dimensions = accepted, base, tuple(dimensions)
        self._sight: feasibility.Foresight | None = None
        self._moves: dict[Knobs, tuple[Knobs, ...]] = {}
        self._worth: tuple[Knobs, ...] | None = None  # since the last time something was learned

    def learn(self, ledger: Ledger) -> None:
        """Take note of what has run."""
        self._sight = feasibility.foreseen(
            self._accepted, ledger.evidence(), ledger.results, self._dimensions
        )
        self._worth = None

    def excess(self, knobs: Knobs) -> dict[str, float]:
        """Return the phases foreseen to overflow beyond the margin, in units of their limits."""
        return {} if self._sight is None else feasibility.excess(self._sight, knobs)

    def expectations(self, knobs: Knobs) -> dict[str, float]:
        """Return by how much each phase is expected to exceed what it may use; empty where unknown."""
        return {} if self._sight is None else feasibility.expectations(self._sight, knobs)

    def much_slower(self, best: Knobs, knobs: Knobs) -> float:
        """Return by what share a candidate is surely slower than the fastest so far; 0: it may be as fast."""
        return 0.0 if self._sight is None else feasibility.much_slower(self._sight, best, knobs)

    def proposal(
        self, *, best: Tried | None, gain: float, permitted: Callable[[Knobs], bool]
    ) -> Knobs | None:
        """Return the candidate foreseen to fit and to be fastest; None where none is worth a run."""
        if self._sight is None:
            return None
        centers = (self._base,) if best is None else tuple(dict.fromkeys((best.knobs, self._base)))
        if self._worth is None:  # several trials may begin on what is known now
            self._worth = feasibility.proposals(self._sight, centers, self._near, gain=gain)
        return next((knobs for knobs in self._worth if permitted(knobs)), None)

    def _near(self, knobs: Knobs) -> tuple[Knobs, ...]:
        if knobs not in self._moves:
            self._moves[knobs] = neighbours(self._accepted.profile, self._base, knobs, self._dimensions)
        return self._moves[knobs]
