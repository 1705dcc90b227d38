"""Messages to the user when nodes stop answering and answer again."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from autotune.launchers.runners.cluster.readers import NodeReader
from autotune.launchers.runners.cluster.timeouts import Waits
from autotune.policies.values.value import Value

HEAD = "the Ray cluster's head"


class State(StrEnum):
    """Probable cause of an unresponsive node."""

    BUSY = "busy"  # Ray's process there answers, the attempt's actor does not
    FROZEN = "frozen"  # neither answers; Ray declares such a node dead after about a minute
    UNKNOWN = "unknown"  # Ray's tables do not answer either


class Silence(Value, frozen=True, kw_only=True):
    """A node, or the head, that has stopped answering."""

    name: str
    state: State
    seconds: float
    supervisor: bool = False
    head: bool = False  # not a node of the attempt: the cluster's head
    reason: str = ""  # as Ray says it


def silences_of(readers: Mapping[str, NodeReader], *, head: str, deaf: frozenset[str]) -> tuple[Silence, ...]:
    """Return how long each node has not answered; in `deaf` are nodes whose Ray process does not either."""
    return tuple(
        Silence(
            name=f"node {reader.name}",
            state=State.FROZEN if node in deaf else State.BUSY,
            seconds=reader.silent_s,
            supervisor=node == head,
        )
        for node, reader in readers.items()
    )


class Silences:
    """Tracks which silences were already reported to the user."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._reported: dict[str, tuple[State, float]] = {}  # name -> state, longest silence

    def lines(self, silences: tuple[Silence, ...], *, blind: bool = False) -> tuple[str, ...]:
        """Return a line for each change since the last call; nodes that are not listed answer.

        `blind`: no other node could be polled.
        """
        lines = []
        now = {silence.name: silence for silence in silences if silence.seconds >= self._waits.notice}
        for name in [name for name in self._reported if name not in now and not blind]:
            _, seconds = self._reported.pop(name)
            lines.append(f"{name} answers again after {seconds:.0f} s")
        for name, silence in now.items():
            if name not in self._reported or self._reported[name][0] is not silence.state:
                lines.append(self._line(silence))
            self._reported[name] = silence.state, silence.seconds
        return tuple(lines)

    def _line(self, silence: Silence) -> str:
        text = f"{silence.name} has not answered for {silence.seconds:.0f} s"
        if silence.state is State.FROZEN:
            text += ", nor has Ray's own process there"
        if silence.head and silence.state is State.BUSY:
            reason = f" ({silence.reason})" if silence.reason else ""
            return f"{text} although it takes connections{reason}; training goes on, and is followed"
        if silence.head or silence.supervisor:
            longest = self._waits.head if silence.head else self._waits.supervisor
            return f"{text}; training goes on, waiting up to {longest:.0f} s"
        return f"{text}; training goes on, its logs and memory are read once it answers"
