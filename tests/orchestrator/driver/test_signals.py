"""A second Ctrl-C is heard wherever it meets the driver, in compiled code too."""

from __future__ import annotations

import signal

import pytest

from autotune.orchestrator.driver.signals import ForcedExit, Interrupts


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
