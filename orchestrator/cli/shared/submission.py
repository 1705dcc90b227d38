"""A run as a Ray job of a cluster, submitted to its dashboard."""

from __future__ import annotations

import logging
import shlex
import sys
import tempfile
import time
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import click
import msgspec

from autotune.launchers.base import Unreachable
from autotune.launchers.packages import DISTRIBUTION
from autotune.orchestrator.calls import option_of
from autotune.orchestrator.cli.shared.options import Options
from autotune.orchestrator.config.schema import LITERAL
from autotune.orchestrator.config.yaml_edit import Edit, edited
from autotune.orchestrator.errors import ExitCode, Failure, require
from autotune.orchestrator.run import directory
from autotune.policies.values.value import Value

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from autotune.orchestrator.cli.shared.edit import RequestedJob

_TRIES = 3
_RETRY_S = 2.0


class Submitted(Value, frozen=True, kw_only=True):
    """The answer of `--submit URL --json`."""

    submission: str  # of the Ray job


def dashboard(address: str) -> str:
    """Return the URL of a cluster's Ray Jobs API, asking the cluster itself."""
    from autotune.launchers.runners.cluster.connection import require_head
    from autotune.launchers.runners.cluster.internals import dashboard_url

    try:
        if address != "auto":
            require_head(address)
        return dashboard_url(address)
    except Unreachable as unreachable:
        raise Failure(unreachable.message, hint="start the cluster, or pass --submit URL") from None
    except (ConnectionError, RuntimeError, ValueError, AssertionError) as error:
        raise Failure(
            f"cannot reach Ray at {address}: {_first_line(error)}",
            hint="start the cluster, or pass --submit URL",
        ) from None


def submit(prepared: RequestedJob, *, url: str, options: Options, continued: bool = False) -> None:
    """Start a run as a Ray job."""
    if not options.runs_dir.is_absolute():
        raise Failure(
            "the runs folder must be absolute with --submit: a Ray job's working directory is temporary",
            hint="pass --runs-dir /shared/runs",
            code=ExitCode.USAGE,
        )
    require("`--submit`", "ray")
    if "://" not in url:
        url = dashboard(url)
    from ray.exceptions import RayError
    from ray.job_submission import JobSubmissionClient

    logging.disable(logging.INFO)  # Ray's loggers, each with a level of its own, report uploads
    here = Edit(("workdir",), prepared.job.workdir, "where it was submitted")
    text = edited(prepared.text, [here], literal=LITERAL)
    python, runs_dir = shlex.quote(sys.executable), shlex.quote(str(options.runs_dir))
    request = prepared.request
    arguments = f"--runs-dir {runs_dir} {request.mode} job.yaml --policy {request.policy}"
    arguments += " --rehearse" if request.rehearse and request.mode is directory.Mode.LAUNCH else ""
    arguments += " --no-rehearse" if not request.rehearse and request.mode is directory.Mode.SEARCH else ""
    arguments += " --continue" if continued else ""
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
        click.echo(f"the cluster must define {names}: `env_vars` of its runtime environment do", err=True)
    click.echo(f"submitted as Ray job {submission}; its run will be in {options.runs_dir}", err=True)
    click.echo(f"  ray job logs --address {url} --follow {submission}   follows it", err=True)
    click.echo(f"  autotune status{option_of(options.runs_dir)}   shows it", err=True)
    click.echo(msgspec.json.encode(Submitted(submission=submission)) if options.json else submission)


class _UnansweredError(Exception):
    """Whether a job was accepted could not be asked."""


def _submit_once(client: JobSubmissionClient, submission: str, **job: Any) -> None:
    """Submit a job under an id of ours: however often that is tried, it is one job.

    Raises what the last try raised where the job is not there, _UnansweredError where that is not known.
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
    """Return whether a cluster has a job; None where it does not say."""
    try:
        client.get_job_info(submission)
    except RuntimeError as error:
        return False if "status code 404" in str(error) else None
    except OSError:
        return None
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
