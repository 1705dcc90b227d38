"""What a framework's rehearsal does in addition to a trial, and which events it covers: `rehearsal.yaml`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

from autotune.launchers.frameworks.core.data import document
from autotune.policies.values.job import Job
from autotune.policies.values.rehearsing import LateEvent, Met
from autotune.policies.values.value import Value

_NEVER = ("", "no", "none", "null", "false")


class RehearsalFile(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A framework's `rehearsal.yaml`; settings are named as in its `trial.yaml`."""

    saves: dict[str, Any] = {}  # makes it save after the step SAVED_AT
    validates: dict[str, Any] = {}  # and validate
    validating: tuple[str, ...] = ()  # settings of a job that validates: each a number above 0, or a word
    left: tuple[str, ...] = ()  # to the job, unlike in a trial
    left_validating: tuple[str, ...] = ()  # the same where it validates
    unmet: dict[LateEvent, str] = {}  # why an event is not met, where it is not
    remarks: dict[LateEvent, str] = {}  # how far one is met


@cache
def rehearsal_file(package: str) -> RehearsalFile:
    """Return the `rehearsal.yaml` of a framework."""
    return document(package, "rehearsal.yaml", RehearsalFile)


def validates(package: str, get: Callable[[str], Any]) -> bool:
    """Return whether a job validates at steps of its own; `get` returns its settings by name."""
    names = rehearsal_file(package).validating
    return bool(names) and all(_says(get(name)) for name in names)


def additions(package: str, *, validation: bool) -> dict[str, Any]:
    """Return the settings of a rehearsal that a trial does not have."""
    file = rehearsal_file(package)
    return {**file.saves, **(file.validates if validation else {})}


def left(package: str, *, validation: bool) -> frozenset[str]:
    """Return the settings that a trial changes and a rehearsal does not."""
    file = rehearsal_file(package)
    return frozenset((*file.left, *(file.left_validating if validation else ())))


def settings_of(
    job: Job, trial: Job, own: Mapping[str, Any], *, left: Collection[str], bare: Callable[[str], str]
) -> dict[str, Any]:
    """Return the settings of a rehearsal: its trial's, what is left to the job, and `own` over both."""
    named = {bare(key) for key in own}
    kept = {k: v for k, v in trial.settings.items() if bare(k) not in named and bare(k) not in left}
    back = {k: v for k, v in job.settings.items() if bare(k) in left and bare(k) not in named}
    return {**kept, **back, **own}


def met(package: str, *, without: Collection[LateEvent]) -> tuple[Met, ...]:
    """Return every event, covered except for those in `without`; without a save there is no reload."""
    file = rehearsal_file(package)
    missing = {*without, *([LateEvent.RELOAD] if LateEvent.SAVE in without else [])}
    return tuple(
        Met(
            event=event,
            met=event not in missing,
            reason=(file.unmet if event in missing else file.remarks).get(event, ""),
        )
        for event in LateEvent
    )


def _says(value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return value is True
    if isinstance(value, int | float):
        return value > 0
    return str(value).lower() not in _NEVER
