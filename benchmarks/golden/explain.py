"""What `autotune explain` says of every log of the tests: cause, phase, component, and the cures in order."""

from __future__ import annotations

from pathlib import Path

from autotune.orchestrator.explain.analyze import explain
from autotune.orchestrator.explain.reader import read
from autotune.policies.values.diagnosis import Diagnosis
from benchmarks.golden.lines import diagnosis_text, settings_text

_TESTS = Path(__file__).parents[2] / "tests"


def cases() -> tuple[str, ...]:
    """Return the logs by the names of their folder and file, which stay when a folder moves."""
    return tuple(sorted(_logs()))


def record(case: str) -> list[str]:
    """Return the diagnosis of a log and its cures, the first one first."""
    explanation = explain(read(str(_logs()[case])), framework=None, model=None)
    framework = explanation.context.framework
    program = "an unknown program" if framework is None else framework.name
    cures = [
        f"  {remedied.cure.name}: {settings_text(remedied.cure.changes)}"
        f"{'' if remedied.cure.exact else ' (direction)'}{' (assumed)' if remedied.assumed else ''}"
        for remedied in explanation.remedies
    ]
    return [f"{program}: {_failure(explanation.diagnosis)}", *cures]


def _failure(diagnosis: Diagnosis) -> str:
    first = diagnosis.evidence[0] if diagnosis.evidence else None
    rule = "no rule" if first is None else f"{first.rule} in line {first.line}"
    rank = "" if diagnosis.rank is None else f" rank {diagnosis.rank}"
    fragmented = " fragmentation" if diagnosis.fragmentation else ""
    return f"{diagnosis_text(diagnosis)}{rank}{fragmented}, {diagnosis.confidence:g} by {rule}"


def _logs() -> dict[str, Path]:
    files = sorted(_TESTS.rglob("*.log"))
    named = {f"{file.parent.name}/{file.stem}": file for file in files}
    if len(named) != len(files):
        raise ValueError("two logs have the same folder and file name")
    return named
