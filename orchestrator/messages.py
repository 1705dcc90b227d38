"""Texts for a run's events, without colour or layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from autotune.orchestrator.units import (
    counted,
    show_duration,
    show_gib,
    show_rate,
    show_setting,
    show_time_left,
)
from autotune.policies.forecast.time_left import TimeLeft, Until
from autotune.policies.values.diagnosis import Diagnosis, Facts, Finding
from autotune.policies.values.events import (
    CuredInPlace,
    Edited,
    Foreseen,
    GaveUp,
    GoalReached,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Progressed,
    Rehearsed,
    Stable,
    Started,
    TrainingCompleted,
    Tried,
    Verdict,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs, Setting, changed
from autotune.policies.values.observation import (
    Cancelled,
    Completed,
    Crashed,
    Hung,
    Lost,
    Outcome,
    Peak,
    Unit,
)
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.remedy import Effect, Remedy
from autotune.policies.values.run.view import RunView

_CAUSES = {
    Cause.CODE: "code: the job's own code failed",
    Cause.CONFIG: "config: the job refused a setting",
    Cause.UNKNOWN: "unknown: no rule matches",
}
_RULES = {"autotune-restarted": "config: the job started over instead of resuming from its checkpoint"}
_TRAIN = {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
_MARGINAL = " with little free memory"
_MANY = 3  # clauses of a remedy's reason besides the first
_MAIN_ROWS = {"rollout", "log_prob", "train"}
# Phases that are not described as "in" and their name.
_PLACES = {
    Phase.INIT: "while starting",
    Phase.RESUME: "while loading a checkpoint",
    Phase.ROLLOUT_INIT: "while starting the rollout engine",
    Phase.COMM: "in communication",
    Phase.DATA: "while loading data",
    Phase.CHECKPOINT: "while writing a checkpoint",
}


def diagnosis(value: Diagnosis) -> str:
    """Return `gpu-oom in backward, after step 2, rank 2`, or the reason of a diagnosis without a log."""
    if value.reason:
        return f"{value.cause}: {value.reason}"
    rule = value.evidence[0].rule if value.evidence else ""
    sentence = _RULES.get(rule) or _CAUSES.get(value.cause)
    place = _place(value.phase)
    parts = [sentence, place] if sentence else [f"{value.cause} {place}".strip()]
    parts.append(value.step_text)
    if value.rank is not None:
        parts.append(f"rank {value.rank}")
    return ", ".join(part for part in parts if part)


def _place(phase: Phase) -> str:
    return "" if phase is Phase.NONE else _PLACES.get(phase, f"in {phase}")


def failure_line(finding: Finding) -> str:
    """Return `gpu-oom in backward (line 5)`, or the line itself if its rule has no cause."""
    text = finding.line.text.strip()[:120]
    if finding.cause is not None:
        text = f"{finding.cause} {_place(finding.phase)}".strip()
    return f"{text} (line {finding.line.line})"


def not_usable(facts: Facts) -> str:
    """Return ` but not usable` if the free memory would have been enough, otherwise the empty string."""
    requested, room = facts.requested_bytes, facts.room_bytes
    return " but not usable" if requested is not None and room is not None and room >= requested else ""


def figures(facts: Facts) -> str:
    """Return the figures of a failure message, or the empty string."""
    parts = []
    if facts.requested_bytes is not None:
        parts.append(f"needed {show_gib(facts.requested_bytes)}")
    if facts.room_bytes is not None:
        parts.append(f"{show_gib(facts.room_bytes)} was free{not_usable(facts)}")
    elif facts.allocated_bytes is not None and facts.capacity_bytes:
        parts.append(f"{show_gib(facts.allocated_bytes)} of {show_gib(facts.capacity_bytes)} was in use")
    elif facts.capacity_bytes:
        parts.append(f"the device has {show_gib(facts.capacity_bytes)}")
    if facts.held_by_others_bytes:
        parts.append(f"{show_gib(facts.held_by_others_bytes)} was held outside this process")
    return ", ".join(parts)


def setting_changes(before: Knobs, after: Knobs) -> str:
    """Return `memory_fraction 0.8 → 0.64, recompute off → full`."""
    return arrows(changed(before, after))


def arrows(changes: Mapping[str, tuple[Setting, Setting]]) -> str:
    """Return the changes of several knobs in one line."""
    return ", ".join(arrow(name, *values) for name, values in changes.items())


def arrow(name: str, before: Setting, after: Setting) -> str:
    """Return one change of a knob."""
    return f"{name} {show_setting(name, before)} → {show_setting(name, after)}"


def price(effect: Effect | None, slows: str) -> str:
    """Return a remedy's effect on numbers and speed: `exact; slows backward`."""
    cost = slows.removeprefix("nothing").removeprefix("; ")
    speed = "" if not cost else f"; {cost}" if slows.startswith("nothing") else f"; slows {cost}"
    return f"{effect}{speed}"


