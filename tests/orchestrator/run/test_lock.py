"""The lock of a run: what a takeover leaves to the driver before, and what a reader's glance does."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

import pytest

from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run.lock import STALE_S, Driven, Lock, owner


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "7c1e"
    path.mkdir()
    return path


def test_a_driver_whose_lock_lapsed_notices_that_another_host_took_over(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is free for another host: its lease ran out, or each host sees its own locks only."""
    asleep = Lock(folder)
    path, old = folder / "lock", time.time() - STALE_S - 30
    fcntl.flock(asleep._file, fcntl.LOCK_UN)
    os.utime(path, (old, old))
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    second = Lock(folder)
    try:
        second.check()
        assert (found := owner(folder)) is not None and found.host == "elsewhere"
        with pytest.raises(Failure, match="was taken over by another host"):
            asleep.check()
        asleep.release()
        assert owner(folder) == found, "the driver before let go of the other's lock"
    finally:
        second.release()
    assert [each.name for each in folder.iterdir()] == ["lock"]


def test_a_reader_that_looks_at_the_lock_keeps_no_driver_from_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "lock").touch()
    with (folder / "lock").open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(reader, fcntl.LOCK_UN))
        held = Lock(folder)
    try:
        held.check()
    finally:
        held.release()


def test_a_driver_that_has_the_lock_is_waited_for_about_a_second(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    held = Lock(folder)
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(Driven, match=f"driven by pid {os.getpid()}") as busy:
        Lock(folder)
    assert busy.value.free_in_s is None and sum(slept) == pytest.approx(1.0, abs=0.1)
    held.release()
