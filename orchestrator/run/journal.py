"""The append-only record of a run: one event per line, one writer, safe against a crash at any byte."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from autotune.orchestrator.errors import Failure
from autotune.policies.values.events import Event, History
from autotune.policies.values.value import Value

_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Owner(Value, frozen=True, kw_only=True):
    """Who drives a run: enough to signal it from another terminal of the same host."""

    host: str
    pid: int
    boot_id: str

    @property
    def is_here(self) -> bool:
        """Whether the owner's pid means something on this machine now."""
        return self.host == socket.gethostname() and self.boot_id == boot_id()


def boot_id() -> str:
    """Return the identity of this boot of the machine."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def decode(line: bytes) -> Event:
    """Return the event of one line."""
    return _DECODER.decode(line)


def encode(event: Event) -> bytes:
    """Return an event as one line without its end."""
    return msgspec.json.encode(event)


def read(path: Path) -> History:
    """Return the events on record without locking; a torn last line is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise Failure(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}") from None
    return _events(data, path)[0]


def owner(folder: Path) -> Owner | None:
    """Return who holds the run's lock now, if anyone does."""
    try:
        with (folder / "lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _read_owner(file.read())
            return None
    except OSError:
        return None


class Journal:
    """The open journal of a run, held by its only writer."""

    def __init__(self, folder: Path, *, tell: Callable[[Event], None] | None = None) -> None:
        self.folder = folder
        self.path = folder / "events.jsonl"
        self._tell = tell
        self._lock = self._acquire()
        try:
            with writing(self.path):
                self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                data = self.path.read_bytes()
                self._history, whole = _events(data, self.path)
                if whole < len(data):
                    os.ftruncate(self._file, whole)
                    os.fsync(self._file)
        except BaseException:
            os.close(self._lock)
            raise
        self._size = whole

    def history(self) -> History:
        """Return every event on record."""
        return self._history

    def append(self, event: Event) -> None:
        """Record an event durably; a failure leaves the journal as it was."""
        line = encode(event) + b"\n"
        with writing(self.path):
            try:
                view = memoryview(line)
                while view:
                    view = view[os.write(self._file, view) :]
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        self._size += len(line)
        self._history = (*self._history, event)
        if self._tell is not None:
            self._tell(event)

    def close(self) -> None:
        """Give up the lock."""
        os.close(self._file)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _acquire(self) -> int:
        path = self.folder / "lock"
        with writing(path):
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with writing(path):
                self._take(lock)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _take(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = _read_owner(os.pread(lock, 4096, 0))
            who = f"pid {other.pid} on {other.host}" if other else "another process"
            raise Failure(
                f"run {self.folder.name} is driven by {who}",
                hint=f"`autotune status {self.folder.name}` shows it",
            ) from None
        me = Owner(host=socket.gethostname(), pid=os.getpid(), boot_id=boot_id())
        os.ftruncate(lock, 0)
        os.pwrite(lock, msgspec.json.encode(me), 0)


def _read_owner(data: bytes) -> Owner | None:
    try:
        return msgspec.json.decode(data, type=Owner)
    except msgspec.DecodeError:
        return None


def _events(data: bytes, path: Path) -> tuple[History, int]:
    """Return the events and how many bytes are whole; only the last line may be torn."""
    events: list[Event] = []
    whole = 0
    lines = (
        data.splitlines(keepends=True) if b"\r" not in data else [part + b"\n" for part in data.split(b"\n")]
    )
    for number, line in enumerate(lines, start=1):
        try:
            if not line.endswith(b"\n"):
                break
            events.append(decode(line))
        except msgspec.ValidationError as error:
            raise Failure(
                f"`{path}` line {number} is not an event of this version: {error}",
                hint="use the newer autotune that wrote it",
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            if number == len(lines):
                break
            raise Failure(
                f"`{path}` line {number} is damaged",
                hint="the lines before it are whole; cut the file there to go on",
            ) from None
        whole += len(line)
    return tuple(events), whole


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error while a file of a run is written into the failure that says what helps."""
    try:
        yield
    except OSError as error:
        raise Failure(
            f"cannot write `{path}`: {(error.strerror or str(error)).lower()}",
            hint=f"make room or pass --runs-dir, then `autotune resume {path.parent.name}`",
        ) from None