def remedy_costs(remedy: Remedy) -> str:
    """Return what a remedy frees and costs."""
    parts = [f"frees {remedy.frees}" if remedy.frees else "", remedy.slows and f"slows {remedy.slows}"]
    if remedy.effect != "exact":
        parts.append(f"{remedy.effect} effect")
    return ", ".join(part for part in parts if part)


def why(remedy: Remedy, *, whole: bool) -> str:
    """Return the reason of a remedy with what it frees and costs.

    Of one that is made of several, only the first reason and the costs, unless `whole`.
    """
    first, *others = remedy.reason.split("; ")
    if whole or len(others) < _MANY:
        costs = remedy_costs(remedy)
        return f"{remedy.reason}{f'; {costs}' if costs else ''}"
    costs = remedy_costs(msgspec.structs.replace(remedy, frees=""))
    return f"{first}, and {counted(len(others), 'further change')}{f'; {costs}' if costs else ''}"


def cluster(value: Cluster) -> str:
    """Return `4 × H100 (79.19 GiB)`, or `no GPU · host 24.0 GiB`."""
    nodes = f"{value.nodes} nodes × " if value.nodes > 1 else ""
    if value.gpus_per_node:
        cards = f"{nodes}{value.gpus_per_node} × {value.gpu_name or 'GPU'}"
        memory = show_gib(value.gpu_memory_bytes) if value.gpu_memory_bytes else "memory unknown"
        return f"{cards} ({memory})"
    return f"{nodes}no GPU · host {show_gib(value.host_memory_bytes, digits=1)}"


def peaks(values: dict[str, Peak], *, mark: str = "") -> str:
    """Return the main peaks in one line; forward, backward and optimizer are one entry, `train`.

    `mark` precedes each size.
    """
    rows: dict[str, Peak] = {}
    for phase, peak in values.items():
        row = "train" if phase in _TRAIN else phase
        if row not in rows or fullness(peak) > fullness(rows[row]):
            rows[row] = peak
    fullest = max(rows, key=lambda row: fullness(rows[row]), default="")
    listed = [row for row in rows if row in _MAIN_ROWS or row == fullest]
    return "   ".join(
        f"{row} {mark}{show_gib(rows[row].used_bytes)}" for row in listed if rows[row].used_bytes
    )


def goal(event: GoalReached) -> str:
    """Return `✓ stable at step 3   train 50.0 MiB   50.0% free   1,638 tok/s`."""
    mark, word = ("!", "marginal") if event.marginal else ("✓", "stable")
    limited = {phase: peak for phase, peak in event.peaks.items() if peak.capacity_bytes}
    parts = [f"{mark} {word} at step {event.step}", peaks(limited or event.peaks)]
    if limited:
        parts.append(f"{event.headroom:.1%} free")
    if event.tokens_per_second:
        parts.append(show_rate(event.tokens_per_second, Unit.TOKENS))
    return "   ".join(part for part in parts if part)


