"""The trials of a search: what to try next, several at once, and when to end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from orchestrator.clock import seconds_of
from orchestrator.errors import Failure
from orchestrator.study import Asked, Study
from orchestrator.trial import Bench, Trial
from orchestrator.underway import POLL_S
from policies import trials
from policies.events import Accepted, Ended, History, Purpose, Result, Started, Tried
from policies.evidence import Lost
from policies.space import Dimension, assembled, legal
from policies.types import Knobs

_ASK_MOST = 200  # proposals in a row that need no run before the space counts as searched


class Gate(Protocol):
    """What is predicted of a configuration before it runs."""

    def excess(self, knobs: Knobs) -> dict[str, float]:
        """Return the phases predicted to overflow beyond the margin, in units of their limits."""

    def learn(self, history: History) -> None:
        """Take note of what has run."""


class Open:
    """Nothing is predicted."""

    def excess(self, knobs: Knobs) -> dict[str, float]:
        """Return nothing."""
        return {}

    def learn(self, history: History) -> None:
        """Take note of nothing."""


class Search:
    """The trials of one run, from wherever its journal stands."""

    def __init__(
        self,
        bench: Bench,
        *,
        dimensions: tuple[Dimension, ...],
        starts: Sequence[Knobs],
        gate: Gate,
        exported: Callable[[Tried], None],
        known: Tried | None = None,
    ) -> None:
        """Search around `starts[0]`; `known` is what it showed already, if that counts as a trial."""
        accepted = bench.journal.history()[0]
        assert isinstance(accepted, Accepted)
        self._bench, self._dimensions, self._gate, self._exported = bench, dimensions, gate, exported
        self._profile, self._begun_at = accepted.profile, seconds_of(accepted.at)
        self._settings, self._base = bench.job.search, starts[0]
        self._study = Study(
            bench.folder.path / "study.journal",
            name=bench.folder.id,
            dimensions=dimensions,
            parallel=self._settings.parallel,
        )
        self._starts, self._known = tuple(starts), known
        self._running: list[Trial] = []
        self._exhausted = False

    # ------------------------------------------------------------------ the search

    def drive(self) -> str:
        """Run trials until something ends the search; returns why it ended, empty when interrupted."""
        self._recover()
        interrupts = self._bench.interrupts
        try:
            while not interrupts.by:
                while not (reason := self._why_end()) and len(self._running) < self._settings.parallel:
                    if not self._begin_next():
                        break
                if not self._running:
                    return reason or self._why_end()
                self._turn()
        except Failure:
            for trial in self._running:
                trial.abandon()
            raise
        self._stop(reason=interrupts.by)
        return ""

    def confirm(self) -> Tried | None:
        """Let the fastest configurations run for goal.steps; returns the fastest that held."""
        while not self._bench.interrupts.by:
            results = self._results()
            judged = {result.knobs for result in results if result.purpose is Purpose.CONFIRM}
            waiting = trials.fastest(r for r in results if r.knobs not in judged)
            held = trials.fastest(results, confirmed=True)
            proven = [
                r
                for r in results
                if r.purpose is Purpose.CONFIRM and r.result is Result.FITS and r.knobs != self._base
            ]
            if waiting is None or len(proven) >= self._settings.confirm or _rate(waiting) <= _rate(held):
                return held
            self._running.append(
                Trial(self._bench, number=waiting.trial, knobs=waiting.knobs, purpose=Purpose.CONFIRM)
            )
            while self._running and not self._bench.interrupts.by:
                self._turn()
        self._stop(reason=self._bench.interrupts.by)
        return trials.fastest(self._results(), confirmed=True)

    def importance(self) -> dict[str, float]:
        """Return what each knob was worth."""
        return self._study.importance()

    def _results(self) -> tuple[Tried, ...]:
        return trials.tried(self._bench.journal.history())

    def _why_end(self) -> str:
        """Return why no further trial begins; those under way count as run."""
        if self._exhausted:
            return "every configuration of the space is known"
        running = [
            Tried(trial=t.number, knobs=t.knobs, purpose=t.purpose, result=Result.FITS) for t in self._running
        ]
        elapsed_s = self._bench.clock.now() - self._begun_at
        return trials.why_end([*self._results(), *running], self._settings, elapsed_s=elapsed_s)

    def _turn(self) -> None:
        """Look once at every running trial."""
        best = trials.fastest(self._results())
        for trial in list(self._running):
            result = trial.turn(best=None if best is None else best.tokens_per_second)
            if result is not None:
                self._running.remove(trial)
                self._take(result)
        self._bench.clock.sleep(POLL_S)

    def _stop(self, *, reason: str) -> None:
        for trial in self._running:
            trial.stop(by="user", reason=reason)
        self._running = []
        self._study.close_zombies(self._results())

    def _recover(self) -> None:
        """End what a dead driver left running and close its trials."""
        bench = self._bench
        history = bench.journal.history()
        ended = {e.attempt for e in history if isinstance(e, Ended)}
        for event in history:
            if not isinstance(event, Started) or event.trial is None or event.attempt in ended:
                continue
            handle = bench.runner.attach(run=bench.folder.id, attempt=event.attempt)
            if handle is not None:
                handle.stop(grace_s=0.0)
                handle.release()
            bench.record(Ended(attempt=event.attempt, outcome=Lost(reason="the driver ended")))
        bench.runner.sweep(run=bench.folder.id)
        self._study.close_zombies(self._results())
        for knobs in self._starts:
            self._study.begin_with(knobs)
        self._gate.learn(bench.journal.history())

    # ------------------------------------------------------------------ what to try

    def _begin_next(self) -> bool:
        """Take the next configuration that is worth a run; false where none is left."""
        for _ in range(_ASK_MOST):
            asked = self._study.ask(seed=len(self._results()) + len(self._running))
            knobs = asked.knobs or assembled(self._profile, self._base, self._dimensions, asked.values)
            if self._known is not None and self._known.knobs == knobs and not self._results():
                self._take(msgspec.structs.replace(self._known, trial=asked.trial))
                continue
            why, excess = self._refusal(asked, knobs)
            if not why:
                self._running.append(
                    Trial(self._bench, number=asked.trial, knobs=knobs, purpose=Purpose.PROBE)
                )
                return True
            self._take(
                Tried(
                    trial=asked.trial,
                    knobs=knobs,
                    purpose=Purpose.PROBE,
                    result=Result.GATED,
                    constraints=excess,
                    reason=why,
                )
            )
        self._exhausted = True
        return False

    def _refusal(self, asked: Asked, knobs: Knobs) -> tuple[str, dict[str, float]]:
        """Return why a configuration is not run, and by how much it is thought to overflow."""
        known = [(r.trial, r.knobs) for r in self._results() if _ran(r)]
        for trial, other in [*known, *((t.number, t.knobs) for t in self._running)]:
            if other == knobs:
                return f"the same as trial {trial}", {}
        started = self._bench.job.resume
        if asked.knobs is None and not legal(self._profile, self._base, knobs, started=started):
            return "the framework does not accept it", {"legality": 1.0}
        why = trials.known_to_fail(self._profile, self._bench.journal.history(), knobs)
        if why:
            return why, {"known": 0.01}
        excess = self._gate.excess(knobs)
        if excess:
            phase = max(excess, key=lambda name: excess[name])
            return f"predicted to exceed {phase} by {excess[phase]:.1%}", excess
        return "", {}

    # ------------------------------------------------------------------ what came of it

    def _take(self, result: Tried) -> None:
        """Record a result, tell the study, and keep the best so far in its files."""
        before = trials.fastest(self._results())
        if result.knobs == self._base and result.result is Result.FITS:
            # It held for goal.steps before the search began.
            result = msgspec.structs.replace(result, purpose=Purpose.CONFIRM)
        self._bench.record(result)
        self._study.tell(result)
        if result.result is Result.LOST:
            self._after_loss(result)
        if result.result is not Result.GATED:
            self._gate.learn(self._bench.journal.history())
        best = trials.fastest(self._results())
        if best is not None and best != before:
            self._exported(best)

    def _after_loss(self, result: Tried) -> None:
        """Try a configuration again that the cluster took away, a few times."""
        lost = sum(r.knobs == result.knobs and r.result is Result.LOST for r in self._results())
        if lost > self._bench.job.recovery.infrastructure_retries:
            raise Failure(
                f"trial {result.trial} was lost {lost} times: {result.reason}", hint="resume the search later"
            )
        if result.purpose is not Purpose.CONFIRM:
            self._study.begin_with(result.knobs)


def _rate(result: Tried | None) -> float:
    return 0.0 if result is None else result.tokens_per_second or 0.0


def _ran(result: Tried) -> bool:
    return result.result not in (Result.GATED, Result.LOST)
