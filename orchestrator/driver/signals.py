"""Records Ctrl-C, SIGTERM and SIGHUP for the loop to check; a second Ctrl-C interrupts any wait.

The handler raises KeyboardInterrupt, which `cutting` turns into ForcedExit: Ray's compiled waits check for
signals once a second and let no other exception through. If the head of a cluster does not answer, some
compiled calls never check; then a thread ends the process, see `insisted`.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.policies.values.events import Interrupted

HEARD_S = 1.0  # the main thread reacts to a second request by then, or is blocked
KILLED_S = 40.0  # it has ended by then, even on a busy machine; otherwise the process ends without it
HURRIED_S = 8.0  # Slurm and Kubernetes kill about 30 s after SIGTERM
_LOOK_S = 0.25
_TO_END = (signal.SIGINT, signal.SIGTERM)
_REPEATED_S = 1.0  # `timeout` signals its child, and at once its child's group: one request


class ForcedExit(BaseException):
    """A second stop request: running attempts are killed immediately."""


class Arrivals:
    """Stop signals, which the interpreter writes to a pipe even while the main thread is blocked."""

    def __init__(self, source: int = -1) -> None:
        self._source, self._counted = source, 0
        self._numbers: list[int] = []
        self._terminated_at = -math.inf

    def read(self) -> list[int]:
        """Return the stop signals received, in order; SIGTERM repeated at once counts once."""
        if self._source >= 0:
            with suppress(BlockingIOError):
                for number in os.read(self._source, 4096):
                    self._take(number)
        return self._numbers

    def _take(self, number: int) -> None:
        now = time.monotonic()
        repeated = number == signal.SIGTERM and now - self._terminated_at < _REPEATED_S
        if number in _TO_END and not repeated:
            self._numbers.append(number)
            self._terminated_at = now if number == signal.SIGTERM else self._terminated_at

    def repeat(self) -> bool:
        """Return whether the signal that is handled is one that `read` left out."""
        return self._source >= 0 and len(self.read()) == self._counted

    def fresh(self) -> int:
        """Return how many arrived since the last call."""
        before, self._counted = self._counted, len(self.read())
        return self._counted - before


class Interrupts:
    """Whether the driver was asked to stop, by the user or the machine."""

    def __init__(self, request: Path | None = None, *, arrivals: Arrivals | None = None) -> None:
        self._by = ""
        self._arrivals = arrivals or Arrivals()
        self._request = request
        self._killed_s = KILLED_S
        self.impatient = False
        self._cutting = self._at_once = self._unheard = self._raised = False

    @property
    def by(self) -> str:
        """SIGINT, SIGTERM or nothing; a request file counts as SIGTERM from another host."""
        if not self._by and self._request is not None and _is_there(self._request):
            self._by = signal.SIGTERM.name
        return self._by

    @property
    def verdict(self) -> Interrupted:
        """The verdict of a run that ends because of them."""
        from autotune.policies.values.events import Interrupted  # this module is imported before all others

        requested = self._request is not None and _is_there(self._request)
        return Interrupted(by=self.by, requested=requested and self.by == signal.SIGTERM.name)

    def patience_s(self) -> float:
        """Return the seconds for which failing storage may still be retried."""
        return 0.0 if self.impatient else HURRIED_S if self.by else math.inf

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Record a signal; the first decides the exit code. Raises KeyboardInterrupt within `cutting`."""
        if self._by and self._arrivals.repeat():
            return
        first = not self._by and self._arrivals.fresh() <= 1  # two signals during compiled code count once
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
        """Let a second signal (with `at_once` the first) raise ForcedExit inside any wait.

        In the main thread only.
        """
        with self._set(cutting=True, at_once=at_once):
            try:
                yield
            except (KeyboardInterrupt, SystemError):  # the latter from compiled code
                if not self._raised:
                    raise
                raise ForcedExit from None

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """On a stop request inside, end the process with the signal's exit code without exit handlers.

        Ray's exit handlers can crash with a half-established connection.
        """
        asked, before = bool(self._by), self._killed_s
        self._killed_s = 0.0  # nothing is running that could be killed
        try:
            yield
        except BaseException:
            if self._by and not asked:
                atexit.register(_leave, 128 + signal.Signals[self._by])
            raise
        finally:
            self._killed_s = before

    @contextmanager
    def insisted(self, *, slow: Callable[[float], None], leave: Callable[[], None]) -> Iterator[None]:
        """Let a second request end the process while the block runs, even if the main thread is blocked.

        It is blocked in compiled calls to a cluster whose head does not answer. If the end takes longer than
        a second, `slow` is called with the seconds left to the main thread; `leave` is called before the
        process ends without it.
        """
        over = threading.Event()
        thread = threading.Thread(
            target=self._insist, args=(over, slow, leave), name="autotune-insist", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _insist(
        self, over: threading.Event, slow: Callable[[float], None], leave: Callable[[], None]
    ) -> None:
        while not self.impatient and len(self._arrivals.read()) < 2:
            if over.wait(_LOOK_S):
                return
        end = time.monotonic() + HEARD_S
        if over.wait(HEARD_S):
            return
        end += self._killed_s
        if self._killed_s:
            slow(self._killed_s)
        if over.wait(end - time.monotonic()):
            return
        self._by = self._by or signal.Signals(self._arrivals.read()[0]).name
        try:
            leave()
        finally:
            _leave(128 + signal.Signals[self._by])

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Let the block finish: a second signal raises ForcedExit after it."""
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


def _is_there(request: Path) -> bool:
    """Return whether a file exists; false if it cannot be checked now."""
    try:
        request.stat()
    except OSError:
        return False
    return True


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_hangups: list[int] = []  # before anybody listened


def outlive_terminal() -> None:
    """Let this process outlive its terminal; a later listener learns that the terminal is gone."""
    if _in_main_thread() and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda number, _: _hangups.append(number))


@contextmanager
def listening(
    request: Path | None = None, *, hung_up: Callable[[], None] = lambda: None
) -> Iterator[Interrupts]:
    """Return the interrupts of this process, and of the file `request`, while the block runs.

    A driver listens before other processes can find it. `hung_up` is called when the terminal goes away,
    unless the driver was started with `nohup`.
    """
    arrivals, theirs = os.pipe()
    os.set_blocking(arrivals, False)
    os.set_blocking(theirs, False)
    wakeup = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    interrupts = Interrupts(request, arrivals=Arrivals(arrivals))
    before = {number: signal.signal(number, interrupts.note) for number in _TO_END}
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


@contextmanager
def hangups_ignored() -> Iterator[None]:
    """Let processes started inside, such as a local Ray's, outlive the terminal."""
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
