"""The conclusion of a run: verdict, changed settings, next commands, and where the time went."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path

from autotune.launchers.base import Framework
from autotune.orchestrator import messages
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.report.document import Change, Conclusion, Fact, Spent
from autotune.orchestrator.report.evidence import path_text
from autotune.orchestrator.run import directory, export
from autotune.orchestrator.run_states import DISPLAYS, display_of
from autotune.orchestrator.units import counted, show_setting
from autotune.policies.search import trials
from autotune.policies.search.space import space
from autotune.policies.values.events import (
    Accepted,
    GaveUp,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Stable,
    TrainingCompleted,
    Verdict,
)
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.observation import Cancelled
from autotune.policies.values.profile import Profile
from autotune.policies.values.run.view import RunView

_DIGITS = 16  # of the digest, enough to compare two files


def conclusion_of(run: directory.RunFolder, view: RunView, framework: Framework) -> Conclusion:
    """Return how a run ended, or its progress so far."""
    accepted, last, verdict = view.accepted, view.last, view.verdict
    assert accepted is not None and last is not None
    attempts = len(view.attempts)
    seconds = max(0.0, seconds_of(last.at) - seconds_of(accepted.at))
    if verdict is None:
        display = DISPLAYS[view.state]
        headline = f"Not finished: {counted(attempts, 'attempt')} on record"
    else:
        display = display_of(verdict)
        text = messages.verdict(verdict, attempts=attempts, seconds=seconds, tried=view.tried)
        headline = text[:1].upper() + text[1:]
    knobs, changes_of = _knobs(view, accepted)
    return Conclusion(
        status=display.report,
        tone=display.tone,
        headline=headline,
        details=_details(verdict),
        would_help=verdict.would_help if isinstance(verdict, GaveUp) else (),
        faster=_faster(verdict),
        changes=_changes(view, framework, accepted, knobs),
        changes_of=changes_of,
        commands=_commands(run, verdict, searches=bool(space(accepted.job, accepted.profile, knobs))),
        facts=_facts(run, accepted),
        spent=_spent(view, accepted),
        gpus=accepted.cluster.gpus,
    )


def _details(verdict: Verdict | None) -> tuple[str, ...]:
    match verdict:
        case GaveUp(nearest=nearest) if nearest:
            return (nearest,)
        case NeedsHuman(diagnosis=diagnosis):
            return tuple(f"line {line.line}: {line.text.strip()[:300]}" for line in diagnosis.evidence[:3])
        case _:
            return ()


def _faster(verdict: Verdict | None) -> str:
    if not isinstance(verdict, (TrainingCompleted, Stable)) or verdict.faster is None:
        return ""
    return verdict.faster.reason


def _knobs(view: RunView, accepted: Accepted) -> tuple[Knobs, str]:
    """Return the configuration to show for a run, and a description of it."""
    proven = export.stable_knobs(view)
    if proven is not None:
        return proven, "the proven configuration"
    if view.latest is not None:
        return view.latest.started.knobs, "the last configuration that was tried, which is not proven"
    return accepted.profile.knobs, "the job as written"


def _changes(view: RunView, framework: Framework, accepted: Accepted, knobs: Knobs) -> tuple[Change, ...]:
    """Return the changes from the job as written, in the framework's spelling."""
    job, profile = accepted.job, accepted.profile
    settings = framework.settings(job, knobs) if knobs != profile.knobs else {}
    settings = export.with_units(settings, framework, job)
    reasons = _reasons(view, profile)
    rows = []
    for name, value in settings.items():
        before = framework.words({name: job.settings[name]}) if name in job.settings else ()
        after = framework.words({name: value})
        if before != after:
            rows.append(Change(setting=name, before=before, after=after, why=reasons.get(name, "")))
    named = {row.setting for row in rows}
    for knob, (old, new) in changed(profile.knobs, knobs).items():
        support = profile.supported.get(knob)
        setting = knob if support is None else support.setting
        if settings or setting in named:
            continue  # already listed in the framework's spelling
        rows.append(
            Change(
                setting=setting,
                before=(f"{setting}: {show_setting(knob, old)}",),
                after=(f"{setting}: {show_setting(knob, new)}",),
                why=reasons.get(setting, ""),
            )
        )
    return tuple(rows)


