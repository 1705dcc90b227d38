"""A rehearsal before the training: what it meets, what is cured, and that it is no part of the training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.launchers import frameworks
from autotune.launchers.base import Exit
from autotune.orchestrator.config.loader import assumed, parse
from autotune.orchestrator.driver import reconcile, rehearsal
from autotune.orchestrator.driver.context import Observer, RunContext
from autotune.orchestrator.driver.signals import Interrupts
from autotune.orchestrator.run import directory, export, journal
from autotune.policies.values.command import Command
from autotune.policies.values.events import (
    Decided,
    Diagnosed,
    GoalReached,
    History,
    NeedsHuman,
    Policy,
    Rehearsed,
    Started,
    TrainingCompleted,
    Verdict,
)
from autotune.policies.values.failure import Phase
from autotune.policies.values.history import fold
from autotune.policies.values.rehearsing import Part
from tests.orchestrator.scripted import (
    Hands,
    Killed,
    Place,
    Script,
    World,
    phase,
    reported,
    settings,
)

JOB = """\
name: night
framework: builtin
settings:
  steps: 12
  prompts: 16
  samples: 8
  prompt_tokens: 8
  response_tokens: 24
  ignore_eos: false
  tokens_per_microbatch: 4096
  trainer_budget: {budget}
  save_every: 10
