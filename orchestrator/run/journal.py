"""The append-only journal of a run: one event per line, one writer, safe against a crash at any byte.

Each line ends with the number of the driver that wrote it (`run/lock`). A driver that opens an existing
journal begins with a row of its own; later rows of drivers with smaller numbers are ignored. Nothing is
truncated: an incomplete line stays, terminated by the next driver's row, and is skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from autotune.orchestrator.clock import Clock, seconds_of, timestamp
from autotune.orchestrator.errors import Failure, UserError, reason_of, writing
from autotune.orchestrator.run.lock import Lock
from autotune.orchestrator.run.storage import Persistence, open_to_read, sync_folder
from autotune.policies.values.events import DriverBegan, Event, History, Notified, Row
from autotune.policies.values.run.view import RunView

_DRIVER = re.compile(rb',"driver":(\d{1,18})\}\n?\Z')
_BEGAN = b'{"type":"driver_began"'
_DECODER: msgspec.json.Decoder[Row] = msgspec.json.Decoder(Row)


def decode(line: bytes) -> Row:
    """Return the event in a line; raises msgspec.DecodeError, or ValidationError if it is none."""
    row = _DECODER.decode(line)
    try:
        seconds_of(row.at)
    except (ValueError, OverflowError):
        raise msgspec.ValidationError(f"`{row.at}` is not a time - at `$.at`") from None
    return row


def encode(event: Row) -> bytes:
    """Return an event as a line without newline."""
    return msgspec.json.encode(event)


def read(path: Path) -> History:
    """Return the recorded events without locking; an incomplete last line is left out.

    Raises Failure if the file cannot be read, or if a line before the last is damaged.
    """
    try:
        with open_to_read(path) as file:
            data = file.read()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise Failure(f"cannot read `{path}`: {reason_of(error)}") from None
    return _recorded(data, path).history


class Tail:
    """Follows a journal that another process may be writing, and keeps the view of its run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.view = RunView()
        self._stamp: tuple[int, int, int] | None = None  # inode, bytes, modification time
        self._offset = self._line = self._driver = 0  # of what has been read

    def update(self) -> History:
        """Return the events since the last call; all of them if the file was replaced.

        An incomplete last line is read by a later call. Raises Failure like `read`; the next call starts
        over.
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
        return events

    def _new(self) -> tuple[History, bool]:
        try:
            with open_to_read(self.path) as file:
                status = os.fstat(file.fileno())
                stamp = status.st_ino, status.st_size, status.st_mtime_ns
                before, self._stamp = self._stamp, stamp
                if stamp == before:
                    return (), False
                again = before is None or stamp[0] != before[0] or stamp[1] <= before[1]
                if again:
                    self._offset = self._line = self._driver = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            again, self._stamp = self._stamp is not None, None
            return (), again
        except OSError as error:
            raise Failure(f"cannot read `{self.path}`: {reason_of(error)}") from None
        result = _recorded(data, self.path, driver=self._driver, before=self._line)
        self._offset += result.whole
        self._line += result.lines
        self._driver = result.driver
        return result.history, again


class Journal:
    """The open journal of a run, held by its only writer."""

    def __init__(
        self,
        folder: Path,
        *,
        tell: Callable[[Event], None] | None = None,
        say: Callable[[str], None] = lambda _: None,
        persist: Persistence | None = None,
        interrupted: Callable[[], str] = str,
    ) -> None:
        """Claim the run and open its journal; `persist` retries while storage fails.

        `interrupted` returns the signal that ends the wait for an unresponsive driver.

        Raises Driven while another driver has the run, Failure if its files cannot be used.
        """
        self.folder = folder
        self.path = folder / "events.jsonl"
        self.persist = persist or Persistence(folder, say=say)
        self._tell = tell
        self._file: int | None = None
        self._lock = Lock(folder, say=say, interrupted=interrupted)
        self._marked: float | None = None
        self._history: History = ()  # of the events, as far as somebody asked for it
        try:
            with writing(self.path):
                self._begin()
        except BaseException:
            self.close()
            raise
        self._lock.forget_older()

    def _begin(self) -> None:
        """Open the file; in a journal with rows, append our own row, which fixes the history before it."""
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        sync_folder(self.folder)
        data = self.path.read_bytes()
        self._lock.raise_above(_recorded(data, self.path).driver)
        self._size = len(data)
        if data:
            self._write(self._line(self._row_of_ours()), whole=data.endswith(b"\n"))
        result = _recorded(self.path.read_bytes(), self.path)
        self._events, self._notified = list(result.history), result.notified
        self.view = RunView(self._events)

    def history(self) -> History:
        """Return every recorded event."""
        if len(self._history) < len(self._events):
            self._history = tuple(self._events)
        return self._history

    def since(self, count: int) -> list[Event]:
        """Return the events after the first `count`."""
        return self._events[count:]

    def notified(self) -> tuple[Notified, ...]:
        """Return the notifications that were sent."""
        return self._notified

    def worked_s(self, now: float) -> float:
        """Return the seconds since the last call by the monotonic clock; at first 0.

        Time that the previous driver worked after its last row is not counted, as only its clock knew it.
        """
        worked = self.unrecorded_s(now)
        self._marked = now
        return worked

    def unrecorded_s(self, now: float) -> float:
        """Return the seconds since the last call of `worked_s`; 0 before the first."""
        return 0.0 if self._marked is None else max(0.0, now - self._marked)

    def append(self, event: Event) -> None:
        """Record an event durably, or wait until that is possible.

        Raises Unrecordable when the wait is over, TakenOver where another driver has the run.
        """
        line = self._line(event)
        self.persist(lambda: self._write(line), path=self.path)
        self._events.append(event)
        self.view.take(event)
        if self._tell is not None:
            self._tell(event)

    def append_notified(self, row: Notified) -> None:
        """Record that a person was notified; raises Failure at once where that cannot be written."""
        line = self._line(row)
        with writing(self.path):
            self._write(line)
        self._notified = (*self._notified, row)

    def _line(self, row: Row) -> bytes:
        return encode(row)[:-1] + b',"driver":%d}\n' % self._lock.number

    def _row_of_ours(self) -> DriverBegan:
        return DriverBegan(at=timestamp(Clock().now()), host=os.uname().nodename, pid=os.getpid())

    def _write(self, line: bytes, *, whole: bool = True) -> None:
        """Bring a line onto the disk once, whatever became of earlier tries; raises OSError.

        Bytes after those that were recorded are the beginning of this line, from a try that failed, or of a
        driver that has lost the run: its line is ended by a row of ours. `whole`: the file ends with a line.
        """
        self._lock.check()
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            tail = self._after_what_is_recorded()
            if not line.startswith(tail):
                self._refuse_newer(tail)
                if b"\n" + line in b"\n" + tail:  # another driver's bytes came after it
                    line = b""
                else:
                    whole = tail.endswith(b"\n")
                    line = self._line(self._row_of_ours()) + line
            elif tail:  # a disk that failed to take them may have dropped them since, without a word
                self._write_again(tail)
                line = line[len(tail) :]
            view = memoryview(line if whole else b"\n" + line)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
            self._size = os.fstat(self._file).st_size
        except OSError:
            self._close_file()  # after an outage a descriptor may stay dead for ever
            raise

    def _after_what_is_recorded(self) -> bytes:
        assert self._file is not None
        size = os.fstat(self._file).st_size
        if size < self._size:
            raise OSError(f"it has {size} bytes, and {self._size} were written: something cut or replaced it")
        return os.pread(self._file, size - self._size, self._size)

    def _refuse_newer(self, tail: bytes) -> None:
        newest = max((_driver_of(line) for line in tail.split(b"\n")), default=0)
        if newest > self._lock.number:
            raise self._lock.taken_over(newest)

    def _write_again(self, tail: bytes) -> None:
        again = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(again, tail, self._size)
            os.fsync(again)
        finally:
            os.close(again)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)

    def close(self) -> None:
        """Give the run up."""
        self._close_file()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Recorded(NamedTuple):
    """The valid rows of a journal."""

    history: History
    notified: tuple[Notified, ...]
    driver: int  # the number of the last driver that wrote to it; 0: none, or one before there were numbers
    whole: int  # bytes of the lines that will not change any more
    lines: int


def _recorded(data: bytes, path: Path, *, driver: int = 0, before: int = 0) -> _Recorded:
    """Return the valid rows; only a driver's unfinished line may be damaged.

    `before` lines precede `data` in the file, the last of them by `driver`.
    """
    events: list[Event] = []
    notified: list[Notified] = []
    newest, whole = driver, 0
    lines = data.split(b"\n")
    torn = lines.pop()  # not ended
    for number, line in enumerate(lines, start=1):
        following = lines[number] if number < len(lines) else torn
        whole += len(line) + 1
        try:
            row = decode(line)
        except msgspec.ValidationError as error:
            raise UserError(
                f"`{path}` line {before + number} is not an event of this version: {error}",
                hint="use the newer autotune that wrote it",
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if following.startswith(_BEGAN):
                continue
            if number == len(lines) and not torn:  # the row of the next driver may follow
                return _Recorded(tuple(events), tuple(notified), newest, whole - len(line) - 1, number - 1)
            raise UserError(
                f"`{path}` line {before + number} is damaged",
                hint="the lines before it are whole; cut the file there to go on",
            ) from None
        by = _driver_of(line)
        if by < newest:
            continue
        newest = max(newest, by)
        if isinstance(row, Notified):
            notified.append(row)
        elif not isinstance(row, DriverBegan):
            events.append(row)
    return _Recorded(tuple(events), tuple(notified), newest, whole, len(lines))


def _driver_of(line: bytes) -> int:
    """Return the number of the driver that wrote a line; 0 if it has none, as in older releases."""
    number = _DRIVER.search(line)
    return int(number[1]) if number is not None else 0
