"""The settings that the head of a verl log shows: command lines, the printed configuration, YAML trees."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from autotune.launchers.frameworks.dialects.hydra import bare
from autotune.launchers.frameworks.verl.overrides import overrides_in

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ACTOR = re.compile(r"^\(([A-Za-z]\w* pid=\d+[^()]*)\) ?")
_ROOTS = ("actor_rollout_ref", "data", "trainer", "algorithm", "critic", "reward", "model_engine")
_DICT = re.compile(rf"^\{{'(?:{'|'.join(_ROOTS)})'")
_TREE = re.compile(rf"^(?:{'|'.join(_ROOTS[:-1])}):\s*$")
_BRANCH = re.compile(r"^(\s+\S|[A-Za-z_][\w]*:|-\s)")
_COMMAND = re.compile(r"^\+*\s*\S*python\S*\s|main_ppo|^\+ ")
_ERROR = "Error executing job with overrides: "
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_LONGEST_DICT = 400_000  # characters; a printed configuration has about 60 000


def printed(text: str) -> dict[str, Any]:
    """Return the settings shown, under the keys of verl; overrides of a command line stand over the rest."""
    result: dict[str, Any] = {}
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    for tree in (*_dictionaries(lines), *_trees(lines)):
        result |= _flat(tree)
    for words in _commands(lines):
        result |= {bare(key): value for key, value in overrides_in(words).items()}
    return result


def _dictionaries(lines: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the dictionaries that pprint wrote, even where their end is missing."""
    for index, line in enumerate(lines):
        tag, bare_line = _untagged(line)
        if not _DICT.match(bare_line):
            continue
        own, size = [bare_line], 0
        for other in lines[index + 1 :]:
            other_tag, other_line = _untagged(other)
            if other_tag == tag and other_line.startswith(" "):
                own.append(other_line)
                size += len(other_line)
            elif other_tag == tag or size > _LONGEST_DICT:
                break
        tree = _literal("\n".join(own))
        if tree is not None:
            yield tree


def _literal(text: str) -> dict[str, Any] | None:
    """Return the dictionary at the start of a text; what is torn at its end is left out."""
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


def _trees(lines: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the trees of `key: value` lines."""
    index = 0
    while index < len(lines):
        tag, line = _untagged(lines[index])
        if not _TREE.match(line):
            index += 1
            continue
        own = [line]
        index += 1
        while index < len(lines):
            other_tag, other = _untagged(lines[index])
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


def _commands(lines: list[str]) -> Iterator[list[str]]:
    """Yield the words of command lines, and of Hydra's own list of overrides."""
    joined = ""
    for line in lines:
        _, bare_line = _untagged(line)
        if _ERROR in bare_line:
            try:
                words = ast.literal_eval(bare_line.partition(_ERROR)[2].strip())
            except (ValueError, SyntaxError):
                words = []
            yield [str(word) for word in words] if isinstance(words, list) else []
            continue
        if joined or _COMMAND.search(bare_line):
            joined += bare_line.rstrip()
            if joined.endswith("\\"):
                joined = joined[:-1] + " "
                continue
            try:
                yield shlex.split(joined)
            except ValueError:
                yield joined.split()
            joined = ""


def _untagged(line: str) -> tuple[str, str]:
    match = _ACTOR.match(line)
    return (match[1], line[match.end() :]) if match else ("", line)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if str(key) == "_target_":
            continue
        if isinstance(value, dict):
            result |= _flat(value, f"{name}.")
        else:
            result[name] = value
    return result
