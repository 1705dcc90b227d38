"""Data files of the adapters: facts about a framework that are rows and lists, decoded into frozen values."""

from __future__ import annotations

from importlib import resources
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


class Words(frozenset[str]):
    """Names that a data file writes as one text, apart by spaces: hundreds of them load at once."""


class DataError(ValueError):
    """A data file that does not hold what its readers expect; the message names file and entry."""


def rows(package: str, file: str, row: type[T]) -> tuple[T, ...]:
    """Return the rows of a file that is one list; raises DataError for a wrong key or type."""
    content = _content(package, file)
    if not isinstance(content, list):
        raise DataError(f"{file}: expected a list of rows")
    return tuple(
        _decoded(value, row, f"{file}, row {number}") for number, value in enumerate(content, start=1)
    )


def table(package: str, file: str, value: type[T]) -> dict[str, T]:
    """Return the entries of a file that is one mapping, by name; raises DataError for a wrong key or type."""
    content = _content(package, file)
    if not isinstance(content, dict):
        raise DataError(f"{file}: expected a mapping of entries")
    return {
        _decoded(key, str, f"{file}, {key}"): _decoded(entry, value, f"{file}, {key}")
        for key, entry in content.items()
    }


def document(package: str, file: str, kind: type[T]) -> T:
    """Return a file as one value; raises DataError for a wrong key or type."""
    return _decoded(_content(package, file), kind, file)


def _content(package: str, file: str) -> Any:
    try:
        return msgspec.yaml.decode(resources.files(package).joinpath(file).read_bytes())
    except msgspec.DecodeError as error:
        raise DataError(f"{file}: {error}") from error


def _decoded(content: Any, kind: type[T], place: str) -> T:
    try:
        return msgspec.convert(content, kind, dec_hook=_words)
    except msgspec.ValidationError as error:
        raise DataError(f"{place}: {error}") from error


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
