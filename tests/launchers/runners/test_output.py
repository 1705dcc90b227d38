"""The output file of a real process: its beginning goes, its offsets stay, the process is never blocked."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.launchers.runners.node import output
from autotune.launchers.runners.node.logs import Logs, Piece
from autotune.launchers.runners.node.output import LEAST_BYTES, Output

LINE = 1000  # bytes
MIB = 1 << 20
COUNT = """
import os, sys
for number in range(int(sys.argv[1])):
    os.write(1, b"%0999d\\n" % number)
"""


def prints(path: Path, lines: int) -> subprocess.Popen[bytes]:
    with path.open("ab", buffering=0) as file:
        return subprocess.Popen([sys.executable, "-c", COUNT, str(lines)], stdout=file)


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


def pieces_of(logs: Logs, offset: int = 0) -> Iterator[Piece]:
    cursor: dict[str, int] = {}
    while True:
        result = [piece for piece in logs.read(cursor or {"": offset}, jobs=(), thorough=True) if piece.data]
        if not result:
            return
        cursor = {piece.path: piece.end for piece in result}
        yield from result


def numbers(data: bytes) -> list[int]:
    assert data.endswith(b"\n") and len(data) % LINE == 0, "a line was torn"
    return [int(line) for line in data.splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "output.log"


def test_what_is_recorded_is_given_back_and_nothing_else(path: Path) -> None:
    assert prints(path, 30_000).wait() == 0
    kept = Output(path, fault=pytest.fail)
    for recorded in (10 * MIB + 17, 10 * MIB, 20 * MIB + 1, 5):
        kept.give_back(recorded)
    assert on_disk(path) <= 30_000 * LINE - 20 * MIB + 2 * MIB
    span = kept.span(20 * MIB + 1)
    assert span == (20 * MIB + 1, 30_000 * LINE, 0)
    assert kept.read(span.begin, 100 * MIB) == b"".join(b"%0999d\n" % n for n in range(30_000))[span.begin :]
    kept.give_back(30_000 * LINE)
    kept.give_back(31_000 * LINE)  # more than there is
    assert kept.span(30_000 * LINE) == (30_000 * LINE, 30_000 * LINE, 0)
    assert prints(path, 3).wait() == 0
    assert [piece.data for piece in read_from(kept, 30_000 * LINE)] == [
        b"".join(b"%0999d\n" % n for n in range(3))
    ]


def read_from(kept: Output, offset: int) -> list[Piece]:
    logs = Logs(output=kept, workers=None)
    return [p for p in logs.read({str(kept.path): offset}, jobs=(), thorough=True) if p.data]


def test_beyond_the_limit_the_oldest_goes_and_is_reported(path: Path) -> None:
    assert prints(path, 40_000).wait() == 0
    kept = Output(path, most_bytes=LEAST_BYTES, fault=pytest.fail)
    kept.keep_within()
    assert on_disk(path) <= LEAST_BYTES
    first, *rest = pieces_of(Logs(output=kept, workers=None))
    data = first.data + b"".join(piece.data for piece in rest)
    assert first.dropped + len(data) == 40_000 * LINE and first.dropped % LINE == 0
    assert not any(piece.dropped for piece in rest)
    assert numbers(data) == list(range(first.dropped // LINE, 40_000))
    late = Logs(output=Output(path, fault=pytest.fail), workers=None)  # the supervisor has died meanwhile
    assert next(pieces_of(late)) == first


def test_without_holes_the_file_is_emptied_and_offsets_go_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_punch", lambda descriptor, upto: False)
    faults: list[str] = []
    kept = Output(path, most_bytes=LEAST_BYTES, fault=faults.append)
    assert prints(path, 20_000).wait() == 0
    kept.keep_within()
    assert path.stat().st_size == 0 and "cannot give back" in faults[0]
    assert kept.span(7000 * LINE) == (20_000 * LINE, 20_000 * LINE, 13_000 * LINE)
    assert prints(path, 5).wait() == 0
    late = Output(path, fault=pytest.fail)
    assert [(piece.end, piece.dropped, numbers(piece.data)) for piece in read_from(late, 20_000 * LINE)] == [
        (20_005 * LINE, 0, [0, 1, 2, 3, 4])
    ]


def test_reading_while_it_grows_and_the_oldest_goes(path: Path) -> None:
    path.touch()
    kept = Output(path, most_bytes=LEAST_BYTES, fault=pytest.fail)
    over = threading.Event()

    def keep() -> None:
        while not over.is_set():
            kept.keep_within()

    keeper = threading.Thread(target=keep)
    keeper.start()
    process = prints(path, 60_000)
    read_numbers, at, rest = list[int](), 0, b""
    logs = Logs(output=kept, workers=None)
    while process.poll() is None or at < 60_000 * LINE:
        for piece in logs.read({str(path): at}, jobs=(), thorough=True):
            assert piece.end == at + piece.dropped + len(piece.data)
            at = piece.end
            whole, newline, rest = ((b"" if piece.dropped else rest) + piece.data).rpartition(b"\n")
            read_numbers += numbers(whole + newline) if newline else []
    over.set()
    keeper.join()
    assert process.returncode == 0
    assert read_numbers == sorted(set(read_numbers)) and read_numbers[-1] == 59_999
