"""Ctrl-C, SIGTERM and SIGHUP as facts that the loop looks at; a second Ctrl-C cuts any wait short.

The handler raises KeyboardInterrupt, which `cutting` turns into ForcedExit: Ray's compiled waits look for
signals once a second and pass on no other exception, they wait to their end.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType


class ForcedExit(BaseException):
    """The user asked a second time: what runs is killed at once."""


class Interrupts:
    """Whether the user or the machine asked the driver to end."""

    def __init__(self, request: Path | None = None, *, arrived: Callable[[], int] = lambda: 1) -> None:
        """`arrived` returns how many signals have come since it was last called."""
        self._by = ""
        self._arrived = arrived
        self._request = request
        self.impatient = False
        self._cutting = self._at_once = self._unheard = self._raised = False

    @property
    def by(self) -> str:
        """SIGINT, SIGTERM or nothing; a request file stands for SIGTERM from another host."""
        if not self._by and self._request is not None and self._request.exists():
            self._by = signal.SIGTERM.name
        return self._by

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Record a signal; the first decides the exit code."""
        first = not self._by and self._arrived() <= 1  # two that meet compiled code are noted once
        if not self._by:
            self._by = signal.Signals(number).name
        if not first:
            self.impatient = self._unheard = True
        if self._cutting and (self._at_once or not first) and _in_main_thread():
            self._unheard = False
            self._raised = True
            raise KeyboardInterrupt

    @contextmanager
    def cutting(self, *, at_once: bool = False) -> Iterator[None]:
        """Let a second signal, `at_once` the first, raise ForcedExit inside, wherever it waits.

        In the main thread only.
        """
        with self._set(cutting=True, at_once=at_once):
            try:
                yield
            except (KeyboardInterrupt, SystemError):  # the latter where compiled code did not expect it
                if not self._raised:
                    raise
                raise ForcedExit from None

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Let a process that is asked to end inside end with the signal's exit code and nothing else at exit.

        What Ray does at exit with a connection that is half made can crash.
        """
        asked = bool(self._by)
        try:
            yield
        except BaseException:
            if self._by and not asked:
                atexit.register(_leave, 128 + signal.Signals[self._by])
            raise

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Let what is inside be finished: a second signal raises ForcedExit after it."""
        with self._set(cutting=False):
            yield
        if self._cutting and self._unheard and _in_main_thread():
            self._unheard = False
            raise ForcedExit

    @contextmanager
    def _set(self, *, cutting: bool, at_once: bool = False) -> Iterator[None]:
        if not _in_main_thread():
            yield
            return
        before = self._cutting, self._at_once
        self._cutting, self._at_once = cutting, at_once
        try:
            yield
        finally:
            self._cutting, self._at_once = before


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_hangups: list[int] = []  # before anybody listened


def outlive_terminal() -> None:
    """Let this process outlive its terminal from now on; whoever listens later is told that it is gone."""
    if _in_main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda number, _: _hangups.append(number))


@contextmanager
def listening(
    request: Path | None = None, *, hung_up: Callable[[], None] = lambda: None
) -> Iterator[Interrupts]:
    """Return the interrupts of this process while the block runs; an old request is forgotten.

    `hung_up` is called when the terminal goes away, unless the user started the driver with `nohup`.
    """
    if request is not None:
        request.unlink(missing_ok=True)
    arrivals, theirs = os.pipe()
    os.set_blocking(arrivals, False)
    os.set_blocking(theirs, False)
    wakeup = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    interrupts = Interrupts(request, arrived=lambda: _requests(arrivals))
    before = {number: signal.signal(number, interrupts.note) for number in (signal.SIGINT, signal.SIGTERM)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda *_: hung_up())
        if _hangups:
            hung_up()
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            # The process of an interrupted driver is about to end by itself, with its own exit code.
            signal.signal(number, signal.SIG_IGN if interrupts.by else handler)
        signal.set_wakeup_fd(wakeup)
        os.close(arrivals)
        os.close(theirs)
        if request is not None:
            request.unlink(missing_ok=True)


def _requests(arrivals: int) -> int:
    """Return how many requests to end are in the pipe that the interpreter writes its signals into."""
    try:
        return sum(number in (signal.SIGINT, signal.SIGTERM) for number in os.read(arrivals, 4096))
    except BlockingIOError:
        return 0


@contextmanager
def hangups_ignored() -> Iterator[None]:
    """Let the processes that are started inside, such as a local Ray's, outlive the terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _leave(code: int) -> None:
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
