"""Drive a run for `launch`, `search` and `resume`: connect, run the loop, print the result."""

from __future__ import annotations

import math
import platform
import signal
import sys
import traceback
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import msgspec

from autotune.launchers import frameworks
from autotune.launchers.base import Framework, Runner, Unreachable
from autotune.launchers.packages import DISTRIBUTION, NEEDED, version_of
from autotune.launchers.runners.node.agent import SWEEP_GRACE_S, end_run
from autotune.orchestrator import messages
from autotune.orchestrator.annotate.annotator import Annotator
from autotune.orchestrator.cli.shared import connect
from autotune.orchestrator.cli.shared.edit import (
    RequestedJob,
    changed_file,
    changed_job,
    check,
    concerns_training,
    what_next,
)
from autotune.orchestrator.cli.shared.options import Options
from autotune.orchestrator.clock import Clock
from autotune.orchestrator.cluster_fit import with_gpu_memory, with_stated_gpus
from autotune.orchestrator.config import secrets
from autotune.orchestrator.config.loader import assumed, parse, written
from autotune.orchestrator.config.own_code import require_importable
from autotune.orchestrator.driver import reconcile, rehearsal
from autotune.orchestrator.driver.attempt import doubtful, end_doubtful
from autotune.orchestrator.driver.capacity import await_to_measure
from autotune.orchestrator.driver.context import EndingContext, RunContext, require_gone
from autotune.orchestrator.driver.side_task import SideTasks
from autotune.orchestrator.driver.signals import ForcedExit, Interrupts, hangups_ignored, listening
from autotune.orchestrator.errors import ExitCode, Failure, UserError, require
from autotune.orchestrator.notify.courier import Courier
from autotune.orchestrator.report import at_end
from autotune.orchestrator.run import calibration_cache, directory, export
from autotune.orchestrator.run.driver_log import DriverLog
from autotune.orchestrator.run.journal import Journal
from autotune.orchestrator.run_states import display_of, exit_code
from autotune.orchestrator.terminal.console import Console
from autotune.orchestrator.terminal.views import Views
from autotune.orchestrator.terminal.widgets import say
from autotune.orchestrator.units import counted
from autotune.policies.estimate.belief.calibration import learned
from autotune.policies.values.events import (
    Edited,
    Finished,
    History,
    Interrupted,
    Rehearsed,
    Verdict,
)
from autotune.policies.values.history import accepted_of, fold
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.run.view import RunView


def console_of(options: Options) -> Console:
    """Return the console on stderr for a command's options."""
    return Console(
        sys.stderr,
        runs_dir=options.runs_dir,
        color=options.color,
        quiet=bool(options.quiet),
        verbose=bool(options.verbose),
    )


def drive(
    run: directory.RunFolder,
    *,
    options: Options,
    job: Job | None = None,
    edit: RequestedJob | None = None,
    fixed: bool = False,
) -> ExitCode:
    """Start or continue a run and drive it to its end; returns the exit code.

    `job` is the job of a new run if already parsed; `edit` is the user's change since the run ended; with
    `fixed` a failed run continues although its job is unchanged.
    """
    log = DriverLog(run.path)
    console = console_of(options)
    exported = {"stable.yaml": lambda: _export(run, current()), export.CERTIFICATE: lambda: _certify(run)}
    views = Views(console, log, as_json=options.json, exported=exported)
    beside = SideTasks(*(kind(run, say=views.say, warn=views.warn) for kind in (Courier, Annotator)))
    new = job is not None

    def current() -> Job:
        assert job is not None
        return job

    try:
        run.forget_request()
        with (
            listening(run.path / directory.REQUEST, hung_up=views.hang_up) as interrupts,
            beside.outlasting(interrupts),
            Journal(
                run.path,
                tell=beside.after(views.tell),
                say=views.say,
                interrupted=lambda: interrupts.by,
            ) as journal,
            beside.at_work(journal),
        ):
            journal.persist.hurry_s = interrupts.patience_s
            if journal.view.unended:
                journal.persist.patience_s = math.inf  # its training continues meanwhile
            if note := journal.persist(lambda: directory.owner_note(run), path=run.path):
                views.say(note)
            before = journal.history()
            if before or job is None:
                job = journal.persist(lambda: _job(run, before), path=run.path)
            if edit is not None:
                job = edit.job
            views.replay(before)
            if before:
                count = len(journal.view.attempts)
                views.say(f"run {run.id} · {counted(count, 'attempt')} on record")
            beside.begin(job)
            try:
                with _insisted(run, journal, views, interrupts):
                    verdict = _drive(run, job, journal, views, interrupts, edit=edit, fixed=fixed, new=new)
            except (Failure, ForcedExit):
                raise
            except Exception as error:
                _tell_bug(error, run, journal, log)
                raise
            _summarise(run, verdict, views, journal.history())
            is_recorded = bool(journal.history())
            code = exit_code(verdict, journal.history())
    finally:
        views.close()
    with listening(hung_up=views.hang_up) as after:
        name = export.REHEARSED if isinstance(verdict, Rehearsed) else export.STABLE
        if code is ExitCode.OK and not options.json and (run.path / name).exists():
            views.print_line(str(options.runs_dir / run.id / name))
        if is_recorded:
            limit_s = at_end.HURRIED_S if isinstance(verdict, Interrupted) else at_end.LIMIT_S
            views.write_view(
                "report.html",
                lambda: at_end.write(run, limit_s=limit_s, cut=lambda: interrupts.impatient or after.by),
            )
    return code


