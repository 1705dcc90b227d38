"""A plan as text for people."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable

from autotune.orchestrator import messages
from autotune.orchestrator.planner import GPU_UNKNOWN, PhasePlan, Plan, RungPlan
from autotune.orchestrator.terminal.widgets import PIPED_WIDTH, rendered, table
from autotune.orchestrator.units import show_gib, show_setting
from autotune.policies.values.rehearsing import LateEvent

_PARTS = {
    "weights": ("weights",),
    "optim.": ("optimizer",),
    "grads": ("gradients",),
    "activ.": ("activations",),
    "logits": ("logits",),
    "kv pool": ("kv_pool",),
    "others": ("buffers", "graphs", "residue", "outside"),
}
# No check mark: what fits is predicted here, and observed by a launch.
_MARKS = {"fits": "fits", "marginal": "! marginal", "overflows": "✗ overflows", "unknown": ""}
_LATE = {
    LateEvent.LENGTH: "full lengths",
    LateEvent.OPTIMIZER: "the second optimizer step",
    LateEvent.SAVE: "a checkpoint",
    LateEvent.VALIDATION: "a validation in the same step",
    LateEvent.RELOAD: "a restart from the checkpoint",
    LateEvent.WAKE_UP: "the engine's wake-up",
}
_NO_REHEARSAL = "the command has no {folder} and {steps}, so it could not run separately from the training"
GPUS_HINT = "hint: add --gpus 8xH100 for the memory of a GPU"
_GIB, _MIB = float(1 << 30), float(1 << 20)
_SMALL_BYTES = 4 * _GIB  # devices below are shown in MiB
_SHORT_COMMAND = 8  # arguments
_INDENT = "  "


def render_plan(
    plan: Plan, *, file: str, verbose: bool, width: int | None = None, needs_edit: bool = False
) -> str:
    """Return the plan of the job in `file`; tables fit into `width` columns, None does not wrap them.

    `needs_edit`: the job has values that nobody filled in, so that a launch would refuse it.
    """
    lines = [f"{plan.name} · {plan.framework} on ray · {_where(plan)}", ""]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    lines += [""] if plan.warnings else []
    lines += [*_estimate(plan, width), *_model(plan, width or PIPED_WIDTH)]
    lines += ["", *_first_attempt(plan, width)]
    lines += _command(plan.command, verbose=verbose, width=width or PIPED_WIDTH)
    if plan.ladder:
        lines += ["", "if it runs out of memory, in this order", *_remedies(plan.ladder, width)]
    else:
        lines += ["", "if it runs out of memory: no remedy, because autotune can change none of its settings"]
    lines += ["", *_rehearsal(plan, width or PIPED_WIDTH)]
    if verbose:
        knobs = ((_INDENT + k.knob, show_setting(k.knob, k.value), k.source, k.setting) for k in plan.knobs)
        unsupported = ((_INDENT + name, why) for name, why in plan.unsupported.items())
        lines += ["", "where the values come from", rendered(table(knobs), width=width)]
        lines += ["", "not available", rendered(table(unsupported, wrap={1: 30}), width=width)]
    run = "Fill them in, then run it" if needs_edit else "Run it"
    lines += ["", f"Nothing was launched. {run}: autotune launch {shlex.quote(file)}"]
    return "\n".join(lines)


def _rehearsal(plan: Plan, width: int) -> list[str]:
    """Return what a rehearsal tests, and what it does not test with the reasons."""
    met = [
        _LATE[each.event] + (f" ({each.reason})" if each.reason else "")
        for each in plan.rehearsal
        if each.met
    ]
    text = f"a rehearsal would test: {', '.join(met)}" if met else f"no rehearsal: {_NO_REHEARSAL}"
    missing = [f"not tested: {_LATE[each.event]} ({each.reason})" for each in plan.rehearsal if not each.met]
    return [
        *textwrap.wrap(text, width=width, subsequent_indent=_INDENT),
        *(
            line
            for each in missing
            for line in textwrap.wrap(
                each, width=width, initial_indent=_INDENT, subsequent_indent=_INDENT * 2
            )
        ),
    ]


def summary(plan: Plan) -> tuple[str, ...]:
    """Return what is predicted in a few lines: each phase's peak against the card, and the first change."""
    lines = [f"{plan.name} · {plan.framework} · {_where(plan)}"]
    if not plan.phases:
        hint = (GPUS_HINT,) if plan.note == GPU_UNKNOWN else ()
        return (*lines, f"no memory estimate: {plan.note}", *hint)
    capacity = next((phase.capacity_bytes for phase in plan.phases if phase.capacity_bytes), None)
    of = f", of {capacity / _GIB:,.1f}" if capacity else ""
    rows = [
        (phase.phase, f"{phase.total_bytes / _GIB:,.1f}", "".join(re.findall("[!✗]", _MARKS[phase.verdict])))
        for phase in plan.phases
    ]
    peaks = ", ".join(f"{name}\N{NO-BREAK SPACE}{peak}{mark}" for name, peak, mark in rows)
    bad = any(phase.verdict == "overflows" for phase in plan.phases)
    narrow = any(phase.verdict == "marginal" for phase in plan.phases)
    verdict = (
        "does not fit" if bad else "may not fit" if narrow else "fits" if capacity else "the GPU is not known"
    )
    text = f"predicted peak per GPU in GiB{of}: {peaks}: {verdict}"
    wrapped = textwrap.wrap(text, PIPED_WIDTH, subsequent_indent=_INDENT)
    lines += [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped]
    if not capacity:
        lines.append(GPUS_HINT)
    changes = [messages.arrow(knob, *values) for knob, values in plan.first.items()]
    return (*lines, *([f"the first launch would change {', '.join(changes)}"] if changes else []))


