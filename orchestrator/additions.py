"""Settings that autotune adds to, replaces in or leaves out of the user's command, with the reasons."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from autotune.launchers import frameworks
from autotune.launchers.base import Framework
from autotune.orchestrator.config.secrets import masked_text
from autotune.policies.values.command import Addition, Command
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs

_ASSIGNED = re.compile(r"\+{0,2}(?P<name>-*[A-Za-z_][\w./@-]*)=(?P<value>.*)", re.DOTALL)
_CHECKPOINT = re.compile(r"(global_step_|checkpoint-|iter_|step_|epoch_?)\d+")
_INDENT = "  "
_PLAIN = re.compile(r"[\s\[\](),'\"]+")


_COMMON = {
    "RAY_DEDUP_LOGS": "the log has the lines of every worker",
    "PYTORCH_*ALLOC_CONF": "how the job's allocator splits its memory",
    "LD_PRELOAD": "the allocator of host memory that the job chose",
}


def additions(
    framework: Framework, job: Job, knobs: Knobs, command: Command, *, why: str, otherwise: str = ""
) -> tuple[Addition, ...]:
    """Return the differences between a command with the values of `knobs` and the job as written.

    `why` is the reason for the knobs' values; reasons for settings that a run needs are in `reasons` of the
    framework; `otherwise` is the reason for all others.
    """
    reasons = {**framework.reasons, **_COMMON}
    turned = {_bare(name) for name in framework.settings(job, knobs)}
    stated = {_bare(name): (name, _text(value)) for name, value in job.settings.items()}
    user, ours = _named(job.command) | stated, _named(command.argv)
    result = []
    for name, (spelled, value) in ours.items():
        before = user[name][1] if name in user else None
        is_filled_in = value == job.config or (before is not None and "{" in before)  # a placeholder
        if not is_filled_in and (before is None or _plain(before) != _plain(value)):
            reason = why if name in turned else _reason(reasons, name) or otherwise
            result.append(Addition(name=spelled, before=before, after=value, reason=reason))
    for name, (spelled, value) in user.items():
        reason = _reason(framework.reasons, name)
        if name not in ours and spelled in job.settings and reason and framework.passes_settings:
            result.append(Addition(name=spelled, before=value, reason=reason))
    for name, value in command.env.items():
        if job.env.get(name) != value:
            spelled, before = f"export {name}", job.env.get(name)
            result.append(Addition(name=spelled, before=before, after=value, reason=_reason(reasons, name)))
    files = command.files if framework.passes_settings else ()
    result += [
        Addition(name=file.name, after=file.source, reason=_reason(reasons, file.name)) for file in files
    ]
    return tuple(result)


def _named(words: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the settings of a command by bare name, each as the name as written and its value."""
    result: dict[str, tuple[str, str]] = {}
    flag = ""
    for word in words:
        assigned = _ASSIGNED.fullmatch(word)
        if assigned is not None:
            flag = ""
            result[_bare(assigned["name"])] = (assigned["name"], assigned["value"])
        elif word.startswith("--") and len(word) > 2:
            flag = word
            result[_bare(word)] = (word, "")
        elif word.startswith("{attempt}") and word.endswith(".py"):  # a program, not a value of the flag
            flag = ""
        elif flag:
            result[_bare(flag)] = (flag, f"{result[_bare(flag)][1]} {word}".strip())
    return result


def _bare(name: str) -> str:
    return name.lstrip("+-").replace("-", "_")


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_text, value))
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _plain(value: str) -> str:
    """Normalize a value: remove differences in brackets, quotes, case and number format."""
    words = _PLAIN.sub(" ", value).strip().casefold()
    try:
        return repr(float(words))
    except ValueError:
        return words or "true"


def _reason(reasons: Mapping[str, str], name: str) -> str:
    return next((why for pattern, why in reasons.items() if fnmatchcase(name, _bare(pattern))), "")


def printable(additions: Iterable[Addition], job: Job) -> tuple[Addition, ...]:
    """Return the additions with the job's secret values masked."""
    return tuple(
        msgspec.structs.replace(
            each,
            before=each.before and masked_text(each.before, job),
            after=each.after and masked_text(each.after, job),
        )
        for each in additions
    )


def change_lines(additions: Iterable[Addition]) -> Iterator[str]:
    """Yield a line for each setting, and the common reason after consecutive settings that share one."""
    for reason, group in groupby(additions, key=lambda each: each.reason):
        yield from map(_line, group)
        if reason:
            yield f"{_INDENT * 2}{reason}"


def _line(change: Addition) -> str:
    if change.after is None:
        return f"- {change.name} {change.before}"
    if change.before is None:
        return f"+ {change.name} {change.after}".rstrip()
    return f"~ {change.name} {change.before} → {change.after}"


def passed_over(job: Job) -> tuple[str, ...]:
    """Return a warning if the job has checkpoints here that a launch would not resume from."""
    folder = None if job.resume else frameworks.find(job.framework).checkpoint_folder(job)
    try:
        names = [each.name for each in Path(folder).iterdir()] if folder else []
    except OSError:
        return ()  # on another machine, or absent
    newest = max(filter(_CHECKPOINT.fullmatch, names), key=_number, default="")
    if not newest:
        return ()
    return (f"{folder} has {newest}, and a launch begins at step 0: `resume: true` continues from it",)


def _number(name: str) -> int:
    return int(re.findall(r"\d+", name)[-1])
