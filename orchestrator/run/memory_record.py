"""The memory samples of an attempt on disk: a summary per minute, and the last minutes in full.

`memory.jsonl` has a line per minute and node, about 1.5 MB a day for a node with 8 GPUs; when it is full,
pairs of lines are merged. `samples.jsonl` and `samples.1.jsonl` hold at least the last 10 minutes, or 16 MiB,
of samples.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from autotune.orchestrator.run.storage import Pause, Persist, append, at_once, is_absent
from autotune.policies.values.observation import GpuMemory, Sample
from autotune.policies.values.value import Value

V = TypeVar("V", bound=Value)
SUMMARY, RECENT, BEFORE = "memory.jsonl", "samples.jsonl", "samples.1.jsonl"
_MINUTE_S = 60.0
_RECENT_SAMPLES = 1200  # per node: 10 minutes at two per second
_RECENT_BYTES = 16 << 20
_SAMPLES_OF_A_MINUTE = 600  # at most, regardless of their times
_HELD = 2880  # minutes kept while storage fails: two days of a node
_SUMMARY_BYTES = 32 << 20  # three weeks of a node with 8 GPUs


class Span(Value, frozen=True, kw_only=True):
    """Minimum, mean and maximum of bytes in use."""

    least: int  # minimum, in bytes
    mean: int  # mean, in bytes
    most: int  # maximum, in bytes


class CardSpan(Value, frozen=True, kw_only=True):
    """A GPU over a time span."""

    index: int  # index of the GPU in its node, from 0
    total_bytes: int  # memory of the GPU, in bytes
    used: Span
    # maximum held by processes of the attempt, in bytes; 0: none, or unknown in a container
    ours_most_bytes: int = 0
    of_attempt: bool = False  # whether the attempt is known to run on the GPU


class MemorySpan(Value, frozen=True, kw_only=True):
    """A node over a time span, as stored in `memory.jsonl`."""

    at: float  # Unix seconds of the first sample
    until: float  # of the last
    node: str  # name of the node
    samples: int  # number of samples that are summarized
    host_total_bytes: int  # host memory of the node, in bytes
    host: Span
    gpus: tuple[CardSpan, ...] = ()
    cpu_share: float = 0.0  # mean
    gpu_share: float = 0.0  # mean


def summary_of(samples: list[Sample]) -> MemorySpan:
    """Summarize samples of one node; raises ValueError for none."""
    if not samples:
        raise ValueError("no samples")
    cards: dict[int, list[GpuMemory]] = {}
    for sample in samples:
        for card in sample.gpus:
            cards.setdefault(card.index, []).append(card)
    return MemorySpan(
        at=samples[0].at,
        until=samples[-1].at,
        node=samples[0].node,
        samples=len(samples),
        host_total_bytes=max(s.host_total_bytes for s in samples),
        host=_span([s.host_used_bytes for s in samples]),
        gpus=tuple(
            CardSpan(
                index=index,
                total_bytes=max(c.total_bytes for c in read),
                used=_span([c.used_bytes for c in read]),
                ours_most_bytes=max(c.ours_bytes for c in read),
                of_attempt=any(c.of_attempt for c in read),
            )
            for index, read in sorted(cards.items())
        ),
        cpu_share=round(sum(s.cpu_share for s in samples) / len(samples), 3),
        gpu_share=round(sum(s.gpu_share for s in samples) / len(samples), 3),
    )


def joined(one: MemorySpan, other: MemorySpan) -> MemorySpan:
    """Merge two spans of one node."""
    whole = one.samples + other.samples

    def mean(a: float, b: float) -> float:
        return (a * one.samples + b * other.samples) / whole

    def both(a: Span, b: Span) -> Span:
        return Span(least=min(a.least, b.least), mean=round(mean(a.mean, b.mean)), most=max(a.most, b.most))

    theirs = {card.index: card for card in other.gpus}
    cards = {card.index: card for card in one.gpus}
    for index, card in theirs.items():
        own = cards.get(index, card)
        cards[index] = msgspec.structs.replace(
            card,
            used=both(own.used, card.used),
            ours_most_bytes=max(own.ours_most_bytes, card.ours_most_bytes),
            of_attempt=own.of_attempt or card.of_attempt,
        )
    return msgspec.structs.replace(
        one,
        until=max(one.until, other.until),
        samples=whole,
        host_total_bytes=max(one.host_total_bytes, other.host_total_bytes),
        host=both(one.host, other.host),
        gpus=tuple(cards[index] for index in sorted(cards)),
        cpu_share=round(mean(one.cpu_share, other.cpu_share), 3),
        gpu_share=round(mean(one.gpu_share, other.gpu_share), 3),
    )


def minutes_of(folder: Path, *, strict: bool = False) -> tuple[MemorySpan, ...]:
    """Return the recorded minutes of an attempt, in the file's order; `strict`: raise OSError."""
    return tuple(_read(folder / SUMMARY, MemorySpan, strict=strict))


def samples_of(folder: Path, *, strict: bool = False) -> tuple[Sample, ...]:
    """Return the samples of the last minutes, oldest first; `strict`: raise OSError."""
    return tuple(s for name in (BEFORE, RECENT) for s in _read(folder / name, Sample, strict=strict))


