"""Files of settings in YAML, and what lies next to them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.orchestrator.config.includes import with_extended
from autotune.orchestrator.config.own_code import is_file, is_there
from autotune.orchestrator.config.yaml_nodes import Document, read_text, scalar_1_1
from autotune.orchestrator.errors import ExitCode, Failure, JobErrors
from autotune.orchestrator.init.bash.state import is_unknown
from autotune.orchestrator.init.entry_points import Program
from autotune.orchestrator.init.settings import areal_settings

_BUILDS_ON = "defaults"


def areal_script(path: Path) -> str:
    """Return the script next to a configuration that probably uses it; empty if there is none."""
    scripts = [each for each in sorted(path.parent.glob("*.py")) if not each.name.startswith("_")]
    stem = path.stem.split("_")[0]
    near = [s for s in scripts if s.stem == path.stem] or [
        s for s in scripts if s.stem.startswith(stem) and re.search(r"rl|train|grpo|ppo", s.stem)
    ]
    chosen = near[0] if near else scripts[0] if len(scripts) == 1 else None
    if chosen is None:
        return ""
    base = repository_of(path)
    return str(chosen.absolute().relative_to(base)) if base is not None else chosen.name


def repository_of(path: Path) -> Path | None:
    """Return the nearest folder above a file that is a repository or a project; None if there is none."""
    return next(
        (p for p in path.absolute().parents if is_there(p / ".git") or is_file(p / "pyproject.toml")), None
    )


def document_of(program: Program, cwd: str) -> dict[str, Any] | None:
    """Return the content of the file of `--config`; None if it is not on this machine."""
    config = areal_settings(program.argv).config
    return None if config is None or is_unknown(config) else readable_document(Path(cwd, config))


def readable_document(path: Path) -> dict[str, Any] | None:
    """Return the mapping in a YAML file; None if the file cannot be read or holds none."""
    try:
        return read_document(path)
    except Failure:
        return None


def read_document(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; raises Failure with the reason and, in the file, its place.

    Files that it extends by their names are read too (NeMo-RL's recipes); Hydra's groups have no suffix.
    """
    document = Document(read_text(path), str(path), read=scalar_1_1)
    if document.complaints:
        raise JobErrors(tuple(document.complaints))
    if document.value is None:
        raise Failure(f"`{path}` is empty", code=ExitCode.USAGE)
    if not isinstance(document.value, dict):
        raise Failure(f"`{path}` is no mapping of settings", code=ExitCode.USAGE)
    named = document.value.get(_BUILDS_ON)
    names = named if isinstance(named, list) else [named]
    if all(str(name).endswith((".yaml", ".yml")) for name in names):
        return with_extended(document.value, path, builds_on=_BUILDS_ON)
    return document.value


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a mapping's values by dotted key, without what belongs to Hydra."""
    result: dict[str, Any] = {}
    for key, value in document.items():
        if key in (_BUILDS_ON, "hydra"):
            continue
        if isinstance(value, dict) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result
