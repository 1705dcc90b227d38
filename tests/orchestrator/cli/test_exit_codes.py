"""Exit code 0 is earned: by the end of the journal, or by an answer that stdout took."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from autotune.orchestrator.run import directory
from autotune.orchestrator.run_states import exit_code
from autotune.policies.values.events import Finished, Interrupted, Started, TrainingCompleted
from autotune.policies.values.knobs import Knobs
from tests.orchestrator.cli.fork_server import Forked
from tests.orchestrator.cli.terminal import ROOT, run
from tests.orchestrator.cli.test_troubles import until
from tests.orchestrator.scripted import JOB


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def test_an_error_that_python_calls_a_broken_pipe_is_no_success(home: Path) -> None:
    result = run("launch", "job.yaml", cwd=home, play="shut_down")
    assert result.code not in (0, 1), result.err
    (outcome,) = directory.runs(home / "runs")
    assert not (outcome.path / "stable.yaml").exists()


def test_a_success_that_is_not_on_record_is_none() -> None:
    verdict = TrainingCompleted()
    started = Started(attempt=1, knobs=Knobs())
    with pytest.raises(RuntimeError, match="not on record"):
        exit_code(verdict, (started,))
    with pytest.raises(RuntimeError, match="not on record"):
        exit_code(verdict, (started, Finished(verdict=Interrupted(by="SIGTERM"))))
    assert exit_code(verdict, (started, Finished(verdict=verdict))) == 0
    assert exit_code(Interrupted(by="SIGTERM"), (started,)) == 143


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("arguments", "code"), [(("remedies", "verl"), 0), (("explain", "nothing.log"), 1)])
def test_a_reader_that_leaves_changes_no_exit_code(
    arguments: tuple[str, ...], code: int, unbuffered: str, home: Path
) -> None:
    (home / "nothing.log").write_text("nothing\n")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        result = autotune(*arguments, cwd=home, stdout=gone, PYTHONUNBUFFERED=unbuffered)
    assert (result.returncode, result.stderr) == (code, "")


def test_an_answer_that_stdout_does_not_take_is_a_failure(home: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        result = autotune("remedies", "verl", cwd=home, stdout=full)
    assert (result.returncode, result.stderr) == (
        3,
        "error: cannot write to stdout: no space left on device\n",
    )


def test_without_standard_streams_no_file_of_the_run_becomes_one(home: Path) -> None:
    words = f"{sys.executable} -m tests.orchestrator.cli.scripted_main tight_memory launch job.yaml --json"
    script = f"exec {words} --policy ladder <&- >&- 2>&-"
    result = subprocess.run(["sh", "-c", script], cwd=home, env=environment(home), check=False)
    assert result.returncode == 0
    (outcome,) = directory.runs(home / "runs")
    assert isinstance(outcome.history()[-1], Finished)  # every line of the journal is an event


def test_following_a_log_ends_when_its_reader_leaves(home: Path) -> None:
    def look(child: Forked) -> None:
        until(home, "progressed")
        following = subprocess.Popen(
            [sys.executable, "-m", "autotune.orchestrator.cli", "logs", "--follow"],
            cwd=home, env=environment(home), stdout=subprocess.PIPE,
        )  # fmt: skip
        assert following.stdout is not None
        os.read(following.stdout.fileno(), 1)
        following.stdout.close()
        codes.append(following.wait(timeout=30))
        assert child.poll() is None
        child.terminate()

    codes: list[int] = []
    result = run("launch", "job.yaml", cwd=home, play="forever", meanwhile=look)
    assert (codes, result.code) == ([0], 143)


def environment(home: Path, **more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **more}


def autotune(
    *arguments: str, cwd: Path, stdout: IO[bytes], **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autotune.orchestrator.cli", *arguments],
        cwd=cwd,
        env=environment(cwd, **variables),
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
