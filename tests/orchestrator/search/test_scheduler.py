"""A search over a scripted world: real study, real policies, memory and speed by formula."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import optuna
import pytest
from msgspec.structs import replace
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from autotune.launchers import frameworks
from autotune.launchers.base import Capacity, Exit, Observed, Unreachable
from autotune.orchestrator import messages
from autotune.orchestrator.config.loader import assumed, parse
from autotune.orchestrator.driver import attempt, reconcile, rehearsal
from autotune.orchestrator.driver.context import Observer, RunContext
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run import directory, journal
from autotune.orchestrator.run.lock import TakenOver
from autotune.orchestrator.search import whole_search
from autotune.policies.search import trials
from autotune.policies.search.feasibility import Forecast
from autotune.policies.values.command import Command
from autotune.policies.values.events import (
    Accepted,
    Ended,
    Event,
    Finished,
    History,
    Interrupted,
    Progressed,
    Purpose,
    Result,
    Stable,
    Started,
    StopRequested,
    Tried,
    Verdict,
)
from autotune.policies.values.history import elapsed_s
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed, Lost, Unit
from autotune.policies.values.run.view import RunView
from tests.orchestrator.scripted import Hands, Killed, Place, Script, World, phase, reported, settings

JOB = """\
name: timid
framework: builtin
settings:
  steps: 200
  prompts: 16
  samples: 8
  prompt_tokens: 8
  response_tokens: 24
  tokens_per_microbatch: 64
  concurrency: 4
  trainer_budget: 100MiB
  save_every: 10
