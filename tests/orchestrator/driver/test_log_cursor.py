"""A log that drivers record one after another: each dies at any moment, no byte is lost or recorded twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.launchers.base import OWN_SOURCE, Chunk
from autotune.orchestrator.driver import log_writer
from autotune.orchestrator.driver.log_writer import LogLine, LogWriter
from autotune.orchestrator.run import log_parts
from autotune.policies.values.value import Value

LONG = 40  # bytes of the longest line


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "_CURSOR_EVERY_S", 0.0)
    monkeypatch.setattr(log_writer, "_CURSOR_SHARE", float("inf"))
    monkeypatch.setattr(log_writer, "_LONGEST_LINE", LONG)
    monkeypatch.setattr(log_writer, "_TOGETHER", LONG // 2)


class Life(Value, frozen=True, kw_only=True):
    """One driver: which pieces it reads, and what its death leaves behind."""

    pieces: tuple[tuple[int, int], ...]  # (file, bytes)
    stale: int  # cursors that were written since the one that is left
    torn: float  # how much is left of the last write of its log; 1: all


class Files:
    """Files of a node: what each holds."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self.contents = contents

    def names(self) -> list[tuple[str, str]]:
        return [(source, f"machine:/{source}") for source in self.contents]

    def piece(self, read: dict[str, int], number: int, size: int) -> Chunk | None:
        source, file = self.names()[number % len(self.contents)]
        begin = read.get(file, 0)
        data = self.contents[source][begin : begin + size]
        read[file] = begin + len(data)
        return Chunk(source=source, data=data, file=file, end=begin + len(data)) if data else None


def lines_of(data: bytes) -> list[bytes]:
    """Return the lines as they are recorded: a long one in pieces."""
    whole = data.split(b"\n")
    if not whole[-1]:
        whole.pop()
    return [line[at : at + LONG] for line in whole for at in range(0, max(1, len(line)), LONG)]


def all_of(writer: LogWriter) -> Iterator[LogLine]:
    while not writer.caught_up:
        for part in writer.catch_up(64):
            yield from part


def play(folder: Path, files: Files, lives: list[Life]) -> list[LogLine]:
    """Return what the last driver has written once it has read everything."""
    log = folder / "run.log"
    for life in lives:
        writer = LogWriter(log)
        list(all_of(writer))
        read = dict(log_writer.read_cursor(folder).offsets)
        cursors = [saved(folder)]
        size = log.stat().st_size if log.exists() else 0
        for number, length in life.pieces:
            chunk = files.piece(read, number, length)
            size = log.stat().st_size if log.exists() else 0
            writer.write((chunk,) if chunk else (), ())
            cursors.append(saved(folder))
        left = cursors[max(0, len(cursors) - 1 - life.stale)]
        if life.torn < 1 and log.exists():  # in its last write, before the cursor that follows it
            left = cursors[max(0, len(cursors) - 2 - life.stale)]
            with log.open("r+b") as file:
                file.truncate(size + int(life.torn * (log.stat().st_size - size)))
        (folder / log_writer.CURSOR).unlink(missing_ok=True)
        if left is not None:
            (folder / log_writer.CURSOR).write_bytes(left)
    writer = LogWriter(log)
    written, read = list(all_of(writer)), dict(log_writer.read_cursor(folder).offsets)
    for number in range(len(files.contents)):
        while (chunk := files.piece(read, number, 1000)) is not None:
            written += [line for part in writer.write((chunk,), ()) for line in part]
    return written + [line for part in writer.finish() for line in part]


def saved(folder: Path) -> bytes | None:
    path = folder / log_writer.CURSOR
    return path.read_bytes() if path.exists() else None


def chance(dice: random.Random) -> tuple[dict[str, bytes], list[Life]]:
    """Return what four files hold and how the drivers die that read them."""
    contents = {}
    for source in ("", "worker-7.out", OWN_SOURCE, "worker-8.err@b"):
        lines = ["".join(dice.choices("ab[@] \r", k=dice.randint(0, 60))) for _ in range(dice.randint(0, 12))]
        contents[source] = ("\n".join(lines) + "\n" * dice.randint(0, 1)).encode()
    lives = [
        Life(
            pieces=tuple((dice.randint(0, 3), dice.randint(1, 90)) for _ in range(dice.randint(0, 10))),
            stale=dice.randint(0, 3),
            torn=dice.choice((1.0, dice.random())),
        )
        for _ in range(dice.randint(0, 4))
    ]
    return contents, lives


@pytest.mark.parametrize("seed", range(100))
def test_no_line_is_lost_or_recorded_twice_whenever_drivers_die(seed: int, tmp_path: Path) -> None:
    contents, lives = chance(random.Random(seed))
    written = play(tmp_path, Files(contents), lives)
    log = tmp_path / "run.log"
    recorded = list(log_parts.read(log)) if log.exists() else []
    for source, data in contents.items():
        assert [line.data for line in recorded if line.source == source] == lines_of(data)
    assert [line.number for line in recorded] == list(range(1, len(recorded) + 1))
    assert sorted({line.number for line in written}) == [line.number for line in recorded]
