"""Distinguishes failures of loading a checkpoint from those of training by the run's history."""

from __future__ import annotations

import msgspec

from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import History, Started
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import Attempt, fold, rehearsal_of
from autotune.policies.values.knob_table import ROWS
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Profile

_MEMORIES = frozenset({Cause.GPU_OOM, Cause.HOST_OOM})
_LOADS = frozenset({Phase.INIT, Phase.CHECKPOINT})
# Phases that may fail because a load fragmented the memory or did not free all of it.
_PASSES = frozenset({Phase.NONE, Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER})
_PROVEN = 2  # steps: from the second one on the optimizer's state exists
_ENGINES = frozenset({Component.ROLLOUT, Component.REWARD})


def while_loading(history: History, diagnosis: Diagnosis, *, attempt: int) -> Diagnosis:
    """Return the diagnosis of an attempt, with phase `resume` if loading a checkpoint is the cause.

    It is the cause if the attempt loads a checkpoint and fails before its first step, and an earlier attempt
    that loaded none passed this point: with the same knobs, or if device memory failed during start-up or
    loading, with knobs that need at least as much of it. A training phase needs two completed steps of such
    an attempt, and is not the load's fault if a load already failed before. Nothing is the load's fault that
    fails with knobs with which another load succeeded.
    """
    run = rehearsal_of(history) if _rehearses(history, attempt) else fold(history)
    place = max((n for n, each in enumerate(run.attempts) if each.number == attempt), default=None)
    if place is None or diagnosis.cause not in _MEMORIES or diagnosis.component in _ENGINES:
        return diagnosis
    last, before = run.attempts[place], run.attempts[:place]
    trained = any(
        each.progress for each in run.attempts if each.number == attempt
    )  # before a cure in place too
    if not last.continued or trained:
        return diagnosis
    if run.accepted.job.resume or any(_loaded(each) and each.knobs == last.knobs for each in before):
        return diagnosis  # with `resume: true` even the first attempt loads a checkpoint: the user's
    fresh = [each for each in before if each.progress and not each.continued]
    if diagnosis.phase in _LOADS:
        loads = any(_asked_no_less(run.accepted.profile, diagnosis, each.knobs, last.knobs) for each in fresh)
    else:
        loads = (
            diagnosis.phase in _PASSES
            and any(_trained(each, last) for each in fresh)
            and not any(each.loading for each in before)
        )
    return msgspec.structs.replace(diagnosis, phase=Phase.RESUME) if loads else diagnosis


def _rehearses(history: History, attempt: int) -> bool:
    return any(isinstance(e, Started) and e.attempt == attempt and e.rehearsal is not None for e in history)


def _loaded(earlier: Attempt) -> bool:
    """Return whether an attempt loaded a checkpoint and completed a step."""
    return earlier.continued and bool(earlier.progress)


def _asked_no_less(profile: Profile, diagnosis: Diagnosis, fresh: Knobs, knobs: Knobs) -> bool:
    """Return whether knobs of a start that succeeded need at least as much memory as those that failed."""
    if diagnosis.cause is Cause.HOST_OOM:
        return fresh == knobs
    return all(
        row.asks_no_less(diagnosis.cause, getattr(knobs, row.name), getattr(fresh, row.name))
        for row in ROWS
        if row.acts(diagnosis.cause, Phase.INIT, profile.placement)
        or row.acts(diagnosis.cause, diagnosis.phase, profile.placement)
    )


def _trained(earlier: Attempt, last: Attempt) -> bool:
    """Return whether an attempt completed _PROVEN steps with the same knobs and no failure of memory."""
    same = earlier.knobs == last.knobs
    return same and len(earlier.progress) >= _PROVEN and not earlier.out_of_memory
