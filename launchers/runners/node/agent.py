"""An attempt on one node: supervise, sample, read logs and end it, without Ray."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from autotune.launchers.base import Exit, Unreachable
from autotune.launchers.runners.node.child import Child, living_attempts, remove_dead_folders
from autotune.launchers.runners.node.host import read_cards, read_host
from autotune.launchers.runners.node.logs import Logs, Piece
from autotune.launchers.runners.node.memory_release import CardState, ProcessHold, Residue, hold_of
from autotune.launchers.runners.node.output import Output
from autotune.launchers.runners.node.processes import ProcessStat, all_pids, end, marked, read_stat, user_of
from autotune.launchers.runners.node.sampler import Sampler
from autotune.policies.values.command import Command
from autotune.policies.values.observation import Sample
from autotune.policies.values.value import Value

SWEEP_GRACE_S = 2.0  # for processes that a driver left behind
STRAGGLER_GRACE_S = 1.0  # for processes that outlive the framework's main process
EXPIRES_S = 72 * 3600.0  # a run that ended on a Friday evening can still be resumed on Monday


class Baseline(Value, frozen=True, kw_only=True):
    """Memory in use on a node before the attempt."""

    host_used_bytes: int
    neighbours_bytes: int = 0  # part of it used by other attempts
    cards: dict[int, int] = {}  # GPU index -> used bytes


class Start(Value, frozen=True, kw_only=True):
    """What a reader needs to read an attempt from its start, even under another supervisor."""

    baseline: Baseline
    output: str = ""  # file of the framework's own output; empty if it runs on another node
    name: str = ""  # of the node
    machine: str = ""  # equal for nodes that see the same files
    cards: tuple[int, ...] = ()  # GPUs reserved for the attempt on this node


class Report(Value, frozen=True, kw_only=True):
    """New data of a node."""

    pieces: tuple[Piece, ...] = ()
    taken: int = 0  # samples so far
    samples: tuple[Sample, ...] = ()
    exit: Exit | None = None
    alive: int = 0  # processes of the attempt
    touched: bool = False  # the attempt had a process here at some time
    faults: tuple[str, ...] = ()  # errors while reading so far
    behind: bool = False  # the logs have more data than fits into one report


class Node:
    """One attempt's part on one node; it keeps no reader's position, so that readers can change."""

    def __init__(
        self,
        *,
        run: str,
        attempt: int,
        name: str,
        workers: str = "",
        cards: tuple[int, ...] = (),
        start: Start | None = None,
        expires_s: float = EXPIRES_S,
    ) -> None:
        self._asked_at, self._expires_s = time.monotonic(), expires_s
        self.attempt = f"{run}/{attempt}"
        self._name = name
        self._workers = Path(workers) if workers else None
        self._child: Child | None = None
        self._start = start or Start(
            baseline=read_baseline(self.attempt), name=name, machine=machine_of(workers), cards=cards
        )
        self._output: Output | None = None
        self._sampler = Sampler(self.attempt, node=name, beside=self._keep_output_within)
        self._sampler.claim(self._start.cards)
        self._logs = self._open_logs()

    def _open_logs(self) -> Logs:
        if self._start.output:
            self._output = Output(Path(self._start.output), fault=self._sampler.fault)
        return Logs(output=self._output, workers=self._workers)

    def _keep_output_within(self) -> None:
        if self._output is not None and self._child is not None:
            with contextlib.suppress(OSError):  # retried at the next sample
                self._output.keep_within()

    def claim(self, cards: Iterable[int], *, pids: Iterable[int] = ()) -> None:
        """Register GPUs, by NVML index, and processes as the attempt's."""
        self._sampler.claim(cards, pids=pids)

    def launch(self, command: Command, *, python: str | None, environment: dict[str, str]) -> Start:
        """Start the framework on this node and return what a new reader needs."""
        if self._child is not None:
            raise Unreachable(f"attempt {self.attempt} has been started already")
        child = Child(command, attempt=self.attempt, python=python, environment=environment)
        self._child = child
        self._start = replace(self._start, output=str(child.output))
        self._logs = self._open_logs()
        return self._start

    def begun(self) -> Start:
        """Return what a new reader needs."""
        self._asked_at = time.monotonic()
        return self._start

    def poll(
        self,
        cursor: dict[str, int],
        *,
        taken: int,
        jobs: tuple[str, ...],
        read: bool = True,
        recorded: int = 0,
    ) -> Report:
        """Return what follows the reader's position in the logs and samples.

        The framework's output is recorded up to the offset `recorded`, so that it need not be kept here.
        """
        self._asked_at = time.monotonic()
        if recorded and self._output is not None and self._child is not None:
            with contextlib.suppress(OSError):  # then it is kept
                self._output.give_back(recorded)
        ended = self._child.ended() if self._child else None  # before the logs, which are then complete
        pieces = self._logs.read(cursor, jobs=jobs, thorough=ended is not None) if read else []
        count, samples = self._sampler.since(taken)
        return Report(
            pieces=tuple(pieces),
            taken=count,
            samples=samples,
            exit=ended,
            alive=len(self._sampler.processes),
            touched=self._touched,
            faults=self._sampler.faults,
            behind=read and self._logs.behind,
        )

    @property
    def _touched(self) -> bool:
        return self._sampler.touched or self._child is not None

    def expired(self) -> bool:
        """Return whether no driver has polled for `expires_s` and no process of the attempt runs here."""
        idle = not self._sampler.find() and (self._child is None or self._child.ended() is not None)
        return idle and time.monotonic() - self._asked_at >= self._expires_s

    def stop_child(self, *, grace_s: float) -> None:
        """End the framework's process group, if it runs here."""
        if self._child is not None:
            self._child.stop(grace_s=grace_s)

    def end(self, *, grace_s: float) -> tuple[str, ...]:
        """End all processes of the attempt on this node; return those that survived SIGKILL."""
        return tuple(
            f"pid {left.pid} ({left.name}) of {user_of(left.pid)}"
            for left in end(self._find, grace_s=grace_s)
        )

    def _find(self) -> tuple[ProcessStat, ...]:
        result = {stat.pid: stat for stat in self._sampler.find()}
        if self._child is not None:
            for pid in all_pids():
                stat = read_stat(pid) if pid not in result else None
                if stat is not None and stat.group == self._child.group:
                    result[pid] = stat
        return tuple(result.values())

    def residue(self, baseline: Baseline) -> Residue:
        """Return the memory still held on the node, compared with `baseline`."""
        sampler, host = self._sampler, read_host()
        ours = self._find()
        pids = {stat.pid for stat in ours}
        return Residue(
            node=self._name,
            ours=tuple(hold_of(stat.pid, stat.rss_bytes) for stat in ours),
            host_used_bytes=host.used_bytes,
            host_total_bytes=host.total_bytes,
            host_baseline_bytes=baseline.host_used_bytes,
            neighbours_bytes=_held_by_others(self.attempt) - baseline.neighbours_bytes,
            touched=self._touched,
            cards=tuple(
                CardState(
                    index=card.index,
                    used_bytes=card.used_bytes,
                    baseline_bytes=baseline.cards.get(card.index, 0),
                    highest_bytes=sampler.highest.get(card.index, 0),
                    ours_before=card.index in sampler.held,
                    holders=tuple(hold_of(h.pid, h.used_bytes) for h in card.holders if h.pid not in pids),
                )
                for card in read_cards()
            ),
        )

    def largest_stranger(self) -> ProcessHold:
        """Return the process with the most resident memory that does not belong to the attempt."""
        ours = {stat.pid for stat in self._find()}
        strangers = [stat for pid in all_pids() if pid not in ours and (stat := read_stat(pid)) is not None]
        largest = max(strangers, key=lambda stat: stat.rss_bytes)
        return hold_of(largest.pid, largest.rss_bytes)

    def release(self) -> None:
        """End the framework and the sampler, and remove the private folder."""
        self._sampler.close()
        if self._child is not None:
            self._child.close()
            self._child = None


