"""`explain RUN` answers with what the launch of that run tries, and `explain` of its bare log cannot."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from autotune.launchers import frameworks
from autotune.orchestrator.config.loader import expected_cluster, parse
from autotune.orchestrator.planner import first_attempt
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import encode
from autotune.policies.values.diagnosis import Line
from autotune.policies.values.events import (
    Decided,
    Diagnosed,
    Ended,
    Event,
    Finished,
    GaveUp,
    Policy,
    Started,
)
from autotune.policies.values.failure import Cause
from autotune.policies.values.observation import Crashed, MemoryGrowth
from tests.orchestrator.cli.terminal import call

JOB = """name: own
framework: command
command: [python3, train.py{words}]
settings: {{longest_sequence: 256{settings}}}
cluster: {{address: local}}
"""
LOG = 'step 22/40 loss=0.1\nTraceback (most recent call last):\n  File "train.py", line 9\nMemoryError\n'
GREW = MemoryGrowth(memory="host", steps=22, per_step_bytes=40 << 20)


def failed_run(
    root: Path, *, knob: bool, after: tuple[Event, ...] = (), policy: Policy = Policy.ESTIMATE
) -> directory.RunFolder:
    words, settings = (", '{tokens_per_microbatch}'", ", tokens_per_microbatch: 4096") if knob else ("", "")
    text = JOB.format(words=words, settings=settings)
    run = directory.create(root, job_text=text)
    job = parse(text)
    framework = frameworks.find(job.framework)
    accepted, launch = first_attempt(job, framework, expected_cluster(job), policy=policy)
    rows = (
        msgspec.structs.replace(accepted, run=run.id),
        Started(attempt=1, knobs=launch.knobs),
        Ended(attempt=1, outcome=Crashed(exit_code=1), drain_s=0.1),
        Diagnosed(
            attempt=1,
            cause=Cause.HOST_OOM,
            step=22,
            evidence=(Line(line=4, text="MemoryError", rule="host-memory-error"),),
            host_share=0.06,
        ),
        *after,
    )
    (run.path / "events.jsonl").write_bytes(b"".join(encode(row) + b"\n" for row in rows))
    folder = run.attempt(1).path
    folder.mkdir(parents=True)
    (folder / "run.log").write_text(LOG)
    return run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.mark.parametrize("by_folder", [False, True])
def test_the_remedies_of_a_run_are_those_that_its_launch_tries(by_folder: bool, tmp_path: Path) -> None:
    run = failed_run(tmp_path / "runs", knob=True)
    answer = call("explain", str(run.path) if by_folder else run.id).out
    assert "help: lower `tokens_per_microbatch` 4096 → 1024" in answer
    assert "dataloader_workers" not in answer and "jemalloc" not in answer
    assert "note: only 6% of the host's memory was in use" in answer
    assert answer.endswith(f"next: autotune fix {run.id}\n")
    elsewhere = failed_run(tmp_path / "my runs", knob=True)
    answer = call("explain", str(elsewhere.path)).out
    assert answer.endswith(f"next: autotune fix '{elsewhere.path}'\n")
    (tmp_path / "run.log").write_text(LOG)
    bare = call("explain", str(tmp_path / "run.log")).out
    assert "4096 → 1024" not in bare and "a limit of the process (`ulimit -v`" in bare


def test_what_the_user_may_change_is_told_of_a_run_that_has_nothing_left(tmp_path: Path) -> None:
    run = failed_run(tmp_path / "runs", knob=False)
    answer = call("explain", run.id).out
    assert "help:" not in answer and "hint: a higher limit of the process" in answer
    assert answer.endswith(f"next: change the job, then autotune resume {run.id} --edit\n")
    fixed = call("fix", run.id).out
    assert "hint: a higher limit of the process" in fixed and f"next: autotune explain {run.id}\n" in fixed


@pytest.mark.parametrize("policy", Policy)
def test_a_run_that_gave_up_is_fixed_by_the_remedy_that_its_launch_tries(
    policy: Policy, tmp_path: Path
) -> None:
    gave_up = Finished(verdict=GaveUp(reason="no relaunch is allowed"))
    run = failed_run(tmp_path / "runs", knob=True, after=(gave_up,), policy=policy)
    fixed = call("fix", run.id).out
    assert "change: tokens_per_microbatch 4096 → 1024" in fixed
    assert fixed.endswith(f"start it with autotune\n  autotune resume {run.id} --edit\n")


def test_growth_that_a_restart_cured_is_the_failure_of_its_run(tmp_path: Path) -> None:
    run = failed_run(tmp_path / "runs", knob=True, after=(Decided(attempt=1, growth=GREW),))
    answer = call("explain", run.id).out
    assert f"hint: restart from the last checkpoint, as the launch did: {GREW.text}" in answer
    assert "help:" not in answer


def test_the_log_of_the_last_failure_stands_for_its_run(tmp_path: Path) -> None:
    run = failed_run(tmp_path / "runs", knob=True)
    log = run.attempt(1).path / "run.log"
    of_run, of_log, of_folder = (call("explain", str(each)) for each in (run.path, log, log.parent))
    assert of_run.out == of_log.out == of_folder.out and "help:" in of_log.out
    assert "change: tokens_per_microbatch 4096 → 1024" in call("fix", str(log)).out
