"""What shows that the training stayed the job's own: its settings, what was turned, losses side by side."""

from __future__ import annotations

import re

from autotune.orchestrator.report.conclusion import setting_text
from autotune.orchestrator.report.document import Fact, Losses, TrainingProof
from autotune.orchestrator.report.log_reading import LogReading, loss_of
from autotune.orchestrator.run import directory
from autotune.orchestrator.units import show_setting
from autotune.policies.values.knobs import KNOBS
from autotune.policies.values.observation import StepDone
from autotune.policies.values.profile import Profile
from autotune.policies.values.run.view import RunView

# Names of settings that decide what is trained, in any framework's spelling.
_TRAINED = re.compile(
    r"(^|[._-])(lr|learning_rate|weight_decay|epochs?|steps|seed|prompts|samples|n|kl\w*|clip\w*|entropy\w*|"
    r"\w*batch_size|\w*(prompt|response)_(length|tokens|len)|\w*samples_per_prompt|num_rollout|adv_estimator|gamma|lam)$"
)
_CURVES = 12
_POINTS = 1000


def training_of(run: directory.RunFolder, view: RunView, logs: LogReading) -> TrainingProof:
    """Return what is known of the training of a run's attempts."""
    accepted = view.accepted
    assert accepted is not None
    knob_settings = {support.setting for support in accepted.profile.supported.values()}
    values = {
        name: setting_text(value)
        for name, value in accepted.job.settings.items()
        if name not in knob_settings and _TRAINED.search(name.lstrip("-+").replace("-", "_"))
    }
    return TrainingProof(
        settings=tuple(Fact(name=name, value=value) for name, value in sorted(values.items())),
        turned=_turned(view, accepted.profile),
        losses=tuple(_losses(run, view, logs)),
    )


def _turned(view: RunView, profile: Profile) -> tuple[Fact, ...]:
    """Return the knobs that attempts changed with their values, and how far that may alter the numbers."""
    tried = [attempt.started.knobs for attempt in view.attempts.values()]
    rows = []
    for knob in KNOBS:
        values = dict.fromkeys(show_setting(knob, getattr(knobs, knob)) for knobs in tried)
        if len(values) > 1:
            support = profile.supported.get(knob)
            effect = "" if support is None else f" ({support.effect.value})"
            rows.append(Fact(name=f"{knob}{effect}", value=", ".join(values)))
    edits = [", ".join(edit.changes) for edit in view.edits if edit.file]
    rows += [Fact(name="edited by the user", value=changes) for changes in edits]
    return tuple(rows)


def _losses(run: directory.RunFolder, view: RunView, logs: LogReading) -> list[Losses]:
    curves: list[Losses] = []
    for attempt in view.attempts.values():
        if attempt.started.rehearsal is not None:
            continue
        steps = [m for m in logs.markers(run.attempt(attempt.number)) if isinstance(m, StepDone)]
        result = [(step.step, loss) for step in steps if (loss := loss_of(step)) is not None]
        if result:
            thin = result[:: -(-len(result) // _POINTS)]
            curves.append(
                Losses(
                    attempt=attempt.number,
                    trial=attempt.started.trial,
                    metric=result[0][1][0],
                    steps=tuple(step for step, _ in thin),
                    values=tuple(value for _, (_, value) in thin),
                )
            )
    if len(curves) > _CURVES:
        return [curves[0], *curves[-(_CURVES - 1) :]]
    return curves
