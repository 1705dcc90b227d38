"""Checks of an examination, and their text: what several nodes have in common is one line."""

from __future__ import annotations

from enum import StrEnum

from autotune.orchestrator.errors import ExitCode
from autotune.policies.values.value import Value


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"  # a launch would begin, and may suffer from it
    FAILED = "failed"  # a launch would fail, or not begin
    SKIPPED = "skipped"  # could not be looked at


class Check(Value, frozen=True, kw_only=True):
    """One check."""

    name: str
    node: str = ""  # empty: of the whole cluster, or of the machine that asks
    status: Status = Status.OK
    what: str  # what was found
    hint: str = ""  # what helps


def failed(name: str, what: str, *, hint: str = "") -> Check:
    """Return a check with which a launch would fail, or not start."""
    return Check(name=name, status=Status.FAILED, what=what, hint=hint)


def warned(name: str, what: str, *, hint: str = "") -> Check:
    """Return a check from which a launch may suffer."""
    return Check(name=name, status=Status.WARNING, what=what, hint=hint)


def skipped(name: str, what: str) -> Check:
    """Return a check that could not be made."""
    return Check(name=name, status=Status.SKIPPED, what=what)


class Examined(Value, frozen=True, kw_only=True):
    """All checks of a machine, its cluster and a job."""

    schema: int = 1
    job: str = ""  # its name; empty without a job
    address: str = ""  # of the cluster; `local`: this machine alone; empty where none answered
    nodes: int = 0  # that were asked
    checks: tuple[Check, ...] = ()

    def count(self, status: Status) -> int:
        """Return how many checks ended so."""
        return sum(check.status is status for check in self.checks)

    @property
    def code(self) -> ExitCode:
        """The exit code: 3 without a cluster, 1 where a check failed."""
        if not self.address:
            return ExitCode.INFRASTRUCTURE
        return ExitCode.NO if self.count(Status.FAILED) else ExitCode.OK


GLYPHS = {Status.OK: "✓", Status.WARNING: "!", Status.FAILED: "✗", Status.SKIPPED: "–"}
_WORDS = {
    Status.FAILED: ("failed", "failed"),
    Status.WARNING: ("warning", "warnings"),
    Status.SKIPPED: ("skipped", "skipped"),
    Status.OK: ("passed", "passed"),
}
_MOST_NAMED = 4  # nodes in a line


def render(examined: Examined, *, quiet: bool = False, verbose: bool = False) -> str:
    """Return all checks as text, `quiet` only those that failed, `verbose` every node's by itself."""
    lines = []
    for check, nodes in _grouped(examined.checks, apart=verbose):
        if quiet and check.status is not Status.FAILED:
            continue
        where = _where(nodes, of=examined.nodes)
        lines.append(f"{GLYPHS[check.status]} {check.name:12} {check.what}{where}")
        if check.hint and check.status is not Status.OK:
            lines.append(f"  hint: {check.hint}")
    if not quiet:
        lines.append(_summary(examined))
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


def _summary(examined: Examined) -> str:
    counts = [(examined.count(status), words) for status, words in _WORDS.items()]
    return ", ".join(f"{count} {words[count != 1]}" for count, words in counts if count)
