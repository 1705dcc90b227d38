"""Sample one node while an attempt runs: GPUs, host memory, the attempt's processes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from autotune.launchers.runners.node.host import Card, read_cards, read_host
from autotune.launchers.runners.node.processes import Census, ProcessStat, own_limit
from autotune.policies.values.observation import GpuMemory, ProcessMemory, Sample

PERIOD_S = 0.45  # a little under half a second, for at least two samples per second
_KEPT_SAMPLES = 4000  # half an hour without a driver
_KEPT_FAULTS = 8  # different faults; a repeated one is kept once


class Sampler:
    """A thread that samples the node twice per second and keeps samples for its readers."""

    def __init__(self, attempt: str, *, node: str, beside: Callable[[], None] = lambda: None) -> None:
        """Start sampling; `beside` is called after every sample."""
        self._node, self._beside = node, beside
        self._census = Census(attempt)
        self._lock = threading.Lock()
        self._samples: deque[tuple[int, Sample]] = deque(maxlen=_KEPT_SAMPLES)
        self._taken = 0
        self._cpu_s: dict[int, float] = {}
        self._last_at = time.monotonic()
        self._ended = threading.Event()
        self.processes: tuple[ProcessStat, ...] = ()
        self.touched = False  # the attempt had a process here at some time
        self.held: set[int] = set()  # GPUs that its processes were observed on, or that Ray assigned to it
        self.highest: dict[int, int] = {}  # GPU index -> peak memory in use since the start
        self.faults: tuple[str, ...] = ()  # errors while reading, each once
        self._on_cards: set[int] = set()  # processes with GPUs assigned by Ray, which a container may hide
        self._thread = threading.Thread(target=self._follow, name="autotune-sampler", daemon=True)
        self._thread.start()

    def since(self, taken: int) -> tuple[int, tuple[Sample, ...]]:
        """Return the number of samples taken so far, and those after the first `taken`."""
        with self._lock:
            fresh = []
            for number, sample in reversed(self._samples):
                if number <= taken:
                    break
                fresh.append(sample)
            return self._taken, tuple(reversed(fresh))

    def claim(self, cards: Iterable[int], *, pids: Iterable[int] = ()) -> None:
        """Register GPUs and processes as the attempt's, even if NVML does not list the processes."""
        with self._lock:
            self.held.update(cards)
            self._on_cards.update(pids)

    def find(self) -> tuple[ProcessStat, ...]:
        """Return the attempt's living processes, after checking all processes of the machine again."""
        with self._lock:
            self._census.forget_strangers()
            return self._census.scan()

    def close(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(PERIOD_S):
            try:
                cards = read_cards(self.fault)
                with self._lock:
                    self._take(cards)
                self._beside()
            except Exception as error:  # a failed sample must not end the thread
                self.fault(f"memory and processes cannot be read: {error or type(error).__name__}")

    def fault(self, text: str) -> None:
        """Report an error to the readers, once per text."""
        if text not in self.faults and len(self.faults) < _KEPT_FAULTS:
            self.faults = (*self.faults, text)

    def _take(self, cards: tuple[Card, ...]) -> None:
        processes = self._census.scan()
        now = time.monotonic()
        cpu_s = {process.pid: process.cpu_s for process in processes}
        spent_s = {pid: max(0.0, value - self._cpu_s.get(pid, value)) for pid, value in cpu_s.items()}
        elapsed_s = max(now - self._last_at, 1e-3)
        self._cpu_s, self._last_at, self.processes = cpu_s, now, processes
        parents = {process.pid: process.parent for process in processes}
        below_s = with_descendants(spent_s, parents)
        holders = {holder.pid for card in cards for holder in card.holders} | self._on_cards
        on_cards = with_descendants({pid: float(pid in holders) for pid in cpu_s}, parents)
        self.touched = self.touched or bool(processes)
        readings = []
        for card in cards:
            ours = sum(holder.used_bytes for holder in card.holders if holder.pid in cpu_s)
            if ours:
                self.held.add(card.index)
            self.highest[card.index] = max(self.highest.get(card.index, 0), card.used_bytes)
            readings.append(
                GpuMemory(
                    index=card.index,
                    used_bytes=card.used_bytes,
                    total_bytes=card.total_bytes,
                    ours_bytes=ours,
                    of_attempt=card.index in self.held,
                )
            )
        host = read_host()
        self._taken += 1
        sample = Sample(
            at=time.time(),
            node=self._node,
            host_used_bytes=host.used_bytes,
            host_total_bytes=host.total_bytes,
            gpus=tuple(readings),
            processes=tuple(
                ProcessMemory(
                    pid=process.pid,
                    name=process.name,
                    rss_bytes=process.rss_bytes,
                    cpu_share=round(below_s[process.pid] / elapsed_s, 3),
                    gpu=on_cards[process.pid] > 0,
                    limit_bytes=limit.bytes,
                    limited_bytes=limit.used_bytes,
                )
                for process, limit in ((each, own_limit(each.pid)) for each in processes)
            ),
            cpu_share=sum(spent_s.values()) / elapsed_s,
            gpu_share=max(
                (card.utilisation for card in cards if card.index in self.held or not self.held), default=0.0
            ),
        )
        self._samples.append((self._taken, sample))


def with_descendants(own: dict[int, float], parents: dict[int, int]) -> dict[int, float]:
    """Return for every process the sum of its own figure and those of its descendants."""
    total = dict(own)
    for pid, value in own.items():
        if not value:
            continue
        passed, above = {pid}, parents.get(pid)
        while above in total and above not in passed:
            total[above] += value
            passed.add(above)
            above = parents.get(above)
    return total
