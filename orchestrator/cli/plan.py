"""`autotune plan`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click
import msgspec

from autotune.launchers import frameworks
from autotune.orchestrator import placeholders
from autotune.orchestrator.additions import additions, passed_over, printable
from autotune.orchestrator.cli.shared.options import (
    Options,
    card_names,
    file_names,
    framework_names,
    given,
    global_options,
    knob_settings,
    known_framework,
)
from autotune.orchestrator.cli.shared.release_text import render_other_release
from autotune.orchestrator.cluster_fit import on_gpus, with_gpu_memory
from autotune.orchestrator.config.cards import Gpus, parse_gpus
from autotune.orchestrator.config.loader import expected_cluster, load_unfinished, parse_elsewhere
from autotune.orchestrator.config.overrides import override, with_edits
from autotune.orchestrator.config.secrets import shown_command
from autotune.orchestrator.config.yaml_edit import Edit
from autotune.orchestrator.errors import ExitCode, Failure, JobErrors, UserError
from autotune.orchestrator.planner import Plan, device_notes, plan
from autotune.orchestrator.run import calibration_cache
from autotune.orchestrator.run.script import command_of
from autotune.orchestrator.terminal.plan_table import render_plan, verdict
from autotune.orchestrator.terminal.widgets import echo, rendered, say, table, width_of
from autotune.policies.explain.advice import LoggedFailure
from autotune.policies.values.command import Addition
from autotune.policies.values.events import Accepted
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.value import Value

_MOST_PER_NODE = 16  # GPUs; more probably mean several nodes, or a rack
_PREDICTED = "as written the job is predicted not to fit"
_OFFERED = ("verl", "slime")  # suggested if a framework's job does not fit
_CODES = """\b
Exit codes:
  0    the plan is printed
  1    with --model: no configuration is predicted to fit
  2    the job file or an option is wrong"""


class StartingJob(Value, frozen=True, kw_only=True):
    """The answer of `autotune plan --model --json`."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    job: str  # the text of the job file
    step_s: float | None  # predicted seconds per step; null if the GPU's speed is unknown
    host_bytes: int  # predicted peak of host memory per node


class PlannedGpus(Value, frozen=True, kw_only=True):
    """What is planned for one of several clusters."""

    gpus: str  # as written in `--gpus`
    verdict: str  # in one sentence; empty if the job has no layout for these GPUs
    refused: str = ""  # why it has no layout
    plan: Plan | None = None  # without its remedies


