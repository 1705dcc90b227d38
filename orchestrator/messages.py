"""What a run's events mean in words, without colour or layout."""

from __future__ import annotations

from typing import assert_never

from autotune.orchestrator.units import show_duration, show_gib, show_rate, show_setting
from autotune.policies.values.events import (
    GaveUp,
    Infrastructure,
    Interrupted,
    NeedsHuman,
    Stable,
    TrainingCompleted,
    Tried,
    Verdict,
)
from autotune.policies.values.evidence import (
    Cancelled,
    Completed,
    Crashed,
    Diagnosis,
    Facts,
    Finding,
    Hung,
    Lost,
    Outcome,
    Peak,
    Remedy,
)
from autotune.policies.values.types import Cause, Cluster, Knobs, Phase, Setting, changed

_CAUSES = {
    Cause.CODE: "code: an error of the job itself,",
    Cause.CONFIG: "config: a setting that the job refuses,",
    Cause.UNKNOWN: "unknown: no rule matches,",
}
_RULES = {"autotune-restarted": "config: the job began anew instead of continuing its checkpoint,"}
_TRAIN = {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
_SHOWN = {"rollout", "log_prob", "train"}
_SPARE = ", with little memory to spare,"
# Words for the phases that do not read well after "in".
_PHASES = {
    Phase.INIT: "while starting",
    Phase.ROLLOUT_INIT: "while starting the rollout engine",
    Phase.COMM: "in communication",
    Phase.DATA: "while loading data",
    Phase.CHECKPOINT: "while writing a checkpoint",
}


def where(diagnosis: Diagnosis) -> str:
    """Return `gpu-oom in backward, step 2, rank 2`."""
    first = diagnosis.evidence[0].rule if diagnosis.evidence else ""
    parts = [_RULES.get(first, _CAUSES.get(diagnosis.cause, str(diagnosis.cause)))]
    if diagnosis.phase is not Phase.NONE:
        parts[0] += f" {_PHASES.get(diagnosis.phase, f'in {diagnosis.phase}')}"
    if diagnosis.step is not None:
        parts.append(f"step {diagnosis.step}")
    if diagnosis.rank is not None:
        parts.append(f"rank {diagnosis.rank}")
    return ", ".join(parts).replace(",,", ",").rstrip(",")


def seen(finding: Finding) -> str:
    """Return what a failure line says, as far as a rule knows it."""
    if finding.cause is None:
        return f"{finding.line.text.strip()[:120]} (line {finding.line.line})"
    phase = finding.phase
    words = f" {_PHASES.get(phase, f'in {phase}')}" if phase is not Phase.NONE else ""
    return f"{finding.cause}{words} (line {finding.line.line})"


def figures(facts: Facts) -> str:
    """Return the figures of a failure message, or the empty string."""
    parts = []
    if facts.requested_bytes is not None:
        parts.append(f"needed {show_gib(facts.requested_bytes)}")
    if facts.free_bytes is not None:
        parts.append(f"{show_gib(facts.free_bytes)} was free")
    elif facts.allocated_bytes is not None and facts.capacity_bytes:
        parts.append(f"{show_gib(facts.allocated_bytes)} of {show_gib(facts.capacity_bytes)} was in use")
    elif facts.capacity_bytes:
        parts.append(f"the device has {show_gib(facts.capacity_bytes)}")
    return ", ".join(parts)


def setting_changes(before: Knobs, after: Knobs) -> str:
    """Return `memory_fraction 0.8 → 0.64, recompute off → full`."""
    return ", ".join(arrow(name, a, b) for name, (a, b) in changed(before, after).items())


def arrow(name: str, before: Setting, after: Setting) -> str:
    """Return one change of a knob."""
    return f"{name} {show_setting(name, before)} → {show_setting(name, after)}"


def remedy_costs(remedy: Remedy) -> str:
    """Return what a remedy frees and costs."""
    parts = [f"frees {remedy.frees}" if remedy.frees else "", remedy.slows and f"slows {remedy.slows}"]
    if remedy.effect != "exact":
        parts.append(f"{remedy.effect} effect")
    return ", ".join(part for part in parts if part)


def place(cluster: Cluster) -> str:
    """Return `4 × H100 (79.19 GiB)` or what stands for it without GPUs."""
    nodes = f"{cluster.nodes} nodes × " if cluster.nodes > 1 else ""
    if cluster.gpus_per_node:
        cards = f"{nodes}{cluster.gpus_per_node} × {cluster.gpu_name or 'GPU'}"
        memory = show_gib(cluster.gpu_memory_bytes) if cluster.gpu_memory_bytes else "memory unknown"
        return f"{cards} ({memory})"
    return f"{nodes}no GPU · host {show_gib(cluster.host_memory_bytes, digits=1)}"


def peaks(values: dict[str, Peak]) -> str:
    """Return the peaks that matter in one line; the passes of training are one row for people."""
    rows: dict[str, Peak] = {}
    for phase, peak in values.items():
        row = "train" if phase in _TRAIN else phase
        if row not in rows or _fullness(peak) > _fullness(rows[row]):
            rows[row] = peak
    fullest = max(rows, key=lambda row: _fullness(rows[row]), default="")
    shown = [row for row in rows if row in _SHOWN or row == fullest]
    return "   ".join(f"{row} {show_gib(rows[row].used_bytes)}" for row in shown if rows[row].used_bytes)


def _fullness(peak: Peak) -> tuple[float, int]:
    return (peak.used_bytes / peak.capacity_bytes if peak.capacity_bytes else 0.0, peak.used_bytes)


def outcome(value: Outcome) -> str:
    """Return how an attempt ended."""
    match value:
        case Completed():
            return "the training is complete"
        case Crashed(exit_code=code, signal=signal):
            if signal is not None:
                return f"ended by signal {signal}"
            if code == 0:
                return "ended with exit code 0 before its last step"
            return f"ended with exit code {code}" if code is not None else "ended"
        case Hung(silent_s=silent):
            return f"hung: silent for {show_duration(silent)}"
        case Lost(reason=reason):
            return f"lost: {reason}"
        case Cancelled(by=by):
            return {
                "user": "stopped",
                "failure": "stopped after its failure",
                "goal": "stopped at the goal",
            }.get(by, f"stopped by {by}")
        case _:
            assert_never(value)


def tried(result: Tried, *, before: Knobs | None) -> str:
    """Return what a search learned about one configuration."""
    change = setting_changes(before, result.knobs) if before is not None else ""
    parts = [f"{result.purpose.value}: {result.result.value}"]
    if result.unit is not None:
        noise = f" ±{result.noise:.0%}" if result.noise is not None and result.noise >= 0.005 else ""
        parts.append(f"{show_rate(result.rate, result.unit)}{noise}")
    if result.headroom is not None:
        parts.append(f"{result.headroom:.1%} free")
    if result.reason:
        parts.append(result.reason)
    parts.append(change or "as the job")
    return "   ".join(parts)


def verdict(value: Verdict, *, attempts: int, seconds: float) -> str:
    """Return how a run ended, in one sentence."""
    tries = f"{attempts} attempt{'' if attempts == 1 else 's'}"
    took = show_duration(seconds)
    match value:
        case TrainingCompleted(marginal=marginal):
            return f"Complete{_SPARE if marginal else ''} after {tries} in {took}"
        case Stable(marginal=marginal):
            return (
                f"{'Stable, with little memory to spare,' if marginal else 'Stable'} after {tries} in {took}"
            )
        case GaveUp(reason=reason):
            return f"gave up after {tries}: {reason}"
        case NeedsHuman(diagnosis=diagnosis):
            return f"stopped after {tries}: {where(diagnosis)}"
        case Infrastructure(reason=reason):
            return reason
        case Interrupted(by=by):
            return f"stopped by {by}" if by.startswith("SIG") else f"stopped by the {by}"
        case _:
            assert_never(value)
