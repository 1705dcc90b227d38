"""The command of an attempt, also as a shell script without secrets that runs without autotune."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from autotune.launchers.base import Framework
from autotune.orchestrator.config.secrets import shown_command
from autotune.policies.recovery.checkpoint_interval import with_saves
from autotune.policies.values.command import Command, File
from autotune.policies.values.events import History
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs

_PACKAGE = Path(__file__).parents[2]  # where File.source is found
_FROM_ENVIRONMENT = re.compile(r"(\$\{[A-Za-z_][A-Za-z0-9_]*:\?\})")


def command_of(
    framework: Framework, job: Job, knobs: Knobs, *, history: History, run: str, attempt: int, resume: bool
) -> Command:
    """Render an attempt's command; its checkpoint interval follows from the step times in `history`."""
    rendered = job if framework.saves_by_time else with_saves(job, history, knobs)
    return framework.command(rendered, knobs, run=run, attempt=attempt, resume=resume)


def script(command: Command, job: Job, *, comments: Iterable[str] = (), by_path: bool = False) -> str:
    """Return a shell script that runs the command without autotune and contains its files.

    With `by_path`, autotune's own files are copied from its installation instead.
    """
    masked = shown_command(command, job)
    notes = (f"# {line}".rstrip() for text in comments for line in text.splitlines())
    lines = ["#!/usr/bin/env bash", *notes]
    lines += ["set -euo pipefail", f"cd {shlex.quote(command.cwd)}"]
    if masked.files:
        lines += ['attempt="$(mktemp -d)"', "umask 077"]
    for file, own in zip(masked.files, command.files, strict=True):
        if by_path and own.source:
            lines.append(f'cp {shlex.quote(str(_PACKAGE / own.source))} "$attempt"/{shlex.quote(file.name)}')
        else:
            lines += _file(file, filled_in=file.text != own.text)
    lines += [f"export {name}={_quote(value)}" for name, value in sorted(masked.env.items())]
    words = [_quote(word.replace("{python}", job.python or sys.executable)) for word in masked.argv]
    lines.append("exec " + " \\\n  ".join(words))
    return "\n".join(lines) + "\n"


def _file(file: File, *, filled_in: bool) -> list[str]:
    """Return the lines that write a file; with `filled_in` the shell expands its `${NAME:?}`."""
    target = f'"$attempt"/{shlex.quote(file.name)}'
    lines = [f'mkdir -p "$(dirname {target})"'] if "/" in file.name else []
    end = _delimiter(file.text)
    body = file.text if file.text.endswith("\n") else f"{file.text}\n"
    if filled_in:
        parts = _FROM_ENVIRONMENT.split(body)
        body = "".join(p if i % 2 else re.sub(r"([\\$`])", r"\\\1", p) for i, p in enumerate(parts))
    fill = 'sed "s|{attempt}|$attempt|g"' if "{attempt}" in file.text else "cat"
    mark = end if filled_in else f"'{end}'"
    return [*lines, f"{fill} > {target} <<{mark}\n{body}{end}"]


def _quote(word: str) -> str:
    """Quote a word for the shell, except `{attempt}` and `${NAME:?}`, which are expanded."""
    parts = re.split(r"(\{attempt\}|\$\{[A-Za-z_][A-Za-z0-9_]*:\?\})", word)
    out = ""
    for part in parts:
        if part == "{attempt}":
            out += '"$attempt"'
        elif part.startswith("${") and part.endswith(":?}"):
            out += f'"{part}"'
        elif part:
            out += shlex.quote(part)
    return out or "''"


def _delimiter(text: str) -> str:
    end = "END"
    while end in text.splitlines():
        end += "_"
    return end
