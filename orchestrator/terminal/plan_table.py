"""Render a plan as text: tables, and the verdict in one sentence."""

from __future__ import annotations

import re
import shlex
import textwrap

from autotune.orchestrator import messages
from autotune.orchestrator.additions import change_lines
from autotune.orchestrator.config.cards import find_card
from autotune.orchestrator.planner import GPU_UNKNOWN, PhasePlan, Plan
from autotune.orchestrator.terminal.plan_remedies import remedies
from autotune.orchestrator.terminal.widgets import PIPED_WIDTH, folded, rendered, table
from autotune.orchestrator.units import counted, show_gib, show_setting
from autotune.policies.estimate.constants import constant
from autotune.policies.values.job import Cluster
from autotune.policies.values.rehearsing import LateEvent

_PARTS = {
    "weights": "weights",
    "optim.": "optimizer",
    "grads": "gradients",
    "activ.": "activations",
    "logits": "logits",
    "kv pool": "kv_pool",
}
_OTHERS = "others"  # the column for the rest of a row's total
_OTHERS_ARE = (
    "others: buffers, CUDA graphs and contexts, what earlier phases leave behind, growth during a run, and"
    " what earlier runs corrected"
)
# No check mark for `fits`: it is only predicted here, and observed by a launch.
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
_GIB, _MIB = float(1 << 30), float(1 << 20)
_SMALL_BYTES = 4 * _GIB  # smaller devices are shown in MiB
_SHORT_COMMAND = 8  # arguments
_SOURCE = re.compile(r" \([^()]*\)$")  # of the table of public models
_INDENT = "  "


def render_plan(
    plan: Plan,
    *,
    file: str,
    verbose: bool,
    width: int | None = None,
    needs_edit: bool = False,
    overrides: tuple[str, ...] = (),
) -> str:
    """Return the plan of the job in `file`; tables fit into `width` columns, None does not wrap them.

    `overrides`: the `--set` options that it was made with. `needs_edit`: the job has unfilled values, so that
    a launch would refuse it.
    """
    head = f"{plan.name} · {plan.framework} on ray · {_where(plan)}"
    wrap = textwrap.TextWrapper(width or PIPED_WIDTH, subsequent_indent=_INDENT, break_on_hyphens=False)
    lines = [*verdict_lines(plan, width or PIPED_WIDTH), "", *wrap.wrap(head), ""]
    lines += [line for warning in plan.warnings for line in wrap.wrap(f"warning: {warning}")]
    lines += [""] if plan.warnings else []
    lines += [*_estimate(plan, width, verbose=verbose), *_model(plan, width or PIPED_WIDTH, verbose=verbose)]
    lines += ["", *_first_attempt(plan, width)]
    lines += _command(plan.command, verbose=verbose, width=width or PIPED_WIDTH)
    if plan.additions:
        lines += ["", "added (+), replaced (~) and left out (-) in your command"]
        lines += [
            part for each in change_lines(plan.additions) for part in _change(each, width or PIPED_WIDTH)
        ]
    if plan.ladder:
        lines += ["", *remedies(plan, width, verbose=verbose)]
    else:
        why = (
            "nothing that it can change saves memory"
            if plan.knobs
            else "autotune can change none of its settings"
        )
        lines += ["", f"if it runs out of memory: no remedy, because {why}"]
    if plan.needs_release:
        hint = f"offered once the release is known (set framework_version): {', '.join(plan.needs_release)}"
        lines += [f"{_INDENT}{line}" for line in wrap.wrap(hint)]
    lines += ["", *_rehearsal(plan, width or PIPED_WIDTH)]
    if verbose:
        knobs = ((_INDENT + k.knob, show_setting(k.knob, k.value), k.source, k.setting) for k in plan.knobs)
        unsupported = ((_INDENT + name, why) for name, why in plan.unsupported.items())
        lines += ["", "where the values come from", rendered(table(knobs), width=width)]
        lines += ["", "not available", rendered(table(unsupported, wrap={1: 30}), width=width)]
    run = "Fill them in, then run it" if needs_edit else "Run it"
    words = ("autotune", "launch", file, *(word for each in overrides for word in ("--set", each)))
    lines += ["", f"Nothing was launched. {run}: {shlex.join(words)}"]
    return "\n".join(lines)


def _rehearsal(plan: Plan, width: int) -> list[str]:
    """Return what a rehearsal tests, and what it does not test and why."""
    met = [
        _LATE[each.event] + (f" ({each.reason})" if each.reason else "")
        for each in plan.rehearsal
        if each.met
    ]
    text = f"a rehearsal would test: {', '.join(met)}" if met else f"no rehearsal: {_NO_REHEARSAL}"
    missing = [f"not tested: {_LATE[each.event]} ({each.reason})" for each in plan.rehearsal if not each.met]
    return [*_wrapped(text, width), *(line for each in missing for line in _wrapped(each, width, _INDENT))]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + _INDENT)


