"""`stop` says that a run is stopped once that was observed, whoever drove it and however its driver ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from autotune.launchers.runners.node.processes import MARKER, attempt_of
from autotune.orchestrator.cli import stop
from autotune.orchestrator.cli.shared.options import Options
from autotune.orchestrator.driver.attempt import doubtful
from autotune.orchestrator.run import directory, lock
from autotune.orchestrator.run.journal import Journal
from autotune.orchestrator.run.lock import Lock, Owner, boot_id
from autotune.policies.values.events import Ended, Event, Finished, Interrupted, Started
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Lost
from tests.orchestrator.cli.fork_server import Forked
from tests.orchestrator.cli.terminal import Seen, call, run
from tests.orchestrator.cli.test_troubles import the_run, until
from tests.orchestrator.scripted import JOB

CLUSTER = "@10.0.0.1:6379"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def killed(home: Path, play: str) -> directory.RunFolder:
    """Launch a job, and kill its driver while it trains."""

    def kill(child: Forked) -> None:
        until(home, "progressed")
        child.kill()

    run("launch", "job.yaml", cwd=home, play=play, meanwhile=kill)
    return the_run(home)


def test_a_run_whose_driver_dies_as_it_is_asked_is_stopped_all_the_same(home: Path) -> None:
    def die_when_asked(child: Forked) -> None:
        until(home, "progressed")
        child.send_signal(signal.SIGSTOP)  # whatever it is asked, it does nothing

        def kill(_: Forked) -> None:
            end = time.monotonic() + 20
            while not (the_run(home).path / "stop").exists():
                assert time.monotonic() < end
                time.sleep(0.01)
            child.kill()
            child.wait()

        items.append(run("stop", cwd=home, play="forever", meanwhile=kill))

    items: list[Seen] = []
    run("launch", "job.yaml", cwd=home, play="forever", meanwhile=die_when_asked)
    (stopped,) = items
    assert (stopped.code, "is stopped" in stopped.err) == (0, True), stopped.err
    assert isinstance(the_run(home).history()[-1], Finished)
    assert not (the_run(home).path / "stop").exists()


def test_a_run_is_stopped_without_the_secrets_that_it_needs_to_go_on(home: Path) -> None:
    def kill(child: Forked) -> None:
        until(home, "progressed")
        child.kill()

    (home / "job.yaml").write_text(JOB + "env: {HF_TOKEN: {env: HF_TOKEN}}\n")
    run("launch", "job.yaml", cwd=home, play="forever", meanwhile=kill, env={"HF_TOKEN": "hf_a1b2"})
    assert run("resume", cwd=home, play="forever").code == 2
    assert run("stop", cwd=home, play="forever").code == 0
    assert isinstance(the_run(home).history()[-1], Finished)


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (":undead", "its processes could not be ended: pid 7 (python) of mia on gpu-02"),
        (":silent", "gpu-03 did not answer"),
    ],
)
def test_what_could_not_be_ended_or_reached_is_named_each_time(trouble: str, words: str, home: Path) -> None:
    killed(home, "forever" + CLUSTER)
    for _ in range(2):
        result = run("stop", cwd=home, play=f"forever{trouble}{CLUSTER}")
        assert result.code == 3 and words in result.err and "is stopped" not in result.err
        assert not isinstance(the_run(home).history()[-1], Finished)
    result = run("stop", cwd=home, play="forever" + CLUSTER)
    assert result.code == 0 and "is stopped" in result.err
    assert run("stop", cwd=home, play="unreachable").code == 0  # the record shows that nothing is left


def test_what_a_driver_could_not_reach_is_looked_for_although_the_run_has_finished(home: Path) -> None:
    made = killed(home, "forever" + CLUSTER)
    unreached = Ended(attempt=1, outcome=Cancelled(by="user"), drain_s=0.2, unreached="gpu-03")
    with Journal(made.path) as journal:
        for event in (unreached, OVER):
            journal.append(msgspec.structs.replace(event, at=journal.history()[-1].at))
    for play in ("unreachable", "forever:silent" + CLUSTER, "forever:undead" + CLUSTER):
        assert run("stop", cwd=home, play=play).code == 3
    result = run("stop", cwd=home, play="forever" + CLUSTER)
    assert result.code == 0 and "was already stopped; no process of it is left" in result.err
    removed = run("remove", the_run(home).id, "--yes", cwd=home)
    assert removed.code == 0 and removed.err.startswith("removed "), removed.err


def test_a_finished_run_is_rid_of_what_its_driver_could_not_end(home: Path) -> None:
    made = killed(home, "forever")
    with Journal(made.path) as journal:
        for event in (Ended(attempt=1, outcome=Lost(reason="its node was silent")), OVER):
            journal.append(msgspec.structs.replace(event, at=journal.history()[-1].at))
    name = f"{made.id}/1"
    left = subprocess.Popen([sys.executable, "-c", "input()"], env={MARKER: name}, stdin=subprocess.PIPE)
    try:
        end = time.monotonic() + 20
        while attempt_of(left.pid) != name:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert run("stop", cwd=home).code == 0
        assert left.wait(timeout=20) == -signal.SIGTERM
    finally:
        left.kill()


def test_processes_on_another_host_are_not_said_to_be_gone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = killed(home, "forever")
    monkeypatch.chdir(home)
    monkeypatch.setattr(stop, "last_owner", lambda _: Owner(host="gpu-07", pid=1, boot_id="another"))
    result = call("stop")
    assert result.code == 3 and "ended on gpu-07, where its processes may be left" in result.err
    assert not isinstance(made.history()[-1], Finished)


def test_a_host_that_was_restarted_since_has_no_processes_of_the_run(home: Path) -> None:
    made = killed(home, "forever")
    here = os.uname().nodename
    stop._require_reachable(made, made.history(), Owner(host=here, pid=1, boot_id="before"))
    with pytest.raises(stop.Failure, match="in its container"):
        stop._require_reachable(made, made.history(), Owner(host=here, pid=1, boot_id=boot_id(), pids=1))


@pytest.mark.parametrize("how", ["signal", "request"])
def test_a_driver_hears_a_request_from_the_moment_that_others_see_it(how: str, home: Path) -> None:
    assert run("launch", "job.yaml", cwd=home, play=f"forever:asked-by-{how}").code == 143
    assert not any(isinstance(e, Started) for e in the_run(home).history())


def test_a_request_for_an_earlier_driver_is_forgotten_and_one_for_the_first_is_not(home: Path) -> None:
    made = directory.create(home / "runs", job_text=JOB)
    result = run("stop", cwd=home, play="tight_memory")
    assert result.code == 0 and "has not started; a driver that is starting now stops at once" in result.err
    assert run("resume", cwd=home, play="tight_memory").code == 143
    assert (made.path / "stop").exists()
    assert run("resume", cwd=home, play="tight_memory").code == 0


def test_a_request_outlasts_the_silence_of_a_driver_that_has_begun_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = directory.create(tmp_path, job_text=JOB)
    (made.path / "drivers").mkdir()
    elsewhere = Owner(host="gpu-07", pid=1, boot_id="another")
    (made.path / "drivers" / "1").write_bytes(msgspec.json.encode(elsewhere))
    monkeypatch.setattr(lock, "STALE_S", 0.5)
    stop.stop(made, options=Options(runs_dir=tmp_path))
    assert (made.path / "stop").exists() and "a driver that is starting now stops" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [False, True], ids=["before the request", "after the request"])
def test_a_run_that_its_launch_refuses_meanwhile_leaves_nothing_to_stop(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = directory.create(tmp_path, job_text=JOB)
    driver, request = Lock(made.path), stop._request

    def refuse_the_job(run: directory.RunFolder) -> None:
        if asked:
            request(run)
        if run.path.exists():
            driver.release()
            directory.discard_unaccepted(run)
        request(run)

    monkeypatch.setattr(stop, "_request", refuse_the_job)
    stop.stop(made, options=Options(runs_dir=tmp_path))
    assert "was refused and removed by its launch before anything was started" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_request_is_repeated_until_the_driver_is_gone(tmp_path: Path) -> None:
    made = directory.create(tmp_path, job_text=JOB)
    lock, request = Lock(made.path), made.path / "stop"

    def start_as_a_driver_does() -> None:
        for _ in range(2):
            end = time.monotonic() + 20
            while not request.exists():
                assert time.monotonic() < end
                time.sleep(0.01)
            request.unlink()
        lock.release()

    driver = threading.Thread(target=start_as_a_driver_does)
    driver.start()
    stop._ask(made, Owner(host="another", pid=1, boot_id="another"))
    driver.join()


STARTED = Started(attempt=1, knobs=Knobs())
OVER = Finished(attempt=1, verdict=Interrupted(by="SIGTERM"))


@pytest.mark.parametrize(
    ("end", "is_doubtful"),
    [
        ([Ended(attempt=1, outcome=Cancelled(by="user"), drain_s=0.2)], False),
        ([Ended(attempt=1, outcome=Cancelled(by="user"), drain_s=0.2, held="pid 7")], True),
        ([Ended(attempt=1, outcome=Cancelled(by="user"), drain_s=0.2, unreached="gpu-03")], True),
        ([Ended(attempt=1, outcome=Cancelled(by="user"))], True),
        ([], True),
    ],
)
def test_an_attempt_is_gone_where_its_end_was_observed_everywhere(
    end: list[Event], is_doubtful: bool
) -> None:
    assert bool(doubtful((STARTED, *end, OVER))) is is_doubtful
