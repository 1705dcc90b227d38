"""The details of a failure: what used the memory, what the request was for, why it did not fit."""

from __future__ import annotations

import re

from autotune.orchestrator.explain.analyze import Explanation
from autotune.orchestrator.explain.headline import device_name, figure, on_budget
from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.units import counted, show_gib
from autotune.policies.diagnosis.memory_users import largest
from autotune.policies.explain.advice import fragmentation_excluded
from autotune.policies.values.failure import Cause, Component, Phase

_CARD = re.compile(r"\b[GNX]PU (\d{1,4})\b")
_RAY_PROCESS = re.compile(r"\(\w[\w.:]{0,80} pid=(?P<pid>\d{1,9})(?:, ip=(?P<host>[\w.:]{1,64}))?\)")
_STEP_OF = re.compile(r"\d{1,9}$")  # a checkpoint's folder
_OLD_ADVICE = "max_split_size_mb"
_RAYS_LIST = re.compile(r"`ray logs raylet\.out[^`]{0,80}`")
_HELD = 4  # maximum processes listed
_TRIFLE = 0.01  # share of a device that an allocator may leave unused without a remark


def forensics(explanation: Explanation) -> list[str]:
    """Return the `info:` lines of an explanation."""
    lines = [_place(explanation)]
    if explanation.diagnosis.cause is Cause.GPU_OOM:
        lines += [
            _card(explanation),
            _request(explanation),
            *_others(explanation),
            *_fragmentation(explanation),
        ]
    elif explanation.diagnosis.cause is Cause.HOST_OOM:
        lines += _users(explanation)
    if explanation.checkpoint:
        lines.append(
            f"info: last checkpoint in the log: {plain(explanation.checkpoint)}{_since(explanation)}"
        )
    if explanation.late:
        lines.append(f"info: {explanation.late}")
    return [line for line in lines if line]


def _place(explanation: Explanation) -> str:
    diagnosis = explanation.diagnosis
    parts = []
    if diagnosis.phase is not Phase.NONE:
        parts.append(f"phase `{diagnosis.phase}`")
    if diagnosis.component is not Component.UNKNOWN:
        parts.append(f"component `{diagnosis.component}`")
    if diagnosis.rank is not None:
        parts.append(f"rank {diagnosis.rank}")
    if (process := _RAY_PROCESS.search(explanation.main_line.text)) is not None:
        parts.append(f"pid {process['pid']}" + (f" on {process['host']}" if process["host"] else ""))
        parts += ["rank not in the log"] if diagnosis.rank is None else []
    if words := step_text(explanation):
        parts.append(words)
    if explanation.context.framework is not None:
        parts.append(f"framework `{explanation.context.framework.name}`")
    elif explanation.context.tools:
        parts.append(f"uses {', '.join(tool.name for tool in explanation.context.tools)}")
    return f"info: {', '.join(parts)}" if parts else ""


def step_text(explanation: Explanation) -> str:
    """Return `after step 23 of 435`, as far as it is known."""
    words, of = explanation.diagnosis.step_text, explanation.steps
    return f"{words} of {of:,}" if words and of is not None else words


def _since(explanation: Explanation) -> str:
    """Return how many completed steps the last checkpoint does not hold; empty if it is not known."""
    saved, step = _STEP_OF.search(explanation.checkpoint), explanation.diagnosis.step
    if saved is None or step is None or not 0 < (lost := step - int(saved[0])) < step:
        return ""
    return f", {counted(lost, 'step')} before"


def _card(explanation: Explanation) -> str:
    facts, text = explanation.diagnosis.facts, explanation.main_line.text
    if facts.capacity_bytes is None:
        return ""
    card = _CARD.search(text)
    figures = (
        (facts.allocated_bytes, "in use by PyTorch"),
        (facts.reserved_unallocated_bytes, "cached"),
        (facts.outside_bytes, "outside PyTorch"),
        (facts.free_bytes, "free"),
    )
    sizes = [(figure(size, text), label) for size, label in figures if size is not None]
    if not sizes:
        return ""
    if all(size.endswith(" GiB") for size, _ in sizes):  # print the unit only once, after the total
        sizes = [(size.removesuffix(" GiB"), label) for size, label in sizes]
    parts = [f"{size} {label}" for size, label in sizes]
    whole = facts.outside_bytes is not None
    total = f"   = {show_gib(facts.capacity_bytes)}" if whole else f"   of {show_gib(facts.capacity_bytes)}"
    device = (
        "budget" if on_budget(explanation) else f"{device_name(explanation)}{f' {card[1]}' if card else ''}"
    )
    allowed = facts.allowed_bytes
    if allowed is not None and allowed < facts.capacity_bytes:
        total += f"; the process may use {figure(allowed, text)}"
    return f"info: {device}   {' · '.join(parts)}{total}"


