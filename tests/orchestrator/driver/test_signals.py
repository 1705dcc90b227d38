"""A second Ctrl-C is heard wherever it meets the driver, in compiled code too."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from autotune.orchestrator import messages
from autotune.orchestrator.driver.signals import ForcedExit, Interrupts, listening


def compiled_wait(interrupts: Interrupts) -> None:
    """Fail as a compiled call does in which a signal handler raises what it does not expect."""
    try:
        interrupts.note(signal.SIGINT)
    except KeyboardInterrupt:
        raise SystemError("returned a result with an exception set") from None


def test_an_exit_that_compiled_code_swallowed_is_an_exit() -> None:
    interrupts = Interrupts()
    interrupts.note(signal.SIGINT)
    with pytest.raises(ForcedExit), interrupts.cutting():
        compiled_wait(interrupts)


def test_another_error_of_compiled_code_stays_one() -> None:
    interrupts = Interrupts()
    interrupts.note(signal.SIGINT)
    with pytest.raises(SystemError), interrupts.cutting():
        raise SystemError("something else")


def test_at_once_the_first_request_is_heard() -> None:
    interrupts = Interrupts()
    with pytest.raises(ForcedExit), interrupts.cutting(), interrupts.cutting(at_once=True):
        interrupts.note(signal.SIGTERM)
    assert interrupts.by == "SIGTERM"
    assert not interrupts.impatient


def test_two_requests_that_meet_compiled_code_are_two() -> None:
    def press_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    with listening() as interrupts:
        thread = threading.Timer(0.1, press_twice)
        thread.start()
        with pytest.raises(ForcedExit), interrupts.cutting():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 5_000_000)  # no handler runs within it
            time.sleep(60)
        thread.join()
    assert interrupts.impatient


def test_a_request_that_is_repeated_at_once_as_timeout_does_is_one() -> None:
    with listening() as interrupts, interrupts.cutting():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.by == "SIGTERM" and not interrupts.impatient


def test_a_stop_by_the_command_is_told_from_a_signal(tmp_path: Path) -> None:
    request = tmp_path / "stop"
    interrupts = Interrupts(request)
    interrupts.note(signal.SIGTERM)
    assert "SIGTERM" in messages.verdict(interrupts.verdict, attempts=1, seconds=1.0)
    request.touch()
    assert messages.verdict(interrupts.verdict, attempts=1, seconds=1.0) == "stopped by `autotune stop`"
    interrupts = Interrupts(request)
    interrupts.note(signal.SIGINT)
    assert interrupts.verdict.by == "SIGINT" and not interrupts.verdict.requested
