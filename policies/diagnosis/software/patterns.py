"""Pattern: a regular expression that is compiled at its first use; a healthy log needs few of hundreds."""

from __future__ import annotations

import functools
import re

from autotune.policies.diagnosis.rules.branches import branches_of

_OFTEN = 16  # searches, after which a pattern is read for the words that it needs


class Pattern:
    """A text of a regular expression and its flags."""

    def __init__(self, text: str, flags: int = 0) -> None:
        self.text = text
        self.flags = flags
        self._searches = 0

    @functools.cached_property
    def compiled(self) -> re.Pattern[str]:
        """The regular expression; raises re.error at its first use where the text is none."""
        return re.compile(self.text, self.flags)

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """Texts of which one stands in every line that matches; empty where none are known."""
        if self.flags & (re.IGNORECASE | re.VERBOSE):
            return ()
        branches = [branch.words for branch in branches_of(self.text, (), {})]
        return tuple({text for words in branches for text in words[0]}) if all(branches) else ()

    def search(self, line: str) -> re.Match[str] | None:
        """Return the first match in a line."""
        if self._searches < _OFTEN:
            self._searches += 1
        elif self.words:
            for word in self.words:
                if word in line:
                    break
            else:
                return None
        return self.compiled.search(line)
