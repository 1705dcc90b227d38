"""The journal: durable, one driver at a time, tolerant of a torn tail and of storage that fails."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import journal, lock
from autotune.orchestrator.run.journal import Journal, Tail, encode
from autotune.orchestrator.run.lock import Lock, TakenOver, owner
from autotune.orchestrator.run.storage import Persistence, Unrecordable
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


def test_every_torn_tail_is_left_out_and_stays(folder: Path) -> None:
    whole = (folder / "events.jsonl").read_bytes()
    second = whole[: whole.rstrip(b"\n").rfind(b"\n") + 1]
    for cut in range(len(second), len(whole) - 1):
        (folder / "events.jsonl").write_bytes(whole[:cut])
        assert journal.read(folder / "events.jsonl") == EVENTS[:2]
        with Journal(folder) as book:
            assert book.history() == EVENTS[:2]
            book.append(EVENTS[2])
        assert journal.read(folder / "events.jsonl") == EVENTS
        assert (folder / "events.jsonl").read_bytes().startswith(whole[:cut])


def test_a_tail_of_zeros_is_torn(folder: Path) -> None:
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes() + b"\0" * 100 + b"\n")
    for row in EVENTS:
        with Journal(folder) as book:
            book.append(row)
    assert journal.read(path) == (*EVENTS, *EVENTS)


def test_damage_in_the_middle_is_reported(folder: Path) -> None:
    path = folder / "events.jsonl"
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first[:-5] + b"\n" + rest)
    with pytest.raises(Failure, match="line 1 is damaged"):
        journal.read(path)


def test_a_row_of_an_older_release_is_read() -> None:
    row = b'{"type":"diagnosed","cause":"gpu-oom","at":"2026-11-23T03:40:09.816Z","attempt":1,"nearest":""}'
    assert journal.decode(row) == Diagnosed(cause=Cause.GPU_OOM, at="2026-11-23T03:40:09.816Z", attempt=1)


def test_a_driver_of_an_older_release_adds_nothing_once_another_has_the_run(folder: Path) -> None:
    path = folder / "events.jsonl"
    rows = [journal.encode(event) + b"\n" for event in EVENTS]  # without a number
    path.write_bytes(b"".join(rows[:2]))
    with Journal(folder) as book, path.open("ab") as older:
        older.write(rows[1])
        older.flush()
        assert journal.read(path) == book.history() == EVENTS[:2]


def test_a_newer_event_is_reported(folder: Path) -> None:
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes() + b'{"type":"paused","attempt":1}\n')
    with pytest.raises(Failure, match="line 4 is not an event of this version"):
        Journal(folder)


@pytest.mark.parametrize("stamp", ["202v-11-23T09:01:53.040Z", "2026-13-23T09:01:53.040Z", "now"])
def test_an_invalid_time_is_reported_with_its_line(stamp: str, folder: Path) -> None:
    path = folder / "events.jsonl"
    line = json.dumps({"type": "progressed", "attempt": 1, "step": 1, "at": stamp}).encode()
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(Failure, match=f"line 4 is not an event of this version: `{stamp}` is not a time"):
        Journal(folder)


def test_a_second_writer_is_refused_and_named(folder: Path) -> None:
    with Journal(folder):
        program = (
            "import sys, pathlib\n"
            "from autotune.orchestrator.run.journal import Journal\n"
            "Journal(pathlib.Path(sys.argv[1]))"
        )
        other = subprocess.run(
            [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False
        )
        assert f"another autotune (pid {os.getpid()} on " in other.stderr
    assert owner(folder) is None


def test_each_row_has_the_number_of_its_driver(folder: Path) -> None:
    """And a driver that finds rows begins with one that says who it is."""
    with Journal(folder) as book:
        book.append(EVENTS[1])
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    assert [(row["type"], row["driver"]) for row in rows] == [
        ("started", 1),
        ("progressed", 1),
        ("stop_requested", 1),
        ("driver_began", 2),
        ("progressed", 2),
    ]
    assert (rows[3]["host"], rows[3]["pid"]) == (os.uname().nodename, os.getpid()) and rows[3]["at"]


def test_a_journal_without_numbers_is_read_and_continued(folder: Path) -> None:
    path = folder / "events.jsonl"
    path.write_bytes(b"".join(journal.encode(event) + b"\n" for event in EVENTS))
    for claim in (folder / "drivers").iterdir():
        claim.unlink()
    assert journal.read(path) == EVENTS
    with Journal(folder) as book:
        book.append(EVENTS[1])
    assert journal.read(path) == (*EVENTS, EVENTS[1])


def test_a_number_is_above_those_of_the_rows_where_the_claims_are_lost(folder: Path) -> None:
    for _ in range(3):
        Journal(folder).close()
    for claim in (folder / "drivers").iterdir():
        claim.unlink()
    with Journal(folder) as book:
        book.append(EVENTS[1])
    assert journal.read(folder / "events.jsonl") == (*EVENTS, EVENTS[1])


def unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next driver believe that the one before it is dead, and that one that it has the run."""
    monkeypatch.setattr(Lock, "check", lambda _: None)
    monkeypatch.setattr(lock, "_lives", lambda _: False)


