"""Ways to begin a run: in this process, in the background, or as a Ray job."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import click
import msgspec

from autotune.launchers import frameworks
from autotune.launchers.base import Unreachable
from autotune.launchers.packages import DISTRIBUTION, EXTRAS, NEEDED
from autotune.orchestrator import placeholders
from autotune.orchestrator.additions import additions, change_lines, passed_over, printable
from autotune.orchestrator.calls import option_of
from autotune.orchestrator.cli.shared import connect, earlier
from autotune.orchestrator.cli.shared.edit import (
    RequestedJob,
    check,
    digest,
    edit_of,
    identity,
    with_options,
)
from autotune.orchestrator.cli.shared.launch_options import LaunchOptions
from autotune.orchestrator.cli.shared.options import Options
from autotune.orchestrator.cluster_fit import with_gpu_memory
from autotune.orchestrator.config import secrets
from autotune.orchestrator.config.loader import expected_cluster, read_text, written
from autotune.orchestrator.config.own_code import require_importable
from autotune.orchestrator.config.schema import LITERAL
from autotune.orchestrator.config.yaml_edit import Edit, edited
from autotune.orchestrator.driver import rehearsal
from autotune.orchestrator.driver.capacity import NodesMissing
from autotune.orchestrator.errors import ExitCode, Failure, UserError, require
from autotune.orchestrator.planner import first_attempt
from autotune.orchestrator.run import calibration_cache, directory
from autotune.orchestrator.run.lock import UNKNOWN, owner
from autotune.orchestrator.run.script import script
from autotune.orchestrator.run_states import display_of
from autotune.orchestrator.terminal.widgets import folded, say
from autotune.policies.values.command import Addition, Command
from autotune.policies.values.events import Finished, GaveUp, NeedsHuman, Policy
from autotune.policies.values.job import Job
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.value import Value

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_DRIVER_START_S = 30.0
_STATED = ("job_digest", "overrides", "relaunches", "trials", "duration")  # what defines a request's job


class Begun(Value, frozen=True, kw_only=True):
    """The answer of `--detach --json`."""

    run: str  # id of the run, also the name of its folder


def prepare(call: LaunchOptions) -> RequestedJob:
    """Return the job of a file with the options of the command line applied."""
    request, path = call.request, call.job_file
    if call.command:
        file, text = "the job of the command", _text_of(call.command, options=call.options)
    else:
        file, text = str(path), read_text(path)
        name = path.name if under_ray_job() else str(path.absolute())
        request = msgspec.structs.replace(request, job_file=name, job_digest=digest(text))
    lookup = os.environ.get if call.submit is None else _value_or_name
    text, job = with_options(text, file=file, request=request, lookup=lookup, elsewhere=call.dry_run)
    request = msgspec.structs.replace(request, identity=identity(text, job))
    return RequestedJob(text=text, job=job, request=request)


def _text_of(command: tuple[str, ...], *, options: Options) -> str:
    """Return the job file that `init` makes from a command, and print its notes."""
    from autotune.orchestrator.cli.init import drafted, tell
    from autotune.orchestrator.init.job_text import job_text, with_variables

    draft = with_variables(drafted(command))
    tell(draft, output=draft.source, options=options)
    return job_text(draft)


def _value_or_name(variable: str) -> str:
    """Return a stand-in for a variable that only the cluster defines."""
    return os.environ.get(variable) or variable


def first_command(job: Job, request: directory.RunRequest) -> tuple[Command, tuple[Addition, ...]]:
    """Return the command of the first attempt as planned before a cluster is known, as in `plan`.

    Beside it: its differences from the user's own.
    """
    framework, cluster = frameworks.find(job.framework), expected_cluster(job)
    job = with_gpu_memory(job, cluster)
    _, launch = first_attempt(job, framework, cluster, recall=calibration_cache.recall, policy=request.policy)
    knobs, own = launch.knobs, job
    planned = rehearsal.planned(framework, job, request)
    if planned is not None:
        folder = f"{job.workdir}/rehearsals/dry-run/1"
        job = framework.rehearsal(job, folder=folder, part=Part.WORST, longest=planned.forces)
    command = framework.command(job, knobs, run="dry-run", attempt=1, resume=job.resume and planned is None)
    why, otherwise = launch.reason, "a rehearsal has a few steps and its own folder" if planned else ""
    return command, additions(framework, own, knobs, command, why=why, otherwise=otherwise)


def begin(call: LaunchOptions) -> ExitCode:
    """Begin a run as requested on the command line; returns the exit code.

    Raises Failure and click.UsageError if it cannot begin.
    """
    prepared, options = earlier.with_earlier_run(prepare(call), call), call.options
    if call.submit and call.detach:
        raise click.UsageError("--submit already runs in the background; remove --detach")
    if under_ray_job() and (call.submit or call.detach):
        option = "--submit" if call.submit else "--detach"
        raise click.UsageError(f"this command runs as a Ray job already; remove {option}")
    rehearsal.planned(frameworks.find(prepared.job.framework), prepared.job, prepared.request)
    if call.dry_run:
        show(prepared, call)
    elif call.submit:
        submit(prepared, url=call.submit, options=options, continued=call.continued)
    elif call.detach:
        if call.continued:
            raise click.UsageError("--continue waits for the run to end; remove --detach")
        detach(prepared, options=options)
    elif call.continued:
        return proceed(prepared, options=options)
    else:
        return launch(prepared, options=options)
    return ExitCode.OK


def show(prepared: RequestedJob, call: LaunchOptions) -> None:
    """Print the first command without any effect."""
    command, changes = first_command(prepared.job, prepared.request)
    if call.options.json:
        click.echo(msgspec.json.encode(secrets.shown_command(command, prepared.job)))
    else:
        lines = folded("\n".join(change_lines(printable(changes, prepared.job))), 78).splitlines()
        comments = ("added (+), replaced (~) and left out (-) in the job's command:", *lines) if lines else ()
        click.echo(script(command, prepared.job, comments=comments, by_path=True), nl=False)
        job = prepared.job
        edits = placeholders.warnings(job)
        for warning in (*edits, *job.notes, *passed_over(job)):
            say(f"warning: {warning}")
        run = "Fill them in, then run it" if edits else "Run it"
        say(f"Nothing was launched. {run}: {_without_dry_run(call)}")


def _without_dry_run(call: LaunchOptions) -> str:
    """Return the command that starts the run printed by a dry run."""
    request = call.request
    options = [word for each in request.overrides for word in ("--set", each)]
    options += _flags(request)
    for name in ("relaunches", "trials", "duration"):
        if (value := getattr(request, name)) is not None:
            options += [f"--{name}", str(value)]
    source = [*options, "--", *call.command] if call.command else [str(call.job_file), *options]
    return shlex.join(["autotune", request.mode, *source])


def _flags(request: directory.RunRequest) -> tuple[str, ...]:
    """Return the options of a request, other than its mode's defaults, that do not change the job."""
    policy = ("--policy", request.policy) if request.policy is not Policy.ESTIMATE else ()
    if request.rehearse is (request.mode is not directory.Mode.LAUNCH):
        return policy
    return (*policy, "--rehearse" if request.rehearse else "--no-rehearse")


