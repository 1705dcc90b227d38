"""The dataclasses of a source tree, read without importing it: their fields, types and plain defaults."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, NamedTuple

_SCALARS = ("int", "float", "bool", "str")
_ABSENT = object()


class Field(NamedTuple):
    """A field of a dataclass."""

    kind: str  # the name of its type, `float?` where None is allowed; empty where it is no scalar
    default: Any  # None where it is no literal
    section: str  # the class of a nested dataclass; empty where it is a value


def dataclasses_in(root: Path) -> dict[str, dict[str, Field]]:
    """Return the fields of every class below a folder by the class's name, inherited ones included."""
    classes: dict[str, ast.ClassDef] = {}
    for file in sorted(root.rglob("*.py")):
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue  # a template or Python 2
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and _is_dataclass(node):
                classes.setdefault(node.name, node)
    return {name: _fields(name, classes) for name in classes}


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _fields(name: str, classes: dict[str, ast.ClassDef]) -> dict[str, Field]:
    node = classes[name]
    found: dict[str, Field] = {}
    for base in node.bases:
        parent = ast.unparse(base).rpartition(".")[2]
        if parent in classes and parent != name:
            found |= _fields(parent, classes)
    for entry in node.body:
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        if not entry.target.id.startswith("_") and "ClassVar" not in ast.unparse(entry.annotation):
            found[entry.target.id] = _field(entry, classes)
    return found


def _field(entry: ast.AnnAssign, classes: dict[str, ast.ClassDef]) -> Field:
    text = ast.unparse(entry.annotation).strip("'\"")
    plain = text.removeprefix("Optional[").removesuffix("]") if text.startswith("Optional[") else text
    parts = [part.strip() for part in plain.split("|")]
    nullable = text != plain or "None" in parts
    parts = [part for part in parts if part != "None"]
    own = parts[0] if len(parts) == 1 else ""
    default = _default(entry.value)
    kind = own if own in _SCALARS else ""
    if kind and (nullable or default is None):
        kind += "?"
    return Field(
        kind=kind, default=None if default is _ABSENT else default, section=own if own in classes else ""
    )


def _default(value: ast.expr | None) -> Any:
    if isinstance(value, ast.Call):
        named = next((word.value for word in value.keywords if word.arg == "default"), None)
        return _default(named) if named is not None else _ABSENT
    try:
        return _ABSENT if value is None else ast.literal_eval(value)
    except ValueError:
        return _ABSENT
