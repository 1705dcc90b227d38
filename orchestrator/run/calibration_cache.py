"""Calibration of the memory estimate, kept in the user's cache for later jobs of the same kind."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from autotune.orchestrator.errors import Failure
from autotune.orchestrator.run.directory import write_json
from autotune.policies.values.priors import Kind, Learned, merged, widened


def folder() -> Path:
    """Return the folder of the cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "autotune" / "learned"


def recall(kind: Kind) -> Learned | None:
    """Return the calibration of earlier jobs of this kind; less certain if of another version."""
    known = _read(_file(kind))
    return None if known is None else widened(known, version=kind.version)


def keep(learned: Learned) -> bool:
    """Add a run's calibration; return false if the cache cannot be written, which only costs accuracy."""
    if not learned.factors:
        return True
    file = _file(learned.kind)
    known = _read(file)
    if known is not None:
        learned = merged(widened(known, version=learned.kind.version), learned)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(file, learned)
    except (OSError, Failure):
        return False
    return True


def _file(kind: Kind) -> Path:
    """Return the file of a kind of job, shared by all versions."""
    words = "/".join((kind.model, kind.gpu, kind.framework, kind.placement))
    return folder() / f"{hashlib.sha256(words.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> Learned | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Learned)
    except (OSError, msgspec.DecodeError):
        return None  # nothing there, or not ours to read
