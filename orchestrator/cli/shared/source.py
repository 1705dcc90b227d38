"""What `init` and `fix` take from a script, a configuration file or a command."""

from __future__ import annotations

import itertools
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from autotune.launchers.likeness import MISSPELT, nearest
from autotune.orchestrator.cli.shared.options import card_names, file_names
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.init.draft import Draft, draft_of

_F = TypeVar("_F", bound=Callable[..., Any])


class SourceCommand(click.Command):
    """A command that ends in the words of another, whose options it leaves alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; raises NoSuchOption for a misspelt option of this command before `--`."""
        known = {name for each in self.params for name in each.opts if name.startswith("--")}
        for word in itertools.takewhile(lambda each: each != "--", args):
            name = word.partition("=")[0]
            near = nearest(name, known, cutoff=MISSPELT) if name not in known else ""
            if near and name.startswith("--"):
                raise click.NoSuchOption(name, possibilities=[near], ctx=ctx)
        return super().parse_args(ctx, args)


def source_options(*, metavar: str, gpus: str) -> Callable[[_F], _F]:
    """Add the words of the source and the GPUs of its job to a command."""

    def decorate(command: _F) -> _F:
        command = click.option("--gpus", metavar="8xH100", shell_complete=card_names, help=gpus)(command)
        words = click.argument(
            "source", metavar=metavar, nargs=-1, type=click.UNPROCESSED, shell_complete=file_names
        )
        return words(command)

    return decorate


def drafted(
    source: Sequence[str], *, training: int | None = None, text: str | None = None, otherwise: str = ""
) -> Draft:
    """Return the job of a source; raises Failure if there is none.

    `otherwise` is the hint where the source is a log; `text` stands for what the script's file holds.
    """
    now = float(os.environ.get("SOURCE_DATE_EPOCH") or time.time())
    try:
        return draft_of(
            source, cwd=str(Path.cwd()), environment=os.environ, now=now, training=training, text=text
        )
    except Failure:
        if not _is_log(source[0]):
            raise
        hint = otherwise or f"`autotune explain {shlex.quote(source[0])}` explains it"
        raise Failure(f"`{source[0]}` is a log", hint=hint, code=ExitCode.USAGE) from None


def _is_log(name: str) -> bool:
    from autotune.orchestrator.explain.analyze import explain
    from autotune.orchestrator.explain.reader import read

    try:
        return explain(read(name), framework=None, model=None).is_answer
    except Failure:
        return False
