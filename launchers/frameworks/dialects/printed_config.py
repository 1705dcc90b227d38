"""Reads settings from the head of a Hydra program's log: command lines, dictionaries, YAML trees."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, TypeAlias

import yaml

from autotune.launchers.frameworks.dialects.hydra import bare, overrides_in
from autotune.launchers.frameworks.dialects.settings import flat

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ACTOR = re.compile(r"^\(([A-Za-z]\w* pid=\d+[^()]*)\) ?")
_BRANCH = re.compile(r"^(\s+\S|[A-Za-z_][\w]*:|-\s)")
_COMMAND = re.compile(r"^\+*\s*\S*python\S*\s|^\+ ")
# The start of a line written by pprint; in an actor's log, Ray ends a line after each of pprint's writes.
_PIECE = re.compile(r"[ '\"{},:\])\d]|\[(?!\w)|(?:True|False|None)\b")
_ERROR = "Error executing job with overrides: "
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_LONGEST_DICT = 400_000  # characters; a printed configuration of verl has about 60 000


Tagged: TypeAlias = tuple[str, str]  # the process that printed a line, and the line without it


class Program(NamedTuple):
    """What identifies a program's configuration and command lines in a log."""

    sections: tuple[str, ...]  # at the top of its configuration
    top: tuple[str, ...]  # keys without a section
    entry: str  # a part of its name on a command line


def printed(text: str, program: Program) -> dict[str, Any]:
    """Return the printed settings by key; overrides of a command line take precedence."""
    result: dict[str, Any] = {}
    lines = _lines(text)
    for tree in (*_dictionaries(lines, program), *_trees(lines, program.sections)):
        own = flat(tree).items()
        result |= {key: value for key, value in own if value != {} and not key.endswith("_target_")}
    for words in _commands(lines, program):
        result |= {bare(key): value for key, value in overrides_in(words, top=program.top).items()}
    return result


def printed_trees(text: str, known: Collection[str]) -> dict[str, Any]:
    """Return the settings of `known` names in the YAML that a log prints."""
    sections = tuple(dict.fromkeys(key.partition(".")[0] for key in known if "." in key))
    result: dict[str, Any] = {}
    for tree in _trees(_lines(text), sections):
        result |= {key: value for key, value in flat(tree).items() if key in known}
    return result


def _lines(text: str) -> list[Tagged]:
    return [_untagged(_ANSI.sub("", line) if "\x1b" in line else line) for line in text.splitlines()]


def _dictionaries(lines: list[Tagged], program: Program) -> Iterator[dict[str, Any]]:
    """Yield the dictionaries written by pprint, also truncated ones."""
    begins = re.compile(rf"^\{{'(?:{'|'.join((*program.sections, *program.top))})'")
    for index, (tag, bare_line) in enumerate(lines):
        if not begins.match(bare_line):
            continue
        own, size = [bare_line], 0
        for other_tag, other_line in lines[index + 1 :]:
            if other_tag == tag and _PIECE.match(other_line):
                own.append(other_line)
                size += len(other_line)
            elif other_tag == tag or size > _LONGEST_DICT:
                break
        tree = _literal("\n".join(own))
        if tree is not None:
            yield tree


def _literal(text: str) -> dict[str, Any] | None:
    """Return the dictionary at the start of a text, without a truncated last entry."""
    stack: list[str] = []
    quote, escaped = "", False
    whole, torn = len(text), ""
    for index, char in enumerate(text):
        if quote:
            quote = quote if escaped or char != quote else ""
            escaped = char == "\\" and not escaped
        elif char in "'\"":
            quote = char
        elif char in _CLOSERS:
            stack.append(_CLOSERS[char])
        elif char in "}])":
            if not stack or stack.pop() != char:
                return None
            if not stack:
                return _evaluated(text[: index + 1])
        elif char == ",":
            whole, torn = index, "".join(reversed(stack))
    return _evaluated(text[:whole] + torn)


def _evaluated(text: str) -> dict[str, Any] | None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _trees(lines: list[Tagged], sections: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the trees of `key: value` lines."""
    begins = re.compile(rf"^(?:{'|'.join(sections)}):\s*$")
    index = 0
    while index < len(lines):
        tag, line = lines[index]
        if not begins.match(line):
            index += 1
            continue
        own = [line]
        index += 1
        while index < len(lines):
            other_tag, other = lines[index]
            if other_tag != tag or not _BRANCH.match(other):
                break
            own.append(other)
            index += 1
        try:
            tree = yaml.safe_load("\n".join(own))
        except yaml.YAMLError:
            continue
        if isinstance(tree, dict):
            yield tree


def _commands(lines: list[Tagged], program: Program) -> Iterator[list[str]]:
    """Yield the words of command lines, and of Hydra's own list of overrides."""
    joined = ""
    for _, bare_line in lines:
        if _ERROR in bare_line:
            try:
                words = ast.literal_eval(bare_line.partition(_ERROR)[2].strip())
            except (ValueError, SyntaxError):
                words = []
            yield [str(word) for word in words] if isinstance(words, list) else []
            continue
        if joined or program.entry in bare_line or _COMMAND.search(bare_line):
            joined += bare_line.rstrip()
            if joined.endswith("\\"):
                joined = joined[:-1] + " "
                continue
            try:
                yield shlex.split(joined)
            except ValueError:
                yield joined.split()
            joined = ""


def _untagged(line: str) -> Tagged:
    match = _ACTOR.match(line) if line.startswith("(") else None
    return (match[1], line[match.end() :]) if match else ("", line)
