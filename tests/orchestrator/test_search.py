"""A search over a scripted world: real study, real policies, memory and speed by formula."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from launchers import frameworks
from launchers.base import Exit, Observed
from orchestrator import journal, loop, runs, searching
from orchestrator.errors import Failure
from orchestrator.interrupts import Interrupts
from orchestrator.job import assumed, parse
from orchestrator.loop import Unseen
from orchestrator.search import Gate, Open
from policies import trials
from policies.events import Finished, History, Interrupted, Purpose, Result, Stable, Started, Tried, Verdict
from policies.types import Command, Knobs
from tests.orchestrator.scripted import Hands, Killed, Place, Script, World, failure, phase, settings

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
        return [*opening, "builtin: phase start name=backward step=1\n", failure("backward", 1)], None
    rate = 1000 * tokens / (tokens + 300) * concurrency / (concurrency + 8)
    lines = [
        phase("forward", n, used=used)
        + f"builtin: step {n}/{steps} seconds=2.5 tokens=4096 tokens_per_second={rate} reward=0.1\n"
        for n in range(1, steps + 1)
    ]
    return [*opening, *lines, f"builtin: done steps={steps}\n"], Exit(code=0)


class Night:
    def __init__(self, folder: Path, world: World, text: str = JOB, gate: Gate | None = None) -> None:
        self.world, self.clock, self.gate = world, Hands(), gate or Open()
        self.run = runs.create(folder / "runs", job_text=text, asked=runs.Asked(mode="search"))
        self.job = parse(text)
        self.interrupts = Interrupts()
        self.exports = 0

    def drive(self) -> Verdict:
        place, framework = Place(self.world, self.clock), frameworks.find("builtin")
        with journal.Journal(self.run.path, tell=lambda _: self.world.tick()) as book:
            if not book.history():
                loop.accept(
                    book,
                    run=self.run.id,
                    job=self.job,
                    profile=framework.profile(self.job, assumed(self.job)),
                    cluster=place.cluster(),
                    versions={},
                    now=self.clock.now(),
                    mode="search",
                )
            return searching.search(
                book,
                framework,
                place,
                self.clock,
                folder=self.run,
                job=self.job,
                interrupts=self.interrupts,
                audience=Unseen(),
                gate=self.gate,
                starts=lambda _: (),
                exported=self._count,
            )

    def _count(self) -> None:
        self.exports += 1

    @property
    def history(self) -> History:
        return self.run.history()

    @property
    def results(self) -> tuple[Tried, ...]:
        return trials.tried(self.history)

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
    class Low:
        def excess(self, knobs: Knobs) -> dict[str, float]:
            tokens = knobs.tokens_per_microbatch or 0
            return {"backward": tokens / 1500 - 1} if tokens > 1500 else {}

        def learn(self, history: History) -> None:
            pass

    night = Night(tmp_path, World(formula), gate=Low())
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


def test_trials_never_touch_the_users_checkpoints(tmp_path: Path) -> None:
    text = JOB.replace("  save_every", "  checkpoint_dir: /data/mine\n  save_every")
    night = Night(tmp_path, World(formula), text)
    night.drive()
    for command in night.world.commands:
        assert not str(settings(command).get("checkpoint_dir", "")).startswith("/data/mine")


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
    before = ran(night.results)
    assert before and night.exports
    night.interrupts = Interrupts()
    assert night.drive() == Stable()
    assert ran(night.results)[: len(before)] == before


def outcomes(results: tuple[Tried, ...]) -> list[tuple[Knobs, Result, float | None]]:
    return [(r.knobs, r.result, r.tokens_per_second) for r in ran(results)]


@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
def test_a_killed_search_ends_with_the_trials_of_one_that_was_not(tmp_path: Path, share: float) -> None:
    whole = Night(tmp_path / "whole", World(formula))
    whole.drive()
    night = Night(tmp_path / "killed", World(formula, kill_at=round(share * whole.world.ticks)))
    with pytest.raises(Killed):
        night.drive()
    for life in night.world.lives.values():
        life.running = False
    assert night.drive() == Stable()
    assert outcomes(night.results) == outcomes(whole.results)
    assert not [t for t in night.study().trials if t.state is TrialState.RUNNING]


def test_a_search_with_nothing_to_vary_is_refused(tmp_path: Path) -> None:
    night = Night(
        tmp_path, World(formula), JOB.replace("[tokens_per_microbatch, concurrency]", "[tensor_parallel]")
    )
    with pytest.raises(Failure, match="does not offer `tensor_parallel`"):
        night.drive()