def launch(prepared: RequestedJob, *, options: Options) -> ExitCode:
    """Run a job here, to its end; raises Failure for a runs folder that the run would outlive."""
    from autotune.orchestrator.cli.shared import drive

    _require(prepared)
    if under_ray_job():
        _require_absolute(options, "under `ray job submit`: its working directory is temporary")
    run = directory.create(options.runs_dir, job_text=prepared.text, request=prepared.request)
    try:
        return drive.drive(run, options=options, job=prepared.job)
    except NodesMissing:
        raise  # `resume` waits again
    except Failure:
        directory.discard_unaccepted(run)
        raise


def proceed(prepared: RequestedJob, *, options: Options) -> ExitCode:
    """Continue the newest run of a job or begin one; returns the exit code. Raises Failure as `launch`."""
    from autotune.orchestrator.cli.shared import drive

    if prepared.job.cluster.address != "local":
        why = "with --continue away from `address: local`: a restarted job may start in another folder"
        _require_absolute(options, why)
    run, edit = _run_to_continue(prepared, root=options.runs_dir)
    if run is None:
        return launch(prepared, options=options)
    return drive.drive(run, options=options, edit=edit)


def _require_absolute(options: Options, why: str) -> None:
    if not options.runs_dir.is_absolute():
        raise UserError(f"the runs folder must be absolute {why}", hint="pass --runs-dir /shared/runs")


def _require(prepared: RequestedJob) -> None:
    """Raise Failure if something that the run needs is not installed, before its folder is created."""
    mode, job = prepared.request.mode, prepared.job
    require(f"`{mode}`", *NEEDED[mode])
    if job.framework == "builtin" and job.python is None and job.cluster.address == "local":
        engine = ("sglang",) if job.settings.get("engine", "sglang") == "sglang" else ()
        require("the built-in job", *(m for m in frameworks.find("builtin").modules if m in EXTRAS), *engine)
    elif job.cluster.address == "local":
        command, _ = first_command(job, prepared.request)
        require_importable(job, command)


