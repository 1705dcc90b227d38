"""Checks as lines for a person: what several nodes have in common is one line."""

from __future__ import annotations

from autotune.orchestrator.doctor.check import Check, Examined, Status

GLYPHS = {Status.OK: "✓", Status.WARNING: "!", Status.FAILED: "✗", Status.SKIPPED: "–"}
_WORDS = {
    Status.FAILED: ("failed", "failed"),
    Status.WARNING: ("warning", "warnings"),
    Status.SKIPPED: ("skipped", "skipped"),
    Status.OK: ("passed", "passed"),
}
_MOST_NAMED = 4  # nodes in a line


def render(found: Examined, *, quiet: bool = False, verbose: bool = False) -> str:
    """Return all checks as text, `quiet` only those that failed, `verbose` every node's by itself."""
    lines = []
    for check, nodes in _grouped(found.checks, apart=verbose):
        if quiet and check.status is not Status.FAILED:
            continue
        where = _where(nodes, of=found.nodes)
        lines.append(f"{GLYPHS[check.status]} {check.name:12} {check.what}{where}")
        if check.hint and check.status is not Status.OK:
            lines.append(f"  hint: {check.hint}")
    if not quiet:
        lines.append(_summary(found))
    return "\n".join(lines)


def _grouped(checks: tuple[Check, ...], *, apart: bool) -> list[tuple[Check, list[str]]]:
    """Return the checks that differ, each with its nodes; none for one of the whole cluster."""
    groups: dict[tuple[str, ...], tuple[Check, list[str]]] = {}
    for check in checks:
        key = (check.name, check.status, check.what, check.hint, check.node if apart else "")
        _, nodes = groups.setdefault(key, (check, []))
        if check.node:
            nodes.append(check.node)
    return list(groups.values())


def _where(nodes: list[str], *, of: int) -> str:
    if not nodes or of <= 1:
        return ""
    if len(nodes) == of:
        return "  (all nodes)"
    more = f" and {len(nodes) - _MOST_NAMED} more" if len(nodes) > _MOST_NAMED else ""
    return f"  ({', '.join(nodes[:_MOST_NAMED])}{more})"


def _summary(found: Examined) -> str:
    counts = [(found.count(status), words) for status, words in _WORDS.items()]
    return ", ".join(f"{count} {words[count != 1]}" for count, words in counts if count)
