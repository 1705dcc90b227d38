"""Which of the trainings that a script starts becomes the job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.init.bash.state import Invocation, Note
from autotune.orchestrator.init.entry_points import Program
from autotune.orchestrator.init.settings import settings_of
from autotune.policies.values.value import Value

_SERVER = re.compile(r"vllm[-_]serve|serve_rm|api_server|launch_server|swift rollout|vllm serve")

_OWN_SERVER = {"trl": ("trl", "vllm-serve"), "ms-swift": ("swift", "rollout")}


class Training(Value, frozen=True, kw_only=True):
    """A program that a script starts, and the framework that it belongs to."""

    invocation: Invocation
    program: Program
    framework: str  # `command: NAME` for one without an adapter

    @property
    def has_adapter(self) -> bool:
        """Whether autotune knows the settings of its framework."""
        return not self.framework.startswith("command:")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its command line."""
        return settings_of(self.framework, self.program.argv).given


def chosen_of(found: Sequence[Training], number: int | None, path: Path, words: Sequence[str]) -> Training:
    """Return the training that becomes the job: the first, or the one with a number from 1.

    Raises Failure where there is none with that number, and where the script runs several with other settings
    at the same time, so that none of them is the first.
    """
    candidates = [each for each in found if each.has_adapter] or list(found)
    if number is not None:
        if not 1 <= number <= len(candidates):
            raise Failure(
                f"`{path}` starts {len(candidates)} trainings: there is no training {number}",
                code=ExitCode.USAGE,
            )
        return candidates[number - 1]
    first = candidates[0]
    beside = [
        each for each in candidates[1:] if _overlap(first.invocation, each.invocation) and first.has_adapter
    ]
    if any(each.settings != first.settings for each in beside):
        lines = ", ".join(dict.fromkeys(str(each.invocation.line) for each in (first, *beside)))
        call = f"autotune init --training N {shlex.join((str(path), *words))}"
        raise Failure(
            f"`{path}` runs {1 + len(beside)} trainings at the same time, started at: {lines}",
            hint=f"name one of them, from 1 to {len(candidates)} in the script's order: {call}",
            code=ExitCode.NO,
        )
    return first


def _overlap(first: Invocation, second: Invocation) -> bool:
    """Return whether the second of two programs starts while a job with the first runs in the background."""
    return second.jobs[: len(first.jobs)] != first.jobs and first.waits == second.waits


def is_server_of(framework: str, argv: Sequence[str]) -> bool:
    """Return whether a command starts the inference server of a framework's own trainer."""
    return bool(argv) and (Path(argv[0]).name, *argv[1:2]) == _OWN_SERVER.get(framework)


def left_out(found: Sequence[Training], chosen: Training) -> Iterator[Note]:
    """Yield what the script starts beside the training that became the job."""
    others: dict[tuple[str, str], list[str]] = {}
    for each in found:
        argv, file, line = each.program.argv, each.invocation.file, each.invocation.line
        if each is chosen or is_server_of(chosen.framework, argv):
            continue
        if _SERVER.search(" ".join(argv[:4])):
            message = f"left out: the server `{' '.join(argv[:3])}`; start it before a launch"
            yield Note(file=file, line=line, message=message)
        elif each.has_adapter:
            others.setdefault((file, argv[0]), []).append(str(line))
        else:
            yield Note(file=file, line=line, message=f"also starts a program; left out: `{argv[0]}`")
    for (file, program), lines in others.items():
        more = f" (and at {', '.join(dict.fromkeys(lines[1:]))})" if len(set(lines)) > 1 else ""
        message = f"also trains; left out: `{program}`{more}; `--training N` chooses the Nth training"
        yield Note(file=file, line=int(lines[0]), message=message)
