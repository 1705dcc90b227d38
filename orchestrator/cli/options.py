"""The options every command has, with one meaning and one variable of the environment each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from click.core import ParameterSource

_F = TypeVar("_F", bound=Callable[..., Any])
_META = "autotune.options"


class Options(msgspec.Struct):
    """The global options as they were given, on the group or on the command."""

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
    """Keep a value that was written; a flag wins over the environment wherever it stands."""
    assert parameter.name is not None
    source = context.get_parameter_source(parameter.name)
    flags: set[str] = context.meta.setdefault(f"{_META}.flags", set())
    if source is ParameterSource.COMMANDLINE:
        flags.add(parameter.name)
    elif source is not ParameterSource.ENVIRONMENT or parameter.name in flags:
        return
    setattr(given(context), parameter.name, value)


def global_options(command: _F) -> _F:
    """Add the options that every command has."""
    shared: dict[str, Any] = {"expose_value": False, "callback": _keep, "show_envvar": True}
    for decorator in (
        click.option(
            "--runs-dir",
            type=click.Path(path_type=Path, file_okay=False),
            envvar="AUTOTUNE_RUNS_DIR",
            help="Where runs are kept (default: runs).",
            **shared,
        ),
        click.option(
            "--color",
            type=click.Choice(["auto", "always", "never"]),
            envvar="AUTOTUNE_COLOR",
            help="When to colour (default: auto).",
            **shared,
        ),
        click.option("--json", is_flag=True, envvar="AUTOTUNE_JSON", help="Print JSON on stdout.", **shared),
        click.option(
            "-q", "--quiet", count=True, envvar="AUTOTUNE_QUIET", help="Say only what failed.", **shared
        ),
        click.option(
            "-v",
            "--verbose",
            count=True,
            envvar="AUTOTUNE_VERBOSE",
            help="Also say every step, and the log lines that decided.",
            **shared,
        ),
        click.version_option(
            None, "-V", "--version", package_name="autotune", message="autotune %(version)s"
        ),
    ):
        command = decorator(command)
    return command


def run_ids(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the ids of runs that begin with what was typed, the latest first; for shell completion."""
    folder = context.params.get("runs_dir") or given(context).runs_dir
    entries = sorted(folder.glob("*/job.yaml"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent.name for file in entries if file.parent.name.startswith(incomplete)]
