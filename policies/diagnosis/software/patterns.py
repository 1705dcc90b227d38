"""Pattern: a regular expression compiled at its first use, because a healthy log needs few of hundreds."""

from __future__ import annotations

import functools
import re

from autotune.policies.diagnosis.rules.branches import literals_of


class Pattern:
    """The text of a regular expression and its flags."""

    def __init__(self, text: str, flags: int = 0) -> None:
        self.text = text
        self.flags = flags

    @functools.cached_property
    def compiled(self) -> re.Pattern[str]:
        """The regular expression; raises re.error at its first use if the text is invalid."""
        return re.compile(self.text, self.flags)

    @functools.cached_property
    def literals(self) -> tuple[str, ...]:
        """Texts of which every line that the pattern matches contains one; empty if it requires none."""
        try:
            return () if self.flags else literals_of(self.text)
        except ValueError:
            return ()

    def search(self, line: str) -> re.Match[str] | None:
        """Return the first match in a line; None if there is none."""
        literals = self.literals
        for text in literals:
            if text in line:
                break
        else:  # `any` of a generator would take several times as long, and most lines end here
            if literals:
                return None
        return self.compiled.search(line)
