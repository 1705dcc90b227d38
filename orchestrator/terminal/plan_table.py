"""A plan for people."""

from __future__ import annotations

import shlex
import textwrap

from autotune.orchestrator.messages import arrow, place
from autotune.orchestrator.planner import PhasePlan, Plan
from autotune.orchestrator.units import show_gib, show_value

_COLUMNS = {
    "weights": "weights",
    "optimizer": "optimizer",
    "grads": "gradients",
    "activ.": "activations",
    "logits": "logits",
    "kv pool": "kv_pool",
}
_OTHERS = ("buffers", "graphs", "residue", "outside")
_MARKS = {"fits": "✓ fits", "marginal": "! marginal", "overflows": "✗ overflows", "unknown": ""}
_GIB, _MIB = float(1 << 30), float(1 << 20)
_SMALL_BYTES = 4 * _GIB  # devices below are shown in MiB


def text(plan: Plan, *, file: str, verbose: bool) -> str:
    """Return the whole plan."""
    host = (
        f" · host {show_gib(plan.cluster.host_memory_bytes, digits=0)}"
        if plan.cluster.host_memory_bytes
        else ""
    )
    where = (
        place(plan.cluster) if plan.cluster.gpus_per_node or plan.cluster.host_memory_bytes else "any cluster"
    )
    lines = [
        f"{plan.name} · {plan.framework} on ray · {where}{host if plan.cluster.gpus_per_node else ''}",
        "",
    ]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    lines += [""] if plan.warnings else []
    lines += _estimate(plan)
    why = plan.reason.replace("as written", "not as written:", 1) if plan.first else plan.reason
    lines += ["", *textwrap.wrap(f"first attempt: {why}", width=100, subsequent_indent="  ")]
    lines += [f"  {arrow(name, a, b)}" for name, (a, b) in plan.first.items()]
    lines += _command(plan.command, verbose=verbose)
    lines += ["", "if it runs out of memory, in this order"]
    phase = ""
    for rung in plan.ladder:
        label = rung.phase if rung.phase != phase else ""
        phase = rung.phase
        changes = ", ".join(arrow(name, a, b) for name, (a, b) in rung.changes.items())
        slower = f", slows {rung.slows}" if rung.slows and rung.slows != "nothing" else ""
        lines.append(f"  {label:<13} {rung.remedy:<21} {changes:<48} {rung.effect.value}{slower}".rstrip())
    if verbose:
        lines += ["", "where values come from"]
        lines += [f"  {k.knob:<27} {show_value(k.value):<12} {k.source:<13} {k.setting}" for k in plan.knobs]
        lines += ["", "why not"]
        lines += [f"  {name:<27} {why}" for name, why in plan.unsupported.items()]
    lines += ["", f"Nothing was launched. Run it: autotune launch {shlex.quote(file)}"]
    return "\n".join(lines)


def _estimate(plan: Plan) -> list[str]:
    if not plan.phases:
        return [f"no prediction: {plan.note}; the ladder decides"]
    small = all((phase.capacity_bytes or phase.total_bytes) < _SMALL_BYTES for phase in plan.phases)
    unit, scale = ("MiB", _MIB) if small else ("GiB", _GIB)
    source = f"calibrated by {plan.calibrated_by} earlier runs" if plan.calibrated_by else "uncalibrated"
    lines = [f"predicted peak per device, {unit} ({source}, ±{plan.error or 0:.0%})"]
    lines.append("phase        " + "".join(f"{name:>10}" for name in (*_COLUMNS, "others", "total")))
    lines += [_row(phase, scale) for phase in plan.phases]
    host = max(phase.host_bytes for phase in plan.phases)
    of = f" of {show_gib(plan.cluster.host_memory_bytes, digits=1)}" if plan.cluster.host_memory_bytes else ""
    lines.append(f"host memory of a node: {show_gib(host, digits=1)}{of}")
    return lines


def _row(phase: PhasePlan, scale: float) -> str:
    def cell(size: float) -> str:
        return f"{'–' if size < 0.05 * scale else format(size / scale, ',.1f'):>10}"

    cells = "".join(cell(phase.parts[part]) for part in _COLUMNS.values())
    others = sum(phase.parts[part] for part in _OTHERS)
    share = f"  {phase.total_bytes / phase.capacity_bytes:5.0%}" if phase.capacity_bytes else ""
    sums = f"{cell(others)}{cell(phase.total_bytes)}{share}"
    return f"{phase.phase:<13}{cells}{sums}  {_MARKS[phase.verdict]}".rstrip()


def _command(argv: tuple[str, ...], *, verbose: bool) -> list[str]:
    """Return the command, one setting a line; without `-v` its beginning."""
    most = len(argv) if verbose else 8
    words = [shlex.quote(word) for word in argv[:most]]
    lines, line = [], "  "
    for word in words:
        if len(line) + len(word) > 98 and line.strip():
            lines.append(f"{line.rstrip()} \\")
            line = "    "
        line += f"{word} "
    left = len(argv) - most
    lines.append(line.rstrip() + (f" …    (all {len(argv)} words: -v)" if left > 0 else ""))
    return lines
