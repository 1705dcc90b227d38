"""`autotune verify`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autotune.orchestrator.cli.shared.options import given, global_options
from autotune.orchestrator.units import counted

if TYPE_CHECKING:
    from autotune.orchestrator.certificate import VerificationDocument
    from autotune.policies.certificate.contents import Training

_CODES = """\b
Exit codes:
  0    the certificate agrees with everything that it was compared with
  1    something differs; each difference is named
  2    the file is no certificate, or something beside it cannot be read"""


@click.command("verify", epilog=_CODES)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@global_options
@click.pass_context
def command(context: click.Context, file: Path) -> None:
    """Check a run's certificate.json: whether its stable settings train what the job says.

    The certificate is compared with what its framework says of the settings, with the files beside it
    (events.jsonl, job.yaml, stable.yaml) and, for the built-in job, with one update that is computed twice.
    Nothing that the files name is executed.

    \b
    Example:
      autotune verify runs/7c1e/certificate.json
    """  # noqa: D301 - click reads the backspace
    import msgspec

    from autotune.orchestrator.certificate import verify
    from autotune.orchestrator.errors import ExitCode, Failure
    from autotune.orchestrator.explain.sanitize import plain
    from autotune.orchestrator.terminal.widgets import echo

    options = given(context)
    try:
        result = verify(file)
    except Failure as failure:
        raise Failure(plain(failure.message), hint=plain(failure.hint), code=failure.code) from None
    if options.json:
        click.echo(msgspec.json.encode(result))
    else:
        echo("\n".join(plain(line) for line in _lines(result)), color=options.color)
    context.exit(ExitCode.NO if result.differences else ExitCode.OK)


def _lines(verification: VerificationDocument) -> list[str]:
    from autotune.orchestrator.messages import arrow

    stable = verification.stable
    runs = f"{counted(stable.confirmations, 'run')} of {stable.steps} steps"
    lines = [
        f"certificate of run {verification.run} · {verification.name} · {verification.framework}",
        f"  stable     by {stable.by}, {runs}",
        f"  trained    {_trained(verification.training) or 'the settings do not say'}",
    ]
    lines += [
        f"  changed    {arrow(change.knob, change.before, change.after)}   {change.effect.value}"
        for change in verification.changes
    ]
    if not verification.changes:
        lines.append("  changed    nothing")
    absent = f" (not here: {', '.join(verification.missing)})" if verification.missing else ""
    lines.append(f"  compared   {', '.join(verification.compared) or 'the certificate alone'}{absent}")
    lines.append(f"  replayed   {verification.replayed.value.replace('_', ' ')}: {verification.replay}")
    return [*lines, "", *_verdict(verification)]


def _verdict(verification: VerificationDocument) -> list[str]:
    from autotune.policies.certificate.contents import Replayed

    if verification.differences:
        return ["✗ differs", *(f"  {sentence}" for sentence in verification.differences)]
    agrees = "✓ agrees: only the declared changes differ"
    if verification.replayed is not Replayed.AGREED:
        return [f"{agrees}, and none is of what is trained (not replayed)"]
    if verification.replayed_by == "update":
        return [f"{agrees}; proven by an update that is the same with both settings"]
    return [f"{agrees}; the losses of the steps that both settings trained stay in their band"]


def _trained(training: Training) -> str:
    parts = (
        (training.samples_per_step, "{:,} samples a step"),
        (training.global_batch, "updates of {:,}"),
        (training.updates_per_step, "{:,} a step"),
        (training.steps, "{:,} steps"),
        (training.epochs, "{:,} epochs"),
        (training.prompt_tokens, "prompts to {:,} tokens"),
        (training.response_tokens, "answers to {:,}"),
        (training.learning_rate, "learning rate {:g}"),
    )
    words = [form.format(value) for value, form in parts if value is not None]
    words += [f"{name} {seed}" for name, seed in training.seeds.items()]
    return " · ".join([*words, *([training.data_order] if training.data_order else [])])
