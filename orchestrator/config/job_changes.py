"""What differs between two readings of a job: by key of job.yaml, and whether only knobs do."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune.policies.values.job import Job
from autotune.policies.values.profile import Profile

# What is derived from other keys: a model or data that changed shows in the settings or in `model`.
_DERIVED = ("shape", "shape_from", "prompts")
# What says how a run is conducted: a failure of an earlier attempt stays one.
_CONDUCT = ("name", "goal.", "recovery.", "search.", "notify.", "annotate")


def differences(before: Job, after: Job) -> dict[str, tuple[Any, Any]]:
    """Return the values before and after of each key that differs, by its dotted path."""
    old, new = (_flat(msgspec.to_builtins(job)) for job in (before, after))
    if after.cluster.gpu_memory_bytes is None:  # it is measured
        old.pop("cluster.gpu_memory_bytes", None)
        new.pop("cluster.gpu_memory_bytes", None)
    return {key: (old.get(key), new.get(key)) for key in sorted({*old, *new}) if old.get(key) != new.get(key)}


def concerns_training(keys: dict[str, tuple[Any, Any]], profile: Profile) -> bool:
    """Return whether anything but knobs and the conduct of the run differs."""
    knobs = {f"settings.{support.setting}" for support in profile.supported.values()}
    return any(key not in knobs and not key.startswith(_CONDUCT) for key in keys)


def concerns_trials(keys: dict[str, tuple[Any, Any]]) -> bool:
    """Return whether anything but the conduct of the run differs: trials are compared with each other."""
    return any(not key.startswith(_CONDUCT) for key in keys)


def _flat(value: dict[str, Any], path: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, inner in value.items():
        if not path and key in _DERIVED:
            continue
        if isinstance(inner, dict):
            out |= _flat(inner, f"{path}{key}.")
        else:
            out[f"{path}{key}"] = inner
    return out
