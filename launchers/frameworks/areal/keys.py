"""Which settings of a GRPO job a release of AReaL knows (areal/api/cli_args.py), with defaults and types."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from autotune.launchers.frameworks.core import versions
from autotune.policies.values.value import Value

SECTION = "section"  # the kind of a name below which there are others
_ANY = "any"  # the type of a setting that takes any value, such as a dictionary
_FACTS = "facts"


class _Facts(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file of `facts/` holds, written by `python -m benchmarks.facts areal VERSION`."""

    engines: dict[str, str]  # the version of an inference engine that the release asks for, by its name
    types: dict[str, str]  # by dotted name; with `?` where null is allowed
    defaults: dict[str, Any]  # those that are not null


class Keys:
    """The settings of one release."""

    def __init__(self, release: versions.Release) -> None:
        file = resources.files(__package__).joinpath(_FACTS, f"{release.version}.json")
        facts = msgspec.json.decode(file.read_bytes(), type=_Facts)
        self.release = release
        self.defaults = facts.defaults
        self.engines = facts.engines
        self._types = facts.types
        self._sections: dict[str, dict[str, str]] = {"": {}}
        for path, kind in facts.types.items():
            self._add(path, kind)

    def fields(self, section: str = "") -> dict[str, str] | None:
        """Return the keys of a section with their types, by its dotted path; None where there is none."""
        return self._sections.get(section)

    def kind_of(self, path: str) -> str | None:
        """Return the type of a setting, such as `int?`; None where the release has no such setting."""
        if path in self._sections:
            return SECTION if path else None
        parts = path.split(".")
        above = (".".join(parts[:n]) for n in range(1, len(parts)))
        return self._types.get(path) or (_ANY if any(self._types.get(p) == _ANY for p in above) else None)

    def leaves(self) -> Iterator[str]:
        """Yield the dotted path of every section and setting."""
        yield from (section for section in self._sections if section)
        yield from self._types

    def is_section(self, path: str) -> bool:
        """Return whether a path names a section and not a value."""
        return bool(path) and path in self._sections

    def _add(self, path: str, kind: str) -> None:
        section, _, key = path.rpartition(".")
        if section and section not in self._sections:
            self._sections[section] = {}
            self._add(section, SECTION)
        self._sections[section][key] = kind


@cache
def releases() -> tuple[str, ...]:
    """Return the releases of AReaL whose settings are known."""
    files = resources.files(__package__).joinpath(_FACTS).iterdir()
    return tuple(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def keys_of(version: str | None) -> Keys:
    """Return the settings that stand for a job's version of AReaL, None where that is not known."""
    return _keys(versions.choose(version, releases()))


@cache
def _keys(release: versions.Release) -> Keys:
    return Keys(release)


def kind_of(path: str) -> str | None:
    """Return the type of a setting of the newest known release; None where it has no such setting."""
    return keys_of(None).kind_of(path)
