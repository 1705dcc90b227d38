"""What the built-in job cured itself: on record, shown, exported, never proposed again."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest
import yaml

from autotune.launchers import frameworks
from autotune.launchers.base import OWN_SOURCE, Chunk, Exit, Observed
from autotune.launchers.builtin.process.records import CureRecord
from autotune.orchestrator.cli.shared.run_status import RunReader
from autotune.orchestrator.cli.status import table
from autotune.orchestrator.config.loader import assumed, parse
from autotune.orchestrator.run import export
from autotune.orchestrator.terminal.console import Console
from autotune.policies.recovery.permissions import relapse_of
from autotune.policies.recovery.worst_case import cautions
from autotune.policies.values.command import Command
from autotune.policies.values.events import (
    Accepted,
    CuredInPlace,
    Diagnosed,
    Ended,
    GaveUp,
    Progressed,
    Started,
    TrainingCompleted,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Completed
from autotune.policies.values.run.view import RunView
from tests.orchestrator.driver.test_reconcile import Case
from tests.orchestrator.scripted import JOB, Script, World, failure, reported, settings, step

DONE = "builtin: done steps=4\n"
BUILTIN = frameworks.find("builtin")


def cure(step: int, *, before: int = 4096, after: int = 2048) -> Observed:
    """The job's own record of a cure, which comes to autotune twice after an attach."""
    raw = json.loads(failure("backward", step).removeprefix("builtin: failure ")) | {"message": ""}
    raw |= {"knob": "tokens_per_microbatch", "before": before, "after": after}
    line = msgspec.convert(raw, type=CureRecord).line().encode() + b"\n"
    return Observed(chunks=(Chunk(source=OWN_SOURCE, data=line), Chunk(source="", data=line)))


def cured_once(world: World, command: Command) -> tuple[Script, Exit | None]:
    return [step(1), cure(2), cure(2), step(2), step(3), step(4), DONE], Exit(code=0)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    case = Case(tmp_path, World(cured_once))
    assert isinstance(case.drive(), TrainingCompleted)
    return case


def test_a_cure_is_recorded_once_and_costs_no_relaunch(case: Case) -> None:
    (event,) = (e for e in case.history if isinstance(e, CuredInPlace))
    assert (event.cause, event.phase, event.rank, event.step) == (Cause.GPU_OOM, Phase.BACKWARD, 0, 2)
    assert (event.knob, event.before, event.after) == ("tokens_per_microbatch", 4096, 2048)
    assert event.facts.requested_bytes == 16 << 20
    assert sum(isinstance(e, Started) for e in case.history) == 1
    assert not any(isinstance(e, Diagnosed) for e in case.history)
    assert [e.outcome for e in case.history if isinstance(e, Ended)] == [Completed()]


def test_the_history_holds_the_failure_and_what_went_on(case: Case) -> None:
    run = fold(case.history)
    failed, after = run.attempts
    assert failed.cured and failed.out_of_memory and failed.number == after.number == 1
    assert [done.step for done in failed.progress] == [1]
    assert [done.step for done in after.progress] == [2, 3, 4]
    assert (failed.step, after.step) == (1, 4)
    assert failed.goal is None and after.goal is not None and after.goal.step == 3
    assert after.knobs.tokens_per_microbatch == 2048 and after.diagnosis is None
    assert relapse_of(run, failed.knobs) is failed
    assert relapse_of(run, after.knobs) is None


def test_a_step_that_was_read_before_the_record_is_the_cured_ones(case: Case) -> None:
    events = [e for e in case.history if not isinstance(e, CuredInPlace)]
    record = next(e for e in case.history if isinstance(e, CuredInPlace))
    late = next(n for n, e in enumerate(events) if isinstance(e, Progressed) and e.step == 3)
    moved = (*events[: late + 1], record, *events[late + 1 :])
    for ours, theirs in zip(fold(moved).attempts, fold(case.history).attempts, strict=True):
        assert (ours.knobs, ours.step, ours.new_step, ours.progress) == (
            theirs.knobs,
            theirs.step,
            theirs.new_step,
            theirs.progress,
        )


def test_the_stable_job_and_its_certificate_have_the_smaller_value(case: Case) -> None:
    knobs = export.stable_knobs(RunView(case.history))
    assert knobs is not None and knobs.tokens_per_microbatch == 2048
    text = export.stable_text(case.run.job_text, case.history, BUILTIN, case.job, knobs)
    assert yaml.safe_load(text)["settings"]["tokens_per_microbatch"] == 2048
    assert "cured in place: backward ran out of memory in step 2" in text
    proof = export.compose_certificate(case.history, BUILTIN, knobs)
    changes = {change.knob: change for change in proof.changes}
    change = changes["tokens_per_microbatch"]
    assert (change.before, change.after, change.effect) == (4096, 2048, "exact")
    assert (proof.stable.by, proof.stable.confirmations) == ("goal", 1)


