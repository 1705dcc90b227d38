"""What the figures of a failure say: who holds the card, what the request was, why it did not fit."""

from __future__ import annotations

import re

from autotune.orchestrator.explain.analyze import Explanation
from autotune.orchestrator.explain.headline import figure, on_budget
from autotune.orchestrator.units import show_gib
from autotune.policies.explain.advice import fragmentation_excluded
from autotune.policies.values.types import Cause, Component, Phase

_CARD = re.compile(r"\bGPU (\d{1,4})\b")
_OLD_ADVICE = "max_split_size_mb"
_HELD = 4  # processes listed


def forensics(found: Explanation) -> list[str]:
    """Return the info lines."""
    lines = [_place(found)]
    if found.diagnosis.cause is Cause.GPU_OOM:
        lines += [_card(found), _request(found), *_others(found), *_fragmentation(found)]
    if found.late:
        lines.append(f"info: {found.late}")
    return [line for line in lines if line]


def _place(found: Explanation) -> str:
    diagnosis = found.diagnosis
    parts = []
    if diagnosis.phase is not Phase.NONE:
        parts.append(f"phase `{diagnosis.phase}`")
    if diagnosis.component is not Component.UNKNOWN:
        parts.append(f"component `{diagnosis.component}`")
    if diagnosis.rank is not None:
        parts.append(f"rank {diagnosis.rank}")
    if diagnosis.step is not None:
        parts.append(f"step {diagnosis.step}")
    if found.context.framework is not None:
        parts.append(f"a log of {found.context.framework.name}")
    elif found.context.tools:
        parts.append(f"seen in the log: {', '.join(tool.name for tool in found.context.tools)}")
    return f"info: {', '.join(parts)}" if parts else ""


def _card(found: Explanation) -> str:
    facts, text = found.diagnosis.facts, found.shown.text
    if facts.capacity_bytes is None:
        return ""
    card = _CARD.search(text)
    figures = (
        (facts.allocated_bytes, "in use by PyTorch"),
        (facts.reserved_unallocated_bytes, "cached"),
        (facts.outside_bytes, "outside PyTorch"),
        (facts.free_bytes, "free"),
    )
    parts = [f"{_short(size, text)} {words}" for size, words in figures if size is not None]
    whole = facts.outside_bytes is not None
    total = f"   = {show_gib(facts.capacity_bytes)}" if whole else f"   of {show_gib(facts.capacity_bytes)}"
    device = "budget" if on_budget(found) else f"GPU{f' {card[1]}' if card else ''}"
    return f"info: {device}   {' · '.join(parts)}{total}"


def _short(size: int, text: str) -> str:
    written = figure(size, text)
    return written.removesuffix(" GiB")


def _request(found: Explanation) -> str:
    request, requested = found.request, found.diagnosis.facts.requested_bytes
    if request is None or requested is None:
        return ""
    written = figure(requested, found.shown.text)
    if request.assumed:
        return (
            f"info: {written} is what {request.formula} take: {request.meaning} "
            "(predicted; the log does not show the tokens)"
        )
    return f"info: {written} = {request.formula}: {request.meaning}"


def _others(found: Explanation) -> list[str]:
    if not found.holders:
        return []
    ordered = sorted(found.holders, key=lambda holder: -holder.held_bytes)
    shown = ", ".join(f"pid {holder.pid} {show_gib(holder.held_bytes)}" for holder in ordered[:_HELD])
    more = f" and {len(ordered) - _HELD} more" if len(ordered) > _HELD else ""
    return [f"info: other processes hold memory of this card: {shown}{more}; an engine of the job may be one"]


def _about(size: int, text: str) -> str:
    """Return a size as the log prints it; one that only follows from its figures is marked."""
    written = figure(size, text)
    return written if written in text else f"about {written}"


def _fragmentation(found: Explanation) -> list[str]:
    diagnosis = found.diagnosis
    facts, text = diagnosis.facts, found.shown.text
    idle, requested = facts.reserved_unallocated_bytes, facts.requested_bytes
    lines = []
    if diagnosis.fragmentation and idle is not None and requested is not None:
        enough = (
            "more than the request" if idle >= requested else "with the free memory enough for the request"
        )
        expandable = any(remedied.cure.name == "expandable_segments" for remedied in found.remedies)
        cure = "" if expandable else "; `expandable_segments` is on already, or not offered here"
        lines.append(
            f"info: fragmentation: {_about(idle, text)} is reserved but unallocated, {enough}, "
            f"in pieces too small for it{cure}"
        )
    elif fragmentation_excluded(diagnosis) and idle is not None:
        lines.append(
            f"info: not fragmentation: only {_about(idle, text)} is reserved but unallocated, "
            "so `expandable_segments` would not help"
        )
    if _OLD_ADVICE in text:
        lines.append(
            f"info: the message's own advice, `{_OLD_ADVICE}`, is of an older PyTorch; "
            "`expandable_segments` does its work since torch 2.1"
        )
    return lines
