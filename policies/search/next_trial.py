"""next_trial(history): a search's pure decision function, which returns the configuration to run next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

from autotune.policies.remedies.allow_deny import legal
from autotune.policies.search import trials
from autotune.policies.search.feasibility import Forecast, foreseen
from autotune.policies.search.space import PERMIT_ALL, Dimension, assembled, neighbours
from autotune.policies.search.trial_history import TrialHistory
from autotune.policies.values.events import Purpose, Result, Tried
from autotune.policies.values.job import Recovery
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Profile
from autotune.policies.values.value import Value

_DRAWS = 40  # draws of the sampler in one decision before the space counts as exhausted
_SAMPLER_EVERY = 3  # in every so many trials, the sampler comes before the estimate


class Proposed(Value, frozen=True, kw_only=True):
    """A configuration proposed as the next trial."""

    knobs: Knobs
    by: str  # start | estimate | sampler
    refused: str = ""  # why it may not run; only for a start, which is then recorded
    excess: dict[str, float] = {}  # by how much it is predicted to overflow, in units of the limits


class Proposals(Protocol):
    """The proposals of a sampler, one after another."""

    def next(self) -> Mapping[str, Setting]:
        """Return a value for every dimension."""

    def refuse(self, *, violation: float) -> None:
        """Report by how much the last proposal exceeds what is allowed."""


class Sampler(Protocol):
    """Creates the proposals of one decision; they depend on the arguments alone."""

    def __call__(
        self,
        dimensions: Sequence[Dimension],
        results: Sequence[Tried],
        running: Sequence[Knobs],
        *,
        near: Knobs | None,
        seed: int,
    ) -> Proposals:
        """Return proposals given these results; with `near`, each differs from it in some knobs only."""


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The constants of a search."""

    profile: Profile
    dimensions: tuple[Dimension, ...]
    starts: tuple[Knobs, ...]  # tried first; the first of them is the stable start
    min_gain: float  # gain over the fastest so far, as a share, that is worth a run
    started: bool = False  # trials resume from a checkpoint
    recovery: Recovery = PERMIT_ALL

    @property
    def base(self) -> Knobs:
        """The stable start, which the search varies."""
        return self.starts[0]

    @cached_property
    def neighbours(self) -> Callable[[Knobs], tuple[Knobs, ...]]:
        """The function from a configuration to those that one move reaches."""
        return cache(
            lambda knobs: neighbours(self.profile, self.base, knobs, self.dimensions, recovery=self.recovery)
        )


def forecast_of(history: TrialHistory, space: SearchSpace) -> Forecast:
    """Return the forecast calibrated by the trials so far; one that predicts nothing if no model is known."""
    foresight = foreseen(
        history.accepted, history.evidence, history.results, space.dimensions, neighbours=space.neighbours
    )
    return Forecast() if foresight is None else foresight


def next_trial(
    history: TrialHistory,
    *,
    space: SearchSpace,
    forecast: Forecast,
    sampler: Sampler,
    running: Sequence[Knobs] = (),
) -> Proposed | None:
    """Return the next configuration of a search; None if none is worth a run beside those in progress.

    First come the starts, then configurations lost with the cluster; then the forecast or the sampler
    proposes, every third time the sampler first, so that a wrong estimate cannot hide a part of the space.
    """
    known = _Known(
        history=history,
        space=space,
        forecast=forecast,
        running=tuple(running),
        suspects=trials.suspects(history.results, start=space.base),
    )
    for knobs in _waiting(known):
        why, excess = ("", {}) if knobs == space.base else known.refusal(knobs)
        return Proposed(knobs=knobs, by="start", refused=why, excess=excess)
    best = trials.fastest(history.results)
    sources: list[tuple[str, Callable[[], Knobs | None]]] = [
        ("estimate", lambda: _estimated(known, best)),
        ("sampler", lambda: _drawn(known, best, sampler)),
    ]
    if (len(history.tried) + len(running)) % _SAMPLER_EVERY == 0:
        sources.reverse()
    for name, source in sources:
        proposed = source()
        if proposed is not None:
            return Proposed(knobs=proposed, by=name)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Everything that one decision depends on."""

    history: TrialHistory
    space: SearchSpace
    forecast: Forecast
    running: tuple[Knobs, ...]
    suspects: tuple[trials.Suspects, ...]

    def refusal(self, knobs: Knobs) -> tuple[str, dict[str, float]]:
        """Return why a configuration must not run, empty if it may, and by how much it overflows."""
        why = self.objection(knobs)
        if why:
            return why, {"known": 0.01}
        excess = self.forecast.excess(knobs)
        if excess:
            phase = max(excess, key=lambda name: excess[name])
            return f"predicted to exceed memory in {phase} by {excess[phase]:.1%}", excess
        return "", {}

    def objection(self, knobs: Knobs) -> str:
        """Return why a configuration need not run, without a forecast; empty if it need."""
        if knobs in self.history.tried:
            return f"the same as trial {self.history.tried[knobs]}"
        if knobs in self.running:
            return "the same as a trial under way"
        space = self.space
        if not legal(space.profile, space.recovery, space.base, knobs, started=space.started):
            return "the framework or the job's `recovery` does not accept it"
        failures = self.history.failures.values()
        failure = trials.known_to_fail(self.space.profile, failures, knobs)
        return failure or trials.suspected(self.suspects, knobs)


def _waiting(known: _Known) -> Iterator[Knobs]:
    """Yield the start configurations without a result, then those lost with the cluster."""
    results = known.history.results
    with_result = {r.knobs for r in results if r.result is not Result.LOST}
    lost = [r.knobs for r in results if r.result is Result.LOST and r.purpose is not Purpose.CONFIRM]
    for knobs in dict.fromkeys([*known.space.starts, *lost]):
        if knobs not in with_result and knobs not in known.running:
            yield knobs


def _estimated(known: _Known, best: Tried | None) -> Knobs | None:
    base = known.space.base
    centers = (base,) if best is None else tuple(dict.fromkeys((best.knobs, base)))
    candidates = known.forecast.proposals(centers, gain=known.space.min_gain)
    return next((knobs for knobs in candidates if not known.objection(knobs)), None)


def _drawn(known: _Known, best: Tried | None, sampler: Sampler) -> Knobs | None:
    space, results = known.space, known.history.results
    near = None if best is None else best.knobs
    draws = sampler(
        space.dimensions, results, known.running, near=near, seed=len(results) + len(known.running)
    )
    for _ in range(_DRAWS):
        knobs = assembled(space.profile, space.base, space.dimensions, draws.next())
        why, excess = known.refusal(knobs)
        slower = 0.0 if why or near is None else known.forecast.much_slower(near, knobs)
        if not why and not slower:
            return knobs
        draws.refuse(violation=max(excess.values(), default=slower))
    return None
