"""Runs attempts on this machine without Ray."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from autotune.launchers.base import Chunk, Drain, Exit, Observed
from autotune.launchers.runners.node.agent import (
    STRAGGLER_GRACE_S,
    SWEEP_GRACE_S,
    Baseline,
    Node,
    end_run,
    sweep_machine,
)
from autotune.launchers.runners.node.host import measure
from autotune.launchers.runners.node.last_output import Harvest
from autotune.launchers.runners.node.memory_release import ENOUGH_SHARE, drain
from autotune.policies.values.command import Command
from autotune.policies.values.job import Cluster


class ProcessHandle:
    """An attempt that is a child of this process."""

    def __init__(self, node: Node, *, baseline: Baseline, enough_share: float = ENOUGH_SHARE) -> None:
        self._node = node
        self._baseline = baseline
        self._enough_share = enough_share
        self.released = False
        self.read_from({})

    def read_from(self, read: Mapping[str, int]) -> None:
        """Make the next poll start at these offsets, or at the start."""
        self._cursor = dict(read)
        self._recorded = 0
        self._taken = 0
        self._faults: set[str] = set()
        self._harvest = Harvest()

    def poll(self) -> Observed:
        """Return what is new."""
        report = self._node.poll(self._cursor, taken=self._taken, jobs=(), recorded=self._recorded)
        self._taken = report.taken
        self._cursor.update((piece.path, piece.end) for piece in report.pieces)
        faults = tuple(fault for fault in report.faults if fault not in self._faults)
        self._faults.update(faults)
        return Observed(
            chunks=tuple(
                Chunk(
                    source=piece.source,
                    data=piece.data,
                    file=piece.path,
                    end=piece.end,
                    dropped=piece.dropped,
                )
                for piece in report.pieces
            ),
            samples=report.samples,
            exit=self._settled(report.exit, heard=bool(report.pieces), alive=report.alive),
            ending=self._harvest.begun,
            behind=report.behind,
            notes=faults,
        )

    def acknowledge(self, recorded: Mapping[str, int]) -> None:
        """Take note that the attempt's output is recorded up to an offset."""
        self._recorded = recorded.get(self._node.begun().output, self._recorded)

    def _settled(self, ended: Exit | None, *, heard: bool, alive: int) -> Exit | None:
        return self._harvest.publish(ended, heard=heard, alive=alive)

    def stop(self, *, grace_s: float) -> float:
        """End the whole attempt and return the seconds it took."""
        begun = time.monotonic()
        self._node.stop_child(grace_s=grace_s)
        self._node.end(grace_s=min(grace_s, STRAGGLER_GRACE_S))
        return time.monotonic() - begun

    def drain(self, *, timeout_s: float) -> Drain:
        """Wait until no memory of the attempt is held any more."""
        return drain(
            lambda: (self._node.residue(self._baseline),),
            timeout_s=timeout_s,
            end=lambda: self._node.end(grace_s=0.0),
            largest_stranger=lambda _: self._node.largest_stranger(),
            enough_share=self._enough_share,
        )

    def release(self) -> None:
        """End what still runs and remove the attempt's private folder."""
        if not self.released:
            self.released = True
            self.stop(grace_s=0.0)
            self._node.release()


class ProcessRunner:
    """Attempts as children of this process: they end with it."""

    address, note = "local", ""

    def __init__(self) -> None:
        self._handles: dict[tuple[str, int], ProcessHandle] = {}

    def capacity(self, *, gpus: int | None, joining: bool) -> None:
        """Return that no node may come."""

    def withdraw(self) -> None:
        """Do nothing: nothing was requested."""

    def cluster(self) -> Cluster:
        """Return what this machine has."""
        machine = measure()
        return Cluster(
            address="local",
            nodes=1,
            gpus_per_node=len(machine.cards),
            gpu_memory_bytes=min((card.total_bytes for card in machine.cards), default=0),
            host_memory_bytes=machine.host_total_bytes,
            gpu_name=machine.card_name,
        )

    def start(self, command: Command, *, run: str, attempt: int, python: str | None) -> ProcessHandle:
        """Start an attempt here."""
        node = Node(run=run, attempt=attempt, name=os.uname().nodename)
        try:
            start = node.launch(command, python=python, environment=dict(os.environ))
        except BaseException:
            node.release()
            raise
        handle = ProcessHandle(node, baseline=start.baseline)
        self._handles[run, attempt] = handle
        return handle

    def attach(self, *, run: str, attempt: int, read: Mapping[str, int] = {}) -> ProcessHandle | None:
        """Return the attempt if this very process started it."""
        handle = self._handles.get((run, attempt))
        if handle is None or handle.released:
            return None
        handle.read_from(read)
        return handle

    def sweep(self, *, run: str) -> tuple[str, ...]:
        """End what is left of a run here without a living supervisor."""
        return sweep_machine(run, spared=set(), grace_s=SWEEP_GRACE_S)

    def end_all(self, *, run: str) -> tuple[str, ...]:
        """End every process of a run here."""
        return end_run(run, grace_s=SWEEP_GRACE_S)

    def close(self) -> None:
        """End the attempts that were not released."""
        for handle in self._handles.values():
            handle.release()
        self._handles.clear()
