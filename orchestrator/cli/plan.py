"""`autotune plan`."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import msgspec

from autotune.launchers import frameworks
from autotune.launchers.runners.node.host import Card, measure
from autotune.orchestrator.cli.options import Options, given, global_options
from autotune.orchestrator.config.loader import assumed, load
from autotune.orchestrator.planner import plan
from autotune.orchestrator.run import calibration_cache, directory
from autotune.orchestrator.run.command import command_of
from autotune.orchestrator.terminal.plan_table import render_plan
from autotune.orchestrator.terminal.widgets import echo, width_of
from autotune.policies.values.events import Accepted
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs

_ROUNDED = 1.05  # of a card's memory: how far above it people write it
_CODES = """\b
Exit codes:
  0    the plan is printed
  2    the job file or an option is wrong"""


def show(job_file: Path, *, options: Options) -> None:
    """Print the plan of a job file."""
    job = load(job_file)
    framework = frameworks.find(job.framework)

    def shown(accepted: Accepted, knobs: Knobs) -> tuple[str, ...]:
        command = command_of(
            framework, job, knobs, history=(accepted,), run="plan", attempt=1, resume=job.resume
        )
        python = job.python or sys.executable
        return tuple(word.replace("{python}", python) for word in directory.shown_argv(command))

    outcome = plan(job, framework, _cluster(job), recall=calibration_cache.recall, render=shown)
    if options.json:
        click.echo(msgspec.json.encode(outcome))
        return
    whole = render_plan(
        outcome, file=str(job_file), verbose=bool(options.verbose), width=width_of(sys.stdout)
    )
    echo(whole, color=options.color)


def _cluster(job: Job) -> Cluster:
    """Return the cluster as the job describes it, with this machine's sizes where the job can run here."""
    spec = assumed(job)
    if job.cluster.address not in (None, "local"):
        return spec
    here = measure()
    cards = here.cards
    if _lacks(spec, cards):
        return spec
    return msgspec.structs.replace(
        spec,
        gpus_per_node=spec.gpus_per_node or len(cards),
        gpu_memory_bytes=spec.gpu_memory_bytes or min((c.total_bytes for c in cards), default=0),
        host_memory_bytes=spec.host_memory_bytes or here.host_total_bytes,
        gpu_name=here.card_name,
    )


def _lacks(spec: Cluster, cards: tuple[Card, ...]) -> bool:
    """Return whether a job asks for GPUs that this machine does not have, so that it runs elsewhere."""
    largest = max((card.total_bytes for card in cards), default=0)
    return spec.gpus_per_node > len(cards) or spec.gpu_memory_bytes > _ROUNDED * largest


@click.command("plan", epilog=_CODES)
@click.argument("job_file", metavar="job.yaml", type=click.Path(path_type=Path))
@global_options
@click.pass_context
def command(context: click.Context, job_file: Path) -> None:
    """Show the predicted memory peaks, the first command and the remedies in order; start nothing.

    \b
    Example:
      autotune plan job.yaml -v
    """  # noqa: D301 - click reads the backspace
    show(job_file, options=given(context))
