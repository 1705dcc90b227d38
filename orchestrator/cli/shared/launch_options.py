"""The options of the commands that begin a run, as one value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from autotune.orchestrator.cli.shared.options import Options, file_names, given, knob_settings

if TYPE_CHECKING:
    from autotune.orchestrator.run.directory import RunRequest


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A call of `launch`, `rehearse` or `search`."""

    job_file: Path = Path()
    command: tuple[str, ...] = ()  # instead of a job file
    options: Options = msgspec.field(default_factory=Options)
    request: RunRequest
    dry_run: bool = False
    detach: bool = False
    submit: str | None = None
    continued: bool = False


_OPTIONS = (
    click.argument(
        "source",
        metavar="job.yaml | -- COMMAND...",
        nargs=-1,
        required=True,
        type=click.UNPROCESSED,
        shell_complete=file_names,
    ),
    click.option(
        "-n",
        "--dry-run",
        is_flag=True,
        help="Print the first command and start nothing.",
    ),
    click.option(
        "--detach",
        is_flag=True,
        help="Return at once; the run continues in the background.",
    ),
    click.option(
        "--submit",
        metavar="URL",
        help="Submit as a Ray job to the cluster whose dashboard is at URL.",
    ),
    click.option(
        "--set",
        "overrides",
        metavar="knob=value",
        multiple=True,
        shell_complete=knob_settings,
        help="Set a knob of the job; can be repeated.",
    ),
    click.option(
        "--continue",
        "continued",
        is_flag=True,
        help="Continue this job's newest run, or start one: for jobs that are requeued or restarted.",
    ),
    click.option(
        "--relaunches",
        type=click.IntRange(min=0),
        metavar="N",
        help="Maximum number of relaunches after failures of the job.",
    ),
    click.option(
        "--policy",
        type=click.Choice(["estimate", "ladder"]),
        default="estimate",
        help="How the next configuration is chosen: by the memory estimate, or by the remedies' fixed order.",
    ),
)


def launching(mode: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options shared by `launch`, `rehearse` and `search`, and begin the run when called.

    The decorated function is never called; it only provides the command's help.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def wished(
            *,
            source: tuple[str, ...],
            policy: str,
            overrides: tuple[str, ...],
            relaunches: int | None,
            trials: int | None = None,
            duration: str | None = None,
            rehearse: bool = False,
            **written: Any,
        ) -> None:
            from autotune.orchestrator.cli.shared import start
            from autotune.orchestrator.run.directory import Mode, RunRequest
            from autotune.policies.values.events import Policy

            request = RunRequest(
                mode=Mode(mode),
                policy=Policy(policy),
                overrides=overrides,
                relaunches=relaunches,
                trials=trials,
                duration=duration,
                rehearse=rehearse or mode == Mode.REHEARSE,
            )
            context = click.get_current_context()
            job: dict[str, Any] = {"command": source}
            if source[0] in context.obj:  # the words before `--`
                job = {"job_file": Path(source[0])}
                if extra := " ".join(source[1:]):
                    raise click.UsageError(f"Got unexpected extra argument ({extra}); `--` begins a command")
            call = LaunchOptions(options=given(context), request=request, **job, **written)
            context.exit(start.begin(call))

        for add in reversed(_OPTIONS):
            wished = add(wished)
        return wished

    return decorate