def _where(plan: Plan) -> str:
    cluster = plan.cluster
    if not cluster.gpus_per_node:
        return messages.cluster(cluster) if cluster.host_memory_bytes else "any cluster"
    host = cluster.host_memory_bytes
    return messages.cluster(cluster) + (f" · host {show_gib(host, digits=0)}" if host else "")


def _estimate(plan: Plan, width: int | None) -> list[str]:
    if not plan.phases:
        order = ["Without one, remedies are tried in a fixed order."] if plan.ladder else []
        hint = [GPUS_HINT] if plan.note == GPU_UNKNOWN else []
        return [f"no memory estimate: {plan.note}", *hint, *order]
    small = all((phase.capacity_bytes or phase.total_bytes) < _SMALL_BYTES for phase in plan.phases)
    unit, scale = ("MiB", _MIB) if small else ("GiB", _GIB)
    runs = f"{plan.calibrated_by} earlier run{'' if plan.calibrated_by == 1 else 's'}"
    source = f"calibrated by {runs}" if plan.calibrated_by else "uncalibrated"
    host = max(phase.host_bytes for phase in plan.phases)
    of = " (the node's size is unknown; set cluster.host_memory)"
    if plan.cluster.host_memory_bytes:
        of = f" of {show_gib(plan.cluster.host_memory_bytes, digits=1)}"
    pools = [phase for phase in plan.phases if phase.pool_tokens is not None]
    pool = [f"KV cache: {pools[-1].pool_tokens:,} tokens per engine{_few(pools[-1])}"] if pools else []
    fullest = max(plan.phases, key=lambda phase: phase.total_bytes / (phase.capacity_bytes or 1.0))
    return [
        f"predicted peak per GPU, {unit} ({source}, ±{fullest.error:.0%} in {fullest.phase})",
        _peaks(plan.phases, scale, width),
        *_by_length(plan, scale, width or PIPED_WIDTH),
        *pool,
        f"host memory per node: {show_gib(host, digits=1)}{of}",
    ]


def _by_length(plan: Plan, scale: float, width: int) -> list[str]:
    """Return how the peaks depend on the lengths of sequences, where they do."""
    lengths = plan.lengths
    moving = [phase for phase in plan.phases if phase.worst_bytes > 1.01 * phase.typical_bytes]
    if lengths is None or not moving:
        return []
    source = {"job": "from `lengths` of the job", "usual": "assumed; set `lengths:` in the job"}
    about = source.get(lengths.source, "one length")
    if lengths.prompt_from and lengths.source != "fixed":
        about = f"lengths of {lengths.prompt_from}, of responses {about}"
    usual = ", ".join(f"{phase.phase} {phase.typical_bytes / scale:,.1f}" for phase in moving)
    longest = ", ".join(f"{phase.phase} {phase.worst_bytes / scale:,.1f}" for phase in moving)
    return [
        *textwrap.wrap(
            f"typical: {usual}, with sequences of {lengths.mean:,.0f} tokens ({about})",
            width=width,
            subsequent_indent=_INDENT,
        ),
        *textwrap.wrap(
            f"longest: {longest}, with all sequences of {lengths.longest:,.0f} tokens",
            width=width,
            subsequent_indent=_INDENT,
        ),
    ]


