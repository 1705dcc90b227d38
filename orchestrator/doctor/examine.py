"""Examine a machine, its cluster and a job, and collect the checks."""

from __future__ import annotations

import platform
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from autotune.launchers import frameworks
from autotune.launchers.base import Unreachable
from autotune.launchers.packages import DISTRIBUTION, absence, how_to_install, missing, version_of
from autotune.launchers.runners.cluster.connection import connect, disconnect, existing
from autotune.launchers.runners.cluster.examine import Answer, examine_nodes
from autotune.launchers.runners.cluster.internals import growth
from autotune.launchers.runners.cluster.timeouts import WAITS
from autotune.launchers.runners.node.examination import IMPORT_S, Examination, examine, folder_facts
from autotune.orchestrator.annotate.child import Child, absent
from autotune.orchestrator.cluster_fit import wait_s, with_gpu_memory
from autotune.orchestrator.config.loader import assumed
from autotune.orchestrator.doctor.check import Check, Examined, failed, warned
from autotune.orchestrator.doctor.job import (
    NodeChecks,
    cluster_checks,
    cluster_of,
    examination_of,
    first_command,
    node_checks,
    settings_checks,
    weighed,
)
from autotune.orchestrator.doctor.machine import machine_checks
from autotune.orchestrator.notify.channels import channels, faults
from autotune.orchestrator.run.log_parts import LIMIT_BYTES
from autotune.orchestrator.units import counted, show_duration, show_gib
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Profile

NODE_S = WAITS.start + IMPORT_S  # seconds to wait for a node's answer


def examine_all(job: Job | None, *, runs_dir: Path, node_s: float = NODE_S) -> Examined:
    """Return all checks of this machine, its cluster and a job; nothing is started on a GPU.

    A node that does not answer within `node_s` seconds is a failed check.
    """
    profile = None
    wanted = Examination()
    if job is not None:
        framework = frameworks.find(job.framework)
        expected = assumed(job)
        profile = framework.profile(with_gpu_memory(job, expected), expected)
        wanted = examination_of(job, framework, profile)
    address, answers, nodes, grows = _ask(job, wanted, node_s=node_s)
    checks = list(nodes)
    facts = tuple((each.facts, each.gpus) for each in answers if each.facts is not None)
    if job is not None and address and facts:
        limit_s = wait_s(job, grows=grows)
        awaited = show_duration(limit_s) if limit_s is not None and address != "local" else ""
        checks += cluster_checks(job, cluster_of(address, facts), awaited=awaited)
    checks.append(_logs(runs_dir, job))
    checks += _of_nodes(answers, job, profile)
    if job is not None and profile is not None:
        checks += settings_checks(job, frameworks.find(job.framework), profile)
        checks += _notifications(job)
        checks += _annotations(job)
    return Examined(
        job=job.name if job is not None else "",
        address=address,
        nodes=len(answers) if address else 0,
        checks=tuple(checks),
    )


def _ask(
    job: Job | None, wanted: Examination, *, node_s: float
) -> tuple[str, tuple[Answer, ...], tuple[Check, ...], bool]:
    """Return the cluster's address, its nodes' answers, its own check, and whether it can start nodes."""
    if absent := missing(["ray"]):
        check = failed("cluster", f"a launch {absence(absent)}", hint=how_to_install(absent))
        return "", _here(wanted), (check,), False
    address = job.cluster.address if job is not None else "auto"
    if address == "local":
        own = Check(name="cluster", what="a launch starts its own Ray here")
        return "local", _here(wanted), (own,), False
    if address is None and existing(any_running=False) is None:
        note = warned(
            "cluster",
            "no Ray cluster is running here; a launch would use only this machine",
            hint="set `cluster: {address: local}` if this is intended; otherwise start the cluster",
        )
        return "local", _here(wanted), (note,), False
    try:
        connection = connect(address)
        try:
            answers = examine_nodes(wanted, timeout_s=node_s)
            grows = bool(growth().grows)
        finally:
            disconnect(connection)
    except Unreachable as unreachable:
        unanswered = failed("cluster", unreachable.message, hint=unreachable.hint)
        return "", _here(Examination()), (unanswered,), False  # this machine may not be a node of the job
    count = counted(len(answers), "node")
    starts = "; its autoscaler starts nodes" if grows else ""
    result = Check(name="cluster", what=f"{connection.address} answers, {count}{starts}")
    return connection.address, answers, (result,), grows


