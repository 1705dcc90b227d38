"""Read the logs of an attempt on one node from the reader's position."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from autotune.launchers.base import OWN_SOURCE
from autotune.launchers.runners.node.output import Output, Span

RECORDS = "records.log"  # next to the framework's output: reports of autotune's own code in the job
_DISCOVERY_S = 1.0
_MOVED = "old"  # Ray moves the logs of dead workers to this folder once a node has more than 200
MOST_BYTES = 8 * 1024 * 1024  # per reading of all logs, because it is stored in Ray's object store
_WORKER_LOG = re.compile(r"worker-[0-9a-f]+-(?P<job>[0-9a-f]{8})-(?P<pid>\d+)\.(?P<stream>out|err)")


class Piece(NamedTuple):
    """New bytes of a log file."""

    source: str
    path: str
    data: bytes
    end: int  # offset after `data`
    dropped: int = 0  # bytes before `data` that were lost unread


class Logs:
    """The files to read: the framework's output, its Ray job's worker logs, and autotune's own records."""

    def __init__(self, *, output: Output | None, workers: Path | None) -> None:
        self._output = output
        self._workers = workers
        self._known: list[tuple[str, str]] = []  # (source, path)
        self._discovered_at = float("-inf")
        self._jobs: tuple[str, ...] = ()
        self.behind = False  # the last reading left a part of a log unread

    def read(self, cursor: dict[str, int], *, jobs: tuple[str, ...], thorough: bool = False) -> list[Piece]:
        """Return what follows the offsets of `cursor`; `thorough` looks for new files immediately."""
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
        """Return the unread span of a log."""
        try:
            if self._output is not None and path == str(self._output.path):
                return self._output.span(offset)
            size = os.stat(_place(path)).st_size  # noqa: PTH116 - per log and poll
        except OSError:
            return Span(offset, offset)
        return Span(0 if size < offset else offset, size)  # a shorter file was started anew

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
            return b""  # removed meanwhile; other logs can still be read

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
        if self._output is not None:  # last, after the lines that led to a record
            result.append((OWN_SOURCE, str(self._output.path.with_name(RECORDS))))
        return result


def _place(path: str) -> str:
    """Return the current path of a log that Ray may have moved; the reader keeps using the original path."""
    if os.path.exists(path):  # noqa: PTH110 - per log and poll
        return path
    folder, name = os.path.split(path)
    return os.path.join(folder, _MOVED, name)  # noqa: PTH118


def fair_shares(wanted: dict[str, int], *, most: int) -> dict[str, int]:
    """Divide `most`: each gets all it wants, or the same share as all others that get less than they want."""
    shares, left = dict.fromkeys(wanted, 0), most
    waiting = sorted(wanted, key=wanted.__getitem__)
    for place, name in enumerate(waiting):
        shares[name] = min(wanted[name], left // (len(waiting) - place))
        left -= shares[name]
    return shares
