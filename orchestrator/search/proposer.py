"""Which configuration a search tries next: the starts, then the estimate's and the sampler's in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autotune.orchestrator.search.optuna_study import Draws
from autotune.orchestrator.search.results import Ledger
from autotune.orchestrator.search.surrogate import Guide
from autotune.policies.search import trials
from autotune.policies.search.space import Dimension, assembled, legal
from autotune.policies.values.events import Purpose, Result
from autotune.policies.values.types import Knobs, Profile, Value

_DRAWS = 40  # of the sampler in one decision, before the space counts as searched
_FREELY = 3  # every so many trials the sampler comes first, whatever the estimate says


class Proposed(Value, frozen=True, kw_only=True):
    """A configuration to try."""

    knobs: Knobs
    by: str  # start | estimate | sampler
    refused: str = ""  # why it may not run; only of a start, which is on record then
    excess: dict[str, float] = {}  # by how much it is foreseen to overflow, in units of the limits


class Choice:
    """What is worth a run, given what a ledger says was tried."""

    def __init__(
        self,
        ledger: Ledger,
        guide: Guide,
        *,
        profile: Profile,
        dimensions: Sequence[Dimension],
        starts: Sequence[Knobs],
        min_gain: float,
        started: bool = False,
    ) -> None:
        """Choose around `starts[0]`; `started`: trials continue a checkpoint."""
        self._ledger, self._guide, self._profile = ledger, guide, profile
        self._dimensions, self._starts = tuple(dimensions), tuple(dict.fromkeys(starts))
        self._min_gain, self._started = min_gain, started
        self._suspects: tuple[trials.Suspects, ...] = ()

    def next(self, running: Sequence[Knobs]) -> Proposed | None:
        """Return the next configuration; None where none is worth a run now."""
        self._suspects = trials.suspects(self._ledger.results, start=self._starts[0])
        for knobs in self._waiting(running):
            if knobs == self._starts[0]:
                return Proposed(knobs=knobs, by="start")
            why, excess = self._refusal(knobs, running)
            return Proposed(knobs=knobs, by="start", refused=why, excess=excess)
        sources: list[tuple[str, Callable[[Sequence[Knobs]], Knobs | None]]] = [
            ("estimate", self._estimated),
            ("sampler", self._drawn),
        ]
        if (len(self._ledger.tried) + len(running)) % _FREELY == 0:
            sources.reverse()
        for name, source in sources:
            found = source(running)
            if found is not None:
                return Proposed(knobs=found, by=name)
        return None

    def _waiting(self, running: Sequence[Knobs]) -> Iterator[Knobs]:
        """Yield the start configurations that nothing is known of, then what the cluster took away."""
        results = self._ledger.results
        judged = {r.knobs for r in results if r.result is not Result.LOST}
        lost = [r.knobs for r in results if r.result is Result.LOST and r.purpose is not Purpose.CONFIRM]
        for knobs in dict.fromkeys([*self._starts, *lost]):
            if knobs not in judged and knobs not in running:
                yield knobs

    def _estimated(self, running: Sequence[Knobs]) -> Knobs | None:
        return self._guide.proposal(
            best=trials.fastest(self._ledger.results),
            gain=self._min_gain,
            permitted=lambda knobs: not self._known(knobs, running),
        )

    def _drawn(self, running: Sequence[Knobs]) -> Knobs | None:
        results = self._ledger.results
        best = trials.fastest(results)
        near = None if best is None else best.knobs
        draws = Draws(self._dimensions, results, running, near=near, seed=len(results) + len(running))
        for _ in range(_DRAWS):
            knobs = assembled(self._profile, self._starts[0], self._dimensions, draws.next())
            why, excess = self._refusal(knobs, running)
            slower = 0.0 if why or near is None else self._guide.much_slower(near, knobs)
            if not why and not slower:
                return knobs
            draws.refuse(violation=max(excess.values(), default=slower))
        return None

    def _refusal(self, knobs: Knobs, running: Sequence[Knobs]) -> tuple[str, dict[str, float]]:
        """Return why a configuration is not run, and by how much it is thought to overflow."""
        why = self._known(knobs, running)
        if why:
            return why, {"known": 0.01}
        excess = self._guide.excess(knobs)
        if excess:
            phase = max(excess, key=lambda name: excess[name])
            return f"foreseen to exceed {phase} by {excess[phase]:.1%}", excess
        return "", {}

    def _known(self, knobs: Knobs, running: Sequence[Knobs]) -> str:
        """Return why a configuration need not run, by what is known without an estimate."""
        if knobs in self._ledger.tried:
            return f"the same as trial {self._ledger.tried[knobs]}"
        if knobs in running:
            return "the same as a trial under way"
        if not legal(self._profile, self._starts[0], knobs, started=self._started):
            return "the framework does not accept it"
        known = trials.known_to_fail(self._profile, self._ledger.failures, knobs)
        return known or trials.suspected(self._suspects, knobs)