def _here(wanted: Examination) -> tuple[Answer, ...]:
    """Return the facts of this machine."""
    facts = examine(wanted)
    return (Answer(node=socket.gethostname(), gpus=len(facts.cards), facts=facts),)


def _of_nodes(answers: tuple[Answer, ...], job: Job | None, profile: Profile | None) -> Iterator[Check]:
    nodes = [NodeChecks(each.gpus, tuple(_of_node(each, job, profile))) for each in answers]
    if job is None or profile is None:
        yield from (check for node in nodes for check in node.checks)
    else:
        placed = any(node.gpus for node in nodes)
        native = first_command(job, frameworks.find(job.framework), profile).ray_native
        # As in the runner: the supervisor is on the head, or on the first of the nodes that Ray reserves.
        yield from weighed(nodes, needed=job.cluster.nodes, supervisor=None if placed and not native else 0)
    yield from _differing(answers)


def _differing(answers: tuple[Answer, ...]) -> Iterator[Check]:
    """Yield warnings if GPUs or drivers differ between nodes."""
    cards = {card.name for each in answers if each.facts for card in each.facts.cards}
    drivers = {each.facts.driver for each in answers if each.facts and each.facts.cards}
    for name, versions in (("gpus", cards), ("driver", drivers)):
        if len(versions) > 1:
            yield warned(
                name,
                f"the nodes differ: {', '.join(sorted(versions))}",
                hint="the slowest GPU sets the speed of collectives, the smallest memory limits every rank",
            )


def _of_node(answer: Answer, job: Job | None, profile: Profile | None) -> Iterator[Check]:
    for check in _checks_of(answer, job, profile):
        yield msgspec.structs.replace(check, node=answer.node)


def _checks_of(answer: Answer, job: Job | None, profile: Profile | None) -> Iterator[Check]:
    if answer.facts is None:
        yield failed(
            "node",
            answer.silence,
            hint="check `ray status` and the node; an attempt would not start there",
        )
        return
    driver = (platform.python_version(), version_of("ray"), version_of(DISTRIBUTION))
    yield from machine_checks(answer.facts, driver=driver, gpus=answer.gpus)
    if job is not None and profile is not None:
        yield from node_checks(answer.facts, job, frameworks.find(job.framework), profile)


def _notifications(job: Job) -> Iterator[Check]:
    """Yield whether notifications can be sent from here, checked without sending one."""
    result = tuple(faults(job.notify, workdir=job.workdir))
    for fault in result:
        what, _, hint = fault.partition("; hint: ")
        yield warned("notify", what, hint=hint)
    ways = channels(job.notify, workdir=job.workdir)
    if ways and not result:
        yield Check(name="notify", what=f"ready: {', '.join(ways)}; no notification was sent")


def _annotations(job: Job) -> Iterator[Check]:
    """Yield whether the packages of the trackers that autotune annotates are installed here."""
    trackers = () if isinstance(job.annotate, str) else job.annotate
    lacking = dict(absent(job, trackers, Child()))
    for tracker, words in lacking.items():
        what, _, hint = words.partition("; hint: ")
        yield warned("annotate", f"{tracker} {what}", hint=hint)
    if ready := [tracker for tracker in trackers if tracker not in lacking]:
        yield Check(name="annotate", what=f"ready: {', '.join(ready)}; nothing was written")


def _logs(runs_dir: Path, job: Job | None) -> Check:
    """Return the check that a run's journal and logs can be written here."""
    folder = folder_facts(str(runs_dir))
    what = f"runs folder {folder.path}: {show_gib(folder.free_bytes)} free"
    if not folder.writable:
        return failed(
            "runs", f"the runs folder {folder.nearest} is not writable", hint="pass another --runs-dir"
        )
    limit = job.log_limit_bytes if job is not None else LIMIT_BYTES
    if folder.free_bytes < limit:
        return warned(
            "runs",
            f"{what}; the logs of a run may take {show_gib(limit)}",
            hint="make room, pass another --runs-dir, or lower `log_limit`",
        )
    return Check(name="runs", what=what)
