"""A job's settings by dotted keys, with the framework's defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from autotune.policies.values.job import Job

_REFERENCE = re.compile(r"^\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^}]*))?\}$")
_DEEPEST = 8  # references resolved from one key


def with_settings(job: Job, changes: Mapping[str, Any]) -> Job:
    """Return a job with other values of some settings."""
    return msgspec.structs.replace(job, settings={**job.settings, **changes})


def with_sizes(job: Job, sizes: Mapping[str, Any]) -> Job:
    """Return a job with other values of plain settings, under the names that the job uses."""
    own = {key.lstrip("+-"): key for key in job.settings}
    dashes = "--" if any(key.startswith("--") for key in job.settings) else ""
    return with_settings(job, {own.get(name, dashes + name): value for name, value in sizes.items()})


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with dotted keys."""
    result: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            result |= flat({f"{key}.{inner}": each for inner, each in value.items()})
        else:
            result[key] = value
    return result


class Settings:
    """A job's values over its framework's defaults; resolves `${a.b}` references."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = values
        self._defaults = defaults

    def has(self, key: str) -> bool:
        """Return whether the job itself sets a key."""
        return key in self._values

    def raw(self, key: str) -> Any:
        """Return the unresolved value of a key, from the job or the framework's defaults."""
        return self._values[key] if key in self._values else self._defaults.get(key)

    def get(self, key: str) -> Any:
        """Return the value of a key, with a reference resolved."""
        value = self.raw(key)
        for _ in range(_DEEPEST):
            reference = _REFERENCE.match(value) if isinstance(value, str) else None
            if reference is None:
                break
            value = self.raw(reference[1])
        return value

    def followed(self, key: str) -> str:
        """Return the key that an unset key refers to by default; empty if none."""
        default = None if self.has(key) else self.raw(key)
        reference = _REFERENCE.match(default) if isinstance(default, str) else None
        return "" if reference is None else reference[1]

    def flag(self, key: str) -> bool:
        """Return whether a key's value is true."""
        return self.get(key) is True

    def count(self, key: str) -> int:
        """Return a key's value as an int; 0 if it is no whole number."""
        value = self.get(key)
        if isinstance(value, float) and value.is_integer():
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    def share(self, key: str) -> float:
        """Return a key's value as a float; 0 if it is no number."""
        value = self.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0

    def text(self, key: str) -> str:
        """Return a key's value as text; empty if unset."""
        value = self.get(key)
        return "" if value is None else str(value)

    def inside(self, node: str) -> dict[str, Any]:
        """Return a free-form section as a dict, whether the job sets it as a whole or key by key."""
        whole = self.get(node)
        apart = {name.removeprefix(f"{node}."): name for name in self._values if name.startswith(f"{node}.")}
        present = dict(whole) if isinstance(whole, Mapping) else {}
        return present | {key: self.get(name) for key, name in apart.items()}
