"""What is installed beside autotune: versions, and the extras by the modules that they bring."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec

DISTRIBUTION = "rl-autotune"  # what pip installs; the import name is `autotune`
# Each module that an extra of pyproject.toml brings: the extra, and its name in a sentence.
EXTRAS: Mapping[str, tuple[str, str]] = {
    "ray": ("ray", "Ray"),
    "optuna": ("ray", "Optuna"),
    "torch": ("builtin", "PyTorch"),
    "transformers": ("builtin", "transformers"),
    "tokenizers": ("builtin", "tokenizers"),
    "safetensors": ("builtin", "safetensors"),
    "sglang": ("sglang", "SGLang"),
}

# What a run imports that is not installed with the core, by the command that began it.
NEEDED: Mapping[str, tuple[str, ...]] = {
    "launch": ("ray",),
    "search": ("ray", "optuna"),
    "rehearse": ("ray",),
}


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow, and most commands do without

    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def missing(modules: Iterable[str]) -> tuple[str, ...]:
    """Return those of the modules that this interpreter cannot find; none is imported."""
    return tuple(module for module in modules if not _is_installed(module))


def _is_installed(module: str) -> bool:
    try:
        return module in sys.modules or find_spec(module) is not None
    except ValueError:  # a module that has no spec, such as one that a test put in place
        return True


def absence(modules: Iterable[str]) -> str:
    """Return what is missing and where, as the end of a sentence that says who needs it."""
    names = " and ".join(EXTRAS[module][1] for module in modules)
    return f"needs {names}, which {sys.executable} does not have"


def how_to_install(modules: Iterable[str]) -> str:
    """Return the command that installs the extras of the modules."""
    extras = dict.fromkeys(EXTRAS[module][0] for module in modules)
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"
