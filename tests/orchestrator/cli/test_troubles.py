"""What happens to the driver itself: closed pipes, lost terminals, impatient users, full disks."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from autotune.orchestrator.run import directory
from autotune.policies.values.events import Ended, Finished, History, Interrupted, Started, TrainingCompleted
from autotune.policies.values.observation import Cancelled
from tests.orchestrator.cli.fork_server import Forked
from tests.orchestrator.cli.terminal import run
from tests.orchestrator.scripted import JOB


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def the_run(home: Path) -> directory.RunFolder:
    (result,) = directory.runs(home / "runs")
    return result


def until(home: Path, kind: str, *, count: int = 1) -> None:
    """Wait until the journal of the only run holds so many events of a kind."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        journals = list((home / "runs").glob("*/events.jsonl"))
        if journals and journals[0].read_text().count(f'"type":"{kind}"') >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {kind}")


def finished(history: History) -> Finished:
    last = history[-1]
    assert isinstance(last, Finished)
    return last


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_away_stops_no_training(stream: str, home: Path) -> None:
    def leave(child: Forked) -> None:
        pipe = child.stdout if stream == "stdout" else child.stderr
        assert pipe is not None
        os.read(pipe.fileno(), 1)
        os.close(pipe.fileno())
        setattr(child, stream, None)

    result = run("launch", "job.yaml", "--json", cwd=home, play="tight_memory", meanwhile=leave)
    assert result.code == 0
    assert isinstance(finished(the_run(home).history()).verdict, TrainingCompleted)
    log = (the_run(home).path / "driver.log").read_text()
    if stream == "stdout":
        assert log.count("cannot write to stdout: broken pipe") == 1
        assert result.err.count("cannot write to stdout") == 1 and "Training complete" in result.err
    else:
        assert log.count("cannot print: broken pipe; the run continues") >= 1 and "Training complete" in log
        assert json.loads(result.out.splitlines()[-1])["type"] == "finished"


def test_a_stable_file_that_cannot_be_written_stops_no_training(home: Path) -> None:
    result = run("launch", "job.yaml", cwd=home, play="no_stable_file")
    assert (result.code, result.out) == (0, "")
    assert result.err.count("cannot write stable.yaml: no space left on device") == 1
    assert "Training complete" in result.err
    assert "No space left on device" in (the_run(home).path / "driver.log").read_text()
    assert run("resume", cwd=home, play="tight_memory").out.strip().endswith("stable.yaml")


def test_a_certificate_that_cannot_be_written_is_one_warning(home: Path) -> None:
    result = run("launch", "job.yaml", cwd=home, play="no_certificate")
    assert result.code == 0 and result.out.strip().endswith("stable.yaml")
    assert result.err.count("cannot write certificate.json: no space left on device") == 1
    assert "Training complete" in result.err and not (the_run(home).path / "certificate.json").exists()


def test_without_its_terminal_a_driver_goes_on(home: Path) -> None:
    def hang_up(child: Forked) -> None:
        until(home, "progressed", count=2)
        child.send_signal(signal.SIGHUP)
        until(home, "progressed", count=len(the_run(home).history()) + 2)
        child.send_signal(signal.SIGTERM)

    result = run("launch", "job.yaml", cwd=home, tty=True, play="forever", meanwhile=hang_up)
    assert result.code == 143
    log = (the_run(home).path / "driver.log").read_text()
    assert "terminal disconnected; the run continues" in log and "stopped by SIGTERM" in log


def test_a_driver_outlives_a_terminal_that_goes_while_it_starts(home: Path) -> None:
    def hang_up(child: Forked) -> None:
        end = time.monotonic() + 20
        while not caught(child.pid) & 1 << signal.SIGHUP - 1:
            assert time.monotonic() < end
            time.sleep(0.001)
        child.send_signal(signal.SIGHUP)

    result = run("launch", "job.yaml", cwd=home, tty=True, play="tight_memory", meanwhile=hang_up)
    assert result.code == 0
    assert "terminal disconnected; the run continues" in (the_run(home).path / "driver.log").read_text()


def caught(pid: int) -> int:
    """Return the signals that a process handles, as the kernel's bits."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("SigCgt:")).split()[1], 16)


def drains(home: Path) -> None:
    """Wait until the memory of an attempt is awaited."""
    end = time.monotonic() + 20
    while not list((home / "runs").glob("*/draining")):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_second_ctrl_c_is_heard_while_it_starts(home: Path) -> None:
    def press_twice(child: Forked) -> None:
        until(home, "started")
        child.send_signal(signal.SIGINT)
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)

    result = run("launch", "job.yaml", cwd=home, play="never_starts", meanwhile=press_twice)
    assert result.code == 130, result.err
    assert the_end(home).outcome == Cancelled(by="user")
    assert "autotune resume" in result.err


def press_twice_once(there: Callable[[], object], child: Forked) -> None:
    end = time.monotonic() + 20
    while not there():
        assert time.monotonic() < end
        time.sleep(0.02)
    for _ in range(2):
        child.send_signal(signal.SIGINT)
        time.sleep(0.2)


def test_a_second_ctrl_c_ends_a_connection_that_hears_none(home: Path) -> None:
    result = run(
        "launch",
        "job.yaml",
        cwd=home,
        play="deaf_connection",
        meanwhile=partial(press_twice_once, (home / "connecting").exists),
    )
    assert result.code == 130, result.err
    assert "stopped by SIGINT before anything was started" in result.err
    assert "autotune resume" in result.err and "asked again" not in result.err


def test_a_second_ctrl_c_ends_a_call_to_the_cluster_that_hears_none(home: Path) -> None:
    def press_twice(child: Forked) -> None:
        until(home, "started")
        press_twice_once(lambda: True, child)

    result = run("launch", "job.yaml", cwd=home, play="deaf", meanwhile=press_twice)
    assert result.code == 130, result.err
    assert (
        "second interrupt: killing the job (up to 3 s)" in result.err.partition("attempt #1 may still run")[0]
    )
    assert "`autotune stop" in result.err
    assert [e for e in the_run(home).history() if isinstance(e, Ended)] == []


def test_an_interrupted_connection_does_not_crash_the_end(home: Path) -> None:
    result = run("launch", "job.yaml", cwd=home, play="half_connected")
    assert result.code == 130, result.err
    assert "stopped by SIGINT before anything was started" in result.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_end_is_heard_while_memory_is_awaited(number: signal.Signals, home: Path) -> None:
    def ask(child: Forked) -> None:
        drains(home)
        child.send_signal(number)

    result = run("launch", "job.yaml", cwd=home, play="never_drains", meanwhile=ask)
    assert result.code == 128 + number, result.err
    the_end(home, by=number.name)
    assert "did not wait for attempt #1 to release its memory" in result.err
    assert "autotune resume" in result.err


def the_end(home: Path, *, by: str = "SIGINT") -> Ended:
    """Return the end of the only attempt of a run that was interrupted."""
    history = the_run(home).history()
    assert finished(history).verdict == Interrupted(by=by)
    (ended,) = (e for e in history if isinstance(e, Ended))
    assert sum(isinstance(e, Started) for e in history) == 1
    return ended


def test_a_bug_names_the_run_to_resume(home: Path) -> None:
    result = run("launch", "job.yaml", cwd=home, play="bug")
    name = the_run(home).id
    assert result.code == 101 and f"`autotune resume {name}` continues the run" in result.err
    assert "ZeroDivisionError" in (the_run(home).path / "driver.log").read_text()