def summary(plan: Plan, width: int = PIPED_WIDTH) -> tuple[str, ...]:
    """Return the prediction in a few lines: each phase's peak, the GPU's memory, and the first change."""
    lines = [f"{plan.name} · {plan.framework} · {_where(plan)}"]
    if not plan.phases:
        return (*lines, f"no memory estimate: {plan.note}", *_gpus_hint(plan))
    capacity = next((phase.capacity_bytes for phase in plan.phases if phase.capacity_bytes), None)
    of = f", of {capacity / _GIB:,.1f}" if capacity else ""
    peaks = ", ".join(
        f"{phase.phase}\N{NO-BREAK SPACE}{phase.total_bytes / _GIB:,.1f}"
        + "".join(re.findall("[!✗]", _MARKS[phase.verdict]))
        for phase in plan.phases
    )
    wrapped = _wrapped(f"predicted peak per GPU in GiB{of}: {peaks}", width)
    lines += [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped]
    verdicts = verdict_lines(plan, width) if capacity else ["the GPU is not known", *_gpus_hint(plan)]
    return (*lines, *verdicts)


def gpus_option(plan: Plan) -> str:
    """Return an example of `--gpus` for the job; empty if the memory of its GPUs is known."""
    if any(phase.capacity_bytes for phase in plan.phases) or (not plan.phases and plan.note != GPU_UNKNOWN):
        return ""
    nodes = f"{plan.cluster.nodes}x" if plan.cluster.nodes > 1 else ""
    return f"--gpus {nodes}{plan.cluster.gpus_per_node or 8}xH100"


def _gpus_hint(plan: Plan) -> list[str]:
    option = gpus_option(plan)
    return [f"hint: add {option} for the memory of a GPU"] if option else []


def _where(plan: Plan) -> str:
    cluster = plan.cluster
    if not cluster.gpus_per_node:
        return messages.cluster(cluster) if cluster.host_memory_bytes else "any cluster"
    host = cluster.host_memory_bytes
    return messages.cluster(cluster) + (f" · host {show_gib(host, digits=0)}" if host else "")


def _estimate(plan: Plan, width: int | None, *, verbose: bool) -> list[str]:
    if not plan.phases:
        return [*_gpus_hint(plan), *(["Remedies are tried in a fixed order."] if plan.ladder else [])]
    small = all((phase.capacity_bytes or phase.total_bytes) < _SMALL_BYTES for phase in plan.phases)
    unit, scale = ("MiB", _MIB) if small else ("GiB", _GIB)
    runs = counted(plan.calibrated_by, "earlier run")
    by = " and ".join(each for each in (plan.log, runs if plan.calibrated_by else "") if each)
    source = f"calibrated by {by}, ± holds nine of ten peaks" if by else NOT_CALIBRATED
    host = max(phase.host_bytes for phase in plan.phases)
    of = " (the node's size is unknown; set cluster.host_memory)"
    if plan.cluster.host_memory_bytes:
        of = f" of {show_gib(plan.cluster.host_memory_bytes, digits=1)}"
    pools = [phase for phase in plan.phases if phase.pool_tokens is not None]
    pool = [f"KV cache: {pools[-1].pool_tokens:,} tokens per engine{_few(pools[-1])}"] if pools else []
    columns = width or PIPED_WIDTH
    return [
        *_wrapped(f"predicted peak per GPU, {unit} ({source})", columns),
        _peaks(plan, scale, width),
        *(_wrapped(_OTHERS_ARE, columns) if verbose else []),
        *_by_length(plan, scale, columns),
        *pool,
        *_wrapped(f"host memory per node: {show_gib(host, digits=1)}{of}", columns),
    ]


def _by_length(plan: Plan, scale: float, width: int) -> list[str]:
    """Return how the peaks depend on sequence lengths; empty if they do not."""
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
        *_wrapped(f"typical: {usual}, with sequences of {lengths.mean:,.0f} tokens ({about})", width),
        *_wrapped(f"longest: {longest}, with all sequences of {lengths.longest:,.0f} tokens", width),
    ]


def _few(phase: PhasePlan) -> str:
    """Return a remark if the KV cache, not the GPU, is too small."""
    fits = phase.capacity_bytes is not None and phase.total_bytes <= phase.capacity_bytes
    return ", too few for the longest sequence" if fits and phase.verdict == "overflows" else ""


