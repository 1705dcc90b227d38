"""Flags of a fork's own program, which go to its command: autotune hands them on and reads none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.launchers import frameworks
from autotune.launchers.frameworks.tabular.flags import FlagFramework
from autotune.orchestrator.config.installed import with_version
from autotune.orchestrator.placeholders import is_unfilled
from autotune.policies.values.job import Job


def fork_flags(
    framework: str,
    settings: Mapping[str, Any],
    *,
    command: tuple[str, ...],
    python: str | None,
    workdir: str,
    env: Mapping[str, str],
) -> dict[str, tuple[str, ...]]:
    """Return the words of each setting that no release of a framework of flags has.

    One whose value has to be edited stays a setting, where the edit has a line of its own.
    """
    adapter = frameworks.find(framework)
    if not isinstance(adapter, FlagFramework):
        return {}
    job = Job(
        name=framework,
        framework=framework,
        command=command,
        python=python,
        settings=dict(settings),
        env=dict(env),
        workdir=workdir,
    )
    foreign = adapter.foreign(with_version(job, adapter))
    words = {key: adapter.words_of({key: settings[key]}) for key in foreign}
    return {key: value for key, value in words.items() if value and not any(map(is_unfilled, value))}