def resume(
    run: directory.RunFolder, *, options: Options, edited: bool = False, job_file: Path | None = None
) -> ExitCode:
    """Resume a run; with `edited`, also a failed run with the edited job."""
    history = run.history()
    if not edited or not history:
        if file := changed_file(run):
            say(
                f"warning: `{file}` has changed since; run {run.id} continues as it was recorded\n"
                f"hint: `{run.call('resume', '--edit')}` continues it with the change"
            )
        return drive(run, options=options)
    edit = changed_job(run, job_file=job_file)
    check(edit, run)
    return drive(run, options=options, edit=edit, fixed=True)


def end(run: directory.RunFolder, *, options: Options) -> None:
    """End all processes of a run, and record that it was stopped if it is not over.

    Raises Failure if a process is left or a node does not answer.
    """
    console = Console(sys.stderr, runs_dir=options.runs_dir, color=options.color, quiet=True)
    views = Views(console, DriverLog(run.path))
    with (
        listening() as interrupts,
        Journal(run.path, say=views.say, interrupted=lambda: interrupts.by) as journal,
    ):
        interrupts.note(signal.SIGTERM)
        history = journal.history()
        if isinstance(history[-1], Finished) and accepted_of(history).cluster.address == "local":
            require_gone(run, end_run(run.id, grace_s=SWEEP_GRACE_S))  # its Ray ended with its driver
        else:
            job, _ = secrets.filled(accepted_of(history).job)  # unset variables are not needed to stop
            with _insisted(run, journal, views, interrupts):
                _drive(run, job, journal, views, interrupts, ends=True)
        last = journal.history()[-1]
        if isinstance(last, Finished) and not last.gone:
            journal.append(msgspec.structs.replace(last, gone=True))


def _drive(
    run: directory.RunFolder,
    job: Job,
    journal: Journal,
    views: Views,
    interrupts: Interrupts,
    *,
    edit: RequestedJob | None = None,
    fixed: bool = False,
    ends: bool = False,
    new: bool = False,
) -> Verdict:
    history = journal.history()
    finished = history[-1] if history else None
    if isinstance(finished, Finished) and edit is None and not ends:
        code = display_of(finished.verdict).exit_code
        if code is ExitCode.OK or (code is ExitCode.NO and not fixed):
            views.show_end(finished)
            return finished.verdict
    accepted = accepted_of(history) if history else None
    require(f"run {run.id}", *NEEDED[accepted.mode if accepted is not None else run.request.mode])
    framework = frameworks.find(job.framework)
    runner: Runner | None = None
    try:
        with interrupts.cutting():
            # The processes of a local Ray must survive a terminal hangup, too.
            with interrupts.connecting(), hangups_ignored():
                before = accepted.cluster if accepted is not None else None
                runner = connect.open_runner(job, before=before, say=views.say)
            if runner.note:
                views.say(runner.note)
            context = (EndingContext if ends else RunContext)(
                journal=journal,
                framework=framework,
                runner=runner,
                clock=Clock(),
                folder=run,
                job=job,
                interrupts=interrupts,
                observer=views,
            )
            changed = edit is not None or connect.left(runner, before=before) is not None
            if not await_to_measure(context, changed=changed and not ends):
                return _not_started(run, journal, views, interrupts)
            if not history:
                _accept(run, journal, runner, framework, job)
        journal.persist.patience_s = math.inf  # a training continues even if its journal cannot be written
        context = _take_up(context, edit=edit, fixed=fixed)
        if ends and isinstance(finished, Finished):
            end_doubtful(context)
            require_gone(run, runner.end_all(run=run.id))
            verdict = finished.verdict
        else:
            verdict = _conduct(context, views)
    except ForcedExit:
        return _not_started(run, journal, views, interrupts)
    except Unreachable as unreachable:
        if runner is None and interrupts.by and not (ends and doubtful(history)):
            return _not_started(run, journal, views, interrupts)
        kept = not new or bool(journal.history())
        then = ("stop",) if ends else ("resume",) if edit is None else ("resume", "--edit")
        raise _unreachable(unreachable, run, then=then, kept=kept) from None
    finally:
        if runner is not None:
            runner.close()
    views.write_view("the calibration of the estimate", lambda: _learn(journal))
    return verdict


