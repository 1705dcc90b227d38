"""Schedule the trials of a search: what to try next, how many in parallel, and when to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec

from autotune.launchers.base import Unreachable
from autotune.orchestrator.driver.attempt import POLL_S, abandon, end_survivors, kill
from autotune.orchestrator.driver.blocking_calls import Invoke, ThreadedInvoke, here
from autotune.orchestrator.driver.capacity import await_nodes
from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.driver.signals import ForcedExit
from autotune.orchestrator.driver.unwatched import observed_s
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run.lock import TakenOver
from autotune.orchestrator.search.optuna_study import TpeProposals
from autotune.orchestrator.search.trial import Trial, TrialContext
from autotune.orchestrator.units import counted, show_duration
from autotune.policies.search import schedule, trials
from autotune.policies.search.feasibility import Forecast
from autotune.policies.search.next_trial import SearchSpace, next_trial
from autotune.policies.search.trial_history import TrialHistory
from autotune.policies.values.events import Ended, Purpose, Result, Tried
from autotune.policies.values.history import elapsed_s
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Lost

_AT_A_TIME = 8  # parallel starts and ends of attempts; more would only take CPU time from running trials
_POLLS_PER_S = 40.0  # of all trials together: a poll costs the driver and a supervisor some milliseconds


class TrialScheduler:
    """The trials of one run, continued from its journal."""

    def __init__(
        self,
        bench: TrialContext,
        *,
        space: SearchSpace,
        forecasts: Callable[[TrialHistory], Forecast],
        exported: Callable[[], None],
        on_progress: Callable[[Mapping[int, Progress]], None],
        known: Tried | None = None,
        trial_s: float = 0.0,
    ) -> None:
        """Search in `space`; `known` is the existing result of its base, if it needs no trial of its own.

        `trial_s`: the seconds of a trial at the speed of the stable start; 0: unknown.
        """
        self._bench, self._rig = bench, bench.context
        self._exported, self._on_progress = exported, on_progress
        self._begun_at = self._rig.clock.monotonic() - elapsed_s(self._rig.journal.history())
        self._settings, self._space, self._ledger = bench.job.search, space, bench.ledger
        self._proposers: dict[int, str] = {}  # trial -> proposer, of trials that this driver began
        self._known, self._trial_s = known, trial_s
        self._forecasts = forecasts
        self._forecast = forecasts(self._ledger.trials)
        self._running: list[Trial] = []
        self._beside = ThreadedInvoke(at_once=_AT_A_TIME) if self._settings.parallel > 1 else None
        self.exhausted = False
        self._fruitless = -1  # number of results at which no further parallel trial was worth a run
        self._again_at = 0.0  # monotonic time before which no trial begins, after a loss

    # ------------------------------------------------------------------ the search

    def drive(self) -> str:
        """Run trials until the search ends; returns the reason, empty if interrupted."""
        with suppress(ForcedExit), self._kept():
            self._recover()
            return self._search()
        return ""

    def _search(self) -> str:
        interrupts = self._rig.interrupts
        while not interrupts.by:
            begun = False
            while not (reason := self._why_end()) and len(self._running) < self._settings.parallel:
                if interrupts.by or self._waits or not self._begin_next():
                    break
                begun = True
            if not self._running and not begun and (reason or not self._waits):
                return reason or self._why_end()
            self._turn()
            if self.elapsed_s >= self._settings.duration_s:
                self._stop(by="deadline", reason="`search.duration` is used up")
        self._stop(by="user", reason=interrupts.by)
        return ""

    def confirm(self) -> Tried | None:
        """Run the fastest configurations for goal.steps, the winner alternating with the stable start.

        Stops early if the time is used up or the user interrupts. Returns the fastest confirmed result.
        """
        with suppress(ForcedExit), self._kept():
            while not self._rig.interrupts.by and self.elapsed_s < self._settings.duration_s:
                if self._waits:
                    self._rig.clock.sleep(POLL_S)
                    continue
                knobs = schedule.next_proof(self._results, self._settings, start=self._space.base)
                if knobs is None:
                    break
                self._prove(knobs)
        return trials.fastest(self._results, confirmed=True)

    @property
    def _results(self) -> tuple[Tried, ...]:
        return self._ledger.trials.results

    @property
    def elapsed_s(self) -> float:
        """The seconds that count against search.duration, without those when no driver was running."""
        return self._rig.clock.monotonic() - self._begun_at

    @property
    def _waits(self) -> bool:
        """Whether the scheduler waits after an infrastructure failure."""
        return self._rig.clock.monotonic() < self._again_at

    def _why_end(self) -> str:
        """Return why no further trial starts; running trials count towards the limits."""
        if self.exhausted:
            return "no remaining configuration is expected to be faster"
        return schedule.why_end(
            self._results,
            self._settings,
            goal_steps=self._bench.job.goal.steps,
            elapsed_s=self.elapsed_s,
            running=len(self._running),
            trial_s=self._trial_s,
        )

    def _turn(self) -> None:
        """Poll every running trial once."""
        best = trials.fastest(self._results)
        for trial in list(self._running):
            self._advance(trial, best)
        if running := {t.attempt: t.progress for t in self._running if t.progress is not None}:
            self._on_progress(running)
        self._rig.clock.sleep(POLL_S)

    def _advance(self, trial: Trial, best: Tried | None) -> None:
        result = trial.turn(best=best, pace_s=max(POLL_S, len(self._running) / _POLLS_PER_S))
        if trial.over:
            self._running.remove(trial)
        if result is not None:
            self._take(result)

    def _stop(self, *, by: str, reason: str) -> None:
        """Stop the running trials in parallel; a trial that ends by itself keeps its result."""
        stopped = self._running[:]
        for trial in stopped:
            trial.stop(by=by, reason=reason)
        while self._running:
            self._turn()
        for trial in stopped:
            self._leave((trial.attempt,) if trial.unreached else (), why=f": {trial.unreached}")

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """End running trials after an error, or after the user's second interrupt."""
        try:
            with self._rig.interrupts.cutting():
                yield
        except ForcedExit:
            self._kill()
            raise
        except TakenOver:
            raise  # the running trials belong to the other driver
        except Exception:
            if self._beside is not None:
                self._beside.finish()
            for trial in self._running:
                trial.abandon()
            raise

    def _kill(self) -> None:
        trials, self._running = self._running, []
        if self._beside is not None:
            self._beside.finish(timeout_s=0.0)
        going = set(self._rig.journal.view.unended)
        running = {trial.attempt: trial.handle for trial in trials if trial.attempt in going}
        self._rig.observer.say(f"killing {counted(len(running), 'trial')}")
        self._leave(kill(self._rig, running, by=self._rig.interrupts.by))

    def _leave(self, attempts: tuple[int, ...], *, why: str = "") -> None:
        """Warn about attempts that could not be ended; the search's next driver ends them."""
        if attempts and self._bench.cluster.address != "local":
            numbers = ", ".join(f"#{number}" for number in attempts)
            hint = f"`{self._rig.folder.call('stop')}` ends what is left"
            self._rig.observer.warn(f"attempt {numbers} may still run{why}; {hint}")

    def _recover(self) -> None:
        """End the trials that a dead driver left running, and record their ends."""
        context = self._rig
        end_survivors(context)
        left = [attempt for attempt in context.journal.view.trials if attempt.ended is None]
        for attempt in left:
            handle = context.runner.attach(run=context.folder.id, attempt=attempt.number)
            if handle is not None and abandon(handle, grace_s=0.0) is None:
                raise Unreachable(f"attempt #{attempt.number} cannot be asked to end")
        context.runner.sweep(run=context.folder.id)
        lost = Lost(reason="the driver ended")
        for attempt in left:
            seconds = observed_s(context, attempt)
            context.record(Ended(attempt=attempt.number, outcome=lost, seconds=seconds, unwatched=True))
        self._learn()

    # ------------------------------------------------------------------ what to try

    def _begin_next(self) -> bool:
        """Begin the next configuration that is worth a run; return false if there is none."""
        if self._running and self._fruitless == len(self._results):
            return False
        while True:
            proposed = next_trial(
                self._ledger.trials,
                space=self._space,
                forecast=self._forecast,
                sampler=TpeProposals,
                running=[trial.knobs for trial in self._running],
            )
            if proposed is None:
                # Results of the running trials may still make another configuration worth a run.
                self.exhausted, self._fruitless = not self._running, len(self._results)
                return False
            number = self._next_number()
            self._proposers[number] = proposed.by
            if self._known is not None and proposed.knobs == self._space.base:
                self._take(msgspec.structs.replace(self._known, trial=number))
                continue
            if not proposed.refused:
                self._add(number, proposed.knobs, Purpose.PROBE)
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

    def _next_number(self) -> int:
        """Return the number of the next trial, after all recorded and running ones."""
        numbers = (*self._rig.journal.view.trial_rows, *(trial.number for trial in self._running))
        return 1 + max(numbers, default=-1)

    def _add(self, number: int, knobs: Knobs, purpose: Purpose) -> None:
        """Begin a trial; after a loss its calls run in this thread, the only one that may reconnect.

        Wait for nodes only while no trial runs, because running trials occupy some of them.
        """
        if not self._running and not await_nodes(self._rig):
            return
        results = self._results
        lost = bool(results) and results[-1].result is Result.LOST
        invoke: Invoke = here if lost or self._beside is None else self._beside
        trial = Trial(self._bench, number=number, knobs=knobs, purpose=purpose, invoke=invoke)
        self._running.append(trial)
        self._advance(trial, None)

    # ------------------------------------------------------------------ what came of it

    def _take(self, result: Tried) -> None:
        """Record a result, and export the best configuration if it changed."""
        if result.result is Result.FITS and (result.extrapolated or not result.constraints):
            # Use the calibrated estimate for lengths that the probe could not force, or without readings.
            self._learn()
            result = trials.with_expectations(result, self._forecast.expectations(result.knobs))
        before = trials.winner(self._results, self._settings, start=self._space.base)
        losses = self._losses(result) if result.result is Result.LOST else None
        if losses is not None and not losses.too_many:
            result = msgspec.structs.replace(result, wait_s=losses.wait_s)
        result = msgspec.structs.replace(result, proposed_by=self._proposers.get(result.trial, ""))
        self._rig.record(result)
        if losses is not None:
            self._after_loss(result, losses)
        elif result.result is not Result.GATED:
            self._learn()
        best = trials.winner(self._results, self._settings, start=self._space.base)
        if best is not None and (before is None or best.knobs != before.knobs):
            self._exported()

    def _losses(self, result: Tried) -> schedule.Losses:
        retries = self._bench.job.recovery.infrastructure_retries
        return schedule.losses((*self._results, result), result.knobs, retries=retries)

    def _after_loss(self, result: Tried, losses: schedule.Losses) -> None:
        """Wait, longer each time; give up if the cluster lost the same configuration too often."""
        if losses.too_many:
            raise Failure(
                f"trial {result.trial} was lost {losses.count} times: {result.reason}",
                hint="resume the search later",
            )
        self._again_at = max(self._again_at, self._rig.clock.monotonic() + losses.wait_s)
        wait = show_duration(losses.wait_s)
        self._rig.observer.say(
            f"trial {result.trial} was lost (infrastructure failure); next trial in {wait}"
        )

    def _learn(self) -> None:
        """Update the forecast from all recorded trials."""
        self._forecast = self._forecasts(self._ledger.trials)

    # ------------------------------------------------------------------ proof

    def _prove(self, knobs: Knobs) -> None:
        number = self._ledger.trials.tried[knobs]
        self._add(number, knobs, Purpose.CONFIRM)
        while self._running:
            self._turn()
            if self._rig.interrupts.by:
                self._stop(by="user", reason=self._rig.interrupts.by)
            elif self.elapsed_s >= self._settings.duration_s:
                self._stop(by="deadline", reason="`search.duration` is used up")
