"""Decisions as lines of text: short, stable across machines, readable in a diff."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import (
    Action,
    Await,
    Finish,
    GaveUp,
    Infrastructure,
    Interrupted,
    Launch,
    NeedsHuman,
    Rehearsed,
    Stable,
    Stop,
    TrainingCompleted,
    Verdict,
)
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.remedy import Remedy

_GIB = 1 << 30


def action_line(action: Action, before: Knobs) -> str:
    """Return an action, the knobs of a launch as changes of those before it."""
    match action:
        case Launch():
            name = "same" if action.remedy is None else action.remedy.name
            wait = f" after {action.not_before_s:g} s" if action.not_before_s else ""
            predicted = "" if action.remedy is None else prediction_text(action.remedy)
            return f"{name}{wait}: {changes_text(before, action.knobs)}{predicted}"
        case Stop():
            return f"stop by {action.by}"
        case Finish():
            return f"finish: {verdict_text(action.verdict)}"
        case Await():
            return "await"


def changes_text(before: Knobs, after: Knobs) -> str:
    """Return the knobs that differ, as `knob before>after`; `-` where none does."""
    pairs = changed(before, after).items()
    return ", ".join(f"{knob} {value_text(old)}>{value_text(new)}" for knob, (old, new) in pairs) or "-"


def prediction_text(remedy: Remedy) -> str:
    """Return what a remedy predicts: its fullest phase, the host and the step; empty without an estimate."""
    if not remedy.predicted:
        return ""
    phase = max(remedy.predicted, key=lambda name: remedy.predicted[name])
    host = "-" if remedy.predicted_host is None else f"{remedy.predicted_host / _GIB:.4g}"
    step = "-" if remedy.step_s is None else f"{remedy.step_s:.4g}"
    return f" ~ {phase} {remedy.predicted[phase] / _GIB:.4g} GiB, host {host} GiB, step {step} s"


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """Return the cause, phase, component and step of a failure."""
    where = f" @{diagnosis.step}" if diagnosis.step is not None else ""
    return f"{diagnosis.cause.value} {diagnosis.phase.value} {diagnosis.component.value}{where}"


def verdict_text(verdict: Verdict) -> str:
    """Return the kind of a verdict and its reason."""
    match verdict:
        case TrainingCompleted() | Stable():
            kind = "completed" if isinstance(verdict, TrainingCompleted) else "stable"
            faster = "" if verdict.faster is None else f", faster: {remedy_text(verdict.faster)}"
            return f"{kind}{' marginal' if verdict.marginal else ''}{faster}"
        case Rehearsed():
            return f"rehearsed{' cured' if verdict.cured else ''}"
        case GaveUp():
            return f"gave up: {verdict.reason}"
        case NeedsHuman():
            return f"needs human: {diagnosis_text(verdict.diagnosis)}"
        case Infrastructure():
            return f"infrastructure: {verdict.reason}"
        case Interrupted():
            return f"interrupted by {verdict.by}"


def remedy_text(remedy: Remedy) -> str:
    """Return the name of a remedy and what it sets."""
    return f"{remedy.name} {settings_text(remedy.changes)}{prediction_text(remedy)}"


def settings_text(changes: Mapping[str, object]) -> str:
    """Return settings as `knob=value`, sorted by knob; `-` where there is none."""
    return ", ".join(f"{knob}={value_text(value)}" for knob, value in sorted(changes.items())) or "-"


def value_text(value: object) -> str:
    """Return a setting; floats with six significant digits."""
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