def _not_started(run: directory.RunFolder, journal: Journal, views: Views, interrupts: Interrupts) -> Verdict:
    """Return the verdict of a driver that was stopped before it drove anything, and print what is left."""
    left = journal.view.unended
    if left:
        numbers = ", ".join(f"#{number}" for number in left)
        views.warn(f"attempt {numbers} may still run; `{run.call('stop')}` ends it")
    elif not journal.view.attempts:
        views.say(f"stopped by {interrupts.by} before anything was started")
    views.say(f"hint: `{run.call('resume')}` continues the run")
    return interrupts.verdict


def _insisted(
    run: directory.RunFolder, journal: Journal, views: Views, interrupts: Interrupts
) -> AbstractContextManager[None]:
    """Let a second interrupt end the process, even in the middle of a call, and print what it leaves."""
    known = len(journal.history())

    def slow(left_s: float) -> None:
        views.say(f"second interrupt: killing the job (up to {left_s:.0f} s)")

    def leave() -> None:
        own = journal.history()[known:]
        if not (own and isinstance(own[-1], Finished)):  # otherwise the end is already printed
            _not_started(run, journal, views, interrupts)
        views.close()

    return interrupts.insisted(slow=slow, leave=leave)


def _tell_bug(error: Exception, run: directory.RunFolder, journal: Journal, log: DriverLog) -> None:
    """Write to driver.log, and add to the traceback, what became of the run."""
    fate = "no process of the run is still running"
    if left := journal.view.unended:
        fate = f"attempt #{left[-1]} continues under its supervisor"
    elif unsure := doubtful(journal.history()):
        fate = f"attempt #{unsure[-1]} may still be running; `{run.call('stop')}` makes sure"
    error.add_note(f"run {run.id}: {fate}; `{run.call('resume')}` continues the run")
    log.note("".join(traceback.format_exception(error)).rstrip())


def _learn(journal: Journal) -> None:
    """Store the run's calibration of the memory estimate for later runs of similar jobs."""
    if journal.view.step is None:
        return
    calibration = learned(fold(journal.history()))
    if calibration is not None:
        calibration_cache.keep(calibration)


def _conduct(context: RunContext, views: Views) -> Verdict:
    """Launch or search, by the mode of the run."""
    if accepted_of(context.journal.history()).mode != directory.Mode.SEARCH:
        return reconcile.run(context)
    from autotune.orchestrator.search import whole_search

    return whole_search.search(context, exported=views.export)


def _job(run: directory.RunFolder, history: History) -> Job:
    """Return a run's job with the values of its variables; raises OSError."""
    if not history:
        return parse(run.job_text, file=str(run.path / "job.yaml"), recorded=True)
    recorded = accepted_of(history).job
    with suppress(FileNotFoundError, UnicodeDecodeError):
        recorded = secrets.restored(recorded, written(run.job_text))
    job, missing = secrets.filled(recorded)
    # The courier warns about variables of `notify`.
    if names := list(dict.fromkeys(each.variable for each in missing if each.path[0] != "notify")):
        message = f"the job needs {', '.join(f'`{name}`' for name in names)}, which is not set"
        raise UserError(message, hint=f"export {'=... '.join(names)}=...")
    return job


def _accept(
    run: directory.RunFolder, journal: Journal, runner: Runner, framework: Framework, job: Job
) -> None:
    cluster, request = with_stated_gpus(runner.cluster(), assumed(job)), run.request
    connect.match(job, cluster)
    job = with_gpu_memory(job, cluster)
    profile = framework.profile(job, cluster)
    if cluster.address == "local":  # also where the job names no cluster and none was there
        command = framework.command(job, profile.knobs, run=run.id, attempt=1, resume=job.resume)
        require_importable(job, command)
    reconcile.accept(
        journal,
        run=run.id,
        job=job,
        profile=profile,
        cluster=cluster,
        versions=versions(),
        mode=request.mode,
        policy=request.policy,
        rehearsed=rehearsal.planned(framework, job, request),
        recall=calibration_cache.recall,
        now=Clock().now(),
    )


def versions() -> dict[str, str]:
    """Return the versions of Python, autotune, Ray, torch and SGLang, for the journal."""
    by_name = {"autotune": DISTRIBUTION, "ray": "ray", "torch": "torch", "sglang": "sglang"}
    result = {name: version_of(distribution) or "not installed" for name, distribution in by_name.items()}
    return {"python": platform.python_version(), **result}