class Comparison(Value, frozen=True, kw_only=True):
    """The answer of `autotune plan job.yaml --gpus 4xH100,8xH100 --json`."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    clusters: tuple[PlannedGpus, ...]  # in the order of `--gpus`


def show(
    job_file: Path,
    *,
    gpus: str | None,
    overrides: tuple[str, ...],
    options: Options,
    log: str | None = None,
    against: str | None = None,
) -> None:
    """Print the plan of a job file; `log` is the log of a failed attempt of the job as written.

    With `against`, another release such as `verl==0.8.0`, print what that release changes.
    """
    failure = None if log is None else _failure_in(log)
    job, missing = load_unfinished(job_file)
    as_written = job
    if overrides:
        settings = override(job, overrides)
        job = with_edits(job, [Edit(("settings", name), value, "--set") for name, value in settings.items()])
    if gpus is not None and "," in gpus:
        compare(job, gpus.split(","), missing=missing, options=options)
        return
    job, resized = with_cards(job, cards_of(gpus))
    if against is not None:
        compare_releases(job, against, options=options)
        return
    edits = placeholders.warnings(job)
    failed = with_cards(as_written, cards_of(gpus))[0] if overrides else None
    outcome = outcome_of(job, missing=(*edits, *missing, *resized), failure=failure, failed=failed)
    outcome = msgspec.structs.replace(outcome, log=log or "")
    if options.json:
        click.echo(msgspec.json.encode(outcome))
        return
    whole = render_plan(
        outcome,
        file=str(job_file),
        needs_edit=bool(edits),
        verbose=bool(options.verbose),
        width=width_of(sys.stdout),
        overrides=overrides,
    )
    echo(whole, color=options.color, folds=False)


def compare(job: Job, clusters: list[str], *, missing: tuple[str, ...], options: Options) -> None:
    """Print the verdict on a job for each of several clusters; raises Failure for an unknown GPU."""
    cards = [(written.strip(), cards_of(written)) for written in clusters]
    rows = [_planned_gpus(job, name, each) for name, each in cards]
    if options.json:
        click.echo(msgspec.json.encode(Comparison(clusters=tuple(rows))))
        return
    lines = table(((row.gpus, row.verdict or f"not possible: {row.refused}") for row in rows), wrap={1: 30})
    warnings = [f"warning: {each}" for each in missing]
    echo("\n".join([*warnings, rendered(lines, width=width_of(sys.stdout))]), color=options.color)


def _planned_gpus(job: Job, name: str, cards: Gpus | None) -> PlannedGpus:
    try:
        resized, changes = with_cards(job, cards)
    except Failure as failure:
        return PlannedGpus(gpus=name, verdict="", refused=str(failure))
    plan = outcome_of(resized, missing=changes, remedies=False)
    return PlannedGpus(gpus=name, verdict=verdict(plan, names_gpus=False), plan=plan)


def compare_releases(job: Job, requirement: str, *, options: Options) -> None:
    """Print what another release changes for a job; raises Failure if it is not a release of its packages."""
    from autotune.orchestrator.other_release import compared, with_release

    framework, cluster = frameworks.find(job.framework), expected_cluster(job)
    job = with_gpu_memory(job, cluster)
    profile = framework.profile(job, cluster)
    package, version, other = with_release(job, framework, profile.engine, requirement)
    plans = outcome_of(job, remedies=False), outcome_of(other, remedies=False)
    difference = compared(
        framework,
        package,
        version,
        jobs=(job, other),
        plans=plans,
        profiles=(profile, framework.profile(other, cluster)),
        verdicts=(verdict(plans[0]), verdict(plans[1])),
    )
    if options.json:
        click.echo(msgspec.json.encode(difference))
        return
    echo(render_other_release(difference, width=width_of(sys.stdout)), color=options.color)


def _failure_in(log: str) -> LoggedFailure:
    """Return the memory failure in a log; raises Failure if it has none."""
    from autotune.orchestrator.explain.analyze import explain
    from autotune.orchestrator.explain.reader import check, read

    check((log,))
    result = explain(read(log), framework=None, model=None).failure
    if not result.diagnosis.cause.is_oom:
        hint = f"`autotune explain {log}` says what it shows"
        raise UserError(f"--log: no memory failure in `{log}`", hint=hint)
    return result


def outcome_of(
    job: Job,
    *,
    missing: tuple[str, ...] = (),
    remedies: bool = True,
    failure: LoggedFailure | None = None,
    failed: Job | None = None,
) -> Plan:
    """Return the plan of a job, with or without remedies.

    `missing` are warnings that come first, such as files that are not on this machine. `failed` is the job
    whose attempt had the `failure`, if it is not this one.
    """
    framework, cluster = frameworks.find(job.framework), expected_cluster(job)
    job = with_gpu_memory(job, cluster)

    changes: list[Addition] = []

    def rendered_command(accepted: Accepted, knobs: Knobs) -> tuple[str, ...]:
        command = command_of(
            framework, job, knobs, history=(accepted,), run="plan", attempt=1, resume=job.resume
        )
        changes.extend(printable(additions(framework, job, knobs, command, why=_PREDICTED), job))
        python = job.python or sys.executable
        return tuple(word.replace("{python}", python) for word in shown_command(command, job).argv)

    outcome = plan(
        job,
        framework,
        cluster,
        recall=calibration_cache.recall,
        render=rendered_command,
        remedies=remedies,
        failure=failure,
        failed=None if failed is None else framework.profile(failed, cluster).knobs,
    )
    return msgspec.structs.replace(
        outcome, warnings=(*missing, *passed_over(job), *outcome.warnings), additions=tuple(changes)
    )


def cards_of(written: str | None) -> Gpus | None:
    """Return the GPUs of `--gpus`; raises Failure for an unknown GPU."""
    if written is None:
        return None
    try:
        return parse_gpus(written)
    except ValueError as error:
        other = "for another GPU, set `cluster: {gpu_memory: 80GiB}` in the job"
        hint = other if "unknown" in str(error) else ""
        raise UserError(f"--gpus: {error}", hint=hint) from None


def with_cards(job: Job, cards: Gpus | None) -> tuple[Job, tuple[str, ...]]:
    """Return the job on these GPUs instead of its own, and a note on the settings that were changed."""
    if cards is None:
        return job, ()
    cluster = msgspec.structs.replace(
        job.cluster,
        gpu=cards.card.name,
        gpu_memory_bytes=None,
        nodes=cards.nodes or job.cluster.nodes,
        gpus_per_node=cards.per_node or job.cluster.gpus_per_node,
    )
    job = msgspec.structs.replace(job, cluster=cluster)
    if cluster.gpus_per_node is None:
        return job, ()
    job, changes = on_gpus(job, nodes=cluster.nodes, per_node=cluster.gpus_per_node)
    stated = (
        f"planned for {cluster.nodes} x {cluster.gpus_per_node} GPUs: {', '.join(changes)}; not in the job"
    )
    return job, (stated,) if changes else ()


def start(wanted: Gpus, *, model: str, framework: str, sizes: dict[str, int], options: Options) -> ExitCode:
    """Print a job file with the fastest configuration that is predicted to be safe; raises Failure."""
    from autotune.launchers.runners.node.model_folder import find_folder
    from autotune.orchestrator.config.model_files import unknown_model
    from autotune.orchestrator.config.public_models import find_public
    from autotune.orchestrator.starting_job import Wish, check, enough_gpus, starting_job

    nodes, per_node, card = wanted.nodes or 1, wanted.per_node or 8, wanted.card
    wish = Wish(
        model=model, framework=known_framework(framework), card=card, nodes=nodes, per_node=per_node, **sizes
    )
    check(wish)
    if find_public(model) is None and find_folder(model, ".") is None:
        raise unknown_model(model)
    if per_node > _MOST_PER_NODE:
        spread = f"; for nodes of 8 write --gpus {per_node // 8}x8x{card.name}" if per_node % 8 == 0 else ""
        say(f"note: planned for one node of {per_node} GPUs{spread}")
    batch, wish = wish.batch, wish.with_even_batch()
    if wish.batch != batch and "batch" in sizes:
        raise UserError(
            f"--batch {batch}: its samples cannot be spread evenly over the GPUs",
            hint=f"--batch {wish.batch} can",
        )
    if wish.batch != batch:
        say(f"note: {wish.batch} prompts a step instead of {batch}, the same number on every GPU")
    result = starting_job(wish)
    where = f"{f'{nodes} x ' if nodes > 1 else ''}{per_node} x {card.name}"
    if result is None:
        say(f"no configuration of {model} for {framework} is predicted to fit {where}")
        others = (msgspec.structs.replace(wish, framework=name) for name in _OFFERED if name != framework)
        fitting = []
        for other in others:
            with contextlib.suppress(JobErrors):  # of a job that the user did not request
                fitting += [f"--framework {other.framework}, which fits"] if starting_job(other) else []
        helping = " or ".join(fitting) or enough_gpus(wish)
        none = f"64 x {card.name} do not hold it either; larger GPUs or a shorter --response may"
        say(f"hint: use {helping}" if helping else f"hint: {none}")
        return ExitCode.NO
    if options.json:
        answer = StartingJob(job=result.text, step_s=result.step_s, host_bytes=result.host_bytes)
        click.echo(msgspec.json.encode(answer))
        return ExitCode.OK
    click.echo(result.text, nl=False)
    for note in device_notes(card.device):
        say(f"note: {note}")
    pace = "" if result.step_s is None else f"about {result.step_s:,.0f} s a step "
    say(
        f"# {verdict(outcome_of(parse_elsewhere(result.text)[0], remedies=False))}\n"
        f"# predicted, not measured: {pace}on {where}\n"
        f"# the fastest of {result.looked_at} configurations that fit\n"
        f"# needs {show_gib(result.host_bytes)} of host memory per node"
    )
    return ExitCode.OK


@click.command("plan", epilog=_CODES)
@click.argument("job_file", metavar="[job.yaml]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--gpus",
    metavar="8xH100",
    shell_complete=card_names,
    help="Plan for these GPUs instead of the local ones; 2x8xH100: two nodes; 4xH100,8xH100: compare.",
)
@click.option(
    "--set",
    "overrides",
    metavar="knob=value",
    multiple=True,
    shell_complete=knob_settings,
    help="Plan with another value of a knob, or of a setting of the framework; can be repeated.",
)
@click.option(
    "--log",
    metavar="FILE",
    shell_complete=file_names,
    help="Correct the prediction by the log of this job, as written, that ran out of memory.",
)
@click.option(
    "--against",
    metavar="PACKAGE==VERSION",
    help="Show what another release of the framework or of the engine changes: verl==0.8.0.",
)
@click.option("--model", metavar="NAME", help="Without a job file: generate one for this model.")
@click.option(
    "--framework",
    metavar="NAME",
    shell_complete=framework_names,
    help="With --model: the framework (default: verl).",
)
@click.option(
    "--prompt", type=click.IntRange(1), metavar="N", help="With --model: prompt tokens at most (1024)."
)
@click.option(
    "--response", type=click.IntRange(1), metavar="N", help="With --model: response tokens at most (4096)."
)
@click.option("--batch", type=click.IntRange(1), metavar="N", help="With --model: prompts per step (256).")
@global_options
@click.pass_context
def command(
    context: click.Context,
    /,
    job_file: Path | None,
    gpus: str | None,
    overrides: tuple[str, ...],
    log: str | None,
    against: str | None,
    model: str | None,
    framework: str | None,
    **sizes: int | None,
) -> None:
    """Show the predicted memory peaks, the first command and the remedies in order; start nothing.

    \b
    Example:
      autotune plan job.yaml -v
      autotune plan job.yaml --gpus 4xH100,8xH100
      autotune plan job.yaml --set tokens_per_microbatch=8192
      autotune plan job.yaml --against verl==0.8.0
      autotune plan --model Qwen/Qwen2.5-7B --gpus 8xH100 --framework verl
    """  # noqa: D301 - click reads the backspace
    options = given(context)
    stated = {name: value for name, value in sizes.items() if value is not None}
    if job_file is not None:
        if model is not None or framework is not None or stated:
            raise click.UsageError("--model and its options generate a job: do not pass a job file too")
        if against is not None and (log is not None or "," in (gpus or "")):
            raise click.UsageError("--against compares two releases: pass neither --log nor several clusters")
        show(job_file, gpus=gpus, overrides=overrides, log=log, against=against, options=options)
        return
    if overrides or log or against:
        raise click.UsageError("--set, --log and --against are of a job: pass its file")
    wanted = cards_of(gpus)
    if model is None or wanted is None:
        raise click.UsageError("pass a job file, or --model and --gpus")
    context.exit(start(wanted, model=model, framework=framework or "verl", sizes=stated, options=options))