def _reasons(view: RunView, profile: Profile) -> dict[str, str]:
    """Return why each setting has its last value."""
    reasons: dict[str, str] = {}
    for attempt in view.attempts.values():
        if (decided := attempt.decided) is None or decided.remedy is None:
            continue
        failed = view.attempts.get(decided.attempt)
        why = export.reason_of(decided.remedy, None if failed is None else failed.diagnosed)
        for knob in decided.remedy.changes:
            support = profile.supported.get(knob)
            reasons[knob if support is None else support.setting] = why
    return reasons


def _commands(run: directory.RunFolder, verdict: Verdict | None, *, searches: bool) -> tuple[Fact, ...]:
    stable = (run.path / "stable.yaml").resolve()
    rows = []
    if stable.is_file():
        rows.append(Fact(name="launch the proven job", value=f"autotune launch {_path(stable)}"))
        script = stable.with_name("launch.sh")
        if getattr(verdict, "growth", None) is None:  # memory that grows needs the restarts of a launch
            rows.append(Fact(name="the same without autotune", value=f"bash {_path(script)}"))
        if run.request.mode is directory.Mode.LAUNCH and searches:
            rows.append(Fact(name="look for a faster one", value=f"autotune search {_path(stable)}"))
    if verdict is None or isinstance(verdict, (Interrupted, Infrastructure)):
        rows.append(Fact(name="continue the run", value=run.call_anywhere("resume")))
    if isinstance(verdict, (GaveUp, NeedsHuman)):
        rows.append(Fact(name="go on with the changed job", value=run.call_anywhere("resume", "--edit")))
    return tuple(rows)


def _path(path: Path) -> str:
    return shlex.quote(path_text(path))


_OURS = ("python", "autotune", "ray")


def _facts(run: directory.RunFolder, accepted: Accepted) -> tuple[Fact, ...]:
    job: Job = accepted.job
    digest = hashlib.sha256((run.path / "job.yaml").read_bytes()).hexdigest()
    own = job.framework == "builtin"  # other frameworks have their own environment
    rows = [
        ("job", job.name),
        ("framework", f"{job.framework} {job.framework_version or ''}".strip()),
        ("cluster", messages.cluster(accepted.cluster)),
        ("model", job.shape_from),
        ("goal", f"{job.goal.steps} steps in a row with {job.goal.headroom:.0%} of every memory free"),
        ("policy", accepted.policy.value),
        ("sha256 of job.yaml", digest[:_DIGITS]),
        *((name, version) for name, version in accepted.versions.items() if name in _OURS or own),
    ]
    return tuple(Fact(name=name, value=value) for name, value in rows if value)


def _spent(view: RunView, accepted: Accepted) -> tuple[Spent, ...]:
    """Return where the time of the attempts went, with the GPU hours that were occupied."""
    gpus = accepted.cluster.gpus
    searching = bool(view.trials)
    seconds = trials.spent(view) if searching else _of_attempts(view)
    of_trials = gpus / max(1, accepted.job.search.parallel)
    return tuple(
        Spent(
            what=what,
            seconds=round(value, 3),
            gpu_hours=round(
                value / 3600 * (gpus if what == "becoming stable" or not searching else of_trials), 4
            ),
        )
        for what, value in seconds.items()
    )


def _of_attempts(view: RunView) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for attempt in view.attempts.values():
        if (ended := attempt.ended) is None:
            continue
        if attempt.proven:
            what = "successful attempts"
        elif ended.outcome == Cancelled(by="user"):
            what = "attempts that were stopped"
        else:
            what = "attempts that failed"
        seconds[what] = seconds.get(what, 0.0) + (ended.seconds or 0.0)
        waited = (ended.stop_s or 0.0) + (ended.drain_s or 0.0)
        if waited:
            seconds["freeing memory"] = seconds.get("freeing memory", 0.0) + waited
    return seconds