workdir: {folder}
goal: {{steps: 3}}
"""


@dataclass
class Late:
    """The scripted job with one failure that comes late: which, and until which setting is changed."""

    fails: Callable[[dict[str, Any], int, bool], str]  # settings, step and whether it resumed -> phase or ""
    token_bytes: int = 0  # of a backward pass beside 50 MiB

    def __call__(self, world: World, command: Command) -> tuple[Script, Exit | None]:
        own = settings(command)
        folder, of, every = str(own["checkpoint_dir"]), int(str(own["steps"])), int(str(own["save_every"]))
        saved = world.folders.get(folder, 0) if own["resume"] == "auto" else 0
        script: Script = ["builtin: phase start name=init step=0\n"]
        if saved:
            script.append(f"builtin: resumed step={saved} path={folder}/{saved}\n")
        for number in range(saved + 1, of + 1):
            failed = self.fails(own, number, bool(saved))
            if failed:
                script += [
                    f"builtin: phase start name={failed} step={number}\n",
                    reported(failed, number),
                ]
                return [*script, *[""] * 1000], None
            used = (50 << 20) + self.token_bytes * tokens(own)
            saves = number % every == 0 or number == of
            script.append(
                phase("rollout", number)
                + phase("backward", number, used=used)
                + f"builtin: step {number}/{of} seconds=2.5 tokens=4096 tokens_per_second=1638.4 reward=0.1\n"
                + (f"builtin: checkpoint step={number} seconds=0.1 path={folder}\n" if saves else "")
            )
            if saves:
                world.folders[folder] = number
        return [*script, f"builtin: done steps={of}\n"], Exit(code=0)


class Night(World):
    """A world whose checkpoints lie in the folders that the settings name."""

    def __init__(self, play: Late, **fields: Any) -> None:
        super().__init__(play, **fields)
        self.folders: dict[str, int] = {}


class MessageObserver(Observer):
    """Keeps the messages."""

    def __init__(self, messages: list[str]) -> None:
        self._messages = messages

    def say(self, text: str) -> None:
        self._messages.append(text)


class Case:
    def __init__(
        self,
        folder: Path,
        world: World,
        *,
        only: bool = False,
        rehearses: bool = True,
        budget: str = "100MiB",
    ) -> None:
        text = JOB.format(folder=folder, budget=budget)
        self.world, self.clock = world, Hands()
        self.messages: list[str] = []
        mode = directory.Mode.REHEARSE if only else directory.Mode.LAUNCH
        request = directory.RunRequest(mode=mode, rehearse=rehearses)
        self.run = directory.create(folder / "runs", job_text=text, request=request)
        self.job = parse(text)

    def drive(self, policy: Policy = Policy.LADDER) -> Verdict:
        place, framework = Place(self.world, self.clock), frameworks.find("builtin")
        with journal.Journal(self.run.path, tell=lambda _: self.world.tick()) as book:
            if not book.history():
                reconcile.accept(
                    book,
                    run=self.run.id,
                    job=self.job,
                    profile=framework.profile(self.job, assumed(self.job)),
                    cluster=place.cluster(),
                    versions={},
                    now=self.clock.now(),
                    mode=self.run.request.mode,
                    policy=policy,
                    rehearsed=rehearsal.planned(framework, self.job, self.run.request),
                )
            return reconcile.run(
                RunContext(
                    journal=book,
                    framework=framework,
                    runner=place,
                    clock=self.clock,
                    folder=self.run,
                    job=self.job,
                    interrupts=Interrupts(),
                    observer=MessageObserver(self.messages),
                )
            )

    @property
    def history(self) -> History:
        return self.run.history()

    @property
    def started(self) -> list[Started]:
        return [e for e in self.history if isinstance(e, Started)]


def parts(case: Case) -> list[tuple[Part | None, bool, bool]]:
    return [(e.rehearsal, e.longest, e.resume) for e in case.started]


def never(_: dict[str, Any], __: int, ___: bool) -> str:
    return ""


def tokens(own: dict[str, Any]) -> int:
    return int(own["tokens_per_microbatch"])


def test_a_job_that_holds_costs_two_starts_and_trains_as_written(tmp_path: Path) -> None:
    world = Night(Late(never))
    case = Case(tmp_path, world)
    assert case.drive() == TrainingCompleted()
    assert parts(case) == [(Part.WORST, True, False), (Part.RELOAD, True, True), (None, False, False)]
    assert len({e.knobs for e in case.started}) == 1
    own = [settings(command) for command in world.commands]
    assert [each["ignore_eos"] for each in own] == [True, True, False]
    assert own[0]["checkpoint_dir"] == own[1]["checkpoint_dir"] != own[2]["checkpoint_dir"]
    assert [each["steps"] for each in own] == [3, 4, 12]
    assert [each["resume"] for each in own][:2] == ["never", "auto"]
    assert [bool(each["in_place"]) for each in own] == [False, False, True]
    # Nothing of it counts as the job's own.
    run = fold(case.history)
    assert [a.number for a in run.attempts] == [3]
    assert [a.number for a in run.rehearsed] == [1, 2]
    assert run.attempts[0].progress[0].step == 1
    assert [e.attempt for e in case.history if isinstance(e, GoalReached)] == [3]
    assert export.proven(case.history) == ("stable.yaml", case.started[-1].knobs)


def test_an_optimizer_step_that_fails_is_cured_before_the_night(tmp_path: Path) -> None:
    def fails(own: dict[str, Any], step: int, resumed: bool) -> str:
        return "optimizer" if step >= 2 and not own.get("optimizer_offload") else ""

    case = Case(tmp_path, Night(Late(fails)))
    assert case.drive() == TrainingCompleted()
    assert [part for part, _, _ in parts(case)][-3:] == [Part.WORST, Part.RELOAD, None]
    assert not [e for e in case.history if isinstance(e, Diagnosed) and e.attempt == case.started[-1].attempt]
    assert settings(case.world.commands[-1])["optimizer_offload"] is True
    assert case.started[-1].knobs.optimizer_offload is True


def test_a_failure_of_the_reload_is_cured_and_the_reload_is_tried_again(tmp_path: Path) -> None:
    def fails(own: dict[str, Any], step: int, resumed: bool) -> str:
        return "init" if resumed and not own.get("optimizer_offload") else ""

    case = Case(tmp_path, Night(Late(fails)))
    assert case.drive() == TrainingCompleted()
    diagnosed = next(e for e in case.history if isinstance(e, Diagnosed))
    assert diagnosed.phase is Phase.RESUME
    assert [part for part, _, _ in parts(case)][-2:] == [Part.RELOAD, None]
    assert len({settings(c)["checkpoint_dir"] for c in case.world.commands[:-1]}) == 1


def long_answers(own: dict[str, Any], _: int, __: bool) -> str:
    return "backward" if own["ignore_eos"] and tokens(own) > 1024 else ""


def test_a_failure_of_full_length_alone_that_no_estimate_calls_likely_keeps_its_remedy_ready(
    tmp_path: Path,
) -> None:
    case = Case(tmp_path, Night(Late(long_answers)))
    assert case.drive() == TrainingCompleted()
    assert parts(case) == [
        (Part.WORST, True, False),
        (Part.WORST, False, False),
        (Part.RELOAD, False, True),
        (None, False, False),
    ]
    assert len({e.knobs for e in case.started}) == 1
    kept = next(e.reason for e in case.history if isinstance(e, Decided))
    assert "full length" in kept and "kept ready: tokens_per_microbatch" in kept


def test_a_failure_that_the_jobs_own_lengths_cause_too_is_cured(tmp_path: Path) -> None:
    def fails(own: dict[str, Any], step: int, resumed: bool) -> str:
        return "backward" if step >= 2 and tokens(own) > 1024 else ""

    case = Case(tmp_path, Night(Late(fails)))
    assert case.drive() == TrainingCompleted()
    assert [longest for _, longest, _ in parts(case)][:2] == [True, False]
    assert tokens(settings(case.world.commands[-1])) <= 1024
    last = case.started[-1].attempt
    assert not [e for e in case.history if isinstance(e, Diagnosed) and e.attempt == last]


def test_a_failure_of_full_length_that_is_likely_in_the_training_is_cured(tmp_path: Path) -> None:
    # With the job's own lengths the pass gets through, and leaves next to nothing free.
    case = Case(tmp_path, Night(Late(long_answers, token_bytes=12_750)))
    assert isinstance(case.drive(Policy.ESTIMATE), TrainingCompleted)
    assert parts(case)[:4] == [
        (Part.WORST, True, False),
        (Part.WORST, False, False),
        (Part.RELOAD, False, True),
        (Part.WORST, True, False),
    ]
    assert parts(case)[-2:] == [(Part.RELOAD, True, True), (None, False, False)]
    assert tokens(settings(case.world.commands[-1])) <= 1024
    assert any("chance in 12 steps" in e.reason for e in case.history if isinstance(e, Decided))


def test_a_rehearsal_that_ends_with_the_jobs_own_error_keeps_no_training_from_its_start(
    tmp_path: Path,
) -> None:
    def play(world: World, command: Command) -> tuple[Script, Exit | None]:
        if "rehearsals" in str(settings(command)["checkpoint_dir"]):
            lines = 'Traceback (most recent call last):\n  File "job.py", line 3\nKeyError: "reward"\n'
            return [lines], Exit(code=1)
        return Late(never)(world, command)

    world = Night(Late(never))
    world.play = play
    case = Case(tmp_path, world)
    assert case.drive() == TrainingCompleted()
    assert [part for part, _, _ in parts(case)] == [Part.WORST, None]
    alone = Night(Late(never))
    alone.play = play
    assert isinstance(Case(tmp_path / "alone", alone, only=True).drive(), NeedsHuman)


def test_rehearse_alone_ends_after_it_and_gives_the_cured_job(tmp_path: Path) -> None:
    def fails(own: dict[str, Any], step: int, resumed: bool) -> str:
        return "optimizer" if step >= 2 and not own.get("optimizer_offload") else ""

    case = Case(tmp_path, Night(Late(fails)), only=True)
    assert case.drive() == Rehearsed(cured=True)
    assert all(e.rehearsal is not None for e in case.started)
    assert export.proven(case.history) == ("rehearsed.yaml", case.started[-1].knobs)
    assert case.drive() == Rehearsed(cured=True)  # once more: nothing is begun again


def test_the_files_of_a_rehearsal_are_removed_and_nothing_else(tmp_path: Path) -> None:
    case = Case(tmp_path, Night(Late(never)))
    mine = tmp_path / "rehearsals" / case.run.id / "1" / "checkpoints"
    mine.mkdir(parents=True)
    (tmp_path / "rehearsals" / "other").mkdir()
    (tmp_path / "checkpoints").mkdir()
    case.drive()
    assert not mine.exists()
    assert (tmp_path / "rehearsals" / "other").exists() and (tmp_path / "checkpoints").exists()


def test_a_run_without_a_rehearsal_removes_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path, Night(Late(never)), rehearses=False)
    other = tmp_path / "rehearsals" / case.run.id
    other.mkdir(parents=True)
    assert case.drive() == TrainingCompleted()
    assert [part for part, _, _ in parts(case)] == [None] and other.exists()


def test_a_link_in_the_place_of_its_folder_is_not_followed(tmp_path: Path) -> None:
    case = Case(tmp_path, Night(Late(never)))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").touch()
    (tmp_path / "rehearsals").mkdir()
    (tmp_path / "rehearsals" / case.run.id).symlink_to(tmp_path / "data")
    assert case.drive() == TrainingCompleted()
    assert (tmp_path / "data" / "mine").exists()
    (message,) = (text for text in case.messages if "stay in" in text)
    assert str(tmp_path / "rehearsals" / case.run.id) in message


def test_checkpoints_on_a_file_system_that_the_driver_cannot_reach_are_reported_once(tmp_path: Path) -> None:
    case = Case(tmp_path, Night(Late(never)))  # whose checkpoints are told and lie nowhere
    assert case.drive() == TrainingCompleted()
    (message,) = (text for text in case.messages if "cannot be seen from here" in text)
    assert str(tmp_path / "rehearsals" / case.run.id) in message


def test_killed_at_any_moment_a_rehearsal_resumes_to_the_same_end(tmp_path: Path) -> None:
    def fails(own: dict[str, Any], step: int, resumed: bool) -> str:
        return "optimizer" if step >= 2 and not own.get("optimizer_offload") else ""

    plain = Case(tmp_path / "plain", Night(Late(fails)))
    plain.drive()
    for number, moment in enumerate(range(2, plain.world.ticks, 9)):
        world = Night(Late(fails), kill_at=moment)
        case = Case(tmp_path / str(moment), world)
        with pytest.raises(Killed):
            case.drive()
        if number % 2:  # its supervisors died with it
            for life in world.lives.values():
                life.running = life.supervised = False
        assert case.drive() == TrainingCompleted()
        assert case.started[-1].rehearsal is None
        assert case.started[-1].knobs == plain.started[-1].knobs
