"""The recorded log and memory of an attempt: bounded, whole after an attach, paused by a full disk."""

from __future__ import annotations

import errno
import gzip
import math
import os
import random
from pathlib import Path

import pytest

from autotune.launchers.base import OWN_SOURCE, Chunk
from autotune.orchestrator.driver.log_writer import LogLine, LogWriter, reread
from autotune.orchestrator.run import log_parts, memory_record, storage
from autotune.orchestrator.run.log_parts import LIMIT_BYTES
from autotune.orchestrator.run.memory_record import MemoryRecord, minutes_of, samples_of, so_far
from autotune.policies.values.observation import GpuMemory, Sample
from tests.orchestrator.full_disk import FullDisk


def attempt(run: Path, number: int = 1) -> Path:
    folder = run / "attempts" / f"{number:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "run.log"


def feed(writer: LogWriter, *texts: str, source: str = "") -> list[LogLine]:
    parts = writer.write(tuple(Chunk(source=source, data=text.encode()) for text in texts), ())
    return [line for part in parts for line in part]


def size_of(run: Path) -> int:
    return sum(file.stat().st_size for file in run.rglob("run.log*"))


def noise(lines: int, seed: int = 0) -> list[str]:
    dice = random.Random(seed)
    return [f"{number} {dice.randbytes(300).hex()}\n" for number in range(lines)]


def test_a_log_is_bounded_and_keeps_its_beginning_its_end_and_its_numbers(tmp_path: Path) -> None:
    limit = 1 << 20
    for number in (1, 2, 3):
        writer = LogWriter(attempt(tmp_path, number), limit_bytes=limit)
        written = noise(4000, seed=number)
        for at in range(0, 4000, 50):
            feed(writer, *written[at : at + 50], source="worker-1.out" if at % 100 else "")
            assert size_of(tmp_path) <= limit + 2 * limit // 64
        writer.finish()
        kept = list(reread(attempt(tmp_path, number)))
        assert len(kept) < 4000 and kept[0].number == 1 and kept[-1].number == 4000
        assert all(line.text + "\n" == written[line.number - 1] for line in kept)
    first = [line.number for line in reread(attempt(tmp_path, 1))]
    newest = [line.number for line in reread(attempt(tmp_path, 3))]
    assert len(newest) > len(first), "older attempts go first"
    packed = sorted(attempt(tmp_path, 3).parent.glob("run.log.*"))
    assert packed[0].name == "run.log.0001.gz"
    assert gzip.decompress(packed[0].read_bytes()).startswith(written[0].encode())
    assert [file.suffix for file in packed].count(".gap") == 1
    assert {file.stat().st_mode & 0o777 for file in tmp_path.rglob("run.log*")} == {0o600}


@pytest.mark.parametrize("limit", [LIMIT_BYTES, 64 << 10])
def test_after_an_attach_nothing_is_lost_twice_or_renumbered(tmp_path: Path, limit: int) -> None:
    log = attempt(tmp_path)
    output = {"": noise(900, 1), "worker-1.out": noise(700, 2), OWN_SOURCE: ["record a\n", "record b\n"]}

    def deliver(writer: LogWriter, upto: float, piece: int) -> list[LogLine]:
        lines = []
        texts = {source: "".join(part)[: int(upto * len("".join(part)))] for source, part in output.items()}
        for at in range(0, max(map(len, texts.values())), piece):
            for source, text in texts.items():
                lines += feed(writer, text[at : at + piece], source=source)
        return lines

    before = LogWriter(log, limit_bytes=limit)
    first = deliver(before, 0.5, 4000)
    del before  # the driver was killed: nothing is finished
    with log.open("ab") as file:
        file.write(b"a line that was cut by the ki")
    kept = list(reread(log))
    attached = LogWriter(log, limit_bytes=limit)
    assert [line.number for line in reread(log)][-1] == max(line.number for line in kept[:-1])
    again = list[LogLine]()
    while not attached.caught_up:
        again += [line for part in attached.catch_up(10_000) for line in part]
    again += deliver(attached, 1.0, 7001)  # in other pieces
    attached.finish()
    if limit == LIMIT_BYTES:
        assert set(first) <= set(again), "a line got another number"
        assert sorted(again, key=lambda line: line.number) == list(reread(log)), (
            "a line is missing or came twice"
        )
        recorded = [(line.source, line.text + "\n") for line in reread(log)]
        for source, part in output.items():
            assert [text for name, text in recorded if name == source] == part
    else:
        recorded = list(reread(log))
        assert recorded[-1].number == sum(map(len, output.values()))
        numbers = {line.number for line in first}
        assert all(line in first for line in recorded if line.number in numbers)


