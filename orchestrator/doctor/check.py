"""What a check found, and all that an examination found."""

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


def failed(name: str, what: str, *, node: str = "", hint: str = "") -> Check:
    """Return a check with which a launch would fail, or not start."""
    return Check(name=name, node=node, status=Status.FAILED, what=what, hint=hint)


def warned(name: str, what: str, *, node: str = "", hint: str = "") -> Check:
    """Return a check from which a launch may suffer."""
    return Check(name=name, node=node, status=Status.WARNING, what=what, hint=hint)


def skipped(name: str, what: str, *, node: str = "", hint: str = "") -> Check:
    """Return a check that could not be made."""
    return Check(name=name, node=node, status=Status.SKIPPED, what=what, hint=hint)


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
