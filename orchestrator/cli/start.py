"""The ways a run begins: here, in the background, or as a Ray job."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import msgspec

from autotune.launchers import frameworks
from autotune.orchestrator.cli.launch_options import LaunchOptions
from autotune.orchestrator.cli.options import Options
from autotune.orchestrator.config.loader import assumed, parse, read_text
from autotune.orchestrator.config.overrides import override, with_edits
from autotune.orchestrator.config.schema import LITERAL
from autotune.orchestrator.config.yaml_edit import Edit, edited
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.journal import owner
from autotune.policies.values.command import Command
from autotune.policies.values.job import Job
from autotune.policies.values.value import Value

_DRIVER_START_S = 30.0


class Prepared(Value, frozen=True, kw_only=True):
    """A job that is ready to run: its text with the command line's options in place, and what it says."""

    text: str
    job: Job
    request: directory.RunRequest


def prepare(launch_options: LaunchOptions) -> Prepared:
    """Return the job of a file with the options of the command line applied."""
    text = read_text(launch_options.job_file)
    job = parse(text, file=str(launch_options.job_file))
    edits = [
        Edit(("settings", key), value, "--set")
        for key, value in override(job, launch_options.overrides).items()
    ]
    edits += [
        Edit((section, key), value, f"--{key}")
        for section, key, value in (
            ("recovery", "relaunches", launch_options.relaunches),
            ("search", "trials", launch_options.trials),
            ("search", "duration", launch_options.duration),
        )
        if value is not None
    ]
    return Prepared(
        text=edited(text, edits, literal=LITERAL), job=with_edits(job, edits), request=launch_options.request
    )


def first_command(job: Job) -> Command:
    """Return the command of the first attempt, as far as it is known before a cluster is."""
    framework = frameworks.find(job.framework)
    knobs = framework.profile(job, assumed(job)).knobs
    return framework.command(job, knobs, run="dry-run", attempt=1, resume=job.resume)


def begin(launch_options: LaunchOptions, *, options: Options) -> ExitCode:
    """Begin a run in the way that the command line asks for."""
    prepared = prepare(launch_options)
    if launch_options.submit and launch_options.detach:
        raise click.UsageError("--submit runs elsewhere already; leave out --detach")
    if launch_options.dry_run:
        show(prepared, as_json=options.json)
    elif launch_options.submit:
        submit(prepared, url=launch_options.submit, options=options)
    elif launch_options.detach:
        detach(prepared, options=options)
    else:
        return launch(prepared, options=options)
    return ExitCode.OK


def show(prepared: Prepared, *, as_json: bool) -> None:
    """Print the first command without any effect."""
    command = first_command(prepared.job)
    if as_json:
        shown = msgspec.structs.replace(
            command, argv=directory.shown_argv(command), env=directory.masked(prepared.job).env
        )
        click.echo(msgspec.json.encode(shown))
    else:
        click.echo(directory.script(command, python=prepared.job.python), nl=False)
        click.echo("Nothing was launched.", err=True)


def launch(prepared: Prepared, *, options: Options) -> ExitCode:
    """Run a job here, to its end."""
    from autotune.orchestrator.cli import drive

    if drive.under_ray_job() and not options.runs_dir.is_absolute():
        raise Failure(
            "the runs folder must be absolute under `ray job submit`: a job's working directory vanishes",
            hint="pass --runs-dir /shared/runs",
            code=ExitCode.USAGE,
        )
    run = directory.create(options.runs_dir, job_text=prepared.text, request=prepared.request)
    return drive.drive(run, options=options, job=prepared.job)


def detach(prepared: Prepared, *, options: Options) -> None:
    """Start a run that goes on without this terminal: a daemon, or a job of an external cluster."""
    address = prepared.job.cluster.address
    if address not in (None, "local"):
        submit(prepared, url=dashboard(address), options=options)
        return
    run = directory.create(options.runs_dir, job_text=prepared.text, request=prepared.request)
    log = run.path / "driver.log"
    argv = [
        sys.executable,
        "-P",  # a folder named autotune where the user stands is not this package
        "-m",
        "autotune.orchestrator.cli",
        "--runs-dir",
        str(options.runs_dir),
        "resume",
        run.id,
    ]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=descriptor, stderr=descriptor, start_new_session=True
        )
    finally:
        os.close(descriptor)
    until = time.monotonic() + _DRIVER_START_S
    while owner(run.path) is None:
        if child.poll() is not None or time.monotonic() > until:
            raise Failure(
                f"the background driver did not start; see `{log}`", hint=f"`autotune resume {run.id}`"
            )
        time.sleep(0.05)
    _follow_up(run.id, f"run {run.id} goes on in the background (pid {child.pid})", options)


def dashboard(address: str) -> str:
    """Return the URL of a cluster's Ray Jobs API, asking the cluster itself."""
    from ray.dashboard.utils import ray_address_to_api_server_url

    try:
        url: str = ray_address_to_api_server_url(address)
    except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
        raise Failure(
            f"cannot reach Ray at {address}: {_first_line(error)}",
            hint="start the cluster, or pass --submit URL",
        ) from None
    return url


def submit(prepared: Prepared, *, url: str, options: Options) -> None:
    """Start a run as a Ray job."""
    if not options.runs_dir.is_absolute():
        raise Failure(
            "the runs folder must be absolute with --submit: a job's working directory vanishes",
            hint="pass --runs-dir /shared/runs",
            code=ExitCode.USAGE,
        )
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray").setLevel(logging.WARNING)  # it tells about uploads
    here = Edit(("workdir",), prepared.job.workdir, "where it was submitted")
    text = edited(prepared.text, [here], literal=LITERAL)
    python, runs_dir = shlex.quote(sys.executable), shlex.quote(str(options.runs_dir))
    request = prepared.request
    arguments = f"--runs-dir {runs_dir} {request.mode} job.yaml --policy {request.policy}"
    entrypoint = (
        f"if {python} -P -c 'import autotune.orchestrator' 2>/dev/null; "
        f"then exec {python} -P -m autotune.orchestrator.cli {arguments}; else exec autotune {arguments}; fi"
    )
    try:
        with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
            (Path(folder) / "job.yaml").write_text(text)
            client = JobSubmissionClient(url)
            submission = client.submit_job(
                entrypoint=entrypoint,
                runtime_env={"working_dir": folder},
                metadata={"name": prepared.job.name},
            )
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        raise Failure(
            f"cannot submit to {url}: {_first_line(error)}", hint="is this the cluster's dashboard?"
        ) from None
    click.echo(f"submitted as Ray job {submission}; its run will be in {options.runs_dir}", err=True)
    click.echo(f"  ray job logs --address {url} --follow {submission}   follows it", err=True)
    click.echo(f"  autotune --runs-dir {options.runs_dir} status   shows it", err=True)
    click.echo(msgspec.json.encode({"submission": submission}) if options.json else submission)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _follow_up(run: str, words: str, options: Options) -> None:
    click.echo(words, err=True)
    for verb, what in (("status", "shows it"), ("stop", "ends it")):
        click.echo(f"  autotune {verb} {run}   {what}", err=True)
    if options.json:
        click.echo(msgspec.json.encode({"run": run}))
    else:
        click.echo(run)