def so_far(folder: Path) -> tuple[MemorySpan, ...]:
    """Summarize the record of an attempt, one span per node."""
    nodes: dict[str, MemorySpan] = {}
    summed: dict[str, float] = {}  # node -> the time of its last sample in the last minute
    for span in minutes_of(folder):
        nodes[span.node] = joined(nodes[span.node], span) if span.node in nodes else span
        summed[span.node] = span.until
    for node, samples in _by_node(samples_of(folder)).items():
        after = _after(samples, summed.get(node))
        if after:
            last = summary_of(after)
            nodes[node] = joined(nodes[node], last) if node in nodes else last
    return tuple(nodes[node] for node in sorted(nodes))


class MemoryRecord:
    """Writes samples in the order of arrival, because a node's clock may jump.

    After an attach, a node's first samples are skipped if they are already recorded.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pause: Pause,
        persist: Persist = at_once,
        summary_bytes: int = _SUMMARY_BYTES,
    ) -> None:
        self._folder, self._pause, self._summary_bytes = folder, pause, summary_bytes
        spans = persist(lambda: minutes_of(folder, strict=True), path=folder)
        recorded = _by_node(persist(lambda: samples_of(folder, strict=True), path=folder))
        summed = {span.node: span.until for span in spans}
        self._known = {node: {sample.at for sample in read} for node, read in recorded.items()}
        # The samples of each node's current minute.
        self._minutes = {node: _after(read, summed.get(node)) for node, read in recorded.items()}
        self._unwritten: deque[MemorySpan] = deque(maxlen=_HELD)
        self._recent: Counter[str] = Counter()  # node -> its samples in samples.jsonl

    def add(self, samples: tuple[Sample, ...]) -> None:
        """Write new samples."""
        fresh = [s for node, read in _by_node(samples).items() for s in self._behind_known(node, read)]
        if fresh:
            self._pause.tries(lambda: self._keep(fresh), samples=len(fresh))
        over = []
        for sample in fresh:
            minute = self._minutes.setdefault(sample.node, [])
            if minute and (abs(sample.at - minute[0].at) >= _MINUTE_S or len(minute) >= _SAMPLES_OF_A_MINUTE):
                over.append(minute)
                minute = self._minutes[sample.node] = []
            minute.append(sample)
        self._sum(over)

    def _behind_known(self, node: str, samples: list[Sample]) -> list[Sample]:
        """Return the samples after the recorded ones; a sampler begins with the oldest that it has."""
        known = self._known.pop(node, set())
        last = max((n for n, sample in enumerate(samples) if sample.at in known), default=-1)
        return samples[last + 1 :]

    def close(self) -> None:
        """Write the current minutes so far."""
        self._sum(list(self._minutes.values()))
        self._minutes = {}

    def _sum(self, minutes: list[list[Sample]]) -> None:
        self._unwritten += [summary_of(minute) for minute in minutes if minute]
        if self._unwritten and self._pause.tries(lambda: self._write_summary(list(self._unwritten))):
            self._unwritten.clear()

    def _keep(self, samples: list[Sample]) -> None:
        path = self._folder / RECENT
        size = _append(path, samples)
        self._recent.update(sample.node for sample in samples)
        if max(self._recent.values()) >= _RECENT_SAMPLES or size >= _RECENT_BYTES:
            path.replace(self._folder / BEFORE)
            self._recent.clear()

    def _write_summary(self, spans: list[MemorySpan]) -> None:
        path = self._folder / SUMMARY
        if _append(path, spans) < self._summary_bytes:
            return
        partial = path.with_name(f".{SUMMARY}.partial")
        partial.unlink(missing_ok=True)
        try:
            _append(partial, _in_pairs(_read(path, MemorySpan)))
            partial.replace(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise


def _in_pairs(spans: Iterable[MemorySpan]) -> Iterator[MemorySpan]:
    waiting: dict[str, MemorySpan] = {}
    for span in spans:
        first = waiting.pop(span.node, None)
        if first is None:
            waiting[span.node] = span
        else:
            yield joined(first, span)
    yield from waiting.values()


def _by_node(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    nodes: dict[str, list[Sample]] = {}
    for sample in samples:
        nodes.setdefault(sample.node, []).append(sample)
    return nodes


def _after(samples: list[Sample], at: float | None) -> list[Sample]:
    """Return the samples of a node after the last one with a timestamp; all if none has it."""
    last = max((n for n, sample in enumerate(samples) if sample.at == at), default=-1)
    return samples[last + 1 :]


def _append(path: Path, values: Iterable[Value]) -> int:
    """Append values as lines and return the file's size in bytes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        append(descriptor, b"".join(msgspec.json.encode(value) + b"\n" for value in values))
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def _read(path: Path, kind: type[V], *, strict: bool = False) -> Iterator[V]:
    """Yield the readable, complete lines of a file that are of this type."""
    decoder = msgspec.json.Decoder(kind)
    if strict and is_absent(path):
        return
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    yield decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue
    except OSError:
        if strict:
            raise


def _span(values: list[int]) -> Span:
    return Span(least=min(values), mean=round(sum(values) / len(values)), most=max(values))
