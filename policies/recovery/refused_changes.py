"""Detect changes that the job refused: an error right after a change undoes and excludes the change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.formatting import show_setting
from autotune.policies.values.history import Attempt, Refused, Run
from autotune.policies.values.knob_table import KNOB_TABLE, ROWS, Part, Unit
from autotune.policies.values.knobs import Knobs, Setting, changed
from autotune.policies.values.profile import Profile

_REFUSALS = frozenset({Cause.CONFIG, Cause.CODE, Cause.UNKNOWN})
_OWN_RULES = "autotune-"  # lines that autotune itself writes into a log are not about a setting
_START = (Phase.NONE, Phase.INIT, Phase.ROLLOUT_INIT, Phase.DATA)
# The order of a step's phases.
_ORDER = (
    *_START,
    Phase.RESUME,
    Phase.ROLLOUT,
    Phase.LOG_PROB,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.OPTIMIZER,
    Phase.COMM,
    Phase.WEIGHT_SYNC,
    Phase.CHECKPOINT,
)
_SIZES = frozenset(row.name for row in ROWS if row.part is Part.TRAINER and row.unit is Unit.RANKS)
_NUMBERS = re.compile(r"\d+")
_BESIDE = frozenset(
    {Component.REWARD, Component.DATA}
)  # parts of a job that no knob of trainer or engine affects
_SERVICE = re.compile(
    r"\b(?:HTTP(?:Error)?:? ?)?(?:429|50[0-4])\b.{0,40}(?:Error|Unavailable|Gateway|Timeout|Too Many)"
)


def without_refused(run: Run) -> Run:
    """Return the run without the attempts that refused their change; `refused` keeps the changes.

    The next action after a refusal is then that after the previous attempt, without the refused change. An
    attempt refuses its change if it ends with an error, of neither memory nor infrastructure, that names a
    changed setting, or that occurs in a phase which the previous attempt reached and in which the setting
    acts. The same error after changes of different knobs is the job's own: its attempt stays. Attempts with
    the same knobs that the cluster ended in between are dropped with the one that refused. Parallel sizes are
    also refused if host memory sufficed for the start before and does not with them: no smaller batch helps
    there.
    """
    kept: list[Attempt] = []
    refused: list[Refused] = []
    profile = run.accepted.profile
    for attempt in run.attempts:
        lost = _losses(kept, attempt.knobs)
        before = kept[: len(kept) - len(lost)]
        remedy = attempt.remedy or next((a.remedy for a in lost if a.remedy is not None), None)
        remedied = msgspec.structs.replace(attempt, remedy=remedy)
        refusal = _refusal(profile, remedied, before[-1] if before else None, refused)
        if refusal is None:
            kept.append(attempt)
        else:
            kept = before
            refused.append(refusal)
    return msgspec.structs.replace(run, attempts=tuple(kept), refused=tuple(refused))


def is_refused(run: Run, proposed: Knobs) -> bool:
    """Return whether a configuration has a change that the job refused.

    A change of several knobs is excluded as a whole until the same error shows which of them causes it; a
    knob of which several values caused the same error is not changed any more.
    """
    for alike in _by_error(run.refused).values():
        common = _common(alike)
        if common and all(_moved(alike, knob, getattr(proposed, knob)) for knob in common):
            return True
    return False


def refusals_text(run: Run) -> str:
    """Return, in words, the changes refused since the last attempt that counts; empty if none."""
    last = run.attempts[-1].number if run.attempts else 0
    return "; ".join(
        "the job refused "
        + ", ".join(
            f"{knob} {show_setting(knob, before)} → {show_setting(knob, after)}"
            for knob, (before, after) in refused.changes.items()
        )
        + f" in attempt #{refused.number}"
        + (f" ({refused.error})" if refused.error else "")
        for refused in run.refused
        if refused.number > last
    )


def _losses(attempts: Sequence[Attempt], knobs: Knobs) -> Sequence[Attempt]:
    """Return the latest attempts in a row with these knobs that the cluster ended."""
    place = len(attempts)
    while place and attempts[place - 1].infrastructure and attempts[place - 1].knobs == knobs:
        place -= 1
    return attempts[place:]


def _refusal(
    profile: Profile, attempt: Attempt, before: Attempt | None, refused: Sequence[Refused]
) -> Refused | None:
    """Return the change that an attempt refused; None if it failed for another reason."""
    diagnosis = attempt.diagnosis
    if diagnosis is None or attempt.remedy is None:
        return None
    changes = changed(profile.knobs if before is None else before.knobs, attempt.knobs)
    if diagnosis.cause is Cause.HOST_OOM:
        return _too_large_for_host(attempt, before, changes)
    if diagnosis.cause not in _REFUSALS:
        return None
    line = diagnosis.evidence[0] if diagnosis.evidence else None
    if line is not None and line.rule.startswith(_OWN_RULES):
        return None
    error = "" if line is None else line.text.strip()
    named = {knob: change for knob, change in changes.items() if _names(profile, knob, error)}
    acting = {knob: change for knob, change in changes.items() if _acts(knob, attempt.diagnosis, error)}
    blamed = named or acting
    if not blamed or not (named or _reached(attempt, before)):
        return None
    refusal = Refused(number=attempt.number, changes=blamed, error=error, renewed=attempt.renewed)
    alike = [r for r in refused if _signature(r) == _signature(refusal)]
    return None if alike and not _common([*alike, refusal]) else refusal


def _acts(knob: str, diagnosis: Diagnosis | None, error: str) -> bool:
    """Return whether a knob may cause an error: its part is at work in the error's phase and component.

    No knob causes the errors that an external service returns. Every knob acts at the start.
    """
    row = KNOB_TABLE.get(knob)
    if row is None or diagnosis is None or diagnosis.phase in _START:
        return row is not None and _SERVICE.search(error) is None
    if _SERVICE.search(error) is not None or diagnosis.component in _BESIDE:
        return False
    match row.part:
        case Part.ENGINE:
            return not row.phases or diagnosis.phase in row.phases
        case Part.TRAINER:
            return diagnosis.phase is not Phase.ROLLOUT
        case Part.WEIGHT_SYNC:
            return diagnosis.phase in row.phases
        case Part.HOST | Part.RUN | Part.DIAGNOSTICS:
            return True
    assert_never(row.part)


def _too_large_for_host(
    attempt: Attempt, before: Attempt | None, changes: Mapping[str, tuple[Setting, Setting]]
) -> Refused | None:
    """Return the trainer's new parallel sizes if host memory sufficed for the start before they changed."""
    sizes = {knob: change for knob, change in changes.items() if knob in _SIZES}
    starting = attempt.diagnosis is not None and attempt.diagnosis.phase in _START
    if before is None or not (sizes and starting and _earlier(attempt, before)):
        return None
    error = "host memory ran out at the start"
    return Refused(number=attempt.number, changes=sizes, error=error, renewed=attempt.renewed)


