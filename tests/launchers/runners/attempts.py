"""How the tests of this folder start attempts and read what they show."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from autotune.launchers.base import Exit, Handle, Observed
from autotune.launchers.runners.node.processes import attempt_of
from autotune.policies.values.command import Command

PATIENCE_S = 60.0


class Program(Protocol):
    def __call__(self, source: str, *, env: dict[str, str] | None = None) -> Command: ...


def wait_for(condition: Callable[[], object], *, seconds: float = PATIENCE_S) -> None:
    """Return once `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.1)


class Reading:
    """Everything that a handle has shown."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self.logs: dict[str, str] = {}
        self.samples = 0
        self.exit: Exit | None = None
        self.lost = ""

    def poll(self) -> Observed:
        observed = self._handle.poll()
        for chunk in observed.chunks:
            self.logs[chunk.source] = self.logs.get(chunk.source, "") + chunk.data.decode()
        self.samples += len(observed.samples)
        self.exit, self.lost = observed.exit, observed.lost
        return observed

    def until(self, text: str, *, source: str = "") -> None:
        def has_output() -> bool:
            self.poll()
            assert self.exit is None or text in self.logs.get(source, ""), self.logs
            return text in self.logs.get(source, "")

        wait_for(has_output)

    def to_end(self) -> Exit:
        wait_for(lambda: self.poll().exit or self.lost)
        assert self.exit is not None, self.lost
        return self.exit

    def all(self) -> str:
        return "".join(self.logs.values())


def carriers(attempt: str) -> set[int]:
    """Return the processes of this machine that carry an attempt's marker."""
    return {
        int(entry.name) for entry in Path("/proc").glob("[0-9]*") if attempt_of(int(entry.name)) == attempt
    }
