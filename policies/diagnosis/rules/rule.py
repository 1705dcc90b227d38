"""The definition of a failure signature."""

from __future__ import annotations

import functools
import re

from autotune.policies.diagnosis.rules.branches import literals_of
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.value import Value

# Whether a matching line means that a running job ends; one that never does may still explain its end.
ALWAYS, UNLESS_PROGRESS, NEVER = "always", "unless_progress", "never"
QUOTED_OOM = "quoted-oom"


class Rule(Value, frozen=True):
    """A signature: one row of a table."""

    name: str
    cause: Cause | None  # None: a consequence of another failure, or harmless
    signature: str
    fatal: str
    example: str
    phase: Phase = Phase.NONE  # if the signature itself determines it
    component: Component = Component.UNKNOWN
    weak: bool = False  # a symptom that any other cause explains
    harmless: bool = False  # a line that only looks like a failure
    header: bool = False  # of a relayed error; the failure itself follows below
    reported: bool = False  # by the kernel, a scheduler or Ray, about a process that it ended
    driver: bool = False  # does not show whether device or pinned host memory was requested
    warning: bool = False  # weak, and printed before an exception that the program may catch
    what: str = ""  # what failed, for the headline; empty: the text of its cause
    hint: str = ""  # what to do if no setting of the job cures it; empty: the text of its cause

    @property
    def pattern(self) -> re.Pattern[str]:
        """The signature, compiled at its first use."""
        return compiled(self.signature)

    @property
    def literals(self) -> tuple[str, ...]:
        """Short texts of which every line that the pattern matches contains at least one."""
        return literals_of(self.signature)

    def matches(self, line: str) -> bool:
        """Return whether a line matches the signature."""
        return any(literal in line for literal in self.literals) and self.pattern.search(line) is not None


@functools.cache
def compiled(signature: str) -> re.Pattern[str]:
    """Return a signature, or a part of one, as a compiled pattern."""
    return re.compile(signature)
