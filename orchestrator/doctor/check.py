"""The checks of `doctor` and their text, in which checks that several nodes share are one line."""

from __future__ import annotations

from enum import StrEnum

from autotune.orchestrator.errors import ExitCode
from autotune.policies.values.value import Value


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"  # a launch would start, but may have problems
    FAILED = "failed"  # a launch would fail or not start
    SKIPPED = "skipped"  # could not be checked


class Check(Value, frozen=True, kw_only=True):
    """One check."""

    name: str  # name of the check, e.g. `gpus`, `disk`, `shm` or `checkpoints`
    node: str = ""  # empty: the whole cluster, or the machine that runs `doctor`
    status: Status = Status.OK
    what: str  # the result
    hint: str = ""  # how to fix it


def failed(name: str, what: str, *, hint: str = "") -> Check:
    """Return a failed check: a launch would fail or not start."""
    return Check(name=name, status=Status.FAILED, what=what, hint=hint)


def warned(name: str, what: str, *, hint: str = "") -> Check:
    """Return a warning: a launch would start, but may have problems."""
    return Check(name=name, status=Status.WARNING, what=what, hint=hint)


def skipped(name: str, what: str) -> Check:
    """Return a check that could not be run."""
    return Check(name=name, status=Status.SKIPPED, what=what)


class Examined(Value, frozen=True, kw_only=True):
    """All checks of a machine, its cluster and a job."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    job: str = ""  # the job's name; empty without a job
    address: str = ""  # of the cluster; `local`: only this machine; empty: no cluster answered
    nodes: int = 0  # number of nodes examined
    checks: tuple[Check, ...] = ()

    def count(self, status: Status) -> int:
        """Return the number of checks with a status."""
        return sum(check.status is status for check in self.checks)

    @property
    def code(self) -> ExitCode:
        """The exit code: 3 without a cluster, 1 if a check failed, otherwise 0."""
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
    """Return all checks as text; `quiet`: only failed ones; `verbose`: those of each node separately."""
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
    """Return the distinct checks, each with its nodes; a check of the whole cluster has none."""
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
