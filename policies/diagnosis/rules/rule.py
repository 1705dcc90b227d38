"""What a failure signature is."""

from __future__ import annotations

import functools
import re

from autotune.policies.diagnosis.rules.branches import literals_of
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.value import Value

# Whether such a line ends a job that still runs; one that never does may yet explain why it died.
ALWAYS, UNLESS_PROGRESS, NEVER = "always", "unless_progress", "never"
QUOTED_OOM = "quoted-oom"


class Rule(Value, frozen=True):
    """A signature: one row of a table."""

    name: str
    cause: Cause | None  # None: a consequence of something else, or harmless
    signature: str
    fatal: str
    example: str
    phase: Phase = Phase.NONE  # where the signature itself says it
    component: Component = Component.UNKNOWN
    weak: bool = False  # a symptom that any other cause explains
    harmless: bool = False  # a line that only looks like a failure
    header: bool = False  # says that a failure was passed on; the failure itself stands below it
    reported: bool = False  # by the kernel, a scheduler or Ray, of a process that it ended
    driver: bool = False  # does not say whether device or pinned host memory was asked for
    warning: bool = False  # weak, and printed before an exception that its program may catch
    what: str = ""  # what failed, in a headline; empty: as for every failure of its cause
    hint: str = ""  # what to do where no setting of the job cures it; empty: likewise

    @property
    def pattern(self) -> re.Pattern[str]:
        """The signature; it is compiled when it is first asked for."""
        return compiled(self.signature)

    @property
    def literals(self) -> tuple[str, ...]:
        """Short texts of which one is in every line that the pattern matches."""
        return literals_of(self.signature)

    def matches(self, line: str) -> bool:
        """Return whether the line shows this signature."""
        return any(literal in line for literal in self.literals) and self.pattern.search(line) is not None


@functools.cache
def compiled(signature: str) -> re.Pattern[str]:
    """Return a signature, or a part of one, as a pattern."""
    return re.compile(signature)
