"""Reads Ray's tables of a cluster in a thread, because the head may take a minute to answer, or never."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from autotune.launchers.runners.cluster.actors import Posts, living_nodes
from autotune.launchers.runners.cluster.connection import Head, serves_ray
from autotune.launchers.runners.cluster.jobs import Claim, claims_of, jobs_of
from autotune.launchers.runners.cluster.timeouts import WAITS, Waits

_LOW_ON_MEMORY = "running low on memory"  # src/ray/common/memory_monitor, in every release that is supported
_WORDS = 40  # lines of an error to search: the sentence and the ten largest processes
_KNOCKS = 4  # health checks per reading, each of which may time out


class Survey(NamedTuple):
    """The tables at one moment."""

    at: float  # on the monotonic clock, when the reading began
    nodes: dict[str, dict[str, Any]]  # that are alive, by id
    actors: frozenset[str]  # names of the attempt's, the dead left out
    jobs: tuple[str, ...]  # of the attempt
    claims: dict[str, Claim]  # node -> GPUs that Ray gave to these jobs
    deaf: frozenset[str]  # unresponsive nodes whose Ray process does not answer either


class Surveyor:
    """Reads the tables every few seconds until it is closed."""

    def __init__(self, posts: Posts, link: Head, *, waits: Waits = WAITS) -> None:
        self._posts, self._link, self._waits = posts, link, waits
        self._latest: Survey | None = None
        self._answered_at = time.monotonic()
        self._news = threading.Condition()
        self._hurried = self._closed = False
        self.suspects: frozenset[str] = frozenset()  # nodes that do not answer, by id
        self.trouble = ""  # why the last reading failed
        self._thread = threading.Thread(target=self._follow, name="autotune-survey", daemon=True)
        self._thread.start()

    @property
    def latest(self) -> Survey | None:
        """The last complete reading."""
        return self._latest

    @property
    def silent_s(self) -> float:
        """How long the tables have not answered."""
        return time.monotonic() - self._answered_at

    def hurry(self) -> None:
        """Read again at once."""
        with self._news:
            self._hurried = True
            self._news.notify_all()

    def fresh(self, *, within_s: float) -> Survey | None:
        """Return a reading that starts now; None if the tables do not answer in time."""
        asked_at = time.monotonic()
        self.hurry()
        with self._news:
            answered = self._news.wait_for(
                lambda: self._latest is not None and self._latest.at >= asked_at, timeout=within_s
            )
        return self._latest if answered else None

    def close(self) -> None:
        """Stop reading, after waiting for the current reading if the tables answer.

        Older Ray aborts a process that disconnects during a reading.
        """
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._thread.join(timeout=self._waits.others)

    def _follow(self) -> None:
        import ray

        while not self._closed:
            try:
                if ray.is_initialized() and not self._link.gone:
                    self._read()
            except Exception as error:  # any error that Ray raises without its head
                self.trouble = first_line(error)
            latest = self._latest
            with self._news:
                self._news.wait_for(
                    lambda: self._hurried or self._closed,
                    timeout=self._waits.survey[bool(latest and (latest.claims or latest.jobs))],
                )
                self._hurried = False

    def _read(self) -> None:
        begun = time.monotonic()
        nodes = {str(node["NodeID"]): node for node in living_nodes()}
        jobs = jobs_of(f"{self._posts.run}/{self._posts.attempt}")
        actors, claims = self._posts.names(), claims_of(jobs)
        self._answered_at = time.monotonic()
        knocked = sorted(node for node in self.suspects if node in nodes)[:_KNOCKS]
        deaf = frozenset(node for node in knocked if not _healthy(nodes[node], self._waits))
        with self._news:
            self._latest, self.trouble = Survey(begun, nodes, actors, jobs, claims, deaf), ""
            self._news.notify_all()


def first_line(error: Exception) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def memory_kill(error: Exception) -> tuple[str, ...]:
    """Return Ray's message for an actor killed by its memory monitor; empty for any other death."""
    lines = str(error).strip().splitlines()[:_WORDS]
    first = next((place for place, line in enumerate(lines) if _LOW_ON_MEMORY in line), None)
    return () if first is None else tuple(line.rstrip() for line in lines[first:] if line.strip())


def _healthy(node: dict[str, Any], waits: Waits) -> bool:
    """Return whether Ray's process on a node answers; true if that cannot be checked."""
    address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
    return serves_ray(address, timeout_s=waits.knock)
