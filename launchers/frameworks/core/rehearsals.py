"""What a framework's rehearsal adds to a trial, and which late events it covers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from autotune.policies.values.job import Job
from autotune.policies.values.rehearsing import LateEvent, Met
from autotune.policies.values.value import Value

_NEVER = ("", "no", "none", "null", "false")


class Rehearsal(Value, frozen=True, kw_only=True):
    """The settings of a rehearsal beyond those of a trial, named as in the framework's `trial.yaml`."""

    saves: Mapping[str, Any] = {}  # make it save after the step SAVED_AT
    validates: Mapping[str, Any] = {}  # make it validate there
    validating: tuple[str, ...] = ()  # a job validates if each of these is a number above 0 or a text
    left: tuple[str, ...] = ()  # settings of a trial that a rehearsal leaves to the job
    left_validating: tuple[str, ...] = ()  # the same in a job that validates
    unmet: Mapping[LateEvent, str] = {}  # events that it does not cover -> why
    remarks: Mapping[LateEvent, str] = {}  # events that it covers in part -> how far

    def validates_job(self, get: Callable[[str], Any]) -> bool:
        """Return whether a job validates during training; `get` returns its settings by name."""
        return bool(self.validating) and all(_says(get(name)) for name in self.validating)

    def additions(self, *, validation: bool) -> dict[str, Any]:
        """Return the settings of a rehearsal that a trial does not have."""
        return {**self.saves, **(self.validates if validation else {})}

    def kept(self, *, validation: bool) -> frozenset[str]:
        """Return the settings that a trial changes and a rehearsal does not."""
        return frozenset((*self.left, *(self.left_validating if validation else ())))

    def met(self, *, without: Collection[LateEvent]) -> tuple[Met, ...]:
        """Return every event, covered except for those in `without`; without a save there is no reload."""
        missing = {*without, *([LateEvent.RELOAD] if LateEvent.SAVE in without else [])}
        return tuple(
            Met(
                event=event,
                met=event not in missing,
                reason=(self.unmet if event in missing else self.remarks).get(event, ""),
            )
            for event in LateEvent
        )


def settings_of(
    job: Job, trial: Job, own: Mapping[str, Any], *, left: Collection[str], bare: Callable[[str], str]
) -> dict[str, Any]:
    """Return the settings of a rehearsal: the trial's without those left to the job, then `own`."""
    named = {bare(key) for key in own}
    kept = {k: v for k, v in trial.settings.items() if bare(k) not in named and bare(k) not in left}
    back = {k: v for k, v in job.settings.items() if bare(k) in left and bare(k) not in named}
    return {**kept, **back, **own}


def _says(value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return value is True
    if isinstance(value, int | float):
        return value > 0
    return str(value).lower() not in _NEVER
