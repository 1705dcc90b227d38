"""The append-only record of a run: one event per line, one writer, safe against a crash at any byte."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.errors import ExitCode, Failure, reason_of, writing
from autotune.orchestrator.run import full_disk
from autotune.orchestrator.run.lock import Lock
from autotune.policies.values.events import Event, History, Notified, Row
from autotune.policies.values.run.view import RunView

_DECODER: msgspec.json.Decoder[Row] = msgspec.json.Decoder(Row)


def decode(line: bytes) -> Row:
    """Return what one line records; raises msgspec.DecodeError, ValidationError where it is no event."""
    row = _DECODER.decode(line)
    try:
        seconds_of(row.at)
    except (ValueError, OverflowError):
        raise msgspec.ValidationError(f"`{row.at}` is not a time - at `$.at`") from None
    return row


def encode(event: Row) -> bytes:
    """Return an event as one line without its end."""
    return msgspec.json.encode(event)


def read(path: Path) -> History:
    """Return the events on record without locking; a torn last line is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise Failure(f"cannot read `{path}`: {reason_of(error)}") from None
    return _rows(data, path)[0]


class Tail:
    """Reads a journal that another process may be writing, each row once, and keeps the view of its run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.view = RunView()
        self._stamp: tuple[int, int, int] | None = None  # inode, bytes, modification time
        self._offset = self._line = 0  # of what has been read

    def update(self) -> tuple[History, bool]:
        """Return the events since the last call, and whether they are all: the file is another one now.

        A torn last line waits for the next call. Raises Failure as `read` does; the next call starts anew.
        """
        try:
            events, again = self._new()
        except Failure:
            self._stamp, self.view = None, RunView()
            raise
        if again:
            self.view = RunView()
        for event in events:
            self.view.take(event)
        return events, again

    def _new(self) -> tuple[History, bool]:
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                stamp = status.st_ino, status.st_size, status.st_mtime_ns
                before, self._stamp = self._stamp, stamp
                if stamp == before:
                    return (), False
                again = before is None or stamp[0] != before[0] or stamp[1] <= before[1]
                if again:
                    self._offset = self._line = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            again, self._stamp = self._stamp is not None, None
            return (), again
        except OSError as error:
            raise Failure(f"cannot read `{self.path}`: {reason_of(error)}") from None
        events, notified, whole = _rows(data, self.path, before=self._line)
        self._offset += whole
        self._line += len(events) + len(notified)
        return events, again


class Journal:
    """The open journal of a run, held by its only writer."""

    def __init__(
        self,
        folder: Path,
        *,
        tell: Callable[[Event], None] | None = None,
        say: Callable[[str], None] = lambda _: None,
        patience_s: float = 0.0,
    ) -> None:
        """Open the journal; `say` is told when a full disk is waited for, `patience_s` seconds at most."""
        self.folder = folder
        self.interrupted: Callable[[], bool] = lambda: False  # ends the wait for a full disk
        self.patience_s = patience_s
        self._say = say
        self.path = folder / "events.jsonl"
        self._tell = tell
        self._lock = Lock(folder)
        try:
            with writing(self.path):
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                data = self.path.read_bytes()
                self._history, self._notified, whole = _rows(data, self.path)
                if whole < len(data):
                    os.ftruncate(self._file, whole)
                    os.fsync(self._file)
        except BaseException:
            self._lock.release()
            raise
        self._size = whole
        self.view = RunView(self._history)
        # The driver before worked on from its last row to its last heartbeat.
        last = self._history[-1].at if self._history else ""
        self._worked_s = max(0.0, self._lock.last_beat - seconds_of(last)) if last else 0.0
        self._marked: float | None = None

    def history(self) -> History:
        """Return every event on record."""
        return self._history

    def notified(self) -> tuple[Notified, ...]:
        """Return of what a person was notified."""
        return self._notified

    def worked_s(self, now: float) -> float:
        """Return the seconds that a driver was at work since the last call, by a clock that nobody sets.

        The first call adds what the driver before worked after its last row; that without one is left out.
        """
        worked, self._worked_s = self._worked_s, 0.0
        if self._marked is not None:
            worked += max(0.0, now - self._marked)
        self._marked = now
        return worked

    def append(self, event: Event) -> None:
        """Record an event durably; a failure leaves the journal as it was.

        Waits while the disk is full; raises Unrecordable when that takes too long, Failure for other errors.
        """
        self._lock.check()
        line = encode(event) + b"\n"
        with writing(self.path):
            full_disk.wait_for_room(
                lambda: self._write(line),
                path=self.path,
                say=self._say,
                interrupted=lambda: self.interrupted(),
                patience_s=self.patience_s,
            )
        self._size += len(line)
        self._history = (*self._history, event)
        self.view.take(event)
        if self._tell is not None:
            self._tell(event)

    def append_notified(self, row: Notified) -> None:
        """Record that a person was notified; raises Failure at once where that cannot be written."""
        self._lock.check()
        line = encode(row) + b"\n"
        with writing(self.path):
            self._write(line)
        self._size += len(line)
        self._notified = (*self._notified, row)

    def _write(self, line: bytes) -> None:
        try:
            full_disk.append(self._file, line)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise

    def close(self) -> None:
        """Give up the lock."""
        os.close(self._file)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _rows(data: bytes, path: Path, *, before: int = 0) -> tuple[History, tuple[Notified, ...], int]:
    """Return events, notifications and how many bytes are whole; only the last line may be torn.

    `before` is the number of lines that precede `data` in the file.
    """
    events: list[Event] = []
    notified: list[Notified] = []
    whole = 0
    lines = (
        data.splitlines(keepends=True) if b"\r" not in data else [part + b"\n" for part in data.split(b"\n")]
    )
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                break
            row = decode(line)
            if isinstance(row, Notified):
                notified.append(row)
            else:
                events.append(row)
        except msgspec.ValidationError as error:
            raise Failure(
                f"`{path}` line {before + number} is not an event of this version: {error}",
                hint="use the newer autotune that wrote it",
                code=ExitCode.USAGE,
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if number == len(lines):
                break
            raise Failure(
                f"`{path}` line {before + number} is damaged",
                hint="the lines before it are whole; cut the file there to go on",
                code=ExitCode.USAGE,
            ) from None
        whole += len(line)
    return tuple(events), tuple(notified), whole