def test_terminal_and_status_say_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "backward ran out of GPU memory in step 2, cured in place: tokens_per_microbatch 4096"
    stream = io.StringIO()
    console = Console(stream, runs_dir=case.run.path.parent, color="never")
    for event in case.history:
        console.print_event(event)
    assert words in stream.getvalue()
    standing = RunReader(case.run, keeps=False).look(now=case.clock.now())
    assert f"attempt #1: {words}" in table([standing], now=case.clock.now(), attempts=True)


def test_a_later_failure_is_answered_from_the_smaller_value(tmp_path: Path) -> None:
    def play(world: World, command: Command) -> tuple[Script, Exit | None]:
        if len(world.lives) == 0:
            return [step(1), cure(2), reported("backward", 2)], Exit(code=1)
        return [step(2), step(3), step(4), DONE], Exit(code=0)

    case = Case(tmp_path, World(play), JOB + "recovery: {relaunches: 1}\n")
    assert isinstance(case.drive(), TrainingCompleted)
    first, second = (settings(command)["tokens_per_microbatch"] for command in case.world.commands)
    assert first == 4096
    assert isinstance(second, int) and second < 2048
    assert len([a for a in fold(case.history).attempts if a.out_of_memory]) == 2


def test_cures_use_up_no_relaunches(tmp_path: Path) -> None:
    def play(world: World, command: Command) -> tuple[Script, Exit | None]:
        return [step(1), cure(2), cure(2, before=2048, after=1024), reported("backward", 2)], Exit(code=1)

    case = Case(tmp_path, World(play), JOB + "recovery: {relaunches: 0}\n")
    verdict = case.drive()
    assert isinstance(verdict, GaveUp) and "no relaunch is allowed" in verdict.reason


def test_lines_of_the_log_are_not_believed(tmp_path: Path) -> None:
    def play(world: World, command: Command) -> tuple[Script, Exit | None]:
        line = cure(2).chunks[1].data.decode()
        return [step(1), line, step(2), step(3), step(4), DONE], Exit(code=0)

    case = Case(tmp_path, World(play))
    assert isinstance(case.drive(), TrainingCompleted)
    assert not any(isinstance(e, CuredInPlace) for e in case.history)


@pytest.mark.parametrize(
    ("recovery", "knobs"),
    [
        ("", ["tokens_per_microbatch", "logprob_tokens"]),
        ("recovery: {in_place: true}\n", ["tokens_per_microbatch", "logprob_tokens"]),
        ("recovery: {in_place: false}\n", []),
        ("recovery: {deny: [logprob_tokens]}\n", ["tokens_per_microbatch"]),
        ("recovery: {deny: [reduce_tokens_per_mb]}\n", []),
    ],
)
def test_the_job_may_turn_what_recovery_permits(recovery: str, knobs: list[str]) -> None:
    job = parse(JOB + recovery)
    command = BUILTIN.command(job, _knobs(job), run="r", attempt=1, resume=False)
    assert settings(command)["in_place"] == knobs
    trial = BUILTIN.trial(job, folder="/t", steps=2, longest=False)
    assert settings(BUILTIN.command(trial, _knobs(job), run="r", attempt=1, resume=False))["in_place"] == []


def test_a_warning_names_a_framework_without_cure_in_place_where_the_user_asked_for_it() -> None:
    def warnings_of(text: str) -> tuple[str, ...]:
        job = parse(text)
        framework = frameworks.find(job.framework)
        cluster = assumed(job)
        profile = framework.profile(job, cluster)
        return cautions(fold((Accepted(run="r", job=job, profile=profile, cluster=cluster),)), profile.knobs)

    other = "name: j\nframework: command\ncommand: [train]\n"
    (warning,) = warnings_of(other + "recovery: {in_place: true}\n")
    assert "in_place: true has no effect with command" in warning
    several = "name: j\nframework: trl\nsettings: {num_processes: 2, loss_type: dapo}\n"
    several += "recovery: {in_place: true}\n"
    (warning,) = (each for each in warnings_of(several) if "in_place" in each)
    assert "it works with one process only, this job has 2" in warning
    alone = several.replace("processes: 2", "processes: 1")
    assert not any("in_place" in each for each in warnings_of(alone))
    assert not any(
        "in_place" in each
        for each in (*warnings_of(other), *warnings_of(JOB + "recovery: {in_place: true}\n"))
    )


def _knobs(job: object) -> Knobs:
    return BUILTIN.profile(job, assumed(job)).knobs  # type: ignore[arg-type]
