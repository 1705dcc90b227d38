"""How `autotune stop` asks a driver that it may not be able to signal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from autotune.orchestrator.cli import stop
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run.directory import Run
from autotune.orchestrator.run.lock import Lock, Owner, boot_id, owner, pid_namespace


@pytest.fixture
def run(tmp_path: Path) -> Run:
    path = tmp_path / "7c1e"
    path.mkdir()
    return Run(path)


def held_by(run: Run, pids: int | None) -> Owner:
    """Take the lock of a run as pid 4242 of a namespace would have; returns who holds it."""
    holder = Owner(host=os.uname().nodename, pid=4242, boot_id=boot_id(), pids=pids)
    (run.path / "lock").write_bytes(msgspec.json.encode(holder))
    found = owner(run.path)
    assert found == holder
    return found


@pytest.fixture
def signalled(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The pids that were signalled, while the run's lock is held and nobody reads requests."""
    pids: list[int] = []
    monkeypatch.setattr(stop, "_STOP_S", 0.0)
    monkeypatch.setattr(os, "kill", lambda pid, _: pids.append(pid))
    lock = Lock(run.path)
    yield pids
    lock.release()


def test_a_pid_of_another_container_is_not_signalled(run: Run, signalled: list[int]) -> None:
    """The host, and what it was booted as, are the same: `--network host` gives its name to a container."""
    driver = held_by(run, (pid_namespace() or 0) + 1)
    with pytest.raises(Failure, match="does not stop") as raised:
        stop._ask(run, driver)
    assert not signalled and (run.path / "stop").exists()
    assert f"in its container on {driver.host} run `kill -9 4242`" in raised.value.hint


@pytest.mark.parametrize("pids", [None, pid_namespace()], ids=["written before", "the same"])
def test_a_pid_of_this_container_is_signalled(pids: int | None, run: Run, signalled: list[int]) -> None:
    driver = held_by(run, pids)
    with pytest.raises(Failure) as raised:
        stop._ask(run, driver)
    assert signalled == [4242] and f"on {driver.host} run `kill -9 4242`" in raised.value.hint


def test_a_lock_of_an_older_release_is_read() -> None:
    old = msgspec.json.decode(b'{"host":"a","pid":1,"boot_id":"b"}', type=Owner)
    assert old == Owner(host="a", pid=1, boot_id="b")


def test_what_another_user_drives_is_asked_by_the_request(
    run: Run, signalled: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = held_by(run, pid_namespace())

    def refused(_: int, __: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    with pytest.raises(Failure, match="does not stop"):
        stop._ask(run, driver)
    assert (run.path / "stop").exists()
    told = capsys.readouterr().err
    assert "pid 4242 belongs to another user and was not signalled" in told and str(run.path / "stop") in told
