"""The text of `autotune plan --against`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from autotune.orchestrator import messages
from autotune.orchestrator.other_release import OtherRelease, PhaseChange
from autotune.orchestrator.terminal.widgets import rendered, table
from autotune.orchestrator.units import show_gib


def render_other_release(change: OtherRelease, *, width: int | None) -> str:
    """Return the comparison as text: verdicts, peaks, and differences in settings, command and remedies."""
    now, against = f"{change.package} {change.now or '(unknown)'}", f"{change.package} {change.against}"
    lines = [f"{now}: {change.verdict_now}", f"{against}: {change.verdict_against}"]
    if change.stands_in:
        lines.append(f"note: not all facts of {against} are on record: {change.stands_in} stands in for them")
    if change.placement:
        lines.append(f"trainer and engines: {' → '.join(change.placement)}")
    rows = [("phase", now, against, ""), *map(_peaks, change.phases)]
    if change.phases:
        lines += ["", rendered(table(rows), width=width)]
    words = [f"  - {word}" for word in change.command.get("removed", ())]
    words += [f"  + {word}" for word in change.command.get("added", ())]
    lost = [f"  - {name}: {reason}" for name, reason in change.remedies_lost.items()]
    sections = [
        *_section(f"settings that {against} does not have", [f"  {name}" for name in change.lacking]),
        *_section(
            f"does not start with {against} until these are changed", [f"  {x}" for x in change.refused]
        ),
        *_section(
            "values that change because a default did",
            [f"  {messages.arrow(name, *values)}" for name, values in change.knobs.items()],
        ),
        *_section(
            "defaults of settings that the job does not write",
            [f"  {name} {_value(here)} → {_value(there)}" for name, (here, there) in change.defaults.items()],
        ),
        *_section("the command of a launch", words),
        *_section("what a launch may change", [*lost, *(f"  + {name}" for name in change.remedies_new)]),
    ]
    if not sections and all(phase.now_bytes == phase.against_bytes for phase in change.phases):
        sections = ["", "nothing that autotune knows differs"]
    return "\n".join([*lines, *sections])


def _peaks(phase: PhaseChange) -> tuple[str, str, str, str]:
    delta = phase.against_bytes - phase.now_bytes
    sign = "+" if delta > 0 else "-"
    difference = f"{sign}{show_gib(abs(delta), digits=1)}" if delta else ""
    return phase.phase, _size(phase.now_bytes, phase), _size(phase.against_bytes, phase), difference


def _size(size: float, phase: PhaseChange) -> str:
    share = f", {size / phase.capacity_bytes:.0%}" if phase.capacity_bytes else ""
    return f"{show_gib(size, digits=1)}{share}"


def _section(title: str, rows: list[str]) -> Iterator[str]:
    if rows:
        yield from ("", title, *rows)


def _value(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
