"""The dataclasses of a source tree, read without importing it: their fields, types and plain defaults."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_SCALARS = ("int", "float", "bool", "str")
_ANY = "any"  # the type of a mapping, and of a value that may be of several types
_MAPPING = re.compile(r"(?:[Dd]ict|Mapping)\b")
_ABSENT = object()
_NOTED = re.compile(r"(?:A|Annotated|\w+\.Annotated)\[(.*)\]", re.DOTALL)  # a type with notes behind it


class Field(NamedTuple):
    """A field of a dataclass."""

    kind: str  # the name of its type, `float?` where None is allowed, or `any`; empty: a list or a class
    default: Any  # None where it is no literal
    section: str  # the class of a nested dataclass; empty where it is a value


class Source(NamedTuple):
    """What the modules of a folder have at their top; of several with a name the first one."""

    classes: dict[str, ast.ClassDef]
    constants: dict[str, ast.expr]

    def __or__(self, other: Source) -> Source:  # type: ignore[override]
        """Return both, the other's where a name is in both."""
        return Source(self.classes | other.classes, self.constants | other.constants)


def dataclasses_in(root: Path, *, private: bool = False) -> dict[str, dict[str, Field]]:
    """Return the fields of every dataclass below a folder by the class's name, inherited ones included.

    `private` includes those whose names begin with an underscore.
    """
    whole = read(root)
    own = Source({name: node for name, node in whole.classes.items() if _is_dataclass(node)}, whole.constants)
    return {name: _fields(name, own, whole, private=private) for name in own.classes}


def declared(fields: Mapping[str, Field], beyond: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return types and defaults by key, `any` for no scalar; `beyond` has defaults that a factory gives."""
    defaults = {key: beyond.get(key, field.default) for key, field in sorted(fields.items())}
    return {
        "types": {key: field.kind or "any" for key, field in sorted(fields.items())},
        "defaults": {key: value for key, value in defaults.items() if value is not None},
    }


def fields_of(name: str, source: Source) -> dict[str, Field]:
    """Return the public fields of one class, inherited ones included."""
    return _fields(name, source, source, private=False)


def read(root: Path) -> Source:
    """Return the classes and constants of a module, or of every module below a folder."""
    classes: dict[str, ast.ClassDef] = {}
    constants: dict[str, ast.expr] = {}
    for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            continue  # a template or Python 2
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                constants.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                constants.setdefault(node.target.id, node.value)
    return Source(classes, constants)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _fields(name: str, own: Source, whole: Source, *, private: bool) -> dict[str, Field]:
    node = own.classes[name]
    result: dict[str, Field] = {}
    for base in node.bases:
        parent = ast.unparse(base).rpartition(".")[2]
        if parent in own.classes and parent != name:
            result |= _fields(parent, own, whole, private=private)
    for entry in node.body:
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        hidden = entry.target.id.startswith("_") and not private
        if not hidden and "ClassVar" not in ast.unparse(entry.annotation):
            result[entry.target.id] = _field(entry, own, whole)
    return result


def _field(entry: ast.AnnAssign, own: Source, whole: Source) -> Field:
    text = ast.unparse(entry.annotation).strip("'\"")
    if noted := _NOTED.fullmatch(text):
        inner = ast.parse(f"({noted[1]},)", mode="eval").body
        assert isinstance(inner, ast.Tuple)
        text = ast.unparse(inner.elts[0]).strip("'\"")
    plain = text.removeprefix("Optional[").removesuffix("]") if text.startswith("Optional[") else text
    parts = [part.strip() for part in plain.split("|")]
    nullable = text != plain or "None" in parts
    parts = [part for part in parts if part != "None"]
    named = parts[0] if len(parts) == 1 else ""
    default = _default(entry.value, whole)
    kind = named if named in _SCALARS else ""
    if kind and (nullable or default is None):
        kind += "?"
    elif not kind and (_MAPPING.match(plain) or (parts and set(parts) <= set(_SCALARS))):
        kind = _ANY
    return Field(
        kind=kind,
        default=None if default is _ABSENT else default,
        section=named if named in own.classes else "",
    )


def _default(value: ast.expr | None, source: Source) -> Any:
    match value:
        case ast.Call(func=ast.Name(id="get_field"), args=[owner, ast.Constant(value=str(name))]):
            return _member(ast.unparse(owner), name, source)  # vLLM: the default of another class's field
        case ast.Call(func=ast.Name(id="int"), args=[ast.Constant(value=int() | float() as number)]):
            return int(number)
        case ast.Call(keywords=keywords):
            named = next((word.value for word in keywords if word.arg == "default"), None)
            return _default(named, source) if named is not None else _ABSENT
        case ast.BinOp(left=left, op=ast.Pow() | ast.Mult() as operation, right=right):
            ends = _default(left, source), _default(right, source)
            if not all(isinstance(end, int) for end in ends):
                return _ABSENT
            return ends[0] ** ends[1] if isinstance(operation, ast.Pow) else ends[0] * ends[1]
        case ast.Attribute(value=ast.Attribute() as member, attr="value"):  # of an enumeration
            return _default(member, source)
        case ast.Attribute(value=owner, attr=name):
            return _member(ast.unparse(owner), name, source)
        case ast.Name(id=name) if name in source.constants:
            others = {other: constant for other, constant in source.constants.items() if other != name}
            return _default(source.constants[name], Source(source.classes, others))
        case None:
            return _ABSENT
    try:
        return ast.literal_eval(value)
    except ValueError:
        return _ABSENT


def _member(owner: str, name: str, source: Source) -> Any:
    """Return the default of a field, or the value of an enumeration's member."""
    for entry in source.classes[owner].body if owner in source.classes else ():
        targets = entry.targets if isinstance(entry, ast.Assign) else [getattr(entry, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return _default(getattr(entry, "value", None), source)
    return _ABSENT