def _run_to_continue(
    prepared: RequestedJob, *, root: Path
) -> tuple[directory.RunFolder, RequestedJob | None] | tuple[None, None]:
    """Return the run that a job continues, and what its file changes; None for both if a new run begins.

    Raises Failure if an incomplete run began with another job, if its journal is damaged, or if other users
    could have written it.
    """
    asked, latest = prepared.request, None
    for run in _runs_of(prepared, root=root):
        latest = latest or run
        request = run.request
        if asked.identity in (request.identity, request.edited_identity):
            return run, None
        if not request.identity and all(getattr(asked, n) == getattr(request, n) for n in _STATED):
            return run, None  # begun by a release without identities
    history = () if latest is None else latest.history()
    if latest is None or not history:
        return None, None
    request = msgspec.structs.replace(
        latest.request,
        **{name: getattr(asked, name) for name in ("identity", *_STATED)},
        edited_file="",
    )
    edit = edit_of(history, prepared.text, prepared.job, file=asked.job_file, request=request)
    if edit is None:
        return latest, None  # the same job, written differently
    verdict = history[-1].verdict if isinstance(history[-1], Finished) else None
    if verdict is not None and display_of(verdict).exit_code is ExitCode.OK:
        return None, None
    if not isinstance(verdict, GaveUp | NeedsHuman):
        raise UserError(
            f"run {latest.id} of this job is not complete, and `{asked.job_file}` has changed since it began",
            hint=f"`{latest.call('resume', '--edit')}` continues it with the change, "
            f"`{latest.call('resume')}` without; without --continue a new run starts",
        )
    check(edit, latest)
    return latest, edit


def _runs_of(prepared: RequestedJob, *, root: Path) -> Iterator[directory.RunFolder]:
    """Yield the runs with a job's name, begun by the same command from the same file, newest first."""
    asked = prepared.request
    for run in reversed(directory.runs(root)):
        try:
            job = written(run.job_text)
        except (OSError, UnicodeDecodeError):
            continue  # another user's, or not a job
        if job is None or job.name != prepared.job.name:
            continue
        request = run.request
        if (request.job_file, request.mode) == (asked.job_file, asked.mode):
            yield directory.checked(run)


def under_ray_job() -> bool:
    """Return whether this process is the entry point of a Ray job, whose working directory is temporary."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def detach(prepared: RequestedJob, *, options: Options) -> None:
    """Start a daemon, or a job of an external cluster, that outlives this terminal; raises Failure."""
    _require(prepared)
    address = prepared.job.cluster.address
    if address not in (None, "local"):
        submit(prepared, url=dashboard(address), options=options)
        return
    if address == "local":
        connect.match(prepared.job, connect.here())
    run = directory.create(options.runs_dir, job_text=prepared.text, request=prepared.request)
    log = run.path / "driver.log"
    argv = [
        sys.executable,
        "-P",  # a folder named autotune in the working directory is not this package
        *("-m", "autotune.orchestrator.cli", "--runs-dir", str(options.runs_dir)),
        *["--quiet"] * options.quiet,
        *["--verbose"] * options.verbose,
        *("resume", run.id),
    ]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    until = time.monotonic() + _DRIVER_START_S
    while owner(run.path) in (None, UNKNOWN):
        if child.poll() is not None:
            raise Failure(
                f"the background driver did not start; see `{log}`",
                hint=f"`{run.call('resume')}`",
            )
        if time.monotonic() > until:  # a file server may be slow or just mounted
            words = f"run {run.id} is still starting in the background (pid {child.pid}); see `{log}`"
            _follow_up(run, words, options, end=f"kill {child.pid}")  # `stop` would not find a driver yet
            return
        time.sleep(0.05)
    words = f"run {run.id} continues in the background (pid {child.pid})"
    _follow_up(run, words, options, end=run.call("stop"))


def _follow_up(run: directory.RunFolder, words: str, options: Options, *, end: str) -> None:
    say(words)
    for command, what in (
        (run.call("attach"), "shows it"),
        (run.call("logs", "-f"), "follows its log"),
        (end, "ends it"),
    ):
        say(f"  {command}   {what}")
    click.echo(msgspec.json.encode(Begun(run=run.id)) if options.json else run.id)


_TRIES = 3
_RETRY_S = 2.0


class Submitted(Value, frozen=True, kw_only=True):
    """The answer of `--submit URL --json`."""

    submission: str  # of the Ray job


def dashboard(address: str) -> str:
    """Return the URL of a cluster's Ray Jobs API, as reported by the cluster; raises Failure."""
    from autotune.launchers.runners.cluster.connection import require_head
    from autotune.launchers.runners.cluster.internals import dashboard_url

    try:
        if address != "auto":
            require_head(address)
        return dashboard_url(address)
    except Unreachable as unreachable:
        message = unreachable.message
    except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
        message = f"cannot reach Ray at {address}: {_first_line(error)}"
    raise Failure(message, hint="start the cluster, or pass --submit URL")