def read_baseline(attempt: str) -> Baseline:
    """Return the memory in use on this machine before an attempt starts."""
    return Baseline(
        host_used_bytes=read_host().used_bytes,
        neighbours_bytes=_held_by_others(attempt),
        cards={card.index: card.used_bytes for card in read_cards()},
    )


def _held_by_others(attempt: str) -> int:
    return sum(stat.rss_bytes for stat in marked(lambda name: name != attempt))


def machine_of(workers: str) -> str:
    """Return a name that is equal for nodes if and only if they see the same worker logs."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if not workers:
        return boot
    status = Path(workers).stat()
    return f"{boot}:{status.st_dev}:{status.st_ino}"


def sweep_machine(run: str, *, spared: set[str], grace_s: float) -> tuple[str, ...]:
    """End the unsupervised processes of a run's attempts on this machine; return what was ended."""
    spared = spared | living_attempts(run)
    ended: dict[int, str] = {}

    def orphans() -> tuple[ProcessStat, ...]:
        result = marked(lambda attempt: attempt.startswith(run + "/") and attempt not in spared)
        for stat in result:
            ended.setdefault(stat.pid, f"pid {stat.pid} ({stat.name}) on {os.uname().nodename}")
        return result

    end(orphans, grace_s=grace_s)
    folders = remove_dead_folders(run, spared=spared)
    return (*ended.values(), *(f"files of attempt {attempt}" for attempt in folders))


def end_run(run: str, *, grace_s: float) -> tuple[str, ...]:
    """End all processes of a run on this machine; return those that survived SIGKILL."""
    left = end(lambda: marked(lambda name: name.startswith(f"{run}/")), grace_s=grace_s)
    return tuple(
        f"pid {stat.pid} ({stat.name}) of {user_of(stat.pid)} on {os.uname().nodename}" for stat in left
    )


def end_attempt(attempt: str, *, grace_s: float) -> tuple[str, ...]:
    """End all processes of an attempt on this machine without its actor; return survivors of SIGKILL."""
    left = end(lambda: marked(lambda name: name == attempt), grace_s=grace_s)
    return tuple(f"pid {stat.pid} ({stat.name}) of {user_of(stat.pid)}" for stat in left)
