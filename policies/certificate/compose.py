"""Composes the certificate of a run from its events alone, so that the same events give the same one."""

from __future__ import annotations

from typing import Any

import msgspec

from autotune.policies.certificate.contents import Certificate, Change, Stability, Training
from autotune.policies.certificate.overlap import losses_of, replay_of
from autotune.policies.values.events import Edited, History, Purpose, Result
from autotune.policies.values.history import accepted_of
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.observation import Completed
from autotune.policies.values.profile import Profile
from autotune.policies.values.remedy import Effect
from autotune.policies.values.run.view import RunView


def certificate_of(
    history: History, *, knobs: Knobs, settings: dict[str, Any], training: Training
) -> Certificate:
    """Return the certificate of stable knobs; `settings`: those that differ from the job as written."""
    accepted = accepted_of(history)
    view = _since_edited(history)
    losses = losses_of(view, stable=knobs)
    replayed, replay = replay_of(view, losses)
    before = accepted.job.settings
    return Certificate(
        run=accepted.run,
        at=next((event.at for event in reversed(history) if event.at), ""),
        job=msgspec.structs.replace(accepted.job, settings={}, variables={}),
        cluster=msgspec.structs.replace(accepted.cluster, address=""),
        training=training,
        before=before,
        after={**before, **settings},
        changes=changes_of(accepted.profile, knobs),
        losses=losses,
        replayed=replayed,
        replay=replay,
        stable=_stability(view, knobs, steps=accepted.job.goal.steps),
        versions=accepted.versions,
    )


def changes_of(profile: Profile, knobs: Knobs) -> tuple[Change, ...]:
    """Return the knobs that differ from the job as written, each with its effect."""
    return tuple(
        Change(
            knob=name,
            setting=profile.supported[name].setting if name in profile.supported else name,
            before=old,
            after=new,
            effect=profile.supported[name].effect if name in profile.supported else Effect.EXACT,
        )
        for name, (old, new) in changed(profile.knobs, knobs).items()
    )


def _since_edited(history: History) -> RunView:
    """Return the run since the user last edited the job: earlier attempts may have trained something else."""
    last = max((n for n, event in enumerate(history) if isinstance(event, Edited)), default=-1)
    return RunView(history[last + 1 :])


def _stability(view: RunView, knobs: Knobs, *, steps: int) -> Stability:
    """Return the strongest evidence that these knobs are stable: search, goal, completed or only probe."""
    confirmed = sum(
        row.knobs == knobs and row.purpose is Purpose.CONFIRM and row.result is Result.FITS
        for row in view.tried
    )
    own = [attempt for attempt in view.training if attempt.knobs == knobs]
    reached = sum(attempt.goal is not None for attempt in own)
    ended = [len(a.steps) for a in own if a.ended is not None and isinstance(a.ended.outcome, Completed)]
    if confirmed:
        return Stability(by="search", steps=steps, confirmations=confirmed)
    if reached:
        return Stability(by="goal", steps=steps, confirmations=reached)
    if ended:  # a training may be shorter than the goal
        return Stability(by="completed", steps=min(ended), confirmations=len(ended))
    return Stability(by="probe", steps=steps, confirmations=0)