def test_what_a_driver_writes_after_it_has_lost_the_run_counts_for_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlocked(monkeypatch)
    path = folder / "events.jsonl"
    with Journal(folder) as lost, path.open("ab") as late, Journal(folder) as book:
        step = Progressed(attempt=1, step=2)
        late.write(journal.encode(step)[:-1] + b',"driver":%d}\n' % lost._lock.number)
        late.flush()
        book.append(EVENTS[1])
        late.write(b'{"type":"progr')  # and in the middle of a row
        late.flush()
        book.append(EVENTS[2])
        assert book.history() == journal.read(path) == (*EVENTS, EVENTS[1], EVENTS[2])
        before = path.read_bytes()
        with pytest.raises(TakenOver, match="was taken over"):
            lost.append(step)
        assert path.read_bytes() == before
    with Journal(folder) as book:
        assert book.history() == (*EVENTS, EVENTS[1], EVENTS[2])


@pytest.mark.parametrize("fails", ["write", "fsync"])
def test_a_failed_append_removes_nothing_that_another_driver_wrote(
    fails: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlocked(monkeypatch)
    path = folder / "events.jsonl"
    with Journal(folder) as lost:
        real = getattr(os, fails)

        def fails_late(*given: Any) -> None:
            monkeypatch.setattr(os, fails, real)
            with Journal(folder) as book:
                for event in EVENTS:
                    book.append(event)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, fails, fails_late)
        with pytest.raises(Unrecordable):
            lost.append(Progressed(attempt=1, step=9))
        with pytest.raises(TakenOver):
            lost.append(Progressed(attempt=1, step=9))
    # The row of the failed fsync was in the file before the other driver came: it counts.
    assert journal.read(path)[-3:] == EVENTS


def test_a_row_is_on_the_disk_before_anybody_hears_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    fsync, path = os.fsync, folder / "events.jsonl"

    def noted(descriptor: int) -> None:
        assert os.path.sameopenfile(descriptor, watched.fileno())
        done.append(("synced", path.stat().st_size))
        fsync(descriptor)

    with (
        path.open("rb") as watched,
        Journal(folder, tell=lambda _: done.append(("told", path.stat().st_size))) as book,
        monkeypatch.context() as patched,
    ):
        patched.setattr(os, "fsync", noted)
        book.append(EVENTS[1])
    whole = path.stat().st_size
    assert done == [("synced", whole), ("told", whole)]


ERRORS = (
    errno.EIO,
    errno.ESTALE,
    errno.ESHUTDOWN,
    errno.ETIMEDOUT,
    errno.EACCES,
    errno.ENOENT,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
)


