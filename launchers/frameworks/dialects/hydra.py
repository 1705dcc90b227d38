"""Settings as overrides of Hydra and OmegaConf, written and parsed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Container, Iterable, Mapping
from typing import Any

import yaml

_PREFIX = re.compile(r"^(\+\+|\+|~)")
_PLAIN = re.compile(r"^[\w./\-@:%]+$")  # needs no quotes in Hydra's grammar
_NUMBER = re.compile(r"^[+-]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?$")
_LITERAL = re.compile(r"[A-Za-z_][\w./:@%+-]*|/[\w./@%+-]*|\$\{[\w.]+\}")
_READ_ALIKE = frozenset({"true", "false", "null", "nan", "inf", "yes", "no", "on", "off"})
_PAIR = re.compile(r"([{,]\w+):(?=\S)")  # YAML needs a space after the colon, Hydra does not
_WORD = re.compile(r"^(\+\+|\+|~)?[A-Za-z_][\w@/\-]*(\.[\w@/\-]+)*(=.*)?$", re.DOTALL)
_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")
_VARIABLES = ".env_vars."
_CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None}  # `none` is a text


def bare(key: str) -> str:
    """Return a key without Hydra's prefix."""
    return _PREFIX.sub("", key)


def prefix(key: str) -> str:
    """Return Hydra's prefix of a key, empty if it has none."""
    match = _PREFIX.match(key)
    return match[1] if match else ""


def value_text(value: Any) -> str:
    """Return a value as the right side of a Hydra override.

    A text that spells a number, list or mapping is written unquoted, so that Hydra reads it as that.
    """
    match value:
        case None:
            return "null"
        case bool():
            return str(value)
        case int() | float():
            return repr(value)
        case Mapping():
            return "{" + ",".join(f"{key}:{value_text(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(value_text(item) for item in value) + "]"
    text = str(value)
    if _PLAIN.match(text) or (text[:1] in "[{" and text[-1:] in "]}"):
        return text
    return _quoted(text)


def literal_text(value: Any) -> str:
    """Return a value as the right side of a Hydra override; a text always stays a text."""
    match value:
        case str():
            plain = _LITERAL.fullmatch(value) and value.lower() not in _READ_ALIKE
            return value if plain else _quoted(value)
        case bool():
            return "true" if value else "false"
        case Mapping():
            return "{" + ",".join(f"{key}:{literal_text(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(literal_text(item) for item in value) + "]"
    return value_text(value)


def value_of(written: Any) -> Any:
    """Return the value that Hydra parses from the right side of an override; only texts change."""
    if not isinstance(written, str):
        return written
    text = written.strip()
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if _NUMBER.match(text):
        number = float(text)
        whole = not any(mark in text for mark in ".eE")
        return int(text) if whole else number
    if text[:1] in "[{'\"" and text[-1:] in "]}'\"":
        try:
            return _plain(yaml.safe_load(_PAIR.sub(r"\1: ", text) if text.startswith(("{", "[{")) else text))
        except yaml.YAMLError:
            return text
    return text


def override(key: str, value: Any) -> str:
    """Return `key=value` for Hydra's command line; a `~key` deletes.

    Environment variables stay texts: Ray refuses numbers among them.
    """
    if prefix(key) == "~" and value is None:
        return key
    if _VARIABLES in key and value is not None and not isinstance(value_of(value), str | Mapping):
        return f"{key}={_quoted(str(value))}"
    return f"{key}={value_text(value)}"


def overrides_in(words: Iterable[str], *, top: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the overrides among the words of a command line, with their keys as written.

    `top`: keys without a section; any other key without a dot is an environment variable.
    """
    result: dict[str, Any] = {}
    for word in words:
        if word.startswith("-") or not _WORD.match(word) or ("=" not in word and word[:1] != "~"):
            continue
        key, _, text = word.partition("=")
        if "." not in key and bare(key) not in top:
            continue
        result[key] = value_of(text)
    return result


def yaml_override(key: str, value: Any) -> str:
    """Return `key=value` for OmegaConf's command line, which parses the right side as YAML.

    Texts that spell a number, list or mapping are treated as in `value_text`.
    """
    if isinstance(value, str) and (_PLAIN.match(value) or (value[:1] in "[{" and value[-1:] in "]}")):
        return f"{key}={value}"
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def _quoted(text: str) -> str:
    # Inside quotes Hydra keeps a backslash, except before a quote.
    escaped = _BEFORE_QUOTE.sub(lambda match: match[1] * 2 + ("\\'" if match[2] else ""), text)
    return f"'{escaped}'"


def _plain(value: Any) -> Any:
    """Return texts inside lists and mappings as Hydra reads them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value_of(value) if isinstance(value, str) and _NUMBER.match(value) else value


def printed_overrides(text: str, known: Container[str], *, top: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the overrides of known keys in the command lines of a log; `top` as in overrides_in."""
    result: dict[str, Any] = {}
    for line in text.splitlines():
        if "=" not in line or not ("." in line or top):
            continue
        try:
            words = shlex.split(line)
        except ValueError:  # a quote in prose
            continue
        overrides = overrides_in(words, top=top)
        result |= {bare(key): value for key, value in overrides.items() if bare(key) in known}
    return result
