"""The answer of a plan in one sentence: whether the job fits, and which phase is nearest to its limit."""

from __future__ import annotations

import textwrap

from autotune.orchestrator import messages
from autotune.orchestrator.config.cards import find_card
from autotune.orchestrator.planner import PhasePlan, Plan
from autotune.orchestrator.units import show_gib
from autotune.policies.values.job import Cluster

NOT_CALIBRATED = "not calibrated"
_INDENT = "  "


def verdict_lines(plan: Plan, width: int) -> list[str]:
    """Return the verdict on the job as written and, where the first launch changes it, on that launch."""
    changes = ", ".join(messages.arrow(knob, *values) for knob, values in plan.first.items())
    lines = [verdict(plan)]
    if changes:
        after = _sentence(plan.first_phases, plan) if plan.first_phases else ""
        lines.append(f"the first launch changes {changes}{f': {after}' if after else ''}")
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent=_INDENT)]


def verdict(plan: Plan, *, names_gpus: bool = True) -> str:
    """Return whether the job as written fits, in one sentence."""
    if not plan.phases:
        return f"no memory estimate: {plan.note}"
    how = [] if is_calibrated(plan) else [NOT_CALIBRATED]
    how += [f"assumed: {fact.value}" for fact in plan.rests_on]
    where = f" on {_gpus(plan.cluster)}" if names_gpus else ""
    return _sentence(plan.phases, plan, where=where) + (f" ({'; '.join(how)})" if how else "")


def is_calibrated(plan: Plan) -> bool:
    """Return whether an earlier run or a log corrected the prediction."""
    return plan.calibrated_by > 0 or bool(plan.log)


def share_of(phase: PhasePlan, *, calibrated: bool) -> str:
    """Return the share of its device that a phase fills, with the error in points where it is calibrated."""
    assert phase.capacity_bytes
    share = phase.total_bytes / phase.capacity_bytes
    return f"{share:.0%}" + (f" ± {100 * phase.error * share:.0f}" if calibrated else "")


def _sentence(phases: tuple[PhasePlan, ...], plan: Plan, *, where: str = "") -> str:
    limited = [phase for phase in phases if phase.capacity_bytes]
    host, of = max(phase.host_bytes for phase in phases), plan.cluster.host_memory_bytes
    if not limited:
        return "no verdict: the memory of a GPU is unknown"
    tightest = max(limited, key=lambda phase: phase.total_bytes / (phase.capacity_bytes or 1))
    share = share_of(tightest, calibrated=is_calibrated(plan))
    missing = tightest.total_bytes - (tightest.capacity_bytes or 0)
    worst = [phase for phase in limited if phase.verdict == "overflows"]
    if missing > 0 and tightest in worst:
        return f"overflows in {tightest.phase} by {show_gib(missing, digits=1)}{where}: {share}"
    if worst:
        return f"does not fit{where}: the KV cache of {worst[0].phase} is too small for the longest sequence"
    if of and host > of:
        return f"overflows host memory by {show_gib(host - of, digits=1)} per node{where}: {host / of:.0%}"
    if any(phase.verdict == "marginal" for phase in limited):
        return f"may not fit{where}: tightest is {tightest.phase}, {share}"
    return f"fits{where}: tightest is {tightest.phase}, {share}, {show_gib(-missing, digits=1)} free"


def _gpus(cluster: Cluster) -> str:
    """Return the GPUs in a few words, such as `2 × 8 × H100-80GB`."""
    if not cluster.gpus_per_node:
        return "this machine" if cluster.address == "local" else "a node"
    card = find_card(cluster.gpu_name)
    nodes = f"{cluster.nodes} × " if cluster.nodes > 1 else ""
    return f"{nodes}{cluster.gpus_per_node} × {card.name if card else cluster.gpu_name or 'GPU'}"