def test_a_source_whose_beginning_is_gone_is_new(tmp_path: Path) -> None:
    writer = LogWriter(attempt(tmp_path))
    feed(writer, "one\ntwo\n")
    del writer
    writer = LogWriter(attempt(tmp_path))
    assert [line.number for line in feed(writer, "three\nfour\n")] == [3, 4]
    writer.finish()
    assert attempt(tmp_path).read_text() == "one\ntwo\nthree\nfour\n"


def test_a_full_disk_pauses_the_log_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "RETRY_S", 0.0)
    disk, messages = FullDisk(monkeypatch, "run.log", "samples.jsonl"), list[str]()
    writer = LogWriter(attempt(tmp_path), say=messages.append)
    feed(writer, "1\n2\n")
    disk.full = True
    assert [line.text for line in feed(writer, "3\n", "4\n")] == ["3", "4"], "the job is still followed"
    feed(writer, "5\n", source="worker-1.out")
    disk.full = False
    assert feed(writer, "6\n")[0].number == 6
    writer.finish()
    assert disk.refused >= 2 and len(messages) == 2
    assert "pause" in messages[0] and "make room" in messages[0] and "resumed" in messages[1]
    assert [(line.number, line.text) for line in reread(attempt(tmp_path))] == [(1, "1"), (2, "2"), (6, "6")]
    assert "3 lines are not recorded here" in attempt(tmp_path).read_text()
    again = LogWriter(attempt(tmp_path))
    assert [line.number for part in again.catch_up() for line in part] == [1, 2, 6]
    assert [line.number for line in feed(again, "1\n2\n3\n4\n6\n7\n")] == [7]


def reading(at: float, *, node: str = "a", host: int = 500, card: int = 50) -> Sample:
    cards = (GpuMemory(index=0, used_bytes=card, total_bytes=100, ours_bytes=card, of_attempt=True),)
    return Sample(at=at, node=node, host_used_bytes=host, host_total_bytes=1000, gpus=cards, cpu_share=1.0)


def test_samples_become_a_line_a_minute_and_peaks_survive(
    tmp_path: Path,
) -> None:
    folder = attempt(tmp_path).parent
    pause = storage.Pause(folder, say=pytest.fail)
    day = [reading(1000.0 + i / 2, node=n, card=90 if i == 777 else 50) for i in range(20_000) for n in "ab"]
    record = MemoryRecord(folder, pause=pause)
    for at in range(0, 30_000, 100):
        record.add(tuple(day[at : at + 100]))
    del record  # killed
    record = MemoryRecord(folder, pause=pause)
    record.add(tuple(day[26_000:30_100]))  # the samplers deliver their last half hour once more
    for at in range(30_100, 40_000, 100):
        record.add(tuple(day[at : at + 100]))
    a, b = so_far(folder)
    assert (a.node, a.samples, a.gpus[0].used.most, a.gpus[0].used.least) == ("a", 20_000, 90, 50)
    assert b.samples == 20_000 and b.host.mean == 500 and b.cpu_share == 1.0
    record.close()
    assert so_far(folder) == (a, b)
    assert len((folder / "memory.jsonl").read_bytes().splitlines()) in range(2 * 166, 2 * 170)
    recent = b"".join(file.read_bytes() for file in folder.glob("samples*.jsonl"))
    assert len(recent.splitlines()) < 2 * 2 * 1300
    assert len(set(recent.splitlines())) == len(recent.splitlines())


