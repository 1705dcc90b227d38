"""Evidence that the training stayed the job's own, and the sources of a report's claims."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from pathlib import Path

import msgspec

from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.report.document import (
    AttemptEvidence,
    Evidence,
    Fact,
    Losses,
    TrainingProof,
    ends_of,
)
from autotune.orchestrator.report.log_reading import LogReading, loss_of
from autotune.orchestrator.run import directory
from autotune.orchestrator.units import show_setting
from autotune.policies.values.events import History, Started
from autotune.policies.values.history import accepted_of
from autotune.policies.values.knobs import KNOBS
from autotune.policies.values.observation import StepDone
from autotune.policies.values.profile import Profile
from autotune.policies.values.run.view import RunView

# Names of settings that define what is trained, in any framework's spelling.
_TRAINED = re.compile(
    r"(^|[._-])(lr|learning_rate|weight_decay|epochs?|steps|seed|prompts|samples|n|kl\w*|clip\w*|entropy\w*|"
    r"\w*batch_size|\w*(prompt|response)_(length|tokens|len)|\w*samples_per_prompt|num_rollout|adv_estimator|gamma|lam)$"
)
_CURVES = 12
_POINTS = 1000


def training_of(run: directory.RunFolder, view: RunView, logs: LogReading) -> TrainingProof:
    """Return the settings, changed knobs and losses of a run's training."""
    accepted = view.accepted
    assert accepted is not None
    knob_settings = {support.setting for support in accepted.profile.supported.values()}
    values = {
        name: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for name, value in accepted.job.settings.items()
        if name not in knob_settings and _TRAINED.search(name.lstrip("-+").replace("-", "_"))
    }
    return TrainingProof(
        settings=tuple(Fact(name=name, value=value) for name, value in sorted(values.items())),
        turned=_turned(view, accepted.profile),
        losses=tuple(_losses(run, view, logs)),
    )


def _turned(view: RunView, profile: Profile) -> tuple[Fact, ...]:
    """Return the knobs that attempts changed with their values, and how much that may alter the numbers."""
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
    return ends_of(curves, 1, _CURVES - 1)


_FIRST_LISTED, _LAST_LISTED = 10, 50  # listed attempts
_PAGE = "report.html"
_LONGEST = 16 << 10  # characters of a command


def evidence_of(run: directory.RunFolder, history: History, view: RunView) -> Evidence:
    """Return the content of the run's folder, without the report itself and locks."""
    accepted = accepted_of(history)
    started = [attempt.started for attempt in view.attempts.values()]
    listed = ends_of(started, _FIRST_LISTED, _LAST_LISTED)
    environment = [Fact(name=name, value=plain(value)) for name, value in sorted(accepted.job.env.items())]
    environment.append(Fact(name="working directory", value=accepted.job.workdir))
    return Evidence(
        folder=path_text(run.path.resolve()),
        files=tuple(
            sorted(
                path_text(path.name)
                for path in run.path.iterdir()
                if path.is_file()
                and not path.name.startswith(".")
                and path.name not in (_PAGE, "lock", "stop")
            )
        ),
        events=dict(sorted(Counter(msgspec.to_builtins(e)["type"] for e in history).items())),
        attempts=tuple(_attempt_evidence(run, event) for event in listed),
        left_out=len(started) - len(listed),
        environment=tuple(environment),
        unsupported=tuple(Fact(name=n, value=why) for n, why in sorted(accepted.profile.unsupported.items())),
    )


def path_text(path: str | Path) -> str:
    """Return a path as text, with bytes that are not UTF-8 replaced."""
    return os.fsencode(path).decode("utf-8", "replace")


def _attempt_evidence(run: directory.RunFolder, started: Started) -> AttemptEvidence:
    folder = run.attempt(started.attempt).path
    names = (
        sorted(path_text(path.name) for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    )
    whole = shlex.join(started.command)
    command = plain(whole[: 4 * _LONGEST])  # a secret that is cut off lies far beyond the shown part
    if len(whole) > _LONGEST:
        command = f"{command[:_LONGEST]}… ({len(whole)} characters; command.sh has all of them)"
    return AttemptEvidence(
        number=started.attempt,
        trial=started.trial,
        command=command,
        files=tuple(f"attempts/{folder.name}/{name}" for name in names if not name.startswith(".")),
    )
