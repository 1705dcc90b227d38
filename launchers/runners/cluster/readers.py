"""Polls the nodes of an attempt in parallel and keeps the read position of each."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from autotune.launchers.base import Chunk, Unreachable
from autotune.launchers.packages import DISTRIBUTION, version_of
from autotune.launchers.runners.cluster.jobs import Claim
from autotune.launchers.runners.cluster.timeouts import Waits
from autotune.launchers.runners.node.agent import Report, Start
from autotune.policies.values.observation import Sample

# Raised for tasks, actors and arguments that a worker could not unpickle.
_NOT_IMPORTED = (
    "No module named 'autotune",
    "failed to import on the worker",
    "System error: No module named",
)
_DOUBLED = 16  # the most doublings of a delay


class Places:
    """Read offsets of log files, by machine; nodes that see the same files share them."""

    def __init__(self, read: Mapping[str, int]) -> None:
        self._offsets: dict[str, dict[str, int]] = {}
        for file, offset in read.items():
            machine, _, path = file.partition(":/")
            self.of(machine)[f"/{path}"] = offset

    def of(self, machine: str) -> dict[str, int]:
        """Return the offsets of a machine's files, by path."""
        return self._offsets.setdefault(machine, {})


class NodeReader:
    """The read position on one node, and whether the node answers."""

    def __init__(self, *, name: str, actor: Any, places: Places) -> None:
        self.name = name
        self.actor = actor  # None once it has died, until another takes its place
        self.start: Start | None = None  # until a new actor has told it
        self.answered_at = time.monotonic()
        self.late = False  # it did not answer in the last round: others are not delayed by it
        self.used = False  # whether the attempt ever had a process or a card here
        self.claim: Claim | None = None  # GPUs of the attempt's jobs that the actor knows
        self.died_at = float("-inf")  # the actor before, on the monotonic clock
        self.deaths = 0
        self._asked: Any = None  # the pending call, at most one
        self.places = places
        self._recorded = 0  # bytes of the framework's output that need not be kept, if it runs here
        self._taken = 0
        self._faults: set[str] = set()

    @property
    def silent_s(self) -> float:
        """Seconds without an answer."""
        return time.monotonic() - self.answered_at

    def ask(self, *, jobs: tuple[str, ...], read: bool) -> Any:
        """Return the pending call's reference, starting a call if there is none."""
        if self._asked is None and self.actor is not None:
            if self.start is None:
                self._asked = self.actor.begun.remote()
            else:
                cursor, more = self.places.of(self.start.machine), {}
                if self._recorded:
                    more["recorded"] = self._recorded
                self._asked = self.actor.poll.remote(cursor, taken=self._taken, jobs=jobs, read=read, **more)
        return self._asked

    def acknowledge(self, recorded: Mapping[str, int]) -> None:
        """Confirm that the framework's output, if it runs here, is recorded up to an offset."""
        if self.start is not None:
            file = file_of(self.start.machine, self.start.output)
            self._recorded = recorded.get(file, self._recorded)

    def replace(self, actor: Any) -> None:
        """Continue with another actor."""
        self.actor, self.claim, self._asked, self._taken = actor, None, None, 0
        self.late = True

    def due(self, waits: Waits) -> bool:
        """Return whether a dead actor may be replaced: immediately, then with growing delays."""
        if self.deaths <= 1:
            return True
        first_s, most_s = waits.retry
        pause_s = min(most_s, first_s * 2.0 ** min(self.deaths - 1, _DOUBLED))
        return time.monotonic() - self.died_at >= pause_s

    def rejoin(self, actor: Any) -> None:
        """Continue with the same actor on a new connection; None: it has died in the meantime."""
        self._asked, self.late = None, True
        if actor is None:
            self.lose()
        self.actor = actor

    def lose(self) -> None:
        """Record that the actor has died."""
        self.actor = self._asked = None
        self.died_at = time.monotonic()
        self.deaths += 1

    def answered(self, answer: Start | Report | Exception) -> None:
        """Record the answer to the pending call; an exception counts as no answer."""
        self._asked = None
        if isinstance(answer, Exception):
            self.late = True
            return
        self.late, self.answered_at, self.deaths = False, time.monotonic(), 0
        if isinstance(answer, Start):
            self.start = answer
            self.used = self.used or bool(answer.cards)
            return
        self.used = self.used or answer.touched
        self._taken = answer.taken
        if self.start is not None:
            self.places.of(self.start.machine).update((piece.path, piece.end) for piece in answer.pieces)

    def news(self, report: Report, *, supervisor: bool) -> tuple[list[Chunk], tuple[Sample, ...], list[str]]:
        """Return a report's new logs and samples, and read failures not reported before."""
        suffix = "" if supervisor else f"@{self.name}"
        machine = self.start.machine if self.start is not None else ""
        chunks = [
            Chunk(
                source=piece.source + suffix,
                data=piece.data,
                file=file_of(machine, piece.path),
                end=piece.end,
                dropped=piece.dropped,
            )
            for piece in report.pieces
        ]
        faults = [f"node {self.name}: {fault}" for fault in report.faults if fault not in self._faults]
        self._faults.update(report.faults)
        return chunks, report.samples, faults