def _model(plan: Plan, width: int, *, verbose: bool) -> list[str]:
    model = plan.model_from if verbose else _SOURCE.sub("", plan.model_from)
    lines = [f"model: {model}"] if model else []
    if plan.settings_of:
        assumed = any(fact.name == "release" and fact.is_assumed for fact in plan.facts)
        lines.append(f"settings and defaults{' (assumed)' if assumed else ''}: {plan.settings_of}")
    for fact in plan.rests_on:
        known = f"; {fact.resolve}" if fact.resolve else ""
        lines.append(f"the prediction rests on an assumption: {fact.value}{known}")
    if plan.model_unknown:
        lines.append(f"not counted, which widens the error: {plan.model_unknown}")
    wrap = textwrap.TextWrapper(width=width, subsequent_indent=_INDENT, break_on_hyphens=False)
    return [part for line in lines for part in wrap.wrap(line)]


def _peaks(plan: Plan, scale: float, width: int | None) -> str:
    """Return the table of peaks, with narrow gaps and marks if `width` requires it."""
    head = ("phase", *_PARTS, _OTHERS, "total", "", "")
    right = range(1, len(head) - 1)
    rows = [_row(phase, scale, calibrated=is_calibrated(plan)) for phase in plan.phases]
    wide = rendered(table(rows, head=head, right=right), width=None)
    if width is None or max(map(len, wide.split("\n"))) <= width:
        return wide
    short = [(*row[:-1], re.sub("[^!✗]", "", row[-1])) for row in rows]
    return rendered(table(short, head=head, right=right, gap=1), width=None)


def _row(phase: PhasePlan, scale: float, *, calibrated: bool) -> tuple[str, ...]:
    """Return a row whose printed sizes add up to its printed total."""
    sizes = [round(phase.parts[part] / scale, 1) for part in _PARTS.values()]
    total = round(phase.total_bytes / scale, 1)
    cells = (f"{size:,.1f}" if abs(size) >= 0.05 else "–" for size in (*sizes, total - sum(sizes), total))
    share = share_of(phase, calibrated=calibrated) if phase.capacity_bytes else ""
    return (phase.phase, *cells, share, _MARKS[phase.verdict])


def _first_attempt(plan: Plan, width: int | None) -> list[str]:
    why = _why_changed(plan) if plan.first else plan.reason
    changes = [_INDENT + messages.arrow(knob, *values) for knob, values in plan.first.items()]
    return [*_wrapped(f"first attempt: {why}", width or PIPED_WIDTH), *changes]


def _why_changed(plan: Plan) -> str:
    """Return why the first launch changes the job: the memory that it would exceed most."""
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
    """Return the command in lines that a shell accepts; without `verbose` only its beginning."""
    count = len(argv) if verbose else _SHORT_COMMAND
    lines, line = [], _INDENT
    for word in map(shlex.quote, argv[:count]):
        if len(line) + len(word) > width - 2 and line.strip():
            lines.append(f"{line.rstrip()} \\")
            line = _INDENT * 2
        line += f"{word} "
    more = [f"{_INDENT * 2}…  (-v prints all {len(argv)} arguments)"] if len(argv) > count else []
    return [*lines, line.rstrip() + (" \\" if more else ""), *more]


def _change(line: str, width: int) -> list[str]:
    """Return a changed setting, of which each value can be copied, or its reason, wrapped."""
    if not line.startswith(" "):
        return folded(f"{_INDENT}{line}", width).split("\n")
    indent = _INDENT * 3
    return textwrap.wrap(line.strip(), width, initial_indent=indent, subsequent_indent=indent)


NOT_CALIBRATED = "not calibrated"


def verdict_lines(plan: Plan, width: int) -> list[str]:
    """Return the verdict on the job as written and, if the first launch changes it, on that launch."""
    lines = [verdict(plan)]
    if plan.first:
        after = _sentence(plan.first_phases, plan) if plan.first_phases else ""
        lines.append(f"the first launch changes {messages.arrows(plan.first)}{f': {after}' if after else ''}")
    return [part for line in lines for part in _wrapped(line, width)]


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
    """Return the share of its device that a phase fills.

    If calibrated, with the points by which nine of ten measured peaks differ from it at most.
    """
    assert phase.capacity_bytes
    share = phase.total_bytes / phase.capacity_bytes
    points = 100 * constant("interval") * phase.error * share
    return f"{share:.0%}" + (f" ± {points:.0f}" if calibrated else "")


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
    """Return the GPUs of a cluster in short, such as `2 × 8 × H100-80GB`."""
    if not cluster.gpus_per_node:
        return "this machine" if cluster.address == "local" else "a node"
    card = find_card(cluster.gpu_name)
    nodes = f"{cluster.nodes} × " if cluster.nodes > 1 else ""
    return f"{nodes}{cluster.gpus_per_node} × {card.name if card else cluster.gpu_name or 'GPU'}"
