"""Drives a run for `launch`, `search` and `resume`: opens the cluster, runs the loop, prints the result."""

from __future__ import annotations

import os
import signal
import sys

import click
import msgspec

from autotune.launchers import frameworks
from autotune.launchers.base import Framework, Runner, Unreachable
from autotune.orchestrator.cli.options import Options
from autotune.orchestrator.clock import Clock
from autotune.orchestrator.config.loader import parse, written
from autotune.orchestrator.driver import reconcile
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.driver.signals import Interrupts, listening
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import calibration_cache, directory, export
from autotune.orchestrator.run.journal import Journal, encode
from autotune.orchestrator.terminal.console import Console
from autotune.orchestrator.units import show_gib
from autotune.policies.estimate.belief.calibration import learned
from autotune.policies.values.events import (
    Accepted,
    Event,
    Finished,
    GaveUp,
    GoalReached,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Progressed,
    Stable,
    Started,
    TrainingCompleted,
    Verdict,
)
from autotune.policies.values.history import fold
from autotune.policies.values.job import Cluster, Job

_CAPACITY_TOLERANCE = 0.03


def open_runner(job: Job, *, before: Cluster | None = None) -> Runner:
    """Return the cluster of a job, the same one as `before`; raises Unreachable."""
    from autotune.launchers.runners.cluster.runner import RayRunner

    spec = job.cluster
    address = spec.address
    if address is None and before is not None:
        address = "local" if before.address == "local" else "auto"
    return RayRunner.open(address=address, nodes=spec.nodes, gpus_per_node=spec.gpus_per_node)


def drive(run: directory.Run, *, options: Options, job: Job | None = None) -> ExitCode:
    """Drive a run from wherever it stands to its end; returns the exit code.

    `job` is what a new run's job file says, where it is known already.
    """
    console = Console(
        sys.stderr,
        runs_dir=options.runs_dir,
        color=options.color,
        quiet=bool(options.quiet),
        verbose=bool(options.verbose),
    )

    def tell(event: Event) -> None:
        if options.json:
            sys.stdout.buffer.write(encode(event) + b"\n")
            sys.stdout.buffer.flush()
        console.print_event(event)
        if isinstance(event, GoalReached):
            assert job is not None
            _export(run, job)

    try:
        with Journal(run.path, tell=tell) as journal, listening(run.path / "stop") as interrupts:
            before = journal.history()
            if before or job is None:
                job = _job(run, before[0] if before else None)
            console.replay(before)
            if before:
                count = sum(isinstance(e, Started) for e in before)
                console.say(f"run {run.id} · {count} attempt{'' if count == 1 else 's'} on record")
            verdict = _drive(run, job, journal, console, interrupts)
            _summarise(run, job, verdict, console)
    finally:
        console.close()
    code = exit_code(verdict)
    if code is ExitCode.OK and not options.json:
        click.echo(str(options.runs_dir / run.id / "stable.yaml"))
    return code


def end(run: directory.Run, *, options: Options) -> None:
    """Stop what a dead driver left running, and record that the run was stopped; raises Failure."""
    console = Console(sys.stderr, runs_dir=options.runs_dir, color=options.color, quiet=True)
    with Journal(run.path) as journal, listening() as interrupts:
        interrupts.note(signal.SIGTERM)
        history = journal.history()
        job = _job(run, history[0] if history else None)
        _drive(run, job, journal, console, interrupts)


def _drive(
    run: directory.Run, job: Job, journal: Journal, console: Console, interrupts: Interrupts
) -> Verdict:
    history = journal.history()
    finished = history[-1] if history else None
    if isinstance(finished, Finished) and isinstance(finished.verdict, (TrainingCompleted, Stable)):
        return finished.verdict
    accepted = history[0] if history else None
    framework = frameworks.find(job.framework)
    try:
        runner = open_runner(job, before=accepted.cluster if isinstance(accepted, Accepted) else None)
    except Unreachable as unreachable:
        if interrupts.by:
            console.say(f"stopped by {interrupts.by} before anything was started")
            console.say(f"hint: `autotune resume {run.id}` continues the run")
            return Interrupted(by=interrupts.by)
        raise _unreachable(unreachable, run) from None
    try:
        note = getattr(runner, "note", "")
        if note:
            console.say(note)
        if not history:
            _accept(run, journal, runner, framework, job)
        context = RunContext(
            journal=journal,
            framework=framework,
            runner=runner,
            clock=Clock(),
            folder=run,
            job=job,
            interrupts=interrupts,
            observer=console,
        )
        verdict = _conduct(context)
    except Unreachable as unreachable:
        raise _unreachable(unreachable, run) from None
    finally:
        runner.close()
    _learn(journal)
    return verdict


