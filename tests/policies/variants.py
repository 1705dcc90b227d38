"""Wordings of failures with what they mean, one block each."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause

_FILE = Path(__file__).with_name("variants.txt")
_ANY = ("any", "-")


class Variant(NamedTuple):
    """A wording and the answers that are right."""

    name: str
    causes: tuple[str, ...]
    phase: str
    component: str
    requested: str
    text: str

    def wrong(self, diagnosis: Diagnosis) -> list[str]:
        """Return what a diagnosis gets wrong; the phase of what is no memory's failure is not asked."""
        answers = [("cause", diagnosis.cause.value, self.causes)]
        if diagnosis.cause.is_oom or diagnosis.cause is Cause.POOL_TOO_SMALL:
            answers.append(("phase", diagnosis.phase.value, (self.phase,)))
        answers.append(("component", diagnosis.component.value, (self.component,)))
        answers.append(("requested", str(diagnosis.facts.requested_bytes), (self.requested,)))
        return [
            f"{what}: {message}, not {meant}"
            for what, message, meant in answers
            if message not in meant and not set(meant) & set(_ANY)
        ]


def variants() -> list[Variant]:
    """Return every block of the file."""
    items = []
    for block in _FILE.read_text().split("=== ")[1:]:
        head, text = block.split("\n", 1)
        name, causes, phase, component, requested = (part.strip() for part in head.split("|"))
        items.append(Variant(name, tuple(causes.split("/")), phase, component, requested, text))
    return items