def _few(phase: PhasePlan) -> str:
    """Return a remark if the KV cache, not the GPU, is too small."""
    fits = phase.capacity_bytes is not None and phase.total_bytes <= phase.capacity_bytes
    return ", too few for the longest sequence" if fits and phase.verdict == "overflows" else ""


def _model(plan: Plan, width: int) -> list[str]:
    lines = [f"model: {plan.model_from}"] if plan.model_from else []
    if plan.settings_of:
        lines.append(f"settings and defaults: {plan.settings_of}")
    for fact in plan.rests_on:
        known = f"; {fact.resolve}" if fact.resolve else ""
        lines.append(f"the prediction rests on an assumption: {fact.value}{known}")
    if plan.model_unknown:
        lines.append(f"not counted, which widens the error: {plan.model_unknown}")
    wrap = textwrap.TextWrapper(width=width, subsequent_indent=_INDENT, break_on_hyphens=False)
    return [part for line in lines for part in wrap.wrap(line)]


def _peaks(phases: Iterable[PhasePlan], scale: float, width: int | None) -> str:
    """Return the table of peaks, with narrow gaps and marks where `width` asks for it."""
    head = ("phase", *_PARTS, "total", "", "")
    right = range(1, len(head) - 1)
    rows = [_row(phase, scale) for phase in phases]
    wide = rendered(table(rows, head=head, right=right), width=None)
    if width is None or max(map(len, wide.split("\n"))) <= width:
        return wide
    short = [(*row[:-1], row[-1][:1]) for row in rows]
    return rendered(table(short, head=head, right=right, gap=1), width=None)


def _row(phase: PhasePlan, scale: float) -> tuple[str, ...]:
    sizes = [sum(phase.parts[part] for part in parts) for parts in _PARTS.values()]
    cells = ("–" if size < 0.05 * scale else f"{size / scale:,.1f}" for size in (*sizes, phase.total_bytes))
    share = f"{phase.total_bytes / phase.capacity_bytes:.0%}" if phase.capacity_bytes else ""
    return (phase.phase, *cells, share, _MARKS[phase.verdict])


def _first_attempt(plan: Plan, width: int | None) -> list[str]:
    why = _why_changed(plan) if plan.first else plan.reason
    changes = [_INDENT + messages.arrow(knob, *values) for knob, values in plan.first.items()]
    return [
        *textwrap.wrap(f"first attempt: {why}", width=width or PIPED_WIDTH, subsequent_indent=_INDENT),
        *changes,
    ]


def _why_changed(plan: Plan) -> str:
    """Return which memory the job as written would exceed most."""
    excess = [
        (phase.total_bytes - phase.capacity_bytes, f"{phase.phase} would need", "the device has")
        for phase in plan.phases
        if phase.capacity_bytes
    ]
    if plan.cluster.host_memory_bytes:
        host = max((phase.host_bytes for phase in plan.phases), default=0.0)
        excess.append((host - plan.cluster.host_memory_bytes, "the host would need", "the node has"))
    missing, who, available = max(excess, default=(0.0, "", ""))
    if missing <= 0:
        return plan.reason
    return f"changed from your job, because {who} {show_gib(missing)} more than {available}"


def _command(argv: tuple[str, ...], *, verbose: bool, width: int) -> list[str]:
    """Return the command in lines that a shell takes; without `verbose` its beginning."""
    shown = len(argv) if verbose else _SHORT_COMMAND
    lines, line = [], _INDENT
    for word in map(shlex.quote, argv[:shown]):
        if len(line) + len(word) > width - 2 and line.strip():
            lines.append(f"{line.rstrip()} \\")
            line = _INDENT * 2
        line += f"{word} "
    more = f" …    (-v prints all {len(argv)} arguments)" if len(argv) > shown else ""
    return [*lines, line.rstrip() + more]


def _remedies(ladder: Iterable[RungPlan], width: int | None) -> list[str]:
    rows: list[tuple[str, str, str]] = []
    phase = ""
    for rung in ladder:
        if rung.phase != phase:
            phase = rung.phase
            rows.append((phase, "", ""))
        changes = ",\n".join(
            messages.arrow(name, before, after) for name, (before, after) in rung.changes.items()
        )
        cost = f"; slows {rung.slows}" if rung.slows and rung.slows != "nothing" else ""
        rows.append((_INDENT + rung.remedy, changes, f"{rung.effect.value}{cost}"))
    body = rendered(table(rows, wrap={2: 16}), width=None if width is None else width - len(_INDENT))
    return textwrap.indent(body, _INDENT).split("\n")