def _learn(journal: Journal) -> None:
    """Store the run's calibration of the memory estimate for later runs of such jobs."""
    history = journal.history()
    if not any(isinstance(event, Progressed) for event in history):
        return
    calibration = learned(fold(history))
    if calibration is not None:
        calibration_cache.keep(calibration)


def _conduct(context: RunContext) -> Verdict:
    """Launch or search, as the run was asked for."""
    if context.folder.request.mode is directory.Mode.LAUNCH:
        return reconcile.run(context)
    from autotune.orchestrator.search import controller

    return controller.search(context, exported=lambda: _export(context.folder, context.job))


def _job(run: directory.Run, accepted: Event | None) -> Job:
    if not isinstance(accepted, Accepted):
        return parse(run.job_text, file=str(run.path / "job.yaml"))
    known = written(run.job_text)
    return directory.unmasked(accepted.job, known.env if known is not None else {})


def _accept(run: directory.Run, journal: Journal, runner: Runner, framework: Framework, job: Job) -> None:
    cluster = runner.cluster()
    _match(job, cluster)
    if job.cluster.gpu_memory_bytes is None and cluster.gpu_memory_bytes:
        # Some defaults of a framework follow the size of the card.
        spec = msgspec.structs.replace(job.cluster, gpu_memory_bytes=cluster.gpu_memory_bytes)
        job = msgspec.structs.replace(job, cluster=spec)
    reconcile.accept(
        journal,
        run=run.id,
        job=job,
        profile=framework.profile(job, cluster),
        cluster=cluster,
        versions=versions(),
        mode=run.request.mode,
        policy=run.request.policy,
        recall=calibration_cache.recall,
        now=Clock().now(),
    )


def versions() -> dict[str, str]:
    """Return the versions of Python, autotune, Ray, torch and SGLang, for the journal."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    by_name = {"python": platform.python_version()}
    for name in ("autotune", "ray", "torch", "sglang"):
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:
            by_name[name] = "not installed"
    return by_name


def _match(job: Job, cluster: Cluster) -> None:
    """Raise Failure where the cluster is smaller than the job says, or its GPUs differ."""
    spec = job.cluster
    if spec.nodes > cluster.nodes:
        raise Failure(
            f"the job needs {spec.nodes} nodes; the cluster has {cluster.nodes}",
            hint="lower `cluster.nodes`, or add nodes and launch again",
        )
    if spec.gpus_per_node is not None and spec.gpus_per_node > cluster.gpus_per_node:
        raise Failure(
            f"the job needs {spec.gpus_per_node} GPUs per node; the cluster has {cluster.gpus_per_node}",
            hint="lower `cluster.gpus_per_node`, or remove it to use all GPUs",
        )
    stated, measured = spec.gpu_memory_bytes, cluster.gpu_memory_bytes
    if stated and measured and abs(stated - measured) > _CAPACITY_TOLERANCE * measured:
        raise Failure(
            f"`cluster.gpu_memory` is {show_gib(stated)} in the job; the cluster has {show_gib(measured)}",
            hint="remove it from the job; autotune then measures it",
            code=ExitCode.USAGE,
        )


def _export(run: directory.Run, job: Job) -> None:
    """Write the stable configuration of a run whose job is `job`."""
    history = run.history()
    knobs = export.stable_knobs(history)
    if knobs is not None and isinstance(history[0], Accepted):
        accepted = msgspec.structs.replace(history[0].job, env=job.env)
        export.write(run, history, frameworks.find(job.framework), accepted, knobs)


def _summarise(run: directory.Run, job: Job, verdict: Verdict, console: Console) -> None:
    """Write the stable configuration of a run that succeeded, and say what changed."""
    if not isinstance(verdict, (TrainingCompleted, Stable)):
        return
    _export(run, job)
    history = run.history()
    knobs = export.stable_knobs(history)
    if knobs is not None:
        framework = frameworks.find(job.framework)
        console.summary(export.changes(history, framework, knobs), stable=str(run.path / "stable.yaml"))


def exit_code(verdict: Verdict) -> ExitCode:
    """Return the exit code of a verdict."""
    match verdict:
        case TrainingCompleted() | Stable():
            return ExitCode.OK
        case GaveUp() | NeedsHuman():
            return ExitCode.NO
        case Infrastructure():
            return ExitCode.INFRASTRUCTURE
        case Interrupted(by=by):
            return ExitCode.INTERRUPTED if by in ("user", "SIGINT") else ExitCode.TERMINATED


def _unreachable(error: Unreachable, run: directory.Run) -> Failure:
    resume = f"`autotune resume {run.id}`"
    hint = f"{error.hint}, then run {resume}" if error.hint else f"{resume} continues the run"
    return Failure(error.message, hint=hint)


def under_ray_job() -> bool:
    """Return whether this process is the entry point of a Ray job, whose working directory is temporary."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
