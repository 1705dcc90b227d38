"""The patterns of the phases: none of their alternatives is written in vain."""

from __future__ import annotations

import re
from itertools import groupby

from autotune.policies.diagnosis.rules.branches import _PIECE, _alternatives
from autotune.policies.diagnosis.software.phases import PHASES

_PLAIN = re.compile(r"[\w ]+(?:\\\.[\w ]+)*")


def test_no_alternative_of_a_phase_is_covered_by_another() -> None:
    """A plain text that an earlier alternative, or a row beside it, already looks for can go."""
    covered: list[str] = []
    earlier: dict[str, set[str]] = {}
    for phase, rows in groupby(PHASES, key=lambda row: row[0]):
        texts = [
            "".join(pieces) for _, pattern in rows for pieces in _alternatives(_PIECE.findall(pattern.text))
        ]
        plain = [text for text in texts if _PLAIN.fullmatch(text)]
        before = earlier.setdefault(phase.value, set())
        for place, text in enumerate(texts):
            bare = text.replace(r"\b", "")
            others = {*before, *plain} - ({text} if texts.index(text) == place else set())
            if _PLAIN.fullmatch(bare) and any(other in bare for other in others):
                covered.append(f"{phase.value}: {text}")
        before.update(plain)
    assert covered == []
