"""Reads the adapters' data files (facts about a framework, as YAML or JSON) into frozen values."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from autotune.launchers.base import Framework

T = TypeVar("T")
_Base: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class DataError(ValueError):
    """A data file with an unexpected key or type; the message names file and entry."""


class _Loader(_Base):  # type: ignore[misc]  # PyYAML has no types
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Return a mapping with string keys, `on` too; raises ConstructorError for a duplicate key."""
        result = {str(key.value): self.construct_object(value, deep=True) for key, value in node.value}
        if len(result) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key is named twice", node.start_mark)
        return result


def document(package: str, file: str, kind: type[T]) -> T:
    """Return a file as one value; raises DataError for a wrong key or type."""
    path = Path(import_module(package).__path__[0], file)  # importlib.resources costs 30 ms at the start
    try:
        return msgspec.convert(yaml.load(path.read_bytes(), _Loader), kind)  # noqa: S506 (a safe loader)
    except (msgspec.ValidationError, yaml.YAMLError) as error:
        raise DataError(f"{file}: {error}") from error


def package_of(framework: Framework) -> str:
    """Return the folder of a framework's adapter as a package."""
    return type(framework).__module__.rpartition(".")[0]