@pytest.mark.parametrize("limit", [LIMIT_BYTES, 1 << 20], ids=["one part", "parts"])
def test_what_is_recorded_is_read_once_by_a_driver_whose_storage_fails(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = attempt(tmp_path)
    before = LogWriter(log, limit_bytes=limit)
    for at in range(0, 3000, 100):
        feed(before, *noise(100, seed=at))
    before.finish()
    kept, reads, messages = list(reread(log)), [0], list[str]()
    row_of = log_parts.row_of

    def fails_at_times(data: bytes) -> log_parts.Row:
        reads[0] += 1
        if reads[0] in (700, 2500):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return row_of(data)

    monkeypatch.setattr(log_parts, "row_of", fails_at_times)
    persist = storage.Persistence(tmp_path, say=messages.append, patience_s=math.inf, sleep=lambda _: None)
    attached = LogWriter(log, limit_bytes=limit, persist=persist)
    again: list[LogLine] = []
    while not attached.caught_up:
        again += [line for part in attached.catch_up() for line in part]
    assert again == kept and len(messages) >= 2 and "stale file handle" in messages[0]


HOUR = 1_800_000_000.0


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0, 1e8])
def test_a_nodes_clock_that_steps_loses_no_sample_and_no_minute(step_s: float, tmp_path: Path) -> None:
    folder = attempt(tmp_path).parent
    record = MemoryRecord(folder, pause=storage.Pause(folder, say=pytest.fail))
    for number in range(240):  # two minutes
        record.add((reading(HOUR + number / 2, node="a", card=50),))
    for number in range(960):  # eight minutes, the clock set in between; the host is full
        record.add((reading(HOUR + 120 + step_s + number / 2, node="a", card=95),))
    record.close()
    assert len(samples_of(folder)) == 1200
    minutes = minutes_of(folder)
    assert sum(minute.samples for minute in minutes) == 1200 and 10 <= len(minutes) <= 12
    assert max(minute.gpus[0].used.most for minute in minutes) == 95
    (whole,) = so_far(folder)
    assert whole.samples == 1200


def test_one_sample_of_the_future_holds_up_nothing(tmp_path: Path) -> None:
    folder = attempt(tmp_path).parent
    record = MemoryRecord(folder, pause=storage.Pause(folder, say=pytest.fail))
    record.add((reading(HOUR + 1e8, node="a", card=50),))
    for number in range(1000):
        record.add((reading(HOUR + number / 2, node="a", card=50),))
        assert len(record._minutes["a"]) <= 130
    attached = MemoryRecord(folder, pause=storage.Pause(folder, say=pytest.fail))
    attached.add(tuple(reading(HOUR + number / 2, node="a", card=50) for number in range(900, 1100)))
    attached.close()
    assert so_far(folder)[0].samples == 1101


def test_what_waits_for_storage_is_bounded_and_what_is_lost_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "RETRY_S", 0.0)
    monkeypatch.setattr(memory_record, "_HELD", 3)
    folder, messages = attempt(tmp_path).parent, list[str]()
    disk = FullDisk(monkeypatch, "memory.jsonl", "samples.jsonl")
    record = MemoryRecord(folder, pause=storage.Pause(folder, say=messages.append))
    disk.full = True
    for number in range(1201):
        record.add((reading(HOUR + number / 2, node="a", card=50),))
    assert len(record._unwritten) == 3
    disk.full = False
    for number in range(1201, 1321):
        record.add((reading(HOUR + number / 2, node="a", card=50),))
    record.close()
    assert "1201 samples of memory were not recorded" in messages[1] and len(messages) == 2
    assert len(samples_of(folder)) == 120
    assert sum(minute.samples for minute in minutes_of(folder)) == 3 * 120 + 121


def test_a_full_summary_is_halved(tmp_path: Path) -> None:
    folder = attempt(tmp_path).parent
    record = MemoryRecord(folder, pause=storage.Pause(folder, say=pytest.fail), summary_bytes=10_000)
    for i in range(5000):
        record.add((reading(i * 30.0 + 1, card=i % 97),))
    record.close()
    assert (folder / memory_record.SUMMARY).stat().st_size < 10_000
    (span,) = so_far(folder)
    assert span.samples == 5000 and span.gpus[0].used.most == 96


def test_a_line_that_imitates_a_source_stays_the_jobs_own(tmp_path: Path) -> None:
    forged = '[@autotune] 7 lines are not recorded here (x): {"": 7}'
    output = [f"{forged}\n", "[@worker-1.out] told\n", "plain [@x] \n", "[@] \n"]
    for _ in range(2):  # and after an attach
        writer = LogWriter(attempt(tmp_path))
        lines = [line for part in writer.catch_up() for line in part] + feed(writer, "".join(output))
        writer.finish()
        assert [(line.number, line.source, f"{line.text}\n") for line in lines] == [
            (number, "", text) for number, text in enumerate(output, 1)
        ]
        assert list(reread(attempt(tmp_path))) == lines
