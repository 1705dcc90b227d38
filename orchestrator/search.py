"""The trials of a search: what to try next, several at once, and when to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from orchestrator.choice import Choice
from orchestrator.clock import seconds_of
from orchestrator.errors import Failure
from orchestrator.guide import Guide
from orchestrator.study import Study
from orchestrator.trial import Bench, Trial
from orchestrator.underway import POLL_S
from orchestrator.watch import Progress
from policies import trials
from policies.events import Accepted, Ended, Purpose, Result, Started, Tried
from policies.evidence import Lost
from policies.space import Dimension
from policies.types import Knobs

_PAIRS = 2  # runs of the stable start and of the winner under the same conditions


class Search:
    """The trials of one run, from wherever its journal stands."""

    def __init__(
        self,
        bench: Bench,
        *,
        dimensions: tuple[Dimension, ...],
        starts: Sequence[Knobs],
        guide: Guide,
        exported: Callable[[], None],
        shown: Callable[[Progress], None],
        known: Tried | None = None,
    ) -> None:
        """Search around `starts[0]`; `known` is what it showed already, if that counts as a trial."""
        accepted = bench.journal.history()[0]
        assert isinstance(accepted, Accepted)
        self._bench, self._guide, self._exported, self._shown = bench, guide, exported, shown
        self._begun_at = seconds_of(accepted.at)
        self._settings, self._base, self._ledger = bench.job.search, starts[0], bench.ledger
        self._study = Study(bench.folder.path / "study.journal", name=bench.folder.id, dimensions=dimensions)
        self._known = known
        self._choice = Choice(
            bench.ledger,
            guide,
            profile=accepted.profile,
            dimensions=dimensions,
            starts=starts,
            min_gain=self._settings.min_gain,
            started=bench.job.resume,
        )
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
                if self._elapsed_s >= self._settings.duration_s:
                    self._stop(by="deadline", reason="search.duration is over")
        except Failure:
            self._abandon()
            raise
        self._stop(by="user", reason=interrupts.by)
        return ""

    def confirm(self) -> Tried | None:
        """Let the fastest configurations run for goal.steps, the winner in turn with the stable start.

        Returns the fastest that held, as far as the time and the user allow.
        """
        try:
            for knobs in self._to_prove():
                if self._bench.interrupts.by or self._elapsed_s >= self._settings.duration_s:
                    break
                self._prove(knobs)
        except Failure:
            self._abandon()
            raise
        return trials.fastest(self._ledger.results, confirmed=True)

    def importance(self) -> dict[str, float]:
        """Return what each knob was worth."""
        return self._study.importance()

    @property
    def _elapsed_s(self) -> float:
        return self._bench.clock.now() - self._begun_at

    def _why_end(self) -> str:
        """Return why no further trial begins; those under way count as run."""
        if self._exhausted:
            return "no configuration is left that is worth a run"
        running = [
            Tried(trial=t.number, knobs=t.knobs, purpose=t.purpose, result=Result.FITS) for t in self._running
        ]
        elapsed_s = self._elapsed_s + self._proof_s()
        return trials.why_end([*self._ledger.results, *running], self._settings, elapsed_s=elapsed_s)

    def _proof_s(self) -> float:
        """Return the time that is kept for the proof: goal.steps of the fastest, start-ups included."""
        timed = [r.seconds for r in self._ledger.results if r.purpose is Purpose.PROBE and r.seconds]
        if not timed or not self._settings.confirm:
            return 0.0
        longer = max(1.0, self._bench.job.goal.steps / max(1, self._settings.probe_steps))
        return min(
            (self._settings.confirm + 1) * longer * sorted(timed)[len(timed) // 2],
            0.5 * self._settings.duration_s,
        )

    def _turn(self) -> None:
        """Look once at every running trial."""
        best = trials.fastest(self._ledger.results)
        for trial in list(self._running):
            result = trial.turn(best=None if best is None else best.tokens_per_second)
            if result is not None:
                self._running.remove(trial)
                self._take(result)
        if self._running and (progress := self._running[-1].progress) is not None:
            self._shown(progress)
        self._bench.clock.sleep(POLL_S)

    def _stop(self, *, by: str, reason: str) -> None:
        for trial in self._running:
            trial.stop(by=by, reason=reason)
        self._running = []
        self._study.close_zombies(self._ledger.results)

    def _abandon(self) -> None:
        for trial in self._running:
            trial.abandon()

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
        self._study.close_zombies(self._ledger.results)
        self._guide.learn(self._ledger)

    # ------------------------------------------------------------------ what to try

    def _begin_next(self) -> bool:
        """Begin the next configuration that is worth a run; false where none is left."""
        while True:
            proposed = self._choice.next([trial.knobs for trial in self._running])
            if proposed is None:
                # What runs may still teach that something else is worth a run.
                self._exhausted = not self._running
                return False
            number = self._study.begin(proposed.knobs, why=proposed.by)
            if self._known is not None and proposed.knobs == self._base:
                self._take(msgspec.structs.replace(self._known, trial=number))
                continue
            if not proposed.refused:
                self._running.append(
                    Trial(self._bench, number=number, knobs=proposed.knobs, purpose=Purpose.PROBE)
                )
                return True
            self._take(
                Tried(
                    trial=number,
                    knobs=proposed.knobs,
                    purpose=Purpose.PROBE,
                    result=Result.GATED,
                    constraints=proposed.excess,
                    reason=proposed.refused,
                )
            )

    # ------------------------------------------------------------------ what came of it

    def _take(self, result: Tried) -> None:
        """Record a result, tell the study, and keep the best so far in its files."""
        if result.result is Result.FITS and (result.extrapolated or not result.constraints):
            # What the probe could not force, or no reading tells, the calibrated estimate does.
            self._guide.learn(self._ledger)
            foreseen = self._guide.expectations(result.knobs)
            merged = {p: max(v, result.constraints.get(p, v)) for p, v in foreseen.items()}
            result = msgspec.structs.replace(
                result, constraints=result.constraints | {p: round(v, 4) for p, v in merged.items()}
            )
        before = trials.winner(self._ledger.results)
        self._bench.record(result)
        self._study.tell(result)
        if result.result is Result.LOST:
            self._after_loss(result)
        elif result.result is not Result.GATED:
            self._guide.learn(self._ledger)
        best = trials.winner(self._ledger.results)
        if best is not None and (before is None or best.knobs != before.knobs):
            self._exported()

    def _after_loss(self, result: Tried) -> None:
        """Give up where the cluster took the same configuration away again and again."""
        lost = sum(r.knobs == result.knobs and r.result is Result.LOST for r in self._ledger.results)
        if lost > self._bench.job.recovery.infrastructure_retries:
            raise Failure(
                f"trial {result.trial} was lost {lost} times: {result.reason}", hint="resume the search later"
            )

    # ------------------------------------------------------------------ proof

    def _to_prove(self) -> Iterator[Knobs]:
        """Yield what runs next for goal.steps: the fastest that were not, then the start and the winner."""
        while True:
            results = self._ledger.results
            judged = {
                r.knobs for r in results if r.purpose is Purpose.CONFIRM and r.result is not Result.LOST
            }
            waiting = trials.fastest(r for r in results if r.knobs not in judged)
            held = trials.fastest(results, confirmed=True)
            proven = {r.knobs for r in results if r.purpose is Purpose.CONFIRM and trials.keeps_limits(r)}
            if waiting is None or len(proven - {self._base}) >= self._settings.confirm:
                break
            if held is not None and _rate(waiting) <= _rate(held):
                break
            yield waiting.knobs
        if not self._settings.confirm:
            return
        while (held := trials.fastest(self._ledger.results, confirmed=True)) and held.knobs != self._base:
            counts = [
                sum(r.knobs == k and r.purpose is Purpose.CONFIRM for r in self._ledger.results)
                for k in (self._base, held.knobs)
            ]
            if min(counts) >= _PAIRS:
                return
            yield self._base if counts[0] <= counts[1] else held.knobs

    def _prove(self, knobs: Knobs) -> None:
        number = self._ledger.tried[knobs]
        self._running.append(Trial(self._bench, number=number, knobs=knobs, purpose=Purpose.CONFIRM))
        while self._running:
            self._turn()
            if self._bench.interrupts.by:
                self._stop(by="user", reason=self._bench.interrupts.by)
            elif self._elapsed_s >= self._settings.duration_s:
                self._stop(by="deadline", reason="search.duration is over")


def _rate(result: Tried) -> float:
    return result.tokens_per_second or 0.0
