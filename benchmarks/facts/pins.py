"""What a release of a framework asks for: inference engines in one version, packages that it builds on."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

_ENGINES = ("sglang", "vllm")


def pinned(root: Path) -> dict[str, str]:
    """Return an engine's version by its name, from an unpacked wheel or a source tree."""
    result: dict[str, str] = {}
    for text in (*_of_wheel(root), *_of_source(root)):
        required = Requirement(text)
        for pin in required.specifier if required.name in _ENGINES else ():
            if pin.operator == "==":
                result.setdefault(required.name, pin.version)
    return result


def required(root: Path) -> dict[str, str]:
    """Return what an unpacked wheel always needs, such as `transformers>=4.56`, by the package's name."""
    needed = [Requirement(text) for text in _of_wheel(root)]
    return {each.name: str(each) for each in needed if each.marker is None}


def versions(root: Path) -> dict[str, str]:
    """Return the versions of the wheels that are unpacked in a folder, by the package's name."""
    names = [folder.name.removesuffix(".dist-info") for folder in root.glob("*.dist-info")]
    return {name: version for name, _, version in (each.rpartition("-") for each in names)}


def _of_wheel(root: Path) -> Iterator[str]:
    for file in root.glob("*.dist-info/METADATA"):
        for line in file.read_text().splitlines():
            if line.startswith("Requires-Dist:"):
                yield line.partition(":")[2]


def _of_source(root: Path) -> Iterator[str]:
    """Yield the requirements of every pyproject file: AReaL has one for each engine."""
    for file in sorted(root.glob("pyproject*.toml")):
        project = tomllib.loads(file.read_text()).get("project", {})
        yield from project.get("dependencies", ())
        for extra in project.get("optional-dependencies", {}).values():
            yield from (text for text in extra if not text.startswith(project.get("name", "") + "["))