def _request(explanation: Explanation) -> str:
    request, requested = explanation.request, explanation.diagnosis.facts.requested_bytes
    if request is None or requested is None:
        return ""
    written = figure(requested, explanation.main_line.text)
    if request.assumed:
        return (
            f"info: {written} matches {request.formula}: {request.meaning} "
            "(predicted; the log does not show the token count)"
        )
    return f"info: {written} = {request.formula}: {request.meaning}"


def _others(explanation: Explanation) -> list[str]:
    if not explanation.holders:
        return []
    ordered = sorted(explanation.holders, key=lambda holder: -holder.held_bytes)
    listed = ", ".join(f"pid {holder.pid} {show_gib(holder.held_bytes)}" for holder in ordered[:_HELD])
    more = f" and {len(ordered) - _HELD} more" if len(ordered) > _HELD else ""
    engine = "" if explanation.context.known.engine is False else "; one may be the job's engine"
    return [f"info: other processes use memory of this {device_name(explanation)}: {listed}{more}{engine}"]


def _users(explanation: Explanation) -> list[str]:
    """Return the largest users of host memory, or a note that the killed process was not one of them."""
    facts = explanation.diagnosis.facts
    if largest(facts) is not None and len(facts.holders) > 1:
        ordered = facts.holders[:_HELD]
        rows = ", ".join(
            f"{'' if one.pid is None else f'pid {one.pid} '}{show_gib(one.held_bytes)} {plain(one.command)}"
            f"{' (killed)' if one.killed else ''}"
            for one in ordered
        )
        return [f"info: largest users of the node's memory: {rows}"]
    if facts.holders and facts.capacity_bytes is None and all(one.killed for one in facts.holders):
        return [
            "info: who held the node's memory stands in the table that the kernel prints above this (`dmesg`)"
        ]
    if not facts.holders and (command := _RAYS_LIST.search(explanation.main_line.text)) is not None:
        return [f"info: the log names no process: {command[0]} lists who held the node's memory"]
    used = (facts.capacity_bytes or 0) - (facts.free_bytes or 0)
    if len(facts.holders) != 1 or facts.free_bytes is None or facts.holders[0].held_bytes >= used / 2:
        return []
    killed = f"{show_gib(facts.holders[0].held_bytes)} of the {show_gib(used)} in use"
    return [
        f"info: the process that was killed used {killed}: raylet.out on that node lists who holds the rest"
    ]


def _about(size: int, text: str) -> str:
    """Return a size as the log prints it, or with `about` if it is derived from other figures."""
    written = figure(size, text)
    return written if written in text else f"about {written}"


def _fragmentation(explanation: Explanation) -> list[str]:
    diagnosis = explanation.diagnosis
    facts, text = diagnosis.facts, explanation.main_line.text
    idle, requested = facts.reserved_unallocated_bytes, facts.requested_bytes
    lines = []
    if diagnosis.fragmentation and idle is not None and requested is not None:
        enough = "more than the request" if idle >= requested else "enough with the free memory"
        if idle < requested <= (facts.room_bytes or 0):
            return []  # enough was free for the request: something else refused it
        if idle < _TRIFLE * (facts.limit_bytes or 0):
            return []  # every process leaves as much unused, and the next request would fail without it
        if idle < requested:
            unused = f"{_about(idle, text)} is reserved but unallocated"
            return [
                f"info: fragmentation may be a part of it: {unused}, enough with the free memory in one piece"
            ]
        expandable = any(remedied.cure.name == "expandable_segments" for remedied in explanation.remedies)
        own = explanation.context.framework
        why = "`expandable_segments` is on already, or an engine that sleeps refuses it"
        if own is not None and "allocator" not in explanation.context.known.fixed:
            reasons = [advice.reason for advice in own.advice if advice.remedy == "expandable_segments"]
            why = ": ".join([f"autotune sets no `expandable_segments` for {own.name}", *reasons[:1]])
        remark = "" if expandable else f"; {why}"
        lines.append(
            f"info: fragmentation: {_about(idle, text)} is reserved but unallocated, {enough}, "
            f"but in blocks that the request cannot use{remark}"
        )
    elif fragmentation_excluded(diagnosis) and idle is not None:
        lines.append(
            f"info: not fragmentation: only {_about(idle, text)} is reserved but unallocated, "
            "so `expandable_segments` would not help"
        )
    if _OLD_ADVICE in text and not explanation.context.device:
        lines.append(
            f"info: the message recommends `{_OLD_ADVICE}`, which `expandable_segments` replaced in torch 2.1"
        )
    return lines
