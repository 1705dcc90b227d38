"""The global options of all commands, which environment variables can also set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from autotune.launchers.option_variables import OPTIONS
from autotune.launchers.packages import DISTRIBUTION

_F = TypeVar("_F", bound=Callable[..., Any])
_META = "autotune.options"


class Options(msgspec.Struct):
    """The global options, which may be written before or after the command."""

    json: bool = False
    color: str = "auto"
    quiet: int = 0
    verbose: int = 0
    runs_dir: Path = Path("runs")


def given(context: click.Context) -> Options:
    """Return the global options of this call."""
    options: Options = context.meta.setdefault(_META, Options())
    return options


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Store the value of a global option; a flag overrides the environment at any position."""
    assert parameter.name is not None
    source = context.get_parameter_source(parameter.name)
    flags: set[str] = context.meta.setdefault(f"{_META}.flags", set())
    if source is ParameterSource.COMMANDLINE:
        flags.add(parameter.name)
    elif source is not ParameterSource.ENVIRONMENT or parameter.name in flags:
        return
    setattr(given(context), parameter.name, value)


def _global(name: str, *short: str, **attributes: Any) -> Callable[[_F], _F]:
    """Return an option of all commands, which an environment variable can also set."""
    return click.option(
        *short, name, envvar=OPTIONS[name], show_envvar=True, expose_value=False, callback=_keep, **attributes
    )


def hand_on_nothing() -> None:
    """Remove this command's options from the environment, so that child processes do not inherit them."""
    for variable in OPTIONS.values():
        os.environ.pop(variable, None)


def global_options(command: _F) -> _F:
    """Add the options that all commands have."""
    for decorator in (
        _global(
            "--runs-dir",
            type=click.Path(path_type=Path, file_okay=False),
            help="Folder of the runs (default: runs).",
        ),
        _global(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            help="When to use colour (default: auto).",
        ),
        _global("--json", is_flag=True, help="Print JSON on stdout."),
        _global("--quiet", "-q", count=True, help="Print errors only."),
        _global(
            "--verbose",
            "-v",
            count=True,
            help="Also print every step and the log lines behind each diagnosis.",
        ),
        click.version_option(
            None,
            "-V",
            "--version",
            package_name=DISTRIBUTION,
            message="autotune %(version)s",
        ),
    ):
        command = decorator(command)
    return command


def run_ids(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the run ids that start with `incomplete`, latest first; for shell completion."""
    folder = context.params.get("runs_dir") or given(context).runs_dir
    entries = sorted(folder.glob("*/job.yaml"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent.name for file in entries if file.parent.name.startswith(incomplete)]


def framework_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the frameworks that start with `incomplete`; for shell completion."""
    from autotune.launchers.frameworks import FRAMEWORKS

    return [name for name in FRAMEWORKS if name.startswith(incomplete)]


def known_framework(name: str) -> str:
    """Return the name of a framework; raises Failure for an unknown one."""
    from autotune.launchers.frameworks import FRAMEWORKS
    from autotune.launchers.likeness import suggestion
    from autotune.orchestrator.errors import UserError

    if name in FRAMEWORKS:
        return name
    hint = suggestion(name, FRAMEWORKS, cutoff=0.5) or f"one of {', '.join(sorted(FRAMEWORKS))}"
    raise UserError(f"unknown framework `{name}`", hint=hint)


def rule_ids(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the rules and causes that start with `incomplete`; for shell completion."""
    from autotune.policies.diagnosis.rules.catalogue import BY_NAME
    from autotune.policies.values.failure import Cause

    return [name for name in (*map(str, Cause), *BY_NAME) if name.startswith(incomplete)]


def knob_settings(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return `knob=` for every knob that starts with `incomplete`, then its values; for shell completion."""
    from autotune.policies.values.knob_table import KNOB_TABLE
    from autotune.policies.values.knobs import KNOBS

    knob, equals, _ = incomplete.partition("=")
    if not equals:
        return [f"{name}=" for name in KNOBS if name.startswith(incomplete)]
    values = KNOB_TABLE[knob].order if knob in KNOB_TABLE else ()
    return [text for value in values if (text := f"{knob}={str(value).lower()}").startswith(incomplete)]


def card_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return `8xH100` for every GPU, with numbers that are already typed; for shell completion."""
    from autotune.orchestrator.config.cards import CARDS

    counts = re.match(r"(\d+x)*", incomplete)
    before = counts[0] if counts is not None and counts[0] else "8x"
    every = (f"{before}{card.name}" for card in CARDS)
    return [text for text in every if text.lower().startswith(incomplete.lower())]


def file_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete files, for an argument that may be something else."""
    return [CompletionItem(incomplete, type="file")]
