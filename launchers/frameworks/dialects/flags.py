"""Command-line flags as settings: read with or without dashes, written as the user writes them."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

_DUMPED = re.compile(r"^.*?\s\s(?P<name>[a-z]\w*) \.{2,} (?P<value>.*)$")
_TRACED = re.compile(r"^(?:\([^()]*\)\s*)?\++\s.*?\s--(?=[a-z])")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def flags_of(settings: Mapping[str, Any], *, negatable: frozenset[str]) -> dict[str, Any]:
    """Return the settings by bare names; `no-x` of a negatable flag becomes `x: false`."""
    given: dict[str, Any] = {}
    for key, value in settings.items():
        name = bare(key)
        if name.startswith("no-") and name[3:] in negatable:
            given[name[3:]] = not is_on(value)
        else:
            given[name] = value
    return given


def bare(key: str) -> str:
    """Return a flag's name without its dashes."""
    return key.lstrip("-")


def is_on(value: Any) -> bool:
    """Return whether a value turns a switch on."""
    return value.lower() in ("true", "1", "yes", "on", "") if isinstance(value, str) else bool(value)


def spelled(
    settings: Mapping[str, Any],
    changes: Mapping[str, Any],
    *,
    negatable: frozenset[str],
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return changes under the names and dashes that the job uses.

    A change is applied to every alias (alias -> name) with which the job sets the flag. The removal of a flag
    that the job does not set is dropped, unless the flag has a no- form.
    """
    own: dict[str, list[str]] = {}
    for key in settings:
        own.setdefault(aliases.get(bare(key), bare(key)), []).append(key)
    dashes = "--" if any(key.startswith("--") for key in settings) else ""
    return {
        key: value
        for name, value in changes.items()
        if name in own or not (value is None or (value is False and name not in negatable))
        for key in own.get(name, [dashes + name])
    }


def arguments(settings: Mapping[str, Any], *, negatable: frozenset[str]) -> tuple[str, ...]:
    """Return settings as words of a command line; false and null yield no word."""
    result: list[str] = []
    for key, value in settings.items():
        result += _one(bare(key), value, negatable=negatable)
    return tuple(result)


def as_typed(settings: Mapping[str, Any], *, negatable: frozenset[str]) -> tuple[str, ...]:
    """Return every setting as its user types it; a flag to remove becomes a sentence that says so."""
    lines = []
    for key, value in settings.items():
        words = _one(bare(key), value, negatable=negatable)
        lines.append(" ".join(map(shlex.quote, words)) if words else f"(without --{bare(key)})")
    return tuple(lines)


def _one(name: str, value: Any, *, negatable: frozenset[str]) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        if value:
            return [f"--{name}"]
        return [f"--no-{name}"] if name in negatable else []
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    if isinstance(value, dict):
        return [f"--{name}", json.dumps(value, separators=(",", ":"))]
    return [f"--{name}", str(value)]


# --------------------------------------------------------------------------- reading logs


def printed_flags(
    text: str, *, known: frozenset[str], inverse: Mapping[str, str], negatable: frozenset[str]
) -> dict[str, Any]:
    """Return the flags in Megatron's dump of its arguments, otherwise in a command line of a shell trace.

    `inverse`: flags that turn off an argument of another name.
    """
    result: dict[str, Any] = {}
    traced: dict[str, Any] = {}
    for raw in text.splitlines():
        line = _ESCAPES.sub("", raw)
        dumped = _DUMPED.match(line)
        if dumped is not None:
            name, value = dumped["name"].replace("_", "-"), parsed_value(dumped["value"].strip())
            if name in inverse:
                result |= {inverse[name]: True} if value is False else {}
            elif name in known and value is not None and (value is not False or name in negatable):
                result[name] = value
        elif _TRACED.match(line):
            traced |= from_words(_split(line))
    return result or {name: value for name, value in traced.items() if name in known}


def printed_namespace(text: str, *, known: frozenset[str]) -> dict[str, Any]:
    """Return the flags in a printed argparse namespace; nested namespaces become dotted flags."""
    result: dict[str, Any] = {}
    for line in text.splitlines():
        begins = line.find("namespace(") if "=namespace(" in line else line.find("Namespace(")
        if begins < 0 or result:
            continue
        try:
            tree = ast.parse(line[begins:].strip(), mode="eval").body
        except SyntaxError:
            continue  # a line torn by a crash
        result = dict(_fields(tree, ""))
    return {name: value for name, value in result.items() if name in known and value not in (None, False)}


def _fields(node: ast.expr, prefix: str) -> Iterator[tuple[str, Any]]:
    for keyword in node.keywords if isinstance(node, ast.Call) else ():
        name = f"{prefix}{keyword.arg}"
        if isinstance(keyword.value, ast.Call):
            yield from _fields(keyword.value, f"{name}.")
        else:
            with suppress(ValueError):  # inf and the like
                yield name, ast.literal_eval(keyword.value)


def from_words(words: Iterable[str]) -> dict[str, Any]:
    """Return the flags of a command line; words before the first flag are the program."""
    result: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            result[name] = parsed_value(value) if equals else True
        elif name:
            present = result[name]
            value = parsed_value(word)
            if present is True:
                result[name] = value
            else:
                result[name] = [*present, value] if isinstance(present, list) else [present, value]
    return result


def parsed_value(text: str) -> Any:
    """Return a printed value as a number, bool, None or text."""
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _split(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # a quote that the line does not close
        return line.split()