def time_left(value: TimeLeft) -> str:
    """Return `9m to 11m left`, `about 5m left to the goal` or `about 5m left until the trials begin`."""
    until = {Until.GOAL: " to the goal", Until.TRIALS: " until the trials begin"}.get(value.until, "")
    return show_time_left(value.least_s, value.most_s) + until


def speed(event: Progressed | None) -> str:
    """Return `, 1,638 tok/s, loss 0.31, reward 0.5` of what a step reports; empty if it reports none."""
    parts = [] if event is None else figures_of_step(event.tokens_per_second, event.scores)
    return "".join(f", {part}" for part in parts)


def figures_of_step(tokens_per_second: float | None, scores: Mapping[str, float]) -> list[str]:
    """Return `1,638 tok/s`, `loss 0.31` and `reward 0.5`, as far as a step reports them."""
    parts = [show_rate(tokens_per_second, Unit.TOKENS)] if tokens_per_second else []
    return [*parts, *(f"{name} {value:.4g}" for name, value in scores.items())]


def cured(event: CuredInPlace) -> str:
    """Return `backward ran out of GPU memory in step 3, cured in place: microbatch_size 8 → 4`."""
    change = arrow(event.knob, event.before, event.after)
    return f"{event.phase} ran out of GPU memory in step {event.step}, cured in place: {change}"


def forecast(event: Foreseen) -> str:
    """Return `backward is expected to run out of GPU memory at step 96 …`, or that this no longer holds."""
    on_host = event.cause is Cause.HOST_OOM
    who, memory = ("the job", "host memory") if on_host else (str(event.phase), "GPU memory")
    if event.own_limit:
        who, memory = f"process {event.process}", "the memory that its own limit allows (`ulimit -v`)"
    if not event.holds or event.step is None:
        return f"{who} is no longer expected to run out of {memory}"
    sure = f"chance {event.chance:.0%}"
    if event.earliest != event.latest:
        sure = f"between {event.earliest} and {event.latest}, {sure}"
    return f"{who} is expected to run out of {memory} at step {step_of(event.step, event.of)} ({sure})"


def forecast_figures(event: Foreseen) -> str:
    """Return the figures of a forecast: current use, growth and limit; empty if it no longer holds."""
    if not event.holds:
        return ""
    lengths = ", with the lengths of the responses" if event.lengths else ""
    parts = [
        f"{show_gib(event.used_bytes)} now",
        f"{show_gib(event.per_step_bytes)} more each step since step {event.since}{lengths}",
        f"{show_gib(event.limit_bytes)} can be used",
    ]
    if event.process and not event.own_limit:
        parts.append(f"process {event.process} gains most of it")
    if event.upper_bound:
        parts.append("a cache may be part of it, so no setting is changed for it")
    return "; ".join(parts)


def step_of(step: int, total: int | None) -> str:
    """Return `3/20`, or `3` if the number of steps is unknown."""
    return f"{step}/{total}" if total else str(step)


def fullness(peak: Peak) -> tuple[float, int]:
    """Return the sort key of peaks: the share of the capacity, then the bytes."""
    return (peak.used_bytes / peak.capacity_bytes if peak.capacity_bytes else 0.0, peak.used_bytes)


def outcome(value: Outcome, *, rehearsal: bool = False) -> str:
    """Return how an attempt ended."""
    match value:
        case Completed():
            return "passed" if rehearsal else "training complete"
        case Crashed():
            return value.text
        case Hung(silent_s=silent, reason=reason):
            idle = f"no output or activity for {show_duration(silent)}"
            return f"hung: {reason if 'step' in reason else idle}"
        case Lost(reason=reason):
            return f"lost: {reason}"
        case Cancelled(by=by):
            return {
                "user": "stopped",
                "failure": "stopped after the failure",
                "goal": "stopped at the goal",
                "forecast": "stopped before it runs out of memory",
            }.get(by, f"stopped by {by}")
        case _:
            assert_never(value)


