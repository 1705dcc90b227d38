"""Edit a launch script or a command, and verify each edit by reading the result again."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec

from autotune.orchestrator.init.draft import Draft

_END = re.compile(r'\s+(?="?\$(?:@|\{@)|[|&;>]|\d>|#)|\s*$')  # end of a command's own words
_MOST_LINES = 2000  # lines searched for the end of the command
_PLAIN = re.compile(r"[\[\]'\"\s]")


def edited_script(
    text: str,
    before: Draft,
    changes: Mapping[str, Any],
    words: Mapping[str, str],
    *,
    variables: Collection[str] = (),
    read: Callable[[str], Draft],
) -> str | None:
    """Return a script with changed settings; None if no edit gives exactly the new command.

    `changes` are the settings by name, `words` their command-line words, `variables` the settings that are
    environment variables, and `read` returns the job of a text. A literal value is replaced in place or where
    its variable is set; otherwise the setting is added at the end of the command, a variable before it.
    """
    wanted = before
    for name, value in changes.items():
        if name in variables:
            wanted = msgspec.structs.replace(wanted, env={**wanted.env, name: str(value)})
            candidates = _exported(text, words[name])
        else:
            wanted = msgspec.structs.replace(wanted, settings={**wanted.settings, name: value})
            candidates = itertools.chain(_replaced(text, words[name]), _added(text, words[name]))
        result = (each for each in candidates if _is_same(read, each, wanted))
        text = next(result, "")
        if not text:
            return None
    return text


def is_same_job(draft: Draft, wanted: Draft) -> bool:
    """Return whether two drafts are one job: program, settings, variables and folder."""
    return _job(draft) == _job(wanted)


def _job(draft: Draft) -> tuple[Any, ...]:
    settings = {_bare(name): _PLAIN.sub("", str(value)).casefold() for name, value in draft.settings.items()}
    return (draft.framework, draft.command, draft.config, draft.env, draft.workdir, settings)


def _is_same(read: Callable[[str], Draft], text: str, wanted: Draft) -> bool:
    try:
        return is_same_job(read(text), wanted)
    except Exception:  # a candidate may be an invalid script
        return False


def _bare(name: str) -> str:
    return name.lstrip("+-").replace("-", "_")


def _replaced(text: str, word: str) -> Iterator[str]:
    """Yield the text with the value of each occurrence of a setting, or of its variable, replaced in turn."""
    name, separator, value = _parts(word)
    if not separator:
        return
    spelled = re.escape(name.lstrip("+-")).replace("_", "[-_]").replace(r"\-", "[-_]")
    use = re.compile(rf"(?<![\w.-])[+-]*{spelled}(?:=|\s+)(?P<quote>[\"']?)(?P<value>[^\s\"'\\;|&)]+)")
    for match in use.finditer(text):
        variable = re.match(r"\$\{?(\w+)", match["value"])
        if variable is None:
            yield text[: match.start("value")] + value + text[match.end("value") :]
            continue
        assigned = re.compile(
            rf"(?:\b{variable[1]}=[\"']?|\$\{{{variable[1]}:[-=])(?P<value>[^\s\"'$;|&)}}]+)"
        )
        for place in assigned.finditer(text):
            yield text[: place.start("value")] + value + text[place.end("value") :]


def _added(text: str, word: str) -> Iterator[str]:
    """Yield the text with the setting appended to each command in turn, before redirections and the like."""
    lines = text.split("\n")
    for at in reversed(range(min(len(lines), _MOST_LINES))):
        line = lines[at]
        end = _END.search(line)
        is_last = not line.rstrip().endswith("\\") or (end is not None and end.end() < len(line.rstrip()))
        if line.strip() and not line.lstrip().startswith("#") and is_last:
            place = end.start() if end is not None else len(line)
            yield "\n".join((*lines[:at], f"{line[:place]} {word}{line[place:]}", *lines[at + 1 :]))


def _exported(text: str, word: str) -> Iterator[str]:
    """Yield the text with each value of a variable replaced in turn, or with it set before each line."""
    name, _, value = word.partition("=")
    for place in re.finditer(rf"(?<!\w){name}=[\"']?(?P<value>[^\s\"';|&)]*)", text):
        yield text[: place.start("value")] + value + text[place.end("value") :]
    lines = text.split("\n")
    for at, line in enumerate(lines[:_MOST_LINES]):
        if line.strip() and not line.lstrip().startswith("#"):
            yield "\n".join((*lines[:at], f"export {word}", *lines[at:]))
    yield f"{word} {text}"  # a single command


def _parts(word: str) -> tuple[str, str, str]:
    """Return the name of a setting on a command line, the separator, and the value."""
    match = re.fullmatch(r"([^\s=]+)(=|\s+)(.*)", word, re.DOTALL)
    return (match[1], match[2], match[3]) if match else (word, "", "")
