"""The frameworks: what to run, rendered from a job and its knobs without any effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from autotune.launchers.base import Framework
from autotune.launchers.frameworks.core.traces import Traces, traces_of

# The folder of each framework and the class in its adapter.py.
_ADAPTERS: Mapping[str, tuple[str, str]] = {
    "builtin": ("builtin", "Builtin"),
    "verl": ("verl", "Verl"),
    "areal": ("areal", "Areal"),
    "relax": ("relax", "Relax"),
    "slime": ("slime", "Slime"),
    "miles": ("miles", "Miles"),
    "openrlhf": ("openrlhf", "OpenRlhf"),
    "skyrl": ("skyrl", "SkyRL"),
    "nemo-rl": ("nemo_rl", "NemoRL"),
    "trl": ("trl", "Trl"),
    "ms-swift": ("ms_swift", "MsSwift"),
    "command": ("command", "AnyCommand"),
}


class Frameworks(Mapping[str, Framework]):
    """Frameworks by name; the modules of one are imported when it is first asked for."""

    def __init__(self, adapters: Mapping[str, tuple[str, str]]) -> None:
        self._adapters = adapters
        self._made: dict[str, Framework] = {}

    def __getitem__(self, name: str) -> Framework:
        if name not in self._made:
            folder, adapter = self._adapters[name]
            self._made[name] = getattr(import_module(f"{__name__}.{folder}.adapter"), adapter)()
        return self._made[name]

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    def __len__(self) -> int:
        return len(self._adapters)


FRAMEWORKS = Frameworks(_ADAPTERS)


def find(name: str) -> Framework:
    """Return the framework of that name; raises KeyError for an unknown one."""
    return FRAMEWORKS[name]


def package_of(name: str) -> str:
    """Return the folder of a framework as a package, without an import of its adapter."""
    return f"{__name__}.{_ADAPTERS[name][0]}"


def traces() -> dict[str, Traces]:
    """Return how the logs of each framework are told, by its name."""
    return {name: traces_of(f"{__name__}.{folder}") for name, (folder, _) in _ADAPTERS.items()}