goal: {steps: 4}
search: {trials: 12, probe_steps: 3, confirm: 1, vary: [tokens_per_microbatch, concurrency]}
"""


def formula(world: World, command: Command) -> tuple[Script, Exit | None]:
    """More tokens at once are faster and need more memory; more than 1,500 do not fit."""
    own = settings(command)
    tokens, concurrency, steps = own["tokens_per_microbatch"], own["concurrency"], own["steps"]
    assert isinstance(tokens, int) and isinstance(concurrency, int) and isinstance(steps, int)
    used = (20 << 20) + tokens * 50_000
    opening = ["builtin: phase start name=init step=0\n"]
    if used > 100 << 20:
        return [*opening, "builtin: phase start name=backward step=1\n", reported("backward", 1)], None
    rate = 1000 * tokens / (tokens + 300) * concurrency / (concurrency + 8)
    lines = [
        phase("forward", n, used=used)
        + f"builtin: step {n}/{steps} seconds=2.5 tokens=4096 tokens_per_second={rate} reward=0.1\n"
        for n in range(1, steps + 1)
    ]
    return [*opening, *lines, f"builtin: done steps={steps}\n"], Exit(code=0)


_BLIND = Forecast()


class Heard(Observer):
    def __init__(self, messages: list[str]) -> None:
        self._messages = messages

    def say(self, text: str) -> None:
        self._messages.append(text)

    def warn(self, text: str) -> None:
        self._messages.append(f"warning: {text}")


class Night:
    def __init__(
        self,
        folder: Path,
        world: World,
        text: str = JOB,
        forecast: Forecast | None = _BLIND,
        *,
        rehearses: bool = False,
        proven_by: str = "",
    ) -> None:
        self.world, self.clock, self.forecast = world, Hands(), forecast
        self.run = directory.create(
            folder / "runs",
            job_text=text,
            request=directory.RunRequest(mode=directory.Mode.SEARCH, rehearse=rehearses, proven_by=proven_by),
        )
        self.job = parse(text)
        self.framework = frameworks.find(self.job.framework)
        self.messages: list[str] = []
        self.interrupts = Interrupts()
        self.recorded: Callable[[Event], None] = lambda _: None
        self.exports = 0

    def drive(self) -> Verdict:
        place, framework = Place(self.world, self.clock), self.framework
        with journal.Journal(self.run.path, tell=self._tell) as book:
            if not book.history():
                reconcile.accept(
                    book,
                    run=self.run.id,
                    job=self.job,
                    profile=framework.profile(self.job, assumed(self.job)),
                    cluster=place.cluster(),
                    versions={},
                    now=self.clock.now(),
                    mode="search",
                    rehearsed=rehearsal.planned(framework, self.job, self.run.request),
                )
            context = RunContext(
                journal=book,
                framework=framework,
                runner=place,
                clock=self.clock,
                folder=self.run,
                job=self.job,
                interrupts=self.interrupts,
                observer=Heard(self.messages),
            )
            forecast = self.forecast
            forecasts = None if forecast is None else lambda _: forecast
            return whole_search.search(context, forecasts=forecasts, exported=self._count)

    def _tell(self, event: Event) -> None:
        self.world.tick()
        self.recorded(event)

    def _count(self) -> None:
        self.exports += 1

    @property
    def history(self) -> History:
        return self.run.history()

    @property
    def results(self) -> tuple[Tried, ...]:
        return tuple(RunView(self.history).tried)

    @property
    def start(self) -> Knobs:
        return next(e.knobs for e in self.history if isinstance(e, Started))

    @property
    def winner(self) -> Tried | None:
        return trials.winner(self.results, self.job.search, start=self.start)

    def study(self) -> optuna.Study:
        storage = JournalStorage(JournalFileBackend(str(self.run.path / "study.journal")))
        return optuna.load_study(study_name=self.run.id, storage=storage)


def ran(results: tuple[Tried, ...]) -> list[Tried]:
    return [r for r in results if r.result not in (Result.GATED, Result.LOST)]


def test_a_search_makes_the_job_stable_and_then_faster(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))
    assert night.drive() == Stable()
    results = night.results
    first, best = results[0], trials.fastest(results, confirmed=True)
    assert first.knobs.tokens_per_microbatch == 64 and first.purpose is Purpose.CONFIRM
    assert best is not None and best.tokens_per_second and first.tokens_per_second
    assert best.tokens_per_second > 1.5 * first.tokens_per_second
    assert all(value <= 0 for value in best.constraints.values())
    assert isinstance(night.history[-1], Finished)
    assert night.exports >= 2


def test_no_configuration_runs_twice_and_none_that_is_known_to_fail(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))
    night.drive()
    probes = [r.knobs for r in ran(night.results) if r.reason != "the stable start"]
    confirmed = [r.knobs for r in ran(night.results) if r.purpose is Purpose.CONFIRM]
    assert len(set(probes)) >= len(probes) - len(confirmed)
    failed = [r.knobs.tokens_per_microbatch or 0 for r in night.results if r.result is Result.FAILS]
    assert len(failed) <= 3


def test_out_of_memory_is_information(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))
    night.drive()
    study = night.study()
    failed = [r for r in night.results if r.result is Result.FAILS]
    assert failed
    for result in failed:
        trial = study.trials[result.trial]
        assert trial.state is TrialState.COMPLETE
        assert trial.constraints["backward"] > 0
        assert trial.user_attrs["result"] == "fails"
    assert not [t for t in study.trials if t.state is TrialState.FAIL]


def test_the_gate_is_never_passed(tmp_path: Path) -> None:
    class Low(Forecast):
        def excess(self, knobs: Knobs) -> dict[str, float]:
            tokens = knobs.tokens_per_microbatch or 0
            return {"backward": tokens / 1500 - 1} if tokens > 1500 else {}

    night = Night(tmp_path, World(formula), forecast=Low())
    night.drive()
    started = [e.knobs.tokens_per_microbatch or 0 for e in night.history if isinstance(e, Started)]
    assert max(started) <= 1500
    gated = [r for r in night.results if r.result is Result.GATED]
    assert all(r.seconds == 0 for r in gated)


def test_a_lost_cluster_costs_nothing(tmp_path: Path) -> None:
    def flaky(world: World, command: Command) -> tuple[Script, Exit | None]:
        if len(world.commands) == 3:
            return [Observed(lost="node gone")], None
        return formula(world, command)

    night = Night(tmp_path, World(flaky))
    night.drive()
    lost = [r for r in night.results if r.result is Result.LOST]
    assert len(lost) == 1
    assert night.study().trials[lost[0].trial].state is TrialState.FAIL
    again = [r for r in ran(night.results) if r.knobs == lost[0].knobs]
    assert again and again[0].result is not Result.LOST
    # What it waited is in the journal, so that a resumed search has no more time than it was given.
    assert lost[0].wait_s == 30
    driven_s = night.clock.now() - 1_800_000_000.0
    without = tuple(replace(e, wait_s=0.0) if isinstance(e, Tried) else e for e in night.history)
    assert driven_s - 10 < elapsed_s(night.history) <= driven_s
    assert elapsed_s(without) == pytest.approx(elapsed_s(night.history) - 30, abs=1)


def test_trials_never_touch_the_users_checkpoints(tmp_path: Path) -> None:
    text = JOB.replace("  save_every", "  checkpoint_dir: /data/mine\n  save_every")
    night = Night(tmp_path, World(formula), text)
    night.drive()
    for command in night.world.commands:
        assert not str(settings(command).get("checkpoint_dir", "")).startswith("/data/mine")


def test_what_trials_wrote_is_removed_once_the_search_is_over(tmp_path: Path) -> None:
    """A file of each trial, where its settings say; those of another run and of the user stay."""
    home = tmp_path / "work"
    others = [home / "trials/another-1/out", home / "trials/mine"]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    written: list[Path] = []

    def writes(world: World, command: Command) -> tuple[Script, Exit | None]:
        folder = Path(str(settings(command)["checkpoint_dir"]))
        folder.mkdir(parents=True, exist_ok=True)
        written.append(folder / "out")
        written[-1].touch()
        if len(world.commands) == 6 and not night.interrupts.by:
            night.interrupts.note(2)
        return formula(world, command)

    night = Night(tmp_path, World(writes), JOB + f"workdir: {home}\n")
    assert night.drive() == Interrupted(by="SIGINT")
    assert all(path.exists() for path in written)  # it goes on from here
    night.interrupts = Interrupts()
    night.world.play = formula
    assert night.drive() == Stable()
    assert written and not any(path.exists() for path in written)
    assert sorted(path for path in (home / "trials").rglob("*") if path.is_file()) == sorted(others)


def test_a_driver_that_was_taken_over_leaves_its_trials_to_the_other(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula, address="10.0.0.1:6379"))

    def taken(event: Event) -> None:
        begun = {e.attempt for e in night.history if isinstance(e, Started) and e.trial is not None}
        if isinstance(event, Progressed) and event.attempt in begun:
            left.append(event.attempt)
            raise TakenOver("the run was taken over by another host")

    left: list[int] = []
    night.recorded = taken
    with pytest.raises(TakenOver):
        night.drive()
    life = night.world.lives[left[0]]
    assert life.running and life.supervised
    assert not [e for e in night.history if isinstance(e, Ended) and e.attempt in left]
    night.recorded = lambda _: None
    assert night.drive() == Stable() and not life.running


def test_two_trials_at_once(tmp_path: Path) -> None:
    text = JOB.replace("confirm: 1,", "confirm: 1, parallel: 2,")
    night = Night(tmp_path, World(formula, at_once=2), text)
    assert night.drive() == Stable()
    assert night.world.most_at_once == 2
    best = trials.fastest(night.results, confirmed=True)
    assert best is not None and best.knobs.tokens_per_microbatch != 64


def test_ctrl_c_keeps_the_best_and_resume_goes_on(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))
    night.world.play = lambda world, command: (
        (night.interrupts.note(2) if len(world.commands) == 6 else None) or formula(world, command)
    )  # type: ignore[func-returns-value]
    assert night.drive() == Interrupted(by="SIGINT")
    assert any(text.startswith("measured so far: ") for text in night.messages), night.messages
    before = ran(night.results)
    assert before and night.exports
    night.interrupts = Interrupts()
    assert night.drive() == Stable()
    assert ran(night.results)[: len(before)] == before


def test_the_estimate_keeps_out_of_memory_rare_and_finds_the_best(tmp_path: Path) -> None:
    blind, guided = (
        Night(tmp_path / "blind", World(formula)),
        Night(tmp_path / "guided", World(formula), forecast=None),
    )
    assert blind.drive() == Stable() and guided.drive() == Stable()
    best = [trials.fastest(night.results, confirmed=True) for night in (blind, guided)]
    rates = [0.0 if b is None else b.tokens_per_second or 0.0 for b in best]
    assert rates[1] >= 0.95 * rates[0]
    failures = [sum(r.result is Result.FAILS for r in night.results) for night in (blind, guided)]
    assert failures[1] <= failures[0]


def test_the_winner_runs_in_turn_with_the_stable_start(tmp_path: Path) -> None:
    night = Night(tmp_path, World(formula))
    night.drive()
    proofs = [r for r in night.results if r.purpose is Purpose.CONFIRM]
    best = night.winner
    assert best is not None
    assert [r.knobs for r in proofs].count(best.knobs) == 2
    assert [r.knobs for r in proofs].count(night.results[0].knobs) == 2
    compared = trials.gain(night.results, night.job.search, start=night.start)
    assert compared is not None and compared.fast > compared.slow and compared.runs == 2


def test_a_probe_under_way_ends_with_the_time(tmp_path: Path) -> None:
    def endless(world: World, command: Command) -> tuple[Script, Exit | None]:
        script, ended = formula(world, command)
        return ([*script[:2], *[""] * 100_000], None) if len(world.commands) == 4 else (script, ended)

    night = Night(tmp_path, World(endless), JOB.replace("trials: 12,", "trials: 12, duration: 300s,"))
    assert night.drive() == Stable()
    elapsed_s = night.clock.now() - 1_800_000_000.0
    assert 300 <= elapsed_s < 330
    assert any(isinstance(e, StopRequested) and e.by == "deadline" for e in night.history)
    assert not [t for t in night.study().trials if t.state is TrialState.RUNNING]
    assert night.exports


def test_one_of_two_that_fails_does_not_disturb_the_other(tmp_path: Path) -> None:
    text = JOB.replace("confirm: 1,", "confirm: 1, parallel: 2,")
    night = Night(tmp_path, World(formula, at_once=2), text)
    night.drive()
    failed = {r.attempt for r in night.results if r.result is Result.FAILS}
    assert failed
    ended = {e.attempt: e.outcome for e in night.history if isinstance(e, Ended)}
    others = [r for r in night.results if r.result is Result.FITS and r.attempt not in failed]
    assert all(isinstance(ended[r.attempt], Completed) for r in others)


def test_more_trials_at_once_than_the_cluster_holds_are_refused() -> None:
    text = JOB.replace("confirm: 1,", "confirm: 1, parallel: 3,")
    job = parse(text)
    cluster = msgspec.structs.replace(assumed(job), gpus_per_node=4, gpu_memory_bytes=80 << 30)
    profile = frameworks.find("builtin").profile(job, cluster)
    with pytest.raises(Failure, match="3 trials need 2 GPUs each; the cluster has 4"):
        whole_search.check(job, Accepted(run="r", job=job, profile=profile, cluster=cluster))


def test_what_no_reading_tells_the_estimate_does(tmp_path: Path) -> None:
    class Sure(Forecast):
        def expectations(self, knobs: Knobs) -> dict[str, float]:
            return {"backward": 0.2 if (knobs.tokens_per_microbatch or 0) > 500 else -0.3}

    def unread(world: World, command: Command) -> tuple[Script, Exit | None]:
        script, ended = formula(world, command)
        return [re.sub(r" peak_bytes=\d+ budget_bytes=\d+", "", str(piece)) for piece in script], ended

    night = Night(tmp_path, World(unread), forecast=Sure())
    night.drive()
    best = night.winner
    assert best is not None and (best.knobs.tokens_per_microbatch or 0) <= 500
    assert [r for r in night.results if r.constraints.get("backward") == 0.2]


def outcomes(results: tuple[Tried, ...]) -> list[tuple[Knobs, Result, float | None]]:
    return [(r.knobs, r.result, r.tokens_per_second) for r in ran(results)]


@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
@pytest.mark.parametrize("forecast", [_BLIND, None], ids=["blind", "estimate"])
def test_a_killed_search_ends_with_the_trials_of_one_that_was_not(
    tmp_path: Path, share: float, forecast: Forecast | None
) -> None:
    whole = Night(tmp_path / "whole", World(formula), forecast=forecast)
    whole.drive()
    kill_at = round(share * whole.world.ticks)
    night = Night(tmp_path / "killed", World(formula, kill_at=kill_at), forecast=forecast)
    with pytest.raises(Killed):
        night.drive()
    for life in night.world.lives.values():
        life.running = False
    assert night.drive() == Stable()
    assert outcomes(night.results) == outcomes(whole.results)
    assert not [t for t in night.study().trials if t.state is TrialState.RUNNING]


@pytest.mark.parametrize("then", ["stop", "resume"])
def test_a_trial_that_cannot_be_asked_to_end_is_not_called_stopped(tmp_path: Path, then: str) -> None:
    night = Night(tmp_path, World(formula, address="10.0.0.1:6379"))
    trial = 0

    def interrupt(event: Event) -> None:
        nonlocal trial
        begun = {e.attempt for e in night.history if isinstance(e, Started) and e.trial is not None}
        if isinstance(event, Progressed) and event.attempt in begun and not night.interrupts.by:
            trial, night.world.deaf = event.attempt, True
            night.interrupts.note(signal.SIGTERM)

    night.recorded = interrupt
    assert night.drive() == Interrupted(by="SIGTERM")
    life = night.world.lives[trial]
    assert life.running and life.supervised
    assert not [e for e in night.history if isinstance(e, Finished)]
    assert not [e for e in night.history if isinstance(e, Ended) and e.attempt == trial]
    hint = f"`{night.run.call('stop')}` ends what is left"
    assert f"warning: attempt #{trial} may still run: the head does not answer; {hint}" in night.messages

    night.recorded = lambda _: None
    with pytest.raises(Unreachable, match=f"attempt #{trial} cannot be asked to end"):
        night.drive()
    assert not [e for e in night.history if isinstance(e, Ended) and e.attempt == trial]

    night.world.deaf = False
    if then == "resume":
        night.interrupts = Interrupts()
        assert night.drive() == Stable()
    else:
        assert night.drive() == Interrupted(by="SIGTERM")
    assert not life.running
    (ended,) = (e for e in night.history if isinstance(e, Ended) and e.attempt == trial)
    assert isinstance(ended.outcome, Lost) and ended.unwatched


SILENT_JOB = """\
name: silent
framework: command
command: [train, "{tokens_per_microbatch}", "{recompute}", "{steps}"]
settings: {tokens_per_microbatch: 4096, recompute: "full", steps: 4}
goal: {steps: 4}
search: {trials: 8, probe_steps: 4, confirm: 1, vary: [tokens_per_microbatch, recompute]}
"""


def untold(_: World, command: Command) -> tuple[Script, Exit | None]:
    """A script that prints its steps and nothing else: 32 s each, 20 s without recomputation."""
    tokens, recompute, steps = int(command.argv[1]), command.argv[2], int(command.argv[3])
    looks = (50 if recompute == "off" else 80) * 4096 // tokens  # of 0.4 s each
    script: Script = []
    for n in range(1, steps + 1):
        script += [*[""] * (looks - 1), f"step {n}/{steps}\n"]
    return script, Exit(code=0)


def test_a_job_that_tells_no_tokens_is_searched_by_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "WATCH_S", attempt.POLL_S)  # the scripted job's clock moves with each look
    night = Night(tmp_path, World(untold), SILENT_JOB)
    assert night.drive() == Stable()
    assert {r.tokens_per_second for r in night.results} == {None}
    first, best = night.results[0], night.winner
    assert best is not None and best.knobs == replace(first.knobs, recompute="off")
    assert first.unit is best.unit is Unit.STEPS
    assert (first.rate, best.rate) == (pytest.approx(1 / 32, rel=0.02), pytest.approx(1 / 20, rel=0.02))
    assert [r for r in night.results if r.result is Result.SLOW]
    words = next(text for text in night.messages if text.startswith("fastest"))
    assert f"trial {best.trial}, 0.05 steps/s, 1.60x the stable start (0.0312 steps/s; 2 runs" in words
    assert "0.05 steps/s" in messages.trial(best, before=first.knobs)
    study = night.study().best_trial
    assert study.number == best.trial and study.value == best.rate


def test_a_search_with_nothing_to_vary_is_refused(tmp_path: Path) -> None:
    night = Night(
        tmp_path, World(formula), JOB.replace("[tokens_per_microbatch, concurrency]", "[tensor_parallel]")
    )
    with pytest.raises(Failure, match="does not offer `tensor_parallel`"):
        night.drive()


def test_trials_wait_for_nodes_only_while_none_runs(tmp_path: Path) -> None:
    """A trial that runs holds a part of the nodes: a request for all of them would bring others."""
    world, beside, waits = World(formula, at_once=2), list[int](), iter([False, True])

    def nodes(world: World) -> Capacity:
        beside.append(sum(life.running for life in world.lives.values()))
        ready = bool(
            len(world.lives) != 1 or next(waits, True)
        )  # a node is away once: before the first trial
        return Capacity(ready=ready, nodes=1 + ready, wanted=2, gpus=0)

    world.nodes = nodes
    night = Night(tmp_path, world, JOB.replace("search: {", "search: {parallel: 2, "))
    night.drive()
    assert len(world.lives) > 3 and not any(beside) and not world.requesting
    assert next(waits, None) is None
