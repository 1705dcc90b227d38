"""The processes of an attempt as its samples show them: which live, which work, which have ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from autotune.policies.values.observation import Sample

_BUSY_CORES = 0.2  # idle Ray workers together stay below on a small node
_BUSY_CORES_EACH = 0.01  # and each of many below this
_BUSY_GPU_SHARE = 0.05
_REMEMBERED_S = 60.0  # a log may be read this long after its process has ended
_STALE_S = 10.0  # samples come twice a second; without them nothing shows whether a process works
_GIVEN_UP_S = 900.0  # as long as a runner waits for a node that does not answer
# A Ray worker that waits for work, or runs a task: Ray ends the one at will, and runs the other's task again.
# One that ends before a sample shows its name may have been such a worker.
_SETTLED_S = 5.0
_REPLACEABLE = re.compile(r"ray::(?:IDLE|[a-z_])")


class Process(NamedTuple):
    """A living process, as the samples show it; times are on the driver's clock."""

    name: str
    since: float  # of the first sample that has it
    on_card: bool  # it or a descendant is known to run on a card
    worked: float | None  # when it or a descendant last used a CPU

    @property
    def idle_since(self) -> float:
        """When it last used a CPU, as far as the samples go back."""
        return self.since if self.worked is None else self.worked


class ProcessTable:
    """What the samples of an attempt say about its processes, on the driver's clock."""

    def __init__(self) -> None:
        self._alive: dict[str, dict[int, Process]] = {}  # by node and pid
        self._ended: dict[tuple[str, int], float] = {}
        self._attempt_worked = float("-inf")
        self._sampled: dict[str, float] = {}  # node -> its latest sample

    def take(self, sample: Sample, now: float) -> None:
        """Take note of a sample that was taken at a time of the driver's clock."""
        node = sample.node
        self._sampled[node] = now
        before = self._alive.get(node, {})
        alive = {}
        for reading in sample.processes:
            earlier = before.get(reading.pid, Process(reading.name, now, on_card=False, worked=None))
            alive[reading.pid] = Process(
                reading.name,
                earlier.since,
                on_card=earlier.on_card or reading.gpu,
                worked=now if reading.cpu_share > _BUSY_CORES else earlier.worked,
            )
        for pid, process in before.items():
            settled = now - process.since >= _SETTLED_S
            if pid not in alive and settled and not _REPLACEABLE.match(process.name):
                self._ended[node, pid] = now
        self._alive[node] = alive
        self._ended = {key: at for key, at in self._ended.items() if now - at <= _REMEMBERED_S}
        idle_cores = max(_BUSY_CORES, _BUSY_CORES_EACH * len(alive))
        if sample.cpu_share > idle_cores or sample.gpu_share > _BUSY_GPU_SHARE:
            self._attempt_worked = now

    def known(self, pid: int, address: str) -> bool:
        """Return whether it is, or was a moment ago, a process of the attempt."""
        return any(self._living(pid, address)) or self.ended(pid, address) is not None

    def ended(self, pid: int, address: str) -> float | None:
        """Return when a process was found to have ended; None while it lives, and where it was never seen.

        Without an address the process must be gone from every node.
        """
        if any(self._living(pid, address)):
            return None
        ends = (at for (node, other), at in self._ended.items() if other == pid and address in ("", node))
        return max(ends, default=None)

    def worked(self, pid: int, address: str) -> float | None:
        """Return when a living process that runs on a card last worked, if ever.

        Others may wait for most of a step while a job trains: those that score, for example.
        """
        living = self._living(pid, address)
        times = (process.worked for process in living if process.on_card and process.worked is not None)
        return max(times, default=None)

    def living(self, pid: int, address: str, now: float) -> tuple[Process, ...]:
        """Return the living processes of an id, none where samples of a node with one are late.

        Without an address several nodes may have one.
        """
        nodes = (node for node, alive in self._alive.items() if pid in alive and address in ("", node))
        late = any(now - self._sampled[node] > _STALE_S for node in nodes)
        return () if late else tuple(self._living(pid, address))

    def attempt_worked(self, now: float) -> float:
        """Return when any process of the attempt last worked; `now` while that is not known of a node."""
        return now if self.unseen(now) else self._attempt_worked

    def unseen(self, now: float) -> bool:
        """Return whether samples of a node with processes of the attempt, or of every node, are late.

        A node that has sent none for as long as a runner waits for it is no longer waited for.
        """
        held = [node for node in self._sampled if self._alive[node]] or self._newest()
        return any(_STALE_S < now - self._sampled[node] < _GIVEN_UP_S for node in held)

    def _newest(self) -> list[str]:
        return [max(self._sampled, key=self._sampled.__getitem__)] if self._sampled else []

    def _living(self, pid: int, address: str) -> Iterator[Process]:
        return (alive[pid] for node, alive in self._alive.items() if pid in alive and address in ("", node))
