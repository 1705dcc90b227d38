"""Command-line options that change a job; all their mistakes are reported at once."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from pydantic import ValidationError

from autotune.launchers import frameworks
from autotune.launchers.base import refusals
from autotune.launchers.likeness import suggestion
from autotune.orchestrator.cluster_fit import with_gpu_memory
from autotune.orchestrator.config import knob_kinds
from autotune.orchestrator.config.loader import assumed
from autotune.orchestrator.config.schema import READ_ELSEWHERE, JobFile, values_of
from autotune.orchestrator.config.yaml_edit import Edit, with_values
from autotune.orchestrator.config.yaml_nodes import scalar
from autotune.orchestrator.errors import Complaint, JobErrors
from autotune.orchestrator.units import show_value, size_bytes
from autotune.policies.remedies.legality import objections
from autotune.policies.values.formatting import BYTE_KNOBS
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import KNOBS, Knobs, Setting
from autotune.policies.values.profile import Grid, Profile


class _RefusedError(Exception):
    """An invalid option; `name` says that its name is wrong, otherwise its value."""

    def __init__(self, message: str, *, hint: str = "", name: bool = False) -> None:
        super().__init__(message)
        self.message, self.hint, self.name = message, hint, name


def override(job: Job, written: tuple[str, ...]) -> dict[str, Any]:
    """Return the framework's settings for `--set name=value` options; raises JobErrors.

    A name is a knob, or a setting of the framework: one that the job has, one that a knob changes, or any
    name with `.` or `-`, which no knob has.
    """
    if not written:
        return {}
    framework, cluster = frameworks.find(job.framework), assumed(job)
    profile = framework.profile(with_gpu_memory(job, cluster), cluster)
    complaints: list[Complaint] = []
    changes: dict[str, Setting] = {}
    settings: dict[str, Any] = {}
    named = {*job.settings, *(support.setting for support in profile.supported.values())} - set(KNOBS)
    for option in written:
        name, _, value = option.partition("=")
        if value and (name in named or re.search("[.-]", name)):
            settings[name] = scalar(value)
            continue
        try:
            changes[name] = _setting(name, value or None, profile)
        except _RefusedError as refused:
            column, width = (1, len(name)) if refused.name else (len(name) + 2, len(value))
            complaints.append(
                _complaint(refused.message, option, column=column, width=width, hint=refused.hint)
            )
    proposed = msgspec.structs.replace(profile.knobs, **changes)
    if not complaints:
        whole = " ".join(written)
        # The user may leave the grids of the knobs, but must meet what the framework requires.
        free = {name: msgspec.structs.replace(each, grid=Grid()) for name, each in profile.supported.items()}
        demands = msgspec.structs.replace(profile, supported=free)
        complaints += [
            _complaint(why, whole) for why in objections(demands, profile.knobs, proposed, started=False)
        ]
    if complaints:
        raise JobErrors(tuple(complaints))
    return framework.settings(job, msgspec.structs.replace(Knobs(), **changes)) | settings


def with_edits(job: Job, edits: list[Edit]) -> Job:
    """Return a job with the values of options; raises JobErrors for values that it does not accept."""
    if not edits:
        return job
    options = {edit.path: edit for edit in edits}
    try:
        file = JobFile.model_validate(with_values(values_of(job), edits))
    except ValidationError as errors:
        refused = [(options[error["loc"][:2]], error["msg"]) for error in errors.errors()]
        named = [(o.why.removeprefix("from "), str(o.value), message) for o, message in refused]
        raise JobErrors(
            tuple(_complaint(f"`{name}` {message}", value, option=name) for name, value, message in named)
        ) from None
    read = {name: getattr(job, name) for name in READ_ELSEWHERE}
    changed = msgspec.structs.replace(msgspec.convert(file, Job, from_attributes=True), **read)
    problems = refusals(frameworks.find(job.framework).check(changed))
    if problems:
        written = ", ".join(f"{edit.path[-1]}={show_value(edit.value)}" for edit in edits)
        raise JobErrors(tuple(_complaint(each.message, written, hint=each.hint) for each in problems))
    return changed


def _complaint(
    message: str,
    text: str,
    *,
    option: str = "--set",
    column: int = 1,
    width: int | None = None,
    hint: str = "",
) -> Complaint:
    width = len(text) if width is None else width
    return Complaint(
        message=message,
        file=option,
        column=column,
        width=max(1, width),
        text=text,
        hint=hint,
        about=option.removeprefix("--"),
    )


def _setting(name: str, text: str | None, profile: Profile) -> Setting:
    if text is None:
        first = next(iter(name.split()), "knob")
        hint = f"such as `--set {first}=...`"
        raise _RefusedError("an override is written knob=value", hint=hint, name=True)
    if name not in KNOBS:
        raise _RefusedError(
            f"unknown knob `{name}`", hint=suggestion(name, tuple(profile.supported) or KNOBS), name=True
        )
    if name not in profile.supported:
        why = profile.unsupported.get(name, "it has no such setting")
        raise _RefusedError(f"{profile.framework} does not offer `{name}`", hint=why, name=True)
    setting = _converted(name, text)
    grid = profile.supported[name].grid
    if setting is None:
        return None
    if grid.values and setting not in grid.values:
        raise _RefusedError(f"`{name}` must be one of " + ", ".join(show_value(v) for v in grid.values))
    if isinstance(setting, (int, float)) and not isinstance(setting, bool):
        if grid.minimum is not None and setting < grid.minimum:
            raise _RefusedError(f"`{name}` must be at least {show_value(grid.minimum)}")
        if grid.maximum is not None and setting > grid.maximum:
            is_percent = grid.maximum <= 1 < setting <= 100
            hint = f"{show_value(setting)} % is `{show_value(setting / 100)}`" if is_percent else ""
            raise _RefusedError(f"`{name}` must be at most {show_value(grid.maximum)}", hint=hint)
    return setting


def _converted(name: str, text: str) -> Setting:
    """Return a text converted to the knob's type."""
    kind, value = knob_kinds.value_type(name), scalar(text)
    try:
        if name in BYTE_KNOBS and isinstance(value, str):
            value = size_bytes(value)
        if kind == float | None and isinstance(value, str) and value.endswith("%"):
            value = float(value[:-1]) / 100
        if kind == float | None and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if kind == str | None and isinstance(value, (bool, int, float)):
            value = text
        setting: Setting = msgspec.convert(value, type=kind)
    except (msgspec.ValidationError, ValueError):
        raise _RefusedError(f"`{name}` must be {knob_kinds.kind(name)}") from None
    return setting
