"""The logs of an attempt on one node, read from where the reader stands."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from autotune.launchers.base import OWN_SOURCE

RECORDS = "records.log"  # beside the framework's output: what autotune's own code in the job reports
_DISCOVERY_S = 1.0
_MOST_BYTES = 4 * 1024 * 1024  # of one log per reading
_WORKER_LOG = re.compile(r"worker-[0-9a-f]+-(?P<job>[0-9a-f]{8})-(?P<pid>\d+)\.(?P<stream>out|err)")


class Piece(NamedTuple):
    """New bytes of a log file."""

    source: str
    path: str
    data: bytes
    end: int  # offset after `data`


class Logs:
    """The files to read: the framework's output, its Ray job's workers, and the records of our own code."""

    def __init__(self, *, output: Path | None, workers: Path | None) -> None:
        self._output = output
        self._workers = workers
        self._known: list[tuple[str, str]] = []  # (source, path)
        self._discovered_at = float("-inf")
        self._jobs: tuple[str, ...] = ()

    def read(self, cursor: dict[str, int], *, jobs: tuple[str, ...], thorough: bool = False) -> list[Piece]:
        """Return what follows the offsets of `cursor`; `thorough` looks for new files at once."""
        now = time.monotonic()
        if thorough or jobs != self._jobs or now - self._discovered_at >= _DISCOVERY_S:
            self._discovered_at, self._jobs = now, jobs
            self._known = self._discover()
        pieces = []
        for source, path in self._known:
            piece = _read(source, path, cursor.get(path, 0))
            if piece is not None:
                pieces.append(piece)
        return pieces

    def _discover(self) -> list[tuple[str, str]]:
        found = [("", str(self._output))] if self._output else []
        if self._workers is not None and self._jobs:
            with os.scandir(self._workers) as entries:
                for entry in entries:
                    worker = _WORKER_LOG.fullmatch(entry.name)
                    if worker and worker["job"] in self._jobs:
                        found.append((f"worker-{worker['pid']}.{worker['stream']}", entry.path))
        if self._output is not None:  # after the lines that led to a record
            found.append((OWN_SOURCE, str(self._output.with_name(RECORDS))))
        return found


def _read(source: str, path: str, offset: int) -> Piece | None:
    try:
        size = os.stat(path).st_size  # noqa: PTH116 - per log and poll
        if size == offset:
            return None
        if size < offset:
            offset = 0  # begun anew
        with open(path, "rb") as file:  # noqa: PTH123
            file.seek(offset)
            data = file.read(_MOST_BYTES)
    except (FileNotFoundError, IsADirectoryError):
        return None
    return Piece(source, path, data, offset + len(data)) if data else None
