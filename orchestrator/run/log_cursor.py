"""How far the logs of an attempt are recorded: `cursor.json`, from which the next driver continues.

It is written after the lines that it counts. A driver that dies in between leaves lines beyond it: the next
one gets them once more and knows them by their number.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import msgspec

from autotune.orchestrator.run.storage import is_absent, sync_folder
from autotune.policies.values.value import Value

NAME = "cursor.json"
_EVERY_S = 1.0
_SHARE = 0.01  # of the time, at most, that is spent on writing it
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Cursor(Value, frozen=True, kw_only=True):
    """A moment at which everything before was recorded."""

    offsets: dict[str, _Count] = {}  # file -> where its first line begins that is not recorded
    lines: dict[str, _Count] = {}  # source -> its recorded lines


def read(folder: Path) -> Cursor:
    """Return how far an attempt is recorded; not at all where its file is damaged. Raises OSError."""
    if is_absent(folder / NAME):
        return Cursor()
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Cursor)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Cursor()


class CursorFile:
    """Writes the cursor of an attempt, as often as is worth it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._due_at = time.monotonic() + _EVERY_S

    @property
    def due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() >= self._due_at

    def write(self, cursor: Cursor, *, durable: bool) -> None:
        """Put a cursor in the place of the one before; `durable` waits for the disk. Raises OSError."""
        begun = time.monotonic()
        partial = self._folder / f".{NAME}.partial"
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(cursor))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(self._folder / NAME)
        if durable:
            sync_folder(self._folder)
        ended = time.monotonic()
        self._due_at = ended + max(_EVERY_S, (ended - begun) / _SHARE)
