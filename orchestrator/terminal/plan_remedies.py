"""The remedies of a plan as text, those of the phases nearest to their limit first."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from autotune.orchestrator import messages
from autotune.orchestrator.planner import ROWS, PhasePlan, Plan, RungPlan
from autotune.orchestrator.terminal.widgets import PIPED_WIDTH, rendered, table
from autotune.policies.values.failure import Cause, Phase

_INDENT = "  "
# Remedies that are printed without -v: those of the phases nearest to the limit.
_NEAR = 0.5  # least share of a GPU's memory
_MOST_PHASES = 3


def remedies(plan: Plan, width: int | None, *, verbose: bool) -> list[str]:
    """Return the remedies after a failure of each phase, the phase nearest to its limit first."""
    shares = {
        row: phase.total_bytes / phase.capacity_bytes for row, phase in _by_row(plan) if phase.capacity_bytes
    }
    phases = sorted(
        dict.fromkeys(map(_out_of_memory_in, plan.ladder)), key=lambda name: -shares.get(name, 1.0)
    )
    logged = _out_of_memory_in(plan.ladder[0]) if plan.log else ""
    phases.sort(key=lambda name: name != logged)
    near = [n for n in phases if n == logged or shares.get(n, 1.0) >= _NEAR][:_MOST_PHASES] or phases[:1]
    known = bool(shares or logged)  # otherwise any phase may be the nearest: the first remedy of each
    most = len(plan.ladder) if verbose or known else 1
    printed = near if known and not verbose else phases
    rows: list[tuple[str, str]] = []
    left = len(plan.ladder)
    for name in printed:
        share = [f"{shares[name]:.0%}"] if name in shares else []
        rows.append((", ".join([name, *share, *([f"as in {plan.log}"] if name == logged else [])]), ""))
        rungs = [rung for rung in plan.ladder if _out_of_memory_in(rung) == name][:most]
        left -= len(rungs)
        for rung in rungs:
            changes = ",\n".join(messages.arrow(knob, *values) for knob, values in rung.changes.items())
            price = "; ".join((messages.price(rung.effect, rung.slows), *rung.at_least))
            rows.append((textwrap.indent(changes, _INDENT), price))
    body = rendered(table(rows, wrap={1: 16}), width=None if width is None else width - len(_INDENT))
    lines = ["if it runs out of memory, in this order", *textwrap.indent(body, _INDENT).split("\n")]
    if left:
        of = f" for {others}" if (others := ", ".join(name for name in phases if name not in printed)) else ""
        more = f"{left} more {'remedy' if left == 1 else 'remedies'}{of}: -v"
        below = _INDENT * 2
        lines += textwrap.wrap(more, width or PIPED_WIDTH, initial_indent=_INDENT, subsequent_indent=below)
    return lines


def _out_of_memory_in(rung: RungPlan) -> str:
    """Return what ran out: the phase or, for an unknown program, the memory."""
    phase = "" if rung.phase == Phase.NONE.value else rung.phase
    if rung.cause == Cause.HOST_OOM.value:
        return f"host memory{f' in {phase}' if phase else ''}"
    return phase or "GPU memory"


def _by_row(plan: Plan) -> Iterator[tuple[str, PhasePlan]]:
    """Yield the names of phases that remedies use, each with its row of the table."""
    for phase in plan.phases:
        for each in ROWS[phase.phase]:
            yield each.value, phase
