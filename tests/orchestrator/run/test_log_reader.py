"""A log that is read while it grows, is compressed part by part and loses its middle."""

import gzip
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.orchestrator.run import log_parts
from autotune.orchestrator.run.log_parts import LogParts, LogReader, mend, read
from autotune.orchestrator.run.storage import Pause


def writer(log: Path, *, limit: int = 64 << 20) -> LogParts:
    mend(log)
    return LogParts(log, pause=Pause(log, say=lambda _: None), limit_bytes=limit)


def put(parts: LogParts, first: int, last: int, *, source: str = "") -> None:
    for number in range(first, last + 1):
        parts.add(source, f"line {number} ".encode() + b"x" * 100)
    parts.flush()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    folder = tmp_path / "attempts" / "0001"
    folder.mkdir(parents=True)
    return folder / "run.log"


@pytest.mark.parametrize("every", [1, 3, 7, 400])
def test_nothing_is_lost_or_repeated_between_parts(log: Path, every: int) -> None:
    parts, reader = writer(log, limit=64 * 4000), LogReader(log)
    assert list(reader.new()) == []
    lines_read = []
    for number in range(400):
        put(parts, 10 * number + 1, 10 * number + 10, source="w.out" if number % 2 else "")
        if number % every == 0:
            lines_read += reader.new()
    lines_read += reader.new()
    parts.close()
    assert len(list(log.parent.glob("run.log.*.gz"))) > 5
    assert [line.number for line in lines_read] == list(range(1, 4001))
    assert all(line.data.startswith(f"line {line.number} ".encode()) for line in lines_read)
    assert {line.source for line in lines_read if line.number % 20 == 15} == {"w.out"}


def test_what_the_limit_dropped_keeps_its_numbers(log: Path) -> None:
    parts = writer(log, limit=64 * 200)
    put(parts, 1, 50)
    for number in range(1, 400):
        put(parts, 50 * number + 1, 50 * number + 50)
    parts.close()
    lines = list(LogReader(log).new())
    assert lines == list(read(log)) and len(lines) < 20_000 and lines[-1].number == 20_000


def test_a_line_that_is_being_written_is_not_cut(log: Path) -> None:
    reader = LogReader(log)
    with log.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert [line.data for line in reader.new()] == [b"one"]
        file.write(b"o\n[@w.err] three\n")
        assert [(line.number, line.source, line.data) for line in reader.new()] == [
            (2, "", b"two"),
            (3, "w.err", b"three"),
        ]


def test_a_torn_line_that_a_resume_cuts_off_is_not_read(log: Path) -> None:
    reader = LogReader(log)
    log.write_bytes(b"one\nto")
    assert [line.data for line in reader.new()] == [b"one"]
    parts = writer(log)  # cuts it off
    parts.add("", b"three")
    parts.close()
    assert [(line.number, line.data) for line in reader.new()] == [(2, b"three")]


def test_a_part_that_cannot_be_opened_is_passed_over(log: Path) -> None:
    log.with_name("run.log.0001").symlink_to("gone")
    log.with_name("run.log.0002").write_bytes(b"two\n")
    log.write_bytes(b"three\n")
    assert [line.data for line in LogReader(log).new()] == [b"two", b"three"]


def test_a_part_that_is_compressed_between_its_listing_and_its_opening_is_read(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, packed = log.with_name("run.log.0001"), log.with_name("run.log.0001.gz")
    plain.write_bytes(b"one\n")
    log.write_bytes(b"two\n")
    rows_of = log_parts.rows_of

    def compress_first(file: Path, *, strict: bool = False) -> Iterator[log_parts.Row]:
        if plain.exists():
            packed.write_bytes(gzip.compress(plain.read_bytes()))
            plain.unlink()
        return rows_of(file, strict=strict)

    monkeypatch.setattr(log_parts, "rows_of", compress_first)
    assert [line.data for line in LogReader(log).new()] == [b"one", b"two"]


def test_a_reader_beside_a_writer_sees_every_line_once(log: Path) -> None:
    parts, reader = writer(log, limit=64 * 4000), LogReader(log)
    done = threading.Event()

    def write() -> None:
        for number in range(500):
            put(parts, 20 * number + 1, 20 * number + 20)
        parts.close()
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    lines_read = []
    while not done.is_set():
        lines_read += reader.new()
    thread.join()
    lines_read += reader.new()
    assert [line.number for line in lines_read] == list(range(1, 10_001))