def _export(run: directory.RunFolder, job: Job) -> None:
    """Write the proven configuration of a run with job `job`, or remove it if it failed later."""
    history = run.history()
    proven = export.proven(history)
    if proven is None:
        export.withdraw(run)
        return
    name, knobs = proven
    accepted = msgspec.structs.replace(
        accepted_of(history).job,
        env=job.env,
        settings=job.settings,
        command=job.command,
        document=job.document,
        notify=job.notify,
        variables=job.variables,
    )
    export.write(run, history, frameworks.find(job.framework), accepted, knobs, name=name)


def _certify(run: directory.RunFolder) -> None:
    """Write the certificate of the stable configuration."""
    history = run.history()
    knobs = export.stable_knobs(RunView(history))
    if knobs is not None:
        export.write_certificate(run, history, frameworks.find(accepted_of(history).job.framework), knobs)


def _summarise(run: directory.RunFolder, verdict: Verdict, views: Views, history: History) -> None:
    """Write the stable configuration of a successful run; print what changed, or how to continue."""
    code = display_of(verdict).exit_code
    if code in (ExitCode.OK, ExitCode.NO):
        views.export()
    if code is ExitCode.NO:
        views.hint(what_next(run, verdict))
    if code is not ExitCode.OK:
        return
    proven = export.proven(history)
    if proven is not None:
        name, knobs = proven
        views.summary(export.changes(history, knobs), stable=str(run.path / name))


def _unreachable(
    error: Unreachable, run: directory.RunFolder, *, then: tuple[str, ...], kept: bool
) -> Failure:
    if not kept:
        return Failure(error.message, hint=error.hint or "launch again")
    again = f"`{run.call(*then)}`"
    continues = f"{again} tries again" if then == ("stop",) else f"{again} continues the run"
    return Failure(error.message, hint=f"{error.hint}, then run {again}" if error.hint else continues)


def _take_up(context: RunContext, *, edit: RequestedJob | None, fixed: bool) -> RunContext:
    """Record changes of job or cluster; returns the context that the run continues with.

    Raises Failure if the run is to be stopped but its attempt may still run on an unreachable cluster.
    """
    history = context.journal.history()
    left = connect.left(context.runner, before=accepted_of(history).cluster)
    if left is not None and context.interrupts.by and doubtful(history):
        raise Failure(
            f"the Ray cluster of the run, {left.address}, could not be reached; "
            "its processes may still be running",
            hint="start that cluster again, or run "
            f"`{context.folder.call('resume')}` to continue on this one",
        )
    if edit is not None:
        context = _take_edit(context, edit, left=left)
    elif left is not None:
        context = _move(context, left)
    elif fixed and isinstance(history[-1], Finished):
        context.observer.say("job file unchanged; continuing the run")
        context.record(reconcile.resumed(history[-1].attempt))
    return context


def _take_edit(context: RunContext, edit: RequestedJob, *, left: Cluster | None) -> RunContext:
    """Record the user's change; returns the context with the changed job."""
    before = accepted_of(context.journal.history()).profile
    context, row = _on_this_cluster(context, edit.job, left=left, changes=edit.changes)
    knobs, forgets = row.profile.knobs != before.knobs, concerns_training(edit.changes, row.profile)
    context.record(msgspec.structs.replace(row, file=edit.file, knobs=knobs, forgets=forgets))
    context.folder.change(edit.text, edit.request)
    return context


def _move(context: RunContext, left: Cluster) -> RunContext:
    """Record that the run continues on another cluster; returns the context with its GPU memory."""
    stated = written(context.folder.job_text)
    job = context.job if stated is None else msgspec.structs.replace(context.job, cluster=stated.cluster)
    context, row = _on_this_cluster(context, job, left=left, changes={})
    changes = {"cluster.address": (left.address, row.cluster.address)}
    context.record(msgspec.structs.replace(row, changes=changes))
    return context


def _on_this_cluster(
    context: RunContext, job: Job, *, left: Cluster | None, changes: dict[str, tuple[Any, Any]]
) -> tuple[RunContext, Edited]:
    """Return the context of a job on the current cluster, and the journal row that records it."""
    cluster = with_stated_gpus(context.runner.cluster(), assumed(job))
    connect.match(job, cluster)
    if left is not None:
        context.observer.say(
            f"the run was on the Ray cluster at {left.address}; "
            f"it continues on the one at {cluster.address}: {messages.cluster(cluster)}"
        )
    job = with_gpu_memory(job, cluster)
    row = Edited(
        attempt=context.journal.view.last_number,
        job=secrets.masked(job),
        profile=context.framework.profile(job, cluster),
        cluster=cluster,
        changes=changes,
    )
    return msgspec.structs.replace(context, job=job), row
