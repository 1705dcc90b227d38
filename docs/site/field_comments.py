"""What the source says of each field of a document or of a knob, for its JSON Schema or its page."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import re
import textwrap
import tokenize
import typing
from enum import Enum
from typing import Any

import msgspec

from autotune.orchestrator.config.knob_kinds import kind
from autotune.policies.values.knobs import KNOBS, Knobs

_IN_JSON = re.compile(r"\b(?:None|True|False)\b")


def describe(schema: dict[str, Any], type_: Any) -> None:
    """Add to a schema made of a type the descriptions of the fields of all objects in it."""
    classes = structs_of(type_)
    for node in (schema, *schema.get("$defs", {}).values()):
        properties = node.get("properties", {})
        for cls in classes:
            texts = descriptions(cls)
            if cls.__name__ == node.get("title") and texts.keys() == properties.keys():
                for name, text in texts.items():
                    properties[name] |= {"description": _IN_JSON.sub(_as_json, text)} if text else {}


def _as_json(match: re.Match[str]) -> str:
    return "null" if match[0] == "None" else match[0].lower()


def structs_of(type_: Any) -> set[type[msgspec.Struct]]:
    """Return the classes of all objects in a document of this type."""
    result: set[type[msgspec.Struct]] = set()
    waiting = [type_]
    while waiting:
        each = waiting.pop()
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            if each not in result:
                result.add(each)
                waiting += [field.type for field in msgspec.structs.fields(each)]
        else:
            waiting += typing.get_args(each)
    return result


@functools.cache
def descriptions(cls: type[msgspec.Struct]) -> dict[str, str]:
    """Return, by its name in JSON, the comment of each field, or else how its type's docstring begins."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            comments |= _comments(base)
    fields = msgspec.structs.fields(cls)
    result = {each.encode_name: comments.get(each.name) or _summary(each.type) for each in fields}
    config = cls.__struct_config__
    return {str(config.tag_field): f"`{config.tag}`"} | result if config.tag_field else result


def _summary(type_: Any) -> str:
    """Return the first sentence of the docstring of a class, also of one that is optional."""
    named = next(each for each in (*typing.get_args(type_), type_) if each is not type(None))
    if isinstance(named, type) and issubclass(named, msgspec.Struct | Enum) and named.__doc__:
        return inspect.cleandoc(named.__doc__).partition("\n\n")[0].replace("\n", " ")
    return ""


def _comments(cls: type) -> dict[str, str]:
    """Return the comments beside the fields of a class, or above a field that has none beside it."""
    source = textwrap.dedent(inspect.getsource(cls))
    beside: dict[int, str] = {}
    above: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# noqa"):
            row = token.start[0]
            (above if token.line.lstrip().startswith("#") else beside)[row] = token.string.lstrip("# ")
    result = {}
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            rows = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            text = " ".join(beside[row] for row in rows if row in beside)
            row = node.lineno - 1
            lines: list[str] = []
            while not text and row in above:
                lines.insert(0, above[row])
                row -= 1
            result[node.target.id] = text or " ".join(lines)
    return result


def knobs() -> list[tuple[str, str, str]]:
    """Return the name, kind and meaning of every knob."""
    # Journals have bytes where a person writes `64MiB`.
    meanings = {name: text.removesuffix(", in bytes") for name, text in descriptions(Knobs).items()}
    return [(name, kind(name), f"{meanings[name][0].upper()}{meanings[name][1:]}.") for name in KNOBS]
