"""`autotune doctor` as it is called: exit codes, JSON, and a machine without a cluster."""

from pathlib import Path

import msgspec
import pytest

from autotune.orchestrator.doctor import examine
from autotune.orchestrator.doctor.check import Check, Examined, Status
from tests.orchestrator.cli.terminal import call

SCRIPT = """\
name: script
framework: command
command: [python, train.py]
cluster: {address: local}
settings: {resume: true}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def decoded(text: str) -> Examined:
    return msgspec.json.decode(text, type=Examined)


def test_this_machine_alone_needs_no_cluster(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(SCRIPT)
    result = call("doctor", "job.yaml", "--json")
    outcome = decoded(result.out)
    assert (outcome.job, outcome.address, outcome.nodes) == ("script", "local", 1)
    by_name = {check.name: check for check in outcome.checks}
    assert {"cluster", "runs", "python", "ray", "gpus", "shm", "disk", "settings", "resume"} <= set(by_name)
    assert by_name["framework"].status is Status.SKIPPED
    assert by_name["python"].status is Status.OK
    assert result.code == (1 if outcome.count(Status.FAILED) else 0)


def test_a_runs_folder_that_cannot_be_written_is_a_failed_check(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(SCRIPT)
    (tmp_path / "file").touch()
    result = call("--runs-dir", "file/runs", "doctor", "job.yaml", "-q")
    assert result.code == 1 and result.err == ""
    assert "✗ runs" in result.out and "hint: pass another --runs-dir" in result.out


def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    result = call("doctor")
    assert result.code == 3 and result.err == ""
    assert "✗ cluster      cannot connect to the Ray cluster at 127.0.0.1:1: " in result.out
    assert "✓ python" in result.out and "1 failed" in result.out


def test_what_others_wrote_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_" + "a1B2" * 8
    held = Check(
        name="held-memory",
        status=Status.WARNING,
        what=f"(pid 7 (\x1b]0;owned\x07py\rthon) {token})",
        hint="end\x1b[2J",
    )
    result = Examined(address="local", nodes=1, checks=(held,))
    monkeypatch.setattr(examine, "examine_all", lambda *_, **__: result)
    assert call("doctor").out.splitlines()[:2] == [
        "! held-memory  (pid 7 (py?thon) ***)",
        "  hint: end",
    ]
    (check,) = decoded(call("doctor", "--json").out).checks
    assert check.what == "(pid 7 (py?thon) ***)"


def test_a_job_file_that_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(SCRIPT + "relaunchs: 3\n")
    result = call("doctor", "job.yaml")
    assert result.code == 2 and "unknown key `relaunchs`" in result.err and result.out == ""
