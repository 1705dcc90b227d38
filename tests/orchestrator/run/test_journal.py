"""The journal: durable, single-writer, tolerant of a torn tail and of a full disk."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import journal
from autotune.orchestrator.run.journal import Journal, Tail, encode
from autotune.orchestrator.run.lock import STALE_S, Driven, Owner, boot_id, owner, pid_namespace
from autotune.policies.values.events import Diagnosed, Event, Progressed, Started, StopRequested
from autotune.policies.values.failure import Cause
from autotune.policies.values.knobs import Knobs

EVENTS: tuple[Event, ...] = (
    Started(attempt=1, knobs=Knobs(concurrency=4)),
    Progressed(attempt=1, step=1, seconds=0.5),
    StopRequested(attempt=1, by="user", reason="naïve ✓\u2028line"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "7c1e"
    path.mkdir()
    with Journal(path) as book:
        for event in EVENTS:
            book.append(event)
    return path


def test_what_is_written_is_read(folder: Path) -> None:
    assert journal.read(folder / "events.jsonl") == EVENTS
    assert (folder / "events.jsonl").stat().st_mode & 0o777 == 0o600
    with Journal(folder) as book:
        assert book.history() == EVENTS


def test_every_torn_tail_is_repaired(folder: Path) -> None:
    whole = (folder / "events.jsonl").read_bytes()
    second = whole[: whole.rstrip(b"\n").rfind(b"\n") + 1]
    for cut in range(len(second), len(whole)):
        (folder / "events.jsonl").write_bytes(whole[:cut])
        assert journal.read(folder / "events.jsonl") == EVENTS[:2]
        with Journal(folder) as book:
            assert book.history() == EVENTS[:2]
            book.append(EVENTS[2])
        assert (folder / "events.jsonl").read_bytes() == whole


def test_a_tail_of_zeros_is_torn(folder: Path) -> None:
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes() + b"\0" * 100 + b"\n")
    with Journal(folder) as book:
        assert book.history() == EVENTS


def test_damage_in_the_middle_is_told(folder: Path) -> None:
    path = folder / "events.jsonl"
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first[:-5] + b"\n" + rest)
    with pytest.raises(Failure, match="line 1 is damaged"):
        journal.read(path)


def test_a_row_of_an_older_release_is_read() -> None:
    row = b'{"type":"diagnosed","cause":"gpu-oom","at":"2026-11-23T03:40:09.816Z","attempt":1,"nearest":""}'
    assert journal.decode(row) == Diagnosed(cause=Cause.GPU_OOM, at="2026-11-23T03:40:09.816Z", attempt=1)


def test_a_newer_event_is_told(folder: Path) -> None:
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"type":"paused","attempt":1}\n')
    with pytest.raises(Failure, match="line 4 is not an event of this version"):
        Journal(folder)


@pytest.mark.parametrize("stamp", ["202v-11-23T09:01:53.040Z", "2026-13-23T09:01:53.040Z", "now"])
def test_a_time_that_is_none_is_told_with_its_line(stamp: str, folder: Path) -> None:
    path = folder / "events.jsonl"
    line = json.dumps({"type": "progressed", "attempt": 1, "step": 1, "at": stamp}).encode()
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(Failure, match=f"line 4 is not an event of this version: `{stamp}` is not a time"):
        Journal(folder)


def test_a_second_writer_is_refused_and_named(folder: Path) -> None:
    with Journal(folder):
        found = owner(folder)
        assert found == Owner(
            host=os.uname().nodename, pid=os.getpid(), boot_id=boot_id(), pids=pid_namespace()
        )
        assert found is not None and found.is_here
        program = (
            "import sys, pathlib\n"
            "from autotune.orchestrator.run.journal import Journal\n"
            "Journal(pathlib.Path(sys.argv[1]))"
        )
        other = subprocess.run(
            [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False
        )
        assert f"driven by pid {os.getpid()}" in other.stderr
    assert owner(folder) is None


def test_an_owner_of_another_boot_is_not_here() -> None:
    assert not Owner(host=os.uname().nodename, pid=1, boot_id="other").is_here


@pytest.mark.parametrize("host", ["elsewhere", os.uname().nodename])
def test_the_lock_of_another_host_is_taken_once_its_heartbeat_is_old(host: str, folder: Path) -> None:
    """As a file server leaves it that has not noticed the end of its holder: the lock itself stays taken."""
    holder = Owner(host=host, pid=os.getpid(), boot_id="other")
    path = folder / "lock"
    path.write_bytes(msgspec.json.encode(holder))
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Driven) as busy:
            Journal(folder)
        assert busy.value.free_in_s is not None and 0 < busy.value.free_in_s <= STALE_S
        old = path.stat().st_mtime - STALE_S - 1
        os.utime(path, (old, old))
        with Journal(folder) as book:
            book.append(EVENTS[1])
            assert (found := owner(folder)) is not None and found.is_here


def test_a_row_is_on_the_disk_before_anybody_hears_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    fsync, path = os.fsync, folder / "events.jsonl"

    def noted(descriptor: int) -> None:
        assert os.path.sameopenfile(descriptor, watched.fileno())
        done.append(("synced", path.stat().st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with (
        path.open("rb") as watched,
        Journal(folder, tell=lambda _: done.append(("told", path.stat().st_size))) as book,
    ):
        book.append(EVENTS[1])
    whole = path.stat().st_size
    assert done == [("synced", whole), ("told", whole)]


def test_a_repaired_tail_is_on_the_disk_before_the_next_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, sizes = folder / "events.jsonl", list[int]()
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes() + b'{"type":')
    monkeypatch.setattr(os, "fsync", lambda _: sizes.append(path.stat().st_size))
    with Journal(folder):
        assert sizes == [whole]


def test_a_full_disk_leaves_the_journal_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with Journal(folder) as book:

        def half_then_full(descriptor: int, data: memoryview) -> int:
            if len(data) > 20:
                return write(descriptor, data[:20])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", half_then_full)
        with pytest.raises(Failure, match="no space left on device") as raised:
            book.append(Progressed(attempt=1, step=2))
        assert raised.value.code == ExitCode.INFRASTRUCTURE and "autotune resume 7c1e" in raised.value.hint
        monkeypatch.undo()
        assert book.history() == EVENTS == journal.read(folder / "events.jsonl")
        book.append(Progressed(attempt=1, step=2))
    assert len(journal.read(folder / "events.jsonl")) == 4


def test_an_unwritable_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="cannot write"):
        Journal(tmp_path / "missing")


def test_a_tail_gives_each_row_once_and_all_of_another_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.update() == ((), False)
    first, second, third = (encode(event) + b"\n" for event in EVENTS)
    path.write_bytes(first)
    assert tail.update() == (EVENTS[:1], True)
    assert tail.update() == ((), False)
    for cut in range(1, len(second)):
        path.write_bytes(first + second[:cut])
        assert tail.update() == ((), False), "a torn line waits"
    path.write_bytes(first + second + third)
    assert tail.update() == (EVENTS[1:], False)
    path.write_bytes(second)
    assert tail.update() == (EVENTS[1:2], True)
    path.unlink()
    assert tail.update() == ((), True) and tail.update() == ((), False)


def test_a_tail_names_the_line_of_the_file_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    line = encode(EVENTS[0]) + b"\n"
    path.write_bytes(line * 2)
    tail.update()
    with path.open("ab") as file:
        file.write(b"{broken}\n" + line)
    with pytest.raises(Failure, match="line 3 is damaged"):
        tail.update()