def submit(prepared: RequestedJob, *, url: str, options: Options, continued: bool = False) -> None:
    """Start a run as a Ray job; raises Failure if Ray does not take it, or whether it did is unknown."""
    _require_absolute(options, "with --submit: a Ray job's working directory is temporary")
    require("`--submit`", "ray")
    if "://" not in url:
        url = dashboard(url)
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    logging.disable(logging.INFO)  # Ray's loggers, each with its own level, report uploads
    here = Edit(("workdir",), prepared.job.workdir, "where it was submitted")
    text = edited(prepared.text, [here], literal=LITERAL)
    python, request = shlex.quote(sys.executable), prepared.request
    call = [request.mode, "job.yaml", *_flags(request), *["--continue"] * continued]
    arguments = shlex.join(["--runs-dir", str(options.runs_dir), *call])
    entrypoint = (
        f"if {python} -P -c 'import autotune.orchestrator' 2>/dev/null; "
        f"then exec {python} -P -m autotune.orchestrator.cli {arguments}; "
        f"elif command -v autotune >/dev/null; then exec autotune {arguments}; "
        f'else echo "error: autotune is not installed on the cluster\'s head node" >&2; '
        f'echo "hint: install {DISTRIBUTION}[ray] there, beside its Ray" >&2; exit {ExitCode.USAGE}; fi'
    )
    submission = f"autotune-{prepared.job.name}-{token_hex(4)}"
    try:
        with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
            (Path(folder) / "job.yaml").write_text(text)
            _submit_once(
                JobSubmissionClient(url),
                submission,
                entrypoint=entrypoint,
                runtime_env={"working_dir": folder},
                metadata={"name": prepared.job.name},
            )
    except _UnansweredError as error:
        raise Failure(
            f"whether {url} accepted Ray job {submission} is not known: {_first_line(error)}",
            hint=f"`ray job status --address {url} {submission}` shows it",
        ) from None
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        hint = "is this the cluster's dashboard?"
        if type(error).__name__ == "AuthenticationError":  # of Ray 2.52 and newer
            hint = "set RAY_AUTH_MODE=token and, without the cluster's ~/.ray/auth_token here, RAY_AUTH_TOKEN"
        raise Failure(f"cannot submit to {url}: {_first_line(error)}", hint=hint) from None
    if prepared.job.variables:
        names = ", ".join(sorted(prepared.job.variables))
        say(f"the cluster must define {names}: `env_vars` of its runtime environment do")
    say(f"submitted as Ray job {submission}; its run will be in {options.runs_dir}")
    say(f"  ray job logs --address {url} --follow {submission}   follows it")
    say(f"  autotune status{option_of(options.runs_dir)}   shows it")
    click.echo(msgspec.json.encode(Submitted(submission=submission)) if options.json else submission)


class _UnansweredError(Exception):
    """It is unknown whether a job was accepted."""


def _submit_once(client: JobSubmissionClient, submission: str, **job: Any) -> None:
    """Submit a job with a fixed id, so that retries cannot submit it twice.

    Raises the error of the last try if the job was not accepted, _UnansweredError if that is unknown.
    """
    for left in reversed(range(_TRIES)):
        try:
            client.submit_job(submission_id=submission, **job)
        except (RuntimeError, OSError) as error:  # requests' errors are OSErrors
            there = _is_there(client, submission)
            if there:
                return
            refused = isinstance(error, RuntimeError)
            if there is False and (refused or not left):
                raise
            if not left:
                raise _UnansweredError(str(error)) from None
            time.sleep(_RETRY_S)
        else:
            return


def _is_there(client: JobSubmissionClient, submission: str) -> bool | None:
    """Return whether a cluster has a job; None if it does not answer."""
    try:
        client.get_job_info(submission)
    except RuntimeError as error:
        return False if "status code 404" in str(error) else None
    except OSError:
        return None
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
