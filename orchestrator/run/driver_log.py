"""`driver.log` of a run: the driver's messages, kept in case its terminal is gone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from autotune.orchestrator.clock import Clock, timestamp


class DriverLog:
    """A text file that only its owner can read. Writing to it never raises."""

    def __init__(self, run: Path) -> None:
        self.path = run / "driver.log"

    def note(self, text: str) -> None:
        """Append a text with the time."""
        with contextlib.suppress(OSError):
            file = self._open()
            try:
                os.write(file, f"{timestamp(Clock().now())} {text}\n".encode(errors="backslashreplace"))
            finally:
                os.close(file)

    def take_over(self, *streams: int) -> None:
        """Redirect these file descriptors to the file, otherwise to /dev/null."""
        try:
            file = self._open()
        except OSError:
            file = os.open(os.devnull, os.O_WRONLY)
        for stream in streams:
            with contextlib.suppress(OSError):
                os.dup2(file, stream)
        os.close(file)

    def is_stream(self, stream: int) -> bool:
        """Return whether a descriptor already writes to the file, as a detached driver's does."""
        try:
            return os.path.samestat(os.fstat(stream), self.path.stat())
        except OSError:
            return False

    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