def one_per_machine(readers: Mapping[str, NodeReader], *, first: str) -> set[str]:
    """Return the nodes to read logs from: one of those that share files, preferably `first`."""
    machines: dict[str, str] = {}
    for node in (first, *readers):
        start = readers[node].start
        if start is not None:
            machines.setdefault(start.machine, node)
    return set(machines.values())


def file_of(machine: str, path: str) -> str:
    """Return a name for a machine's file that stays valid across drivers."""
    return f"{machine}:{path}"


def wait_once(
    asked: dict[str, Any],
    *,
    late: Collection[str] = (),
    first: str = "",
    timeout_s: float,
    waits: Waits,
) -> dict[str, Any]:
    """Return each answer or exception, with one timeout for all.

    Once `first` has answered, the others have `waits.others` seconds. Nodes in `late` are waited for only if
    there is no other; answers that they gave in the meantime are returned.
    """
    import ray

    nodes = {reference: node for node, reference in asked.items()}
    if not asked:
        return {}
    pending = list(nodes)
    awaited = {node for node in asked if node not in late} or set(asked)
    until = time.monotonic() + (timeout_s if awaited - set(late) else min(timeout_s, waits.others))
    answers: dict[str, Any] = {}
    while pending:
        left = until - time.monotonic() if awaited else 0.0
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, left))
        for reference in done:
            node = nodes[reference]
            awaited.discard(node)
            try:
                answers[node] = ray.get(reference, timeout=waits.answer)
            except ray.exceptions.RayError as error:
                answers[node] = error
            if node == first:
                until = min(until, time.monotonic() + waits.others)
        if not done and left <= 0:
            break
    return {node: answers[node] for node in asked if node in answers}


def has_died(answer: object) -> bool:
    """Return whether an answer shows that the actor is dead rather than unreachable."""
    import ray

    errors = ray.exceptions
    ends = (errors.RayActorError, errors.ActorUnschedulableError, errors.OutOfMemoryError)
    dead = isinstance(answer, ends)
    return dead and not isinstance(answer, errors.ActorUnavailableError)


def import_failure(error: BaseException) -> str:
    """Return why a worker could not import autotune; empty for any other failure.

    This happens if the environment of the cluster's Ray lacks autotune or has another version.
    """
    text = str(getattr(error, "cause", None) or error)
    if not any(words in text for words in _NOT_IMPORTED):
        return ""
    return next((line.strip() for line in reversed(text.splitlines()) if "Error: " in line), "ImportError")


def install_hint() -> str:
    """Return a hint for workers that cannot import autotune."""
    autotune = f"{DISTRIBUTION} {version_of(DISTRIBUTION)}".strip()
    return f"install {autotune} into the environment of the cluster's Ray, on every node"


def answers_of(asked: list[tuple[str, Any]], *, timeout_s: float) -> list[Any]:
    """Return the answers by the actor's name.

    Raises Unreachable, naming actors that did not answer in time or cannot import autotune, or an exception
    that one of them raised.
    """
    import ray

    references = [reference for _, reference in asked]
    _, pending = ray.wait(references, num_returns=len(references), timeout=timeout_s)
    silent = [name for name, reference in asked if reference in pending]
    if silent:
        raise Unreachable(f"{', '.join(dict.fromkeys(silent))} did not answer within {timeout_s:.0f} s")
    answers = []
    for name, reference in asked:
        try:
            answers.append(ray.get(reference))
        except ray.exceptions.RayError as error:
            if not (reason := import_failure(error)):
                raise
            raise Unreachable(
                f"the environment of Ray on {name} cannot import autotune: {reason}", hint=install_hint()
            ) from error
    return answers
