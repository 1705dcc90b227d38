"""Runs that go on after a failure: with a changed job, after a fix elsewhere, or repeated by a scheduler."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import msgspec
import pytest

from autotune.orchestrator.cli.shared import start
from autotune.orchestrator.cli.shared.edit import RequestedJob, identity
from autotune.orchestrator.config.loader import parse, written
from autotune.orchestrator.config.referenced_files import with_document
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.lock import Owner
from autotune.policies.values.events import Decided, Edited, Finished, Started
from autotune.policies.values.history import RESUMED
from tests.orchestrator.cli.fork_server import Forked
from tests.orchestrator.cli.terminal import Seen, run
from tests.orchestrator.cli.test_transcripts import interrupt
from tests.orchestrator.cli.test_troubles import the_run, until
from tests.orchestrator.scripted import JOB


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def edits(home: Path) -> list[Edited]:
    return [e for e in the_run(home).history() if isinstance(e, Edited)]


def starts(home: Path) -> list[Started]:
    return [e for e in the_run(home).history() if isinstance(e, Started)]


def test_a_run_that_gave_up_says_what_to_do_and_goes_on_with_the_changed_job(home: Path) -> None:
    assert run("launch", "job.yaml", cwd=home, play="never_fits").code == 1
    again = run("resume", cwd=home, play="tight_memory")
    name = the_run(home).id
    assert again.code == 1 and "gave up after" in again.err
    assert f"`{home / 'job.yaml'}`, then `autotune resume {name} --edit`" in again.err
    for verb in ("status", "attach"):
        assert f"then `autotune resume {name} --edit`" in run(verb, name, cwd=home).err
    unchanged = run("resume", "--edit", cwd=home, play="tight_memory")
    assert unchanged.code == 2 and "nothing differs from the job with which" in unchanged.err
    before = len(starts(home))
    (home / "job.yaml").write_text(JOB.replace("prompt_tokens: 8", "prompt_tokens: 4"))
    result = run("resume", "--edit", cwd=home, play="tight_memory")
    assert result.code == 0, result.err
    assert "edited: prompt_tokens 8 → 4" in result.err
    (edit,) = edits(home)
    assert edit.changes == {"settings.prompt_tokens": (8, 4)} and edit.forgets and not edit.knobs
    # What was excluded before is not any more: the job begins as it is written.
    first = starts(home)[before]
    assert first.knobs == edit.profile.knobs and first.knobs.tokens_per_microbatch == 4096
    status = json.loads(run("status", name, "--json", cwd=home).out)
    assert status["edits"] == ["prompt_tokens 8 → 4"] and status["status"] == "COMPLETED"
    assert "prompt_tokens 8 → 4" in run("status", name, cwd=home).out
    assert "prompt_tokens: 4" in (the_run(home).path / "stable.yaml").read_text()


def test_knobs_that_the_user_changed_run_next_and_failures_stay_known(home: Path) -> None:
    assert run("launch", "job.yaml", cwd=home, play="never_fits").code == 1
    before = len(starts(home))
    other = home / "other.yaml"
    other.write_text(JOB.replace("tokens_per_microbatch: 4096", "tokens_per_microbatch: 1024"))
    result = run("resume", "--job", "other.yaml", cwd=home, play="tight_memory")
    assert result.code == 0, result.err
    (edit,) = edits(home)
    assert (edit.knobs, edit.forgets, edit.file) == (True, False, str(other))
    assert [e.knobs.tokens_per_microbatch for e in starts(home)[before:]] == [1024]
    assert run("resume", "--edit", cwd=home, play="tight_memory").code == 0  # nothing differs any more
    done = run("resume", "--job", "job.yaml", cwd=home, play="tight_memory")
    assert done.code == 2 and "is complete" in done.err


def test_a_failure_that_was_fixed_elsewhere_goes_on_with_edit(home: Path) -> None:
    assert run("launch", "job.yaml", cwd=home, play="own_failure").code == 1
    assert run("resume", cwd=home, play="tight_memory").code == 1
    result = run("resume", "--edit", cwd=home, play="tight_memory")
    assert result.code == 0 and "job file unchanged; continuing the run" in result.err
    assert RESUMED in [e.reason for e in the_run(home).history() if isinstance(e, Decided)]
    assert not edits(home)


def requeued(home: Path, play: str, *more: str) -> Seen:
    arguments = ("launch", "job.yaml", "--continue", "--runs-dir", str(home / "runs"), *more)
    return run(*arguments, cwd=home, play=play)


def test_what_a_scheduler_repeats_is_one_run(home: Path) -> None:
    def lose(child: Forked) -> None:
        until(home, "progressed")
        child.kill()

    arguments = ("launch", "job.yaml", "--continue", "--runs-dir", str(home / "runs"))
    run(*arguments, cwd=home, play="forever", meanwhile=lose)
    result = requeued(home, "tight_memory")
    assert result.code == 0 and "1 attempt on record" in result.err
    done = requeued(home, "never_fits")
    assert (done.code, done.out) == (0, result.out) and len(directory.runs(home / "runs")) == 1
    assert run("launch", "job.yaml", "--continue", cwd=home, play="tight_memory").code == 2
    (home / "job.yaml").write_text(JOB.replace("name: story", "name: other"))
    assert requeued(home, "tight_memory").code == 0 and len(directory.runs(home / "runs")) == 2


def test_a_run_with_a_ray_of_its_own_continues_in_a_relative_runs_folder(home: Path) -> None:
    (home / "job.yaml").write_text(f"{JOB}cluster: {{address: local}}\n")
    run("launch", "job.yaml", "--continue", cwd=home, play="forever", meanwhile=interrupt)
    result = run("launch", "job.yaml", "--continue", cwd=home, play="tight_memory")
    assert (result.code, len(directory.runs(home / "runs"))) == (0, 1), result.err


def test_a_repeated_run_that_gave_up_begins_again_once_its_job_changed(home: Path) -> None:
    assert requeued(home, "own_failure").code == 1
    again = requeued(home, "tight_memory")
    assert again.code == 1 and "failed after 1 attempt" in again.err
    (home / "job.yaml").write_text(JOB.replace("prompt_tokens: 8", "prompt_tokens: 4"))
    assert requeued(home, "tight_memory").code == 0
    assert len(edits(home)) == len(directory.runs(home / "runs")) == 1


LONGER = JOB.replace("steps: 4", "steps: 400")


def trained(home: Path) -> list[str]:
    """Return what each run was asked to train and whether it did, the oldest first."""
    items = []
    for each in directory.runs(home / "runs"):
        (steps,) = [line.strip() for line in each.job_text.splitlines() if line.startswith("  steps:")]
        verdicts = [type(e.verdict).__name__ for e in each.history() if isinstance(e, Finished)]
        items.append(f"{steps} {' '.join(verdicts)}")
    return items


def test_a_changed_job_after_a_complete_run_is_a_run_of_its_own(home: Path) -> None:
    assert requeued(home, "tight_memory").code == 0
    (home / "job.yaml").write_text("# another comment\n" + JOB.replace("samples: 8", "samples: 0x8"))
    assert requeued(home, "never_fits").code == 0  # the same job in other words is complete
    (home / "job.yaml").write_text(LONGER)
    assert requeued(home, "own_failure").code == 1
    assert requeued(home, "own_failure", "--set", "tokens_per_microbatch=2048").code == 1
    assert trained(home) == ["steps: 4 TrainingCompleted", "steps: 400 NeedsHuman NeedsHuman"]


def test_a_changed_job_of_an_incomplete_run_needs_a_decision(home: Path) -> None:
    def lose(child: Forked) -> None:
        until(home, "progressed")
        child.kill()

    arguments = ("launch", "job.yaml", "--continue", "--runs-dir", str(home / "runs"))
    run(*arguments, cwd=home, play="forever", meanwhile=lose)
    before = the_run(home).history()
    (home / "job.yaml").write_text(LONGER)
    result = requeued(home, "tight_memory")
    assert result.code == 2 and f"`{home / 'job.yaml'}` has changed since it began" in result.err
    assert f"resume {the_run(home).id} --edit" in result.err and the_run(home).history() == before
    (home / "job.yaml").write_text(JOB)
    changed = requeued(home, "tight_memory", "--set", "tokens_per_microbatch=2048")
    assert changed.code == 2 and the_run(home).history() == before
    assert requeued(home, "tight_memory").code == 0


def test_a_run_that_never_began_does_not_keep_a_changed_job_from_its_start(home: Path) -> None:
    request = directory.RunRequest(job_file=str(home / "job.yaml"))
    directory.create(home / "runs", job_text=JOB, request=request)
    (home / "job.yaml").write_text(LONGER)
    assert requeued(home, "own_failure").code == 1
    assert trained(home) == ["steps: 4 ", "steps: 400 NeedsHuman"]


def test_two_jobs_of_one_name_that_ray_jobs_bring_are_two_runs(home: Path) -> None:
    for team, text in (("a", JOB), ("b", LONGER.replace("prompts: 16", "prompts: 32"))):
        (home / team).mkdir()
        (home / team / "job.yaml").write_text(text)
        arguments = ("launch", "job.yaml", "--continue", "--runs-dir", str(home / "runs"))
        result = run(
            *arguments, cwd=home / team, play="own_failure" if team == "b" else "tight_memory",
            env={"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"},
        )  # fmt: skip
        assert result.code == (1 if team == "b" else 0), result.err
    assert trained(home) == ["steps: 4 TrainingCompleted", "steps: 400 NeedsHuman"]


def test_a_run_from_before_identities_is_found_by_its_file(home: Path) -> None:
    assert requeued(home, "tight_memory").code == 0
    record = the_run(home).path / "asked.json"
    asked = json.loads(record.read_text())
    assert asked.pop("identity")
    record.write_text(json.dumps(asked))
    assert requeued(home, "never_fits").code == 0 and len(directory.runs(home / "runs")) == 1
    (home / "job.yaml").write_text("# another comment\n" + JOB)
    assert requeued(home, "never_fits").code == 0 and len(directory.runs(home / "runs")) == 1
    changed = requeued(home, "own_failure", "--set", "tokens_per_microbatch=512")
    assert changed.code == 1 and len(directory.runs(home / "runs")) == 2
    (home / "job.yaml").write_text(LONGER)
    assert requeued(home, "own_failure").code == 1
    assert trained(home)[0] == "steps: 4 TrainingCompleted"


@pytest.mark.parametrize("identified", [True, False])
def test_an_edit_from_another_file_is_no_run_of_what_the_launched_file_states_since(
    home: Path, identified: bool
) -> None:
    assert requeued(home, "own_failure").code == 1
    if not identified:
        record = the_run(home).path / "asked.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"identity": ""}))
    (home / "other.yaml").write_text(JOB.replace("prompt_tokens: 8", "prompt_tokens: 4"))
    (home / "job.yaml").write_text(LONGER)
    assert run("resume", "--job", "other.yaml", cwd=home, play="tight_memory").code == 0
    assert requeued(home, "own_failure").code == 1
    assert trained(home) == ["steps: 4 NeedsHuman TrainingCompleted", "steps: 400 NeedsHuman"]


def test_many_earlier_runs_of_a_job_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    asked = directory.RunRequest(job_file=str(tmp_path / "job.yaml"), identity="another job")
    made = [directory.create(tmp_path / "runs", job_text=JOB, request=asked) for _ in range(5)]
    listings: list[Path] = []
    listed = directory.runs
    monkeypatch.setattr(directory, "runs", lambda root: (listings.append(root), listed(root))[1])
    request = msgspec.structs.replace(asked, identity="this job")
    prepared = RequestedJob(text=JOB, job=parse(JOB, file="job.yaml"), request=request)
    items = list(start._runs_of(prepared, root=tmp_path / "runs"))
    assert {run.id for run in items} == {run.id for run in made} and len(listings) == 1


def test_resume_says_that_the_job_file_has_changed(home: Path) -> None:
    def stop(child: Forked) -> None:
        until(home, "progressed")
        child.terminate()

    assert run("launch", "job.yaml", cwd=home, play="forever", meanwhile=stop).code == 143
    (home / "job.yaml").write_text(LONGER)
    result = run("resume", cwd=home, play="tight_memory")
    assert result.code == 0 and f"warning: `{home / 'job.yaml'}` has changed since" in result.err
    assert f"`autotune resume {the_run(home).id} --edit` continues it with the change" in result.err
    (home / "job.yaml").write_text("# as it was\n" + JOB)
    assert "has changed since" not in run("resume", cwd=home, play="tight_memory").err


def test_the_identity_of_a_job_is_what_it_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stated(text: str, config: str = "actor: {lr: 1}\n") -> str:
        (tmp_path / "trainer.yaml").write_text(config)
        text = f"framework: areal\nconfig: trainer.yaml\nworkdir: {tmp_path}\n{text}"
        job = msgspec.structs.replace(written(text), workdir=str(tmp_path))  # type: ignore[type-var]
        return identity(text, with_document(job)[0])

    monkeypatch.setenv("HF_TOKEN", "one")
    first = stated("name: a\nenv: {TOKEN: {env: HF_TOKEN}, A: '1'}\n")
    monkeypatch.setenv("HF_TOKEN", "two")
    assert stated("env: {A: '1', TOKEN: {env: HF_TOKEN}}\nname: a  # mine\n") == first
    assert stated("name: b\nenv: {TOKEN: {env: HF_TOKEN}, A: '1'}\n") != first
    assert stated("name: a\nenv: {TOKEN: {env: HF_TOKEN}, A: '1'}\n", config="actor: {lr: 2}\n") != first


def test_what_a_ray_job_repeats_is_found_after_an_edit(home: Path) -> None:
    """Each try of a Ray job unpacks its job file into another folder."""

    def tried(number: int, text: str, play: str) -> Seen:
        folder = home / f"try-{number}"
        folder.mkdir()
        (folder / "job.yaml").write_text(text)
        arguments = ("launch", "job.yaml", "--continue", "--runs-dir", str(home / "runs"))
        return run(*arguments, cwd=folder, play=play, env={"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"})

    changed = JOB.replace("prompt_tokens: 8", "prompt_tokens: 4")
    assert tried(1, JOB, "own_failure").code == 1
    assert tried(2, changed, "own_failure").code == 1
    assert (the_run(home).request.job_file, the_run(home).request.edited_file) == ("job.yaml", "")
    again = tried(3, changed, "tight_memory")
    assert again.code == 1 and "failed after" in again.err  # nothing has changed since
    assert tried(4, changed.replace("prompt_tokens: 4", "prompt_tokens: 6"), "tight_memory").code == 0
    assert len(edits(home)) == 2


def test_a_repeated_run_is_found_after_an_edit_from_another_file(home: Path) -> None:
    hook = "notify: {{on: [gave-up], webhook: 'https://hooks.example.org/{}'}}\n"
    (home / "job.yaml").write_text(JOB + hook.format("a"))
    assert requeued(home, "own_failure").code == 1
    other = home / "other.yaml"
    other.write_text(JOB.replace("prompt_tokens: 8", "prompt_tokens: 4") + hook.format("b"))
    edited = run("resume", "--job", "other.yaml", cwd=home, play="own_failure")
    assert edited.code == 1 and str(other) in run("resume", cwd=home, play="tight_memory").err
    assert "https://hooks.example.org/b" in the_run(home).job_text
    # The launched file has not changed: what it says does not replace the edit.
    again = requeued(home, "tight_memory")
    assert again.code == 1 and "failed after" in again.err and "has changed since" not in again.err
    other.write_text(other.read_text().replace("prompt_tokens: 4", "prompt_tokens: 6"))
    assert run("resume", "--edit", cwd=home, play="tight_memory").code == 0
    assert [e.changes["settings.prompt_tokens"] for e in edits(home)] == [(8, 4), (4, 6)]
    assert {e.file for e in edits(home)} == {str(other)}
    done = requeued(home, "never_fits")
    assert done.code == 0 and "has changed since" not in done.err


def test_a_repeated_run_that_others_could_have_written_is_refused(home: Path) -> None:
    assert requeued(home, "own_failure").code == 1
    journal = the_run(home).path / "events.jsonl"
    journal.chmod(0o660)
    result = requeued(home, "tight_memory")
    assert result.code == 2 and "can be written by others" in result.err
    journal.chmod(0o600)
    (the_run(home).path / "asked.json").write_bytes(b"{")
    result = requeued(home, "tight_memory")
    assert result.code == 2 and "asked.json` is damaged" in result.err
    # The record of another job does not keep this one from its start.
    (home / "job.yaml").write_text(JOB.replace("name: story", "name: other"))
    assert requeued(home, "tight_memory").code == 0 and len(directory.runs(home / "runs")) == 2


def test_a_run_that_another_host_drives_is_refused_at_its_next_beat(home: Path) -> None:
    assert requeued(home, "own_failure").code == 1
    claim = the_run(home).path / "drivers" / "7"
    claim.write_bytes(msgspec.json.encode(Owner(host="elsewhere", pid=1, boot_id="")))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.5):
            os.utime(claim)

    elsewhere = threading.Thread(target=beat)
    elsewhere.start()
    try:
        busy = run("resume", "--edit", cwd=home, play="tight_memory")
    finally:
        ended.set()
        elsewhere.join()
    assert busy.code == 3 and "waiting up to 90 s to see whether it still does" in busy.err
    assert "another autotune (pid 1 on elsewhere) is running" in busy.err
    assert json.loads(run("status", "--json", cwd=home).out)[0]["status"] == "FAILED"
    claim.write_bytes(msgspec.json.encode(Owner(host="elsewhere", pid=1, boot_id="", over=True)))
    assert run("resume", "--edit", cwd=home, play="tight_memory").code == 0


def test_a_limit_that_the_edited_file_states_replaces_that_of_the_command_line(home: Path) -> None:
    assert run("launch", "job.yaml", "--relaunches", "0", cwd=home, play="never_fits").code == 1
    (home / "job.yaml").write_text(f"{JOB}\nrecovery: {{relaunches: 5}}\n")
    result = run("resume", "--edit", cwd=home, play="tight_memory")
    assert "edited: recovery.relaunches 0 → 5" in result.err
    assert the_run(home).request.relaunches is None
