"""The processes of an attempt as its samples show them: which live, which work, which have ended."""

from __future__ import annotations

import re

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


class ProcessTable:
    """What the samples of an attempt say about its processes, on the driver's clock."""

    def __init__(self) -> None:
        self._alive: dict[str, dict[int, tuple[str, float]]] = {}  # node -> pid -> name, first seen
        self._ended: dict[tuple[str, int], float] = {}
        self._worked: dict[tuple[str, int], float] = {}
        self._attempt_worked = float("-inf")
        self._sampled: dict[str, float] = {}  # node -> its latest sample

    def take(self, sample: Sample, now: float) -> None:
        """Take note of a sample that was taken at a time of the driver's clock."""
        node = sample.node
        self._sampled[node] = now
        before = self._alive.get(node, {})
        alive = {
            process.pid: (process.name, before[process.pid][1] if process.pid in before else now)
            for process in sample.processes
        }
        for pid, (name, since) in before.items():
            if pid not in alive:
                self._worked.pop((node, pid), None)
                if now - since >= _SETTLED_S and not _REPLACEABLE.match(name):
                    self._ended[node, pid] = now
        self._alive[node] = alive
        self._ended = {key: at for key, at in self._ended.items() if now - at <= _REMEMBERED_S}
        for process in sample.processes:
            if process.gpu and process.cpu_share > _BUSY_CORES:
                self._worked[node, process.pid] = now
        idle_cores = max(_BUSY_CORES, _BUSY_CORES_EACH * len(alive))
        if sample.cpu_share > idle_cores or sample.gpu_share > _BUSY_GPU_SHARE:
            self._attempt_worked = now

    def known(self, pid: int, address: str) -> bool:
        """Return whether it is, or was a moment ago, a process of the attempt."""
        living = any(pid in alive for node, alive in self._alive.items() if address in ("", node))
        return living or self.ended(pid, address) is not None

    def ended(self, pid: int, address: str) -> float | None:
        """Return when a process was found to have ended; None while it lives, and where it was never seen.

        Without an address the process must be gone from every node.
        """
        if any(pid in alive for node, alive in self._alive.items() if address in ("", node)):
            return None
        ends = (at for (node, other), at in self._ended.items() if other == pid and address in ("", node))
        return max(ends, default=None)

    def worked(self, pid: int, address: str) -> float | None:
        """Return when a living process that runs on a card last worked, if ever.

        Others may wait for most of a step while a job trains: those that score, for example.
        """
        times = (at for (node, other), at in self._worked.items() if other == pid and address in ("", node))
        return max(times, default=None)

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