@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("fails", ["open", "write", "fsync", "fstat", "pread"])
def test_a_row_waits_for_its_storage_and_is_written_once(
    fails: str, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it may be there already; the descriptor that failed is never used again."""
    real, left, messages, dead = getattr(os, fails), [3], list[str](), list[int]()

    def failing(*given: Any, **options: Any) -> Any:
        if left[0] and fails != "open":
            dead.append(given[0])
        if left[0] and (fails != "open" or str(given[0]).endswith("events.jsonl")):
            left[0] -= 1
            if fails == "write":
                real(given[0], given[1][:20])
            raise OSError(number, os.strerror(number))
        return real(*given, **options)

    persist = Persistence(folder, say=messages.append, patience_s=math.inf, sleep=lambda _: None)
    with Journal(folder, persist=persist) as book:
        if fails == "open":
            book._close_file()
        monkeypatch.setattr(os, fails, failing)
        book.append(EVENTS[1])
        book.append(EVENTS[2])
        monkeypatch.undo()
        assert book.history() == journal.read(folder / "events.jsonl") == (*EVENTS, *EVENTS[1:])
    assert len(messages) == 2 and os.strerror(number).lower() in messages[0] and "waiting" in messages[0]
    assert "can be accessed again" in messages[1]


def test_a_row_that_a_failed_sync_may_have_lost_is_written_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux marks pages clean that it could not write: the next fsync of them succeeds without any effect."""
    path, synced = folder / "events.jsonl", list[bytes]()
    pwrite, fsync = os.pwrite, os.fsync
    again: list[bytes] = []

    def failing(descriptor: int) -> None:
        if not synced:
            synced.append(b"")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    def noted(descriptor: int, data: bytes, at: int) -> int:
        again.append(data)
        return pwrite(descriptor, data, at)

    persist = Persistence(folder, patience_s=math.inf, sleep=lambda _: None)
    with Journal(folder, persist=persist) as book:
        size = path.stat().st_size
        monkeypatch.setattr(os, "fsync", failing)
        monkeypatch.setattr(os, "pwrite", noted)
        book.append(EVENTS[1])
        assert again == [path.read_bytes()[size:]]
    assert journal.read(path) == (*EVENTS, EVENTS[1])


def test_a_wait_is_reported_at_once_and_every_ten_minutes_until_the_user_ends_it(
    folder: Path,
) -> None:
    at, messages = [0.0], list[tuple[float, str]]()

    def fails() -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    persist = Persistence(
        folder,
        say=lambda text: messages.append((at[0], text)),
        patience_s=math.inf,
        monotonic=lambda: at[0],
        sleep=lambda seconds: at.__setitem__(0, at[0] + seconds),
    )
    persist.hurry_s = lambda: 0.0 if at[0] > 3000 else math.inf
    with pytest.raises(Unrecordable, match="stale file handle") as raised:
        persist(fails, path=folder / "events.jsonl")
    assert raised.value.code == ExitCode.INFRASTRUCTURE and "autotune resume 7c1e" in raised.value.hint
    assert [round(when, -2) for when, _ in messages] == [0, 600, 1200, 1800, 2400]


def test_the_folder_has_the_journals_name_before_a_row_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        done.append(name.name if name.parent.name != "drivers" else "claim")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    (tmp_path / "7c1e").mkdir()
    with Journal(tmp_path / "7c1e", tell=lambda _: done.append("told")) as book:
        book.append(EVENTS[1])
    assert done[: done.index("told") + 1][-3:] == ["7c1e", "events.jsonl", "told"]


def test_what_the_driver_before_worked_after_its_last_row_is_not_guessed_from_a_clock(folder: Path) -> None:
    """A copied folder has new times, and a file server has a clock of its own."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (4_000_000_000, 4_000_000_000))
    with Journal(folder) as book:
        assert book.worked_s(1000.0) == 0.0
        assert book.worked_s(1002.5) == 2.5
        assert book.worked_s(900.0) == 0.0


def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="cannot write"):
        Journal(tmp_path / "missing")


def test_a_tail_gives_each_row_once_and_all_of_another_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    assert tail.update() == ()
    first, second, third = (encode(event) + b"\n" for event in EVENTS)
    path.write_bytes(first)
    assert tail.update() == EVENTS[:1]
    assert tail.update() == ()
    for cut in range(1, len(second)):
        path.write_bytes(first + second[:cut])
        assert tail.update() == (), "a torn line waits"
    path.write_bytes(first + second + third)
    assert tail.update() == EVENTS[1:]
    path.write_bytes(second)
    assert tail.update() == EVENTS[1:2] and tail.view.count == 1
    path.unlink()
    assert tail.update() == () and tail.update() == ()


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
