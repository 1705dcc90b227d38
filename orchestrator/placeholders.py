"""Values of a job that must be filled in: text that only a shell can resolve, and placeholders."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from autotune.policies.explain.secrets import is_secret_variable
from autotune.policies.values.job import Job

KeyPath = tuple[str | int, ...]

LITERAL = "# autotune: literal"  # at the end of a job file's line: its values are not placeholders
_FOR_A_SHELL = re.compile(r"\$\([^()]*(?:\([^()]*\)[^()]*)*\)?|^[^\s`]*`[^`]+`[^\s`]*$")
_WORDS = r"your|path|dir|folder|dataset|data|model|name|file|user|key|url|checkpoint|ckpt"
_PLACEHOLDER = re.compile(
    rf"""<(?=[^<>]*(?:{_WORDS}|(?:\b|_)(?:host|ip|port|addr)\b))[a-z][\w ./:-]*>  # <DATA_PATH>, <NODE_IP>
    |(?<![\w.-])/?path/to/[^\s'",\]}}]+  # /path/to/model
    |(?:(?<=[/\s\['"<=])|^)/?your[_/-][^\s'",\]}}]*  # your_model, /your/save/path
    |(?:(?<=['"\[])|^)your(?:[ ]\w+){{1,4}}(?=['"\],]|$)  # 'Your Test Dataset'
    |^(?:x{{3,}}|\.\.\.)$
    |(?-i:^(?:TRAIN|TEST|CHECKPOINTS|ENVIRONMENT|AGENT)(?:\.(?:parquet|jsonl|py))?$)  # of `plan --model`
    |(?:(?<=/)|^)(?:todo|fixme|change[_-]?me|(?:to[_ -]be[_ -])?fill(?:ed)?(?:[_ -](?:me|in))?)(?=/|$)""",
    re.VERBOSE | re.IGNORECASE,
)
_DUMMY = re.compile(r"[xX]+|\.+")
_MARKED = re.compile(r"(?<=\s)#\s*autotune:\s*literal\s*$")


def unfilled(job: Job) -> Iterator[tuple[KeyPath, str]]:
    """Yield the paths of a job's unfilled values, and what is wrong with each.

    Not reported are: a placeholder that is an existing path of this machine; shell substitutions in the text
    of `bash -c`; dummy keys in variables (`OPENAI_API_KEY: xxx`), which self-hosted servers accept; and
    values that the job file marks as `LITERAL`.
    """
    for path, reason in _unfilled(job):
        if dotted(path) not in job.literals:
            yield path, reason


def literals(job: Job, line_of: Callable[[KeyPath], str]) -> tuple[str, ...]:
    """Return the dotted keys of values that look unfilled but are on a line marked as `LITERAL`."""
    return tuple(dotted(path) for path, _ in unfilled(job) if _MARKED.search(line_of(path)))


def dotted(path: KeyPath) -> str:
    """Return a path of keys joined by dots, for messages."""
    return ".".join(map(str, path))


def _unfilled(job: Job) -> Iterator[tuple[KeyPath, str]]:
    yield from _inside(job.settings, ("settings",), for_a_shell=True)
    for name in ("config", "model"):
        yield from _inside(getattr(job, name), (name,), for_a_shell=True)
    for at, word in enumerate(job.command):
        is_text = any(re.fullmatch(r"-[a-z]*c", before) for before in job.command[max(0, at - 1) : at])
        yield from _inside(word, ("command", at), for_a_shell=not is_text)
    for name, value in job.env.items():
        if not is_secret_variable(name) and _DUMMY.fullmatch(value) is None:
            yield from _inside(value, ("env", name), for_a_shell=False)


def warnings(job: Job) -> tuple[str, ...]:
    """Return a warning for each unfilled value, for commands that launch nothing."""
    left_out = (
        f"`settings.{name}` has no value yet: planned with the default; `autotune launch` refuses it"
        for name in job.unfilled
    )
    return (
        *(f"`{dotted(path)}`: {reason}; `autotune launch` refuses it" for path, reason in unfilled(job)),
        *left_out,
    )


def without(job: Job, names: tuple[str, ...]) -> Job:
    """Return a job without some unfilled settings, whose names are put into its `unfilled`."""
    settings = {name: value for name, value in job.settings.items() if name not in names}
    return msgspec.structs.replace(job, settings=settings, unfilled=names) if names else job


def is_unfilled(setting: Any) -> bool:
    """Return whether a setting has an unfilled value."""
    return any(_inside(setting, (), for_a_shell=True))


def placeholder_in(text: str) -> str:
    """Return the placeholder in a text; empty if there is none, or if the text is a path of this machine."""
    match = _PLACEHOLDER.search(text)
    return match[0] if match and not _exists(text) else ""


def _inside(value: Any, path: KeyPath, *, for_a_shell: bool) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _inside(item, (*path, name), for_a_shell=for_a_shell)
    elif isinstance(value, (list, tuple)):
        for at, item in enumerate(value):
            yield from _inside(item, (*path, at), for_a_shell=for_a_shell)
    elif isinstance(value, str):
        shell = _FOR_A_SHELL.search(value) if for_a_shell else None
        if shell:
            yield path, f"`{shell[0]}` is known only where a shell runs it: write the value"
        elif placeholder := placeholder_in(value):
            yield path, f"`{placeholder}` is a placeholder: write the value"


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False
