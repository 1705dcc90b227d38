"""Drivers in the background: what `--detach` says of one, and how `stop` asks one that it may not signal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from autotune.orchestrator.cli import stop
from autotune.orchestrator.cli.shared import start
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.directory import RunFolder
from autotune.orchestrator.run.lock import UNKNOWN, Lock, Owner, boot_id, owner, pid_namespace
from tests.orchestrator.cli.terminal import Seen, call
from tests.orchestrator.scripted import JOB


def detached(code: int | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Seen, RunFolder]:
    """Launch with a driver that takes no lock within the wait, and has ended with `code` if it has one."""

    class Child:
        pid = 4242

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def poll(self) -> int | None:
            return code

    monkeypatch.chdir(folder)
    Path("job.yaml").write_text(JOB)
    monkeypatch.setattr("subprocess.Popen", Child)
    monkeypatch.setattr(start, "_DRIVER_START_S", -1.0)
    result = call("launch", "job.yaml", "--detach", "--json", "--runs-dir", str(folder / "runs"))
    (made,) = directory.runs(folder / "runs")
    return result, made


def test_a_driver_that_is_slow_to_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, made = detached(None, tmp_path, monkeypatch)
    assert result.code == 0 and json.loads(result.out) == {"run": made.id}
    log = made.path / "driver.log"
    assert f"run {made.id} is still starting in the background (pid 4242); see `{log}`" in result.err
    assert "  kill 4242   ends it" in result.err and "did not start" not in result.err


def test_a_driver_that_cannot_be_read_is_not_said_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "owner", lambda _: UNKNOWN)
    result, made = detached(None, tmp_path, monkeypatch)
    assert f"run {made.id} is still starting" in result.err and "continues" not in result.err


def test_a_driver_that_ended_did_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, made = detached(1, tmp_path, monkeypatch)
    assert result.code == 3 and "the background driver did not start" in json.loads(result.out)["error"]
    assert "the background driver did not start" in result.err and f"resume {made.id}" in result.err


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    path = tmp_path / "7c1e"
    path.mkdir()
    return RunFolder(path)


def held_by(run: RunFolder, pids: int | None) -> Owner:
    """Take the lock of a run as pid 4242 of a namespace would have; returns who holds it."""
    holder = Owner(host=os.uname().nodename, pid=4242, boot_id=boot_id(), pids=pids)
    (run.path / "drivers").mkdir(exist_ok=True)
    (run.path / "drivers" / "2").write_bytes(msgspec.json.encode(holder))
    result = owner(run.path)
    assert result == holder
    return result


@pytest.fixture
def signalled(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The pids that were signalled, while the run's lock is held and nobody reads requests."""
    pids: list[int] = []
    monkeypatch.setattr(stop, "_STOP_S", 0.0)
    monkeypatch.setattr(os, "kill", lambda pid, number: pids.append(pid) if number else None)
    lock = Lock(run.path)
    yield pids
    lock.release()


def test_a_pid_of_another_container_is_not_signalled(run: RunFolder, signalled: list[int]) -> None:
    """The host, and what it was booted as, are the same: `--network host` gives its name to a container."""
    driver = held_by(run, (pid_namespace() or 0) + 1)
    with pytest.raises(Failure, match="does not stop") as raised:
        stop._ask(run, driver)
    assert not signalled and (run.path / "stop").exists()
    assert f"in its container on {driver.host} run `kill -9 4242`" in raised.value.hint


def test_no_command_is_named_for_a_driver_that_is_not_known(run: RunFolder, signalled: list[int]) -> None:
    with pytest.raises(Failure, match="who drives it cannot be read") as raised:
        stop._ask(run, UNKNOWN)
    assert not signalled and "kill" not in raised.value.hint


@pytest.mark.parametrize("pids", [None, pid_namespace()], ids=["written before", "the same"])
def test_a_pid_of_this_container_is_signalled(pids: int | None, run: RunFolder, signalled: list[int]) -> None:
    driver = held_by(run, pids)
    with pytest.raises(Failure) as raised:
        stop._ask(run, driver)
    assert signalled == [4242] and f"on {driver.host} run `kill -9 4242`" in raised.value.hint


def test_a_lock_of_an_older_release_is_read() -> None:
    old = msgspec.json.decode(b'{"host":"a","pid":1,"boot_id":"b"}', type=Owner)
    assert old == Owner(host="a", pid=1, boot_id="b")


def test_what_another_user_drives_is_asked_by_the_request(
    run: RunFolder, signalled: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = held_by(run, pid_namespace())

    def refused(_: int, __: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    with pytest.raises(Failure, match="does not stop"):
        stop._ask(run, driver)
    assert (run.path / "stop").exists()
    output = capsys.readouterr().err
    assert (
        "pid 4242 belongs to another user and was not signalled" in output
        and str(run.path / "stop") in output
    )
