"""One attempt on a Ray cluster, as its driver sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from autotune.launchers.base import Chunk, Drain, Exit, Observed, Unreachable
from autotune.launchers.runners.cluster.actors import Posts, name_of, on_node
from autotune.launchers.runners.cluster.connection import Head, in_main_thread
from autotune.launchers.runners.cluster.jobs import remove_leftovers
from autotune.launchers.runners.cluster.readers import NodeReader, has_died, one_per_machine, wait_once
from autotune.launchers.runners.cluster.silence_messages import HEAD, Silence, Silences, State, silences_of
from autotune.launchers.runners.cluster.survey import Survey, Surveyor, first_line, memory_kill
from autotune.launchers.runners.cluster.timeouts import WAITS, Waits
from autotune.launchers.runners.node.agent import STRAGGLER_GRACE_S, Report, end_attempt
from autotune.launchers.runners.node.last_output import Harvest
from autotune.launchers.runners.node.memory_release import ENOUGH_SHARE, ProcessHold, Residue, drain
from autotune.policies.values.observation import Sample


class RayHandle:
    """An attempt supervised by actors; its only state is its position in their logs and samples."""

    def __init__(
        self,
        posts: Posts,
        *,
        readers: dict[str, NodeReader],
        head: str,
        link: Head,
        reach: Callable[[], Head] | None = None,
        give_up: Callable[[RayHandle], None] = lambda _: None,
        waits: Waits = WAITS,
    ) -> None:
        """Read the nodes of `readers`, by id; the supervisor is on `head`.

        `reach` reconnects to a cluster whose head was away; `give_up` is called with a handle that could not
        be released.
        """
        self._posts, self._readers, self._head = posts, readers, head
        self._link, self._reach, self._give_up = link, reach, give_up
        self._waits, self._enough_share = waits, ENOUGH_SHARE
        self._surveyor = Surveyor(posts, link, waits=waits)
        self._survey: Survey | None = None
        self._linked_at = self._tried_at = time.monotonic()
        self._trouble = ""  # why the cluster is unusable
        self._harvest = Harvest()
        self._silences = Silences(waits)
        self._notes: list[str] = []
        self._residues_asked: dict[str, Any] = {}  # node -> its pending answer
        self._died: tuple[float, str] | None = None  # the supervisor: when, why
        self._killed_for_memory: tuple[str, ...] = ()
        self._lost = ""
        self._stopping: set[str] = set()  # the supervisor while it waits for the framework to end

    # ------------------------------------------------------------------ reading

    def poll(self) -> Observed:
        """Return what is new on all nodes."""
        import ray

        if self._lost:
            return Observed(lost=self._lost, notes=self._news())
        reports: dict[str, Report] = {}
        linked = self._linked()
        if linked and not self._lost:
            try:
                reports = self._round()
                self._linked_at = time.monotonic()
            except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
                linked, self._trouble = False, first_line(error)
        chunks, samples = self._take(reports)
        self._judge(reports, linked=linked)
        self._notes += self._silences.lines(self._silent(linked=linked), blind=not linked)
        return Observed(
            chunks=chunks,
            samples=samples,
            exit=self._exit(reports, heard=bool(chunks)),
            ending=self._harvest.begun,
            lost=self._lost,
            killed_for_memory=self._killed_for_memory if self._lost else (),
            silent_s=0.0 if self._head in reports else self._readers[self._head].silent_s,
            behind=any(report.behind for report in reports.values()),
            notes=self._news(),
        )

    def acknowledge(self, recorded: Mapping[str, int]) -> None:
        """Confirm that the attempt's output is recorded up to an offset."""
        self._readers[self._head].acknowledge(recorded)

    def _news(self) -> tuple[str, ...]:
        news, self._notes = tuple(self._notes), []
        return news

    def _linked(self) -> bool:
        """Return whether the head answers; reconnect if this process had disconnected."""
        if self._link.gone and self._reach is not None and in_main_thread():
            self._rejoin(self._reach)
        answers = self._link.answers()
        self._trouble = "" if answers else self._link.gone or self._trouble
        return answers

    def _rejoin(self, reach: Callable[[], Head]) -> None:
        now = time.monotonic()
        if now - self._tried_at < self._waits.survey[1]:
            return
        self._tried_at = now
        try:
            self.relink(reach())
        except Unreachable as unreachable:
            self._trouble = unreachable.message
            return
        if self._readers[self._head].actor is None:
            self._lost = "the Ray cluster came back without the attempt's supervisor"

    def relink(self, link: Head) -> None:
        """Continue on a new connection: look up the attempt's actors by name."""
        self._link = link
        self._surveyor.close()
        self._surveyor = Surveyor(self._posts, link, waits=self._waits)
        for node, reader in self._readers.items():
            reader.rejoin(self._posts.find("" if node == self._head else node))

    def _round(self) -> dict[str, Report]:
        """Poll every node without a pending question, and return the answers."""
        survey = self._surveyor.latest
        if survey is not None and survey is not self._survey:
            self._reconcile(survey)
        jobs = survey.jobs if survey is not None else ()
        reading = one_per_machine(self._readers, first=self._head)
        asked = {
            node: reference
            for node, reader in self._readers.items()
            if (reference := reader.ask(jobs=jobs, read=node in reading)) is not None
        }
        answers = self._await(asked, timeout_s=self._waits.round)
        for node, answer in answers.items():
            if has_died(answer):
                self._lose(node, answer)
            else:
                self._readers[node].answered(answer)
        # A node that stops answering when the framework fails may be the cause: do not wait for it.
        longest = self._waits.others if self._harvest.begun else self._waits.notice / 2
        self._surveyor.suspects = frozenset(
            node for node, reader in self._readers.items() if reader.silent_s >= longest
        )
        return {node: answer for node, answer in answers.items() if isinstance(answer, Report)}

    def _await(self, asked: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        late = {node for node in asked if self._readers[node].late}
        answers = wait_once(asked, late=late, first=self._head, timeout_s=timeout_s, waits=self._waits)
        for node in asked:
            self._readers[node].late = node not in answers
        return answers

    def _lose(self, node: str, error: Exception) -> None:
        reader = self._readers[node]
        reader.lose()
        if node == self._head and self._died is None:
            self._killed_for_memory = memory_kill(error)
            why = "Ray killed it because the node's memory was full" if self._killed_for_memory else ""
            why = why or first_line(error)
            self._died = time.monotonic(), f"the attempt's supervisor on {reader.name} died: {why}"
        self._surveyor.hurry()

    def _reconcile(self, survey: Survey) -> None:
        """Create an actor on every live node that has none, and drop nodes that have left."""
        self._survey = survey
        for identity in [node for node in self._readers if node not in survey.nodes]:
            self._leave(identity, had_cards=identity in survey.claims)
        for identity, node in survey.nodes.items():
            reader = self._readers.get(identity)
            if reader is None:
                name, actor = name_of(node), self._posts.create(node, supervisor=False)
                places = self._readers[self._head].places
                self._readers[identity] = NodeReader(name=name, actor=actor, places=places)
                self._notes.append(f"node {name} joined the cluster")
            elif reader.actor is None and survey.at > reader.died_at and reader.due(self._waits):
                reader.replace(self._posts.create(node, supervisor=False, start=reader.start))
            self._claim(identity, survey)
        head = self._readers[self._head]
        if head.late and self._died is None and self._posts.name not in survey.actors:
            self._died = time.monotonic(), f"the attempt's supervisor on {head.name} died"
            head.lose()

    def _leave(self, identity: str, *, had_cards: bool) -> None:
        reader = self._readers[identity]
        if identity == self._head or reader.used or had_cards:
            self._lost = self._lost or f"node {reader.name} left the cluster"
        else:
            self._notes.append(f"node {reader.name} left the cluster; the attempt had nothing there")
        reader.lose()
        if identity != self._head:
            del self._readers[identity]

    def _claim(self, identity: str, survey: Survey) -> None:
        """Report the attempt's GPUs to a node: in a container NVML does not list processes."""
        reader, claim = self._readers[identity], survey.claims.get(identity)
        if claim is not None and claim.places and claim != reader.claim and reader.actor is not None:
            reader.actor.claim_offered.remote(*claim)
            reader.claim, reader.used = claim, True

    def _take(self, reports: dict[str, Report]) -> tuple[tuple[Chunk, ...], tuple[Sample, ...]]:
        chunks: list[Chunk] = []
        samples: list[Sample] = []
        for node, report in reports.items():
            fresh, taken, faults = self._readers[node].news(report, supervisor=node == self._head)
            chunks += fresh
            samples += taken
            self._notes += faults
        return tuple(chunks), tuple(samples)

    def _judge(self, reports: dict[str, Report], *, linked: bool) -> None:
        """Decide whether the attempt is lost: its supervisor is dead, or has not answered for too long."""
        now, head = time.monotonic(), self._readers[self._head]
        if self._lost:
            return
        if not linked and self._reach is None and self._link.gone:
            self._lost = self._link.gone
        elif not linked and now - self._linked_at > self._waits.head:
            self._lost = f"{HEAD} has not answered for {now - self._linked_at:.0f} s: {self._trouble}"
        elif self._died is not None:
            since, reason = self._died
            # Another actor has read its last output, or cannot.
            if self._head in reports or now - since > self._waits.last_words:
                self._lost = reason
        elif linked and head.silent_s > self._waits.supervisor:
            self._lost = f"the attempt's supervisor on {head.name} has not answered for {head.silent_s:.0f} s"

    def _silent(self, *, linked: bool) -> tuple[Silence, ...]:
        if not linked:
            seconds = time.monotonic() - self._linked_at
            return (Silence(name=HEAD, state=State.UNKNOWN, seconds=seconds, head=True),)
        if self._died is not None:
            return ()
        tables = self._surveyor
        head = Silence(name=HEAD, state=State.BUSY, seconds=tables.silent_s, head=True, reason=tables.trouble)
        return head, *silences_of(self._readers, head=self._head, deaf=self._deaf)

    def _exit(self, reports: dict[str, Report], *, heard: bool) -> Exit | None:
        head = reports.get(self._head)
        if head is None or head.exit is None:
            return None
        silent = {node for node, reader in self._readers.items() if reader.used and node not in reports}
        alive = sum(report.alive for report in reports.values()) + len(silent)
        ended = self._harvest.publish(head.exit, heard=heard, alive=alive)
        if ended is None:
            self._surveyor.hurry()  # a job that failed early may be missing from the last reading
        elif ended.code != 0 and (gone := sorted(self._readers[node].name for node in silent & self._deaf)):
            self._lost = f"node {', '.join(gone)} does not answer, nor does Ray's own process there"
            return None  # the framework failed because of it
        return ended

    @property
    def _deaf(self) -> frozenset[str]:
        return self._survey.deaf if self._survey is not None else frozenset()

    # ------------------------------------------------------------------ ending

    def stop(self, *, grace_s: float) -> float:
        """Stop the attempt on every node: its process group, Ray job, then all processes with its marker."""
        import ray

        begun = time.monotonic()
        if not self._link.answers():
            raise Unreachable(f"{HEAD} does not answer")  # the next start, or `sweep`, kills what is left
        try:
            self._end_everywhere(grace_s)
        except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
            self._notes.append(f"the attempt could not be ended everywhere: {first_line(error)}")
        return time.monotonic() - begun

    def _end_everywhere(self, grace_s: float) -> None:
        asked = set(self._readers) - self._stopping
        answering = set(self._ask("begun", nodes=asked, timeout_s=self._waits.replace))
        patience_s = grace_s + self._waits.end
        if self._head in answering:
            self._stopping = {self._head}  # until it answers; a second stop request may shorten this
            self._stopping -= set(
                self._ask("stop_child", nodes={self._head}, timeout_s=patience_s, grace_s=grace_s)
            )
        survey = self._surveyor.fresh(within_s=self._waits.answer)
        jobs = survey.jobs if survey is not None else self._survey.jobs if self._survey is not None else ()
        if survey is not None:
            remove_leftovers(jobs)  # before their processes: Ray restarts detached actors
        polite = self._head not in answering  # the framework has not received SIGTERM yet
        self._end(answering, survey, grace_s=grace_s if polite else min(grace_s, STRAGGLER_GRACE_S))
        if survey is not None and remove_leftovers(jobs):
            self._end(answering, survey, grace_s=0.0)

    def _end(self, answering: set[str], survey: Survey | None, *, grace_s: float) -> None:
        """Kill the processes with the marker on every node, through its actor or else a task."""
        import ray

        task = ray.remote(num_cpus=0, max_retries=0)(end_attempt)
        name = f"{self._posts.run}/{self._posts.attempt}"
        nodes = survey.nodes if survey is not None else {}
        asked = {node: self._readers[node].actor.end.remote(grace_s=grace_s) for node in answering}
        asked |= {
            node: task.options(**on_node(nodes[node])).remote(name, grace_s=grace_s)
            for node in nodes
            if node not in answering
        }
        answers = wait_once(asked, timeout_s=grace_s + self._waits.end, waits=self._waits)
        for node, reader in self._readers.items():
            if isinstance(answers.get(node, TimeoutError()), Exception):
                note = f"node {reader.name} does not answer: what runs there could not be ended"
                self._notes += [note] if note not in self._notes else []

    def _ask(
        self, method: str, *, timeout_s: float, nodes: set[str] | None = None, **arguments: object
    ) -> dict[str, Any]:
        """Return the answers that arrive in time."""
        asked = {
            node: getattr(reader.actor, method).remote(**arguments)
            for node, reader in self._readers.items()
            if reader.actor is not None and (nodes is None or node in nodes)
        }
        answers = wait_once(asked, timeout_s=timeout_s, waits=self._waits)
        return {node: answer for node, answer in answers.items() if not isinstance(answer, Exception)}

    def drain(self, *, timeout_s: float) -> Drain:
        """Wait until no node holds memory of the attempt; the result names nodes that do not answer."""
        import ray

        begun = time.monotonic()
        if not self._link.answers():
            return Drain(clear=False, seconds=0.0, unknown=self._link.gone or f"{HEAD} does not answer")
        try:
            survey = self._surveyor.fresh(within_s=self._waits.answer)
            if survey is not None:
                self._reconcile(survey)
            return drain(
                self._residues,
                timeout_s=timeout_s,
                end=self._end_rest,
                largest_stranger=self._largest_stranger,
                enough_share=self._enough_share,
                silent=lambda: tuple(
                    self._readers[node].name for node in self._residues_asked if self._readers[node].used
                ),
            )
        except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
            unknown = f"the Ray cluster cannot be reached: {first_line(error)}"
            return Drain(clear=False, seconds=time.monotonic() - begun, unknown=unknown)

    def _end_rest(self) -> None:
        self._ask("end", timeout_s=self._waits.end, grace_s=0.0)
        self._residues_asked.clear()  # answers to earlier questions are outdated

    def _residues(self) -> tuple[Residue, ...]:
        """Return what the nodes still hold; nodes left in `_residues_asked` have not answered."""
        asked = {
            node: self._residues_asked.get(node) or reader.actor.residue.remote(reader.start.baseline)
            for node, reader in self._readers.items()
            if reader.actor is not None and reader.start is not None
        }
        answers = self._await(asked, timeout_s=self._waits.answer)
        self._residues_asked = {node: asked[node] for node in asked if node not in answers}
        for node, answer in answers.items():
            if has_died(answer):
                self._readers[node].lose()
        return tuple(
            replace(answer, touched=answer.touched or self._readers[node].used)
            for node, answer in answers.items()
            if isinstance(answer, Residue)
        )

    def _largest_stranger(self, name: str) -> ProcessHold | None:
        nodes = {node for node, reader in self._readers.items() if reader.name == name}
        answers = self._ask("largest_stranger", nodes=nodes, timeout_s=self._waits.answer)
        return next(iter(answers.values()), None)

    def leave(self) -> None:
        """Stop querying Ray; the attempt continues."""
        self._surveyor.close()

    def release(self) -> None:
        """Release the attempt's actors; processes that still run end."""
        import ray

        self.leave()
        try:
            if self._link.answers() and self._surveyor.silent_s < self._waits.notice:
                self._posts.dismiss()
                return
        except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
            self._trouble = first_line(error)
        self._give_up(self)