def attempt(event: Started, *, before: Knobs, first: Knobs | None) -> str:
    """Return what an attempt changes and, for a rehearsal, which part it is."""
    same = "as written" if event.knobs == first else "same settings again"
    change = setting_changes(before, event.knobs) or same
    if event.rehearsal is None:
        return change
    part = "rehearsal" if event.rehearsal is Part.WORST else "rehearsal, from its checkpoint"
    full = ", every answer at full length" if event.longest else ""
    return f"{part}{full}: {change}"


def edits(event: Edited) -> str:
    """Return `steps 4 → 8, trainer_budget 100MiB → 200MiB`."""
    return ", ".join(
        f"{key.removeprefix('settings.')} {_written(before)} → {_written(after)}"
        for key, (before, after) in event.changes.items()
    )


def _written(value: object) -> str:
    return "unset" if value is None else msgspec.json.encode(value).decode()


def trial(result: Tried, *, before: Knobs | None) -> str:
    """Return the result of a trial: purpose, result, speed, free memory and change."""
    change = setting_changes(before, result.knobs) if before is not None else ""
    return f"{trial_result(result)}   {change or 'as written'}"


def trial_result(result: Tried) -> str:
    """Return the result of a trial: purpose, result, speed and free memory."""
    parts = [f"{result.purpose.value}: {result.result.value}"]
    if result.unit is not None:
        noise = f" ±{result.noise:.0%}" if result.noise is not None and result.noise >= 0.005 else ""
        parts.append(f"{show_rate(result.rate, result.unit)}{noise}")
    if result.headroom is not None:
        parts.append(f"{result.headroom:.1%} free")
    if result.reason:
        parts.append(result.reason)
    return "   ".join(parts)


def lasted(seconds: float | None, *, at_least: bool = False) -> str:
    """Return a duration as text; `at_least`: the end was not observed."""
    if seconds is None or (at_least and not seconds):  # 0: an older journal, which did not record it
        return "unknown time"
    return f"at least {show_duration(seconds)}" if at_least else show_duration(seconds)


def continues(view: RunView, *, report: str) -> str:
    """Return what resuming an interrupted run does; `report` is the command for its report."""
    if view.tried:
        return f"continues the search; `{report}` shows its trials"
    saved = max((each.saved or 0 for each in view.training), default=0)
    checkpoint = f" from the checkpoint of step {saved}" if saved else ""
    return f"continues at attempt #{view.last_number + 1}{checkpoint}"


def verdict(value: Verdict, *, attempts: int, seconds: float, tried: Sequence[Tried] = ()) -> str:
    """Return in one sentence how a run ended; `tried` are the results of a search."""
    tries = counted(attempts, "attempt")
    took = show_duration(seconds)
    match value:
        case TrainingCompleted(marginal=marginal, growth=growth) | Stable(marginal=marginal, growth=growth):
            word = "Stable" if isinstance(value, Stable) else "Training complete"
            grew = "" if growth is None else f"; {growth.text}"
            if tried:
                from autotune.policies.search.schedule import count

                word, tries = "Search complete: stable", counted(count(tried), "trial")
            return f"{word}{_MARGINAL if marginal else ''} after {tries} in {took}{grew}"
        case Rehearsed(cured=cured):
            how = "with the settings above" if cured else "as written"
            return f"Rehearsed {how} after {tries} in {took}"
        case GaveUp(reason=reason):
            return f"gave up after {tries}: {reason}"
        case NeedsHuman(diagnosis=diagnosed):
            return f"failed after {tries}: {diagnosis(diagnosed)}"
        case Infrastructure(reason=reason):
            return reason
        case Interrupted(requested=True):
            return "stopped by `autotune stop`"
        case Interrupted(by=by):
            return f"stopped by {by}" if by.startswith("SIG") else f"stopped by the {by}"
        case _:
            assert_never(value)
