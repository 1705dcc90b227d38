"""The logs of an attempt on one node, read from the reader's position."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from autotune.launchers.base import OWN_SOURCE
from autotune.launchers.runners.node.output import Output, Span

RECORDS = "records.log"  # beside the framework's output: what autotune's own code in the job reports
_DISCOVERY_S = 1.0
_MOVED = "old"  # where Ray puts the logs of dead workers once a node has more than 200
MOST_BYTES = 8 * 1024 * 1024  # per reading, of all logs together: it waits in Ray's object store
_WORKER_LOG = re.compile(r"worker-[0-9a-f]+-(?P<job>[0-9a-f]{8})-(?P<pid>\d+)\.(?P<stream>out|err)")


class Piece(NamedTuple):
    """New bytes of a log file."""

    source: str
    path: str
    data: bytes
    end: int  # offset after `data`
    dropped: int = 0  # bytes before `data` that are gone unread


class Logs:
    """The files to read: the framework's output, its Ray job's workers, and the records of our own code."""

    def __init__(self, *, output: Output | None, workers: Path | None) -> None:
        self._output = output
        self._workers = workers
        self._known: list[tuple[str, str]] = []  # (source, path)
        self._discovered_at = float("-inf")
        self._jobs: tuple[str, ...] = ()
        self.behind = False  # whether the last reading left something unread of a log that it read

    def read(self, cursor: dict[str, int], *, jobs: tuple[str, ...], thorough: bool = False) -> list[Piece]:
        """Return what follows the offsets of `cursor`; `thorough` looks for new files at once."""
        now = time.monotonic()
        if thorough or jobs != self._jobs or now - self._discovered_at >= _DISCOVERY_S:
            self._discovered_at, self._jobs = now, jobs
            self._known = self._discover()
        unread = {path: self._unread(path, cursor.get(path, 0)) for _, path in self._known}
        shares = fair_shares({path: span.end - span.begin for path, span in unread.items()}, most=MOST_BYTES)
        pieces = []
        for source, path in self._known:
            begin, _, dropped = unread[path]
            data = self._read(path, begin, shares[path])
            if data:
                pieces.append(Piece(source, path, data, begin + len(data), dropped))
        self.behind = any(piece.end < unread[piece.path].end for piece in pieces)
        return pieces

    def _unread(self, path: str, offset: int) -> Span:
        """Return the place to read from and the end of a log."""
        try:
            if self._output is not None and path == str(self._output.path):
                return self._output.span(offset)
            size = os.stat(_place(path)).st_size  # noqa: PTH116 - per log and poll
        except OSError:
            return Span(offset, offset)
        return Span(0 if size < offset else offset, size)  # a shorter one was begun anew

    def _read(self, path: str, begin: int, most: int) -> bytes:
        if not most:
            return b""
        try:
            if self._output is not None and path == str(self._output.path):
                return self._output.read(begin, most)
            with open(_place(path), "rb") as file:  # noqa: PTH123
                file.seek(begin)
                return file.read(most)
        except OSError:
            return b""  # gone meanwhile; the other logs can be read

    def _discover(self) -> list[tuple[str, str]]:
        result = [("", str(self._output.path))] if self._output else []
        if self._workers is not None and self._jobs:
            moved = self._workers / _MOVED
            names = dict.fromkeys(os.listdir(self._workers))  # noqa: PTH208 - every second, of many files
            names |= dict.fromkeys(os.listdir(moved) if moved.is_dir() else ())  # noqa: PTH208
            for name in names:
                worker = _WORKER_LOG.fullmatch(name)
                if worker and worker["job"] in self._jobs:
                    result.append((f"worker-{worker['pid']}.{worker['stream']}", str(self._workers / name)))
        if self._output is not None:  # after the lines that led to a record
            result.append((OWN_SOURCE, str(self._output.path.with_name(RECORDS))))
        return result


def _place(path: str) -> str:
    """Return where a log lies now: its name for the reader stays that of the folder it was written in."""
    if os.path.exists(path):  # noqa: PTH110 - per log and poll
        return path
    folder, name = os.path.split(path)
    return os.path.join(folder, _MOVED, name)  # noqa: PTH118


def fair_shares(wanted: dict[str, int], *, most: int) -> dict[str, int]:
    """Return how much of `most` each gets: all that it wants, or as much as any other that goes short."""
    shares, left = dict.fromkeys(wanted, 0), most
    waiting = sorted(wanted, key=wanted.__getitem__)
    for place, name in enumerate(waiting):
        shares[name] = min(wanted[name], left // (len(waiting) - place))
        left -= shares[name]
    return shares