def _names(profile: Profile, knob: str, error: str) -> bool:
    """Return whether an error names the knob, by its own name or by the framework's."""
    support = profile.supported.get(knob)
    names = {knob} if support is None else {knob, re.split(r"[.\s=]", support.setting.strip("-+ "))[-1]}
    words = set(re.findall(r"\w+", error.lower().replace("-", "_")))
    return any(name.lower().replace("-", "_") in words for name in names if "_" in name or "-" in name)


def _reached(attempt: Attempt, before: Attempt | None) -> bool:
    """Return whether an attempt ended in a phase that the previous one reached."""
    if _earlier(attempt, before):
        return True
    if attempt.diagnosis is None or attempt.progress or before is None or before.diagnosis is None:
        return False
    return attempt.diagnosis.phase is before.diagnosis.phase


def _earlier(attempt: Attempt, before: Attempt | None) -> bool:
    """Return whether an attempt ended in an earlier phase than the previous one."""
    if attempt.diagnosis is None or attempt.progress:
        return False
    phase = attempt.diagnosis.phase
    if before is None or before.diagnosis is None:
        return phase in _START
    if before.step is not None and phase in _START:
        return True
    return _ORDER.index(phase) < _ORDER.index(before.diagnosis.phase)


def _signature(refused: Refused) -> str:
    return _NUMBERS.sub("", refused.error)


def _by_error(refused: Sequence[Refused]) -> dict[str, list[Refused]]:
    alike: dict[str, list[Refused]] = {}
    for each in refused:
        alike.setdefault(_signature(each), []).append(each)
    return alike


def _common(alike: Sequence[Refused]) -> set[str]:
    """Return the knobs that all of the refused changes have in common."""
    return set[str].intersection(*(set(refused.changes) for refused in alike))


def _moved(alike: Sequence[Refused], knob: str, value: Setting) -> bool:
    """Return whether a value of the knob is the refused one, or any changed value if several were refused."""
    before = {refused.changes[knob][0] for refused in alike}
    after = {refused.changes[knob][1] for refused in alike}
    return value in after if len(after) == 1 else value not in before
