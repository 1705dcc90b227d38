"""One attempt on a Ray cluster, as its driver sees it."""

from __future__ import annotations

import time
from typing import Any

from autotune.launchers.base import Chunk, Drain, Exit, Observed
from autotune.launchers.runners.cluster.actors import Posts, living_nodes
from autotune.launchers.runners.cluster.connection import Head
from autotune.launchers.runners.cluster.jobs import Claim, claims_of, jobs_of, remove_leftovers
from autotune.launchers.runners.node.agent import Baseline, Report, Start
from autotune.launchers.runners.node.drain import ENOUGH_SHARE, ProcessHold, Residue, drain
from autotune.launchers.runners.node.harvest import Harvest
from autotune.policies.values.observation import Sample

_ANSWER_S = 15.0
_SILENT_S = 60.0  # a node under memory pressure may answer late
_END_S = 30.0
_STRAGGLER_GRACE_S = 1.0  # for what outlives the framework's main process
_JOB_SEARCH_S = (1.0, 5.0)  # between looks at Ray's tables: until job and cards are known, afterwards


class RayHandle:
    """An attempt supervised by actors; everything it remembers is its own place in their logs and samples."""

    def __init__(
        self,
        posts: Posts,
        *,
        actors: dict[str, Any],
        starts: dict[str, Start],
        head: str,
        link: Head,
        enough_share: float = ENOUGH_SHARE,
    ) -> None:
        self._posts = posts
        self._actors = actors  # by node id
        self._starts = starts
        self._head = head
        self._link = link
        self._enough_share = enough_share
        self._readers = self._choose_readers()
        self._cursors: dict[str, dict[str, int]] = {node: {} for node in actors}
        self._taken = dict.fromkeys(actors, 0)
        self._harvest = Harvest()
        self._jobs: tuple[str, ...] = ()
        self._jobs_due_at = 0.0
        self._claimed: dict[str, Claim] = {}  # node -> GPUs of the jobs that its actor knows
        self._answered_at = time.monotonic()
        self._lost = ""

    def poll(self) -> Observed:
        """Return what is new on all nodes."""
        import ray

        if self._lost or not self._link.answers():
            self._lost = self._lost or self._link.gone
            return Observed(lost=self._lost)
        try:
            reports = self._reports()
            if len(self._actors) < len(self._starts):
                self._mend()  # another actor reads the last words
                reports = self._reports()
            chunks, samples = self._take(reports)
        except ray.exceptions.GetTimeoutError:
            if time.monotonic() - self._answered_at > _SILENT_S:
                self._lost = f"the attempt's supervisor has not answered for {_SILENT_S:.0f} s"
            return Observed(lost=self._lost)
        except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
            self._lost = self._lost or f"the Ray cluster cannot be reached: {_first_line(error)}"
            return Observed(lost=self._lost)
        ended = self._exit(reports, heard=bool(chunks))
        return Observed(chunks=chunks, samples=samples, exit=ended, lost=self._lost)

    def _reports(self) -> dict[str, Report]:
        import ray

        self._find_jobs()
        asked = {
            node: actor.poll.remote(
                self._cursors[node], taken=self._taken[node], jobs=self._jobs, read=node in self._readers
            )
            for node, actor in self._actors.items()
        }
        reports = {}
        for node, reference in asked.items():
            try:
                reports[node] = ray.get(reference, timeout=_ANSWER_S)
            except ray.exceptions.RayActorError as error:
                self._note_death(node, error)
        self._answered_at = time.monotonic()
        return reports

    def _note_death(self, node: str, error: Exception) -> None:
        name = self._starts[node].name
        del self._actors[node]
        alive = node in {living["NodeID"] for living in living_nodes()}
        if not alive:
            self._lost = self._lost or f"node {name} left the cluster"
        elif node == self._head:
            self._lost = self._lost or f"the attempt's supervisor on {name} died: {_first_line(error)}"
        else:
            self._mend()

    def _find_jobs(self) -> None:
        now = time.monotonic()
        if now >= self._jobs_due_at:
            self._jobs = jobs_of(f"{self._posts.run}/{self._posts.attempt}")
            self._claim(claims_of(self._jobs))
            with_cards = any(start.baseline.cards for start in self._starts.values())
            self._jobs_due_at = now + _JOB_SEARCH_S[bool(self._claimed if with_cards else self._jobs)]

    def _claim(self, claims: dict[str, Claim]) -> None:
        """Tell the nodes which cards are the attempt's: in a container NVML does not name its processes."""
        for node, actor in self._actors.items():
            claim = claims.get(node)
            if claim is not None and claim.places and claim != self._claimed.get(node):
                actor.claim_offered.remote(*claim)
                self._claimed[node] = claim

    def _take(self, reports: dict[str, Report]) -> tuple[tuple[Chunk, ...], tuple[Sample, ...]]:
        chunks: list[Chunk] = []
        samples: list[Sample] = []
        for node, report in reports.items():
            self._taken[node] = report.taken
            samples += report.samples
            for piece in report.pieces:
                self._cursors[node][piece.path] = piece.end
                source = piece.source if node == self._head else f"{piece.source}@{self._starts[node].name}"
                chunks.append(Chunk(source=source, data=piece.data))
        return tuple(chunks), tuple(samples)

    def _exit(self, reports: dict[str, Report], *, heard: bool) -> Exit | None:
        head = reports.get(self._head)
        if head is None or head.exit is None:
            return None
        alive = sum(report.alive for report in reports.values())
        ended = self._harvest.publish(head.exit, heard=heard, alive=alive)
        if ended is None:
            self._jobs_due_at = 0.0  # a job that failed early may not be known yet
        return ended

    def _choose_readers(self) -> set[str]:
        readers = {self._head: self._starts[self._head].machine}
        for node, start in self._starts.items():
            if start.machine not in readers.values():
                readers[node] = start.machine
        return set(readers)

    def _mend(self) -> None:
        """Put a new actor on every living node whose actor has died."""
        for node in living_nodes():
            identity = node["NodeID"]
            if identity in self._starts and identity not in self._actors:
                self._actors[identity] = self._posts.create(
                    node, supervisor=False, start=self._starts[identity]
                )
                self._taken[identity] = 0
                self._claimed.pop(identity, None)

    def stop(self, *, grace_s: float) -> float:
        """End the attempt on every node: its process group, its Ray job, then what carries its marker."""
        import ray

        begun = time.monotonic()
        if not self._link.answers():
            return 0.0  # nothing of the cluster can be reached; `sweep` ends what is left once it is back
        try:
            self._forget_dead()
            self._mend()
            if self._head in self._actors:
                supervisor = self._actors[self._head]
                ray.get(supervisor.stop_child.remote(grace_s=grace_s), timeout=grace_s + _END_S)
            self._jobs_due_at = 0.0
            self._find_jobs()
            remove_leftovers(self._jobs)  # before their processes: Ray restarts detached actors
            self._end(grace_s=min(grace_s, _STRAGGLER_GRACE_S))
            if remove_leftovers(self._jobs):
                self._end(grace_s=0.0)
        except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
            self._lost = self._lost or f"the Ray cluster cannot be reached: {_first_line(error)}"
        return time.monotonic() - begun

    def _forget_dead(self) -> None:
        import ray

        references = {node: actor.begun.remote() for node, actor in self._actors.items()}
        for node, reference in references.items():
            try:
                ray.get(reference, timeout=_ANSWER_S)
            except ray.exceptions.RayActorError:
                del self._actors[node]

    def _end(self, *, grace_s: float) -> tuple[str, ...]:
        import ray

        references = [actor.end.remote(grace_s=grace_s) for actor in self._actors.values()]
        return tuple(left for found in ray.get(references, timeout=grace_s + _END_S) for left in found)

    def drain(self, *, timeout_s: float) -> Drain:
        """Wait until no memory of the attempt is held on any node."""
        import ray

        if not self._link.answers():
            return Drain(
                clear=False, seconds=0.0, held=self._link.gone or "the Ray cluster's head does not answer"
            )
        try:
            self._forget_dead()
            self._mend()
            return drain(
                self._residues,
                timeout_s=timeout_s,
                end=lambda: self._end(grace_s=0.0),
                largest_stranger=self._largest_stranger,
                enough_share=self._enough_share,
            )
        except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
            return Drain(
                clear=False, seconds=0.0, held=f"the Ray cluster cannot be reached: {_first_line(error)}"
            )

    def _residues(self) -> tuple[Residue, ...]:
        import ray

        references = [actor.residue.remote(self.baseline(node)) for node, actor in self._actors.items()]
        return tuple(ray.get(references, timeout=_ANSWER_S))

    def baseline(self, node: str) -> Baseline:
        """Return what was in use on a node before the attempt."""
        return self._starts[node].baseline

    def _largest_stranger(self, name: str) -> ProcessHold:
        import ray

        node = next(identity for identity in self._actors if self._starts[identity].name == name)
        hold: ProcessHold = ray.get(self._actors[node].largest_stranger.remote(), timeout=_ANSWER_S)
        return hold

    def release(self) -> None:
        """Give up the attempt's actors; what still runs of it ends."""
        import ray

        if not self._link.answers():
            return
        try:
            self._posts.dismiss()
        except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
            self._lost = self._lost or f"the Ray cluster cannot be reached: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
