"""Data files of the adapters: facts about a framework that are rows and lists, decoded into frozen values."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from autotune.launchers.base import Framework

T = TypeVar("T")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TEXT = "tag:yaml.org,2002:str"


class Words(frozenset[str]):
    """Names that a data file writes as one text, apart by spaces: hundreds of them load at once."""


class DataError(ValueError):
    """A data file that does not hold what its readers expect; the message names file, line and entry."""


def rows(package: str, file: str, row: type[T]) -> tuple[T, ...]:
    """Return the rows of a file that is one list; raises DataError for a wrong key or type."""
    root = _root(package, file)
    if not isinstance(root, yaml.SequenceNode):
        raise DataError(f"{file}: expected a list of rows")
    return tuple(_decoded(node, row, f"{file}, line {_line(node)}") for node in root.value)


def table(package: str, file: str, value: type[T]) -> dict[str, T]:
    """Return the entries of a file that is one mapping, by name; raises DataError for a wrong key or type."""
    root = _root(package, file)
    if not isinstance(root, yaml.MappingNode):
        raise DataError(f"{file}: expected a mapping of entries")
    entries: dict[str, T] = {}
    for key, node in root.value:
        place = f"{file}, line {_line(key)}, {key.value}"
        if key.value in entries:
            raise DataError(f"{place}: named twice")
        entries[key.value] = _decoded(node, value, place)
    return entries


def document(package: str, file: str, kind: type[T]) -> T:
    """Return a file as one value; raises DataError for a wrong key or type."""
    return _decoded(_root(package, file), kind, file)


def package_of(framework: Framework) -> str:
    """Return the folder of a framework's adapter as a package."""
    return type(framework).__module__.rpartition(".")[0]


def _root(package: str, file: str) -> Any:
    folder = import_module(package).__path__[0]  # importlib.resources costs 30 ms at the start
    loader = _LOADER(Path(folder, file).read_bytes())
    try:
        return loader.get_single_node()
    except yaml.YAMLError as error:
        raise DataError(f"{file}: {error}") from error
    finally:
        loader.dispose()


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _decoded(node: Any, kind: type[T], place: str) -> T:
    try:
        return msgspec.convert(_plain(node, yaml.constructor.SafeConstructor()), kind, dec_hook=_words)
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise DataError(f"{place}: {error}") from error


def _plain(node: Any, scalars: Any) -> Any:
    """Return a node's content in half the time of PyYAML's constructor; keys are texts, none comes twice."""
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, scalars) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        content = {str(key.value): _plain(value, scalars) for key, value in node.value}
        if len(content) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key is named twice", node.start_mark)
        return content
    return node.value if node.tag == _TEXT else scalars.construct_object(node)


def _words(kind: type, content: Any) -> Words:
    if kind is not Words:
        raise NotImplementedError(kind)
    if not isinstance(content, str):
        raise ValueError(f"Expected names apart by spaces, got `{type(content).__name__}`")  # noqa: TRY004
    names = content.split()
    words = Words(names)
    if len(words) < len(names):
        twice = sorted(name for name in words if names.count(name) > 1)
        raise ValueError(f"Named twice: {', '.join(twice)}")
    return words
