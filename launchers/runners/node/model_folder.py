"""Find a model on this machine by its path or hub name, without network access."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

CONFIG = "config.json"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_folder(name: str, workdir: str | Path, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder or config.json of a model's path or hub name on this machine; None if absent."""
    local = Path(workdir) / Path(name).expanduser()
    try:
        if local.is_file() or (local / CONFIG).is_file():
            return local
    except OSError:  # a folder that this user may not open, or a name that is too long
        return None
    if not HUB_NAME.fullmatch(name):
        return None
    return _snapshot(_cache(environment) / f"models--{name.replace('/', '--')}")


def _cache(environment: Mapping[str, str]) -> Path:
    # In the order of huggingface_hub's constants.py.
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        value = environment.get(variable)
        if value:
            return Path(value).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"


def _snapshot(repository: Path) -> Path | None:
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        revision = ""
    named = repository / "snapshots" / revision
    if revision and (named / CONFIG).is_file():
        return named
    complete = (path.parent for path in repository.glob(f"snapshots/*/{CONFIG}"))
    return max(complete, key=lambda folder: folder.stat().st_mtime, default=None)
