"""RULES: one row per failure signature, each with an example line."""

from __future__ import annotations

from autotune.policies.diagnosis.rules.builtin import BUILTIN
from autotune.policies.diagnosis.rules.device import DEVICE
from autotune.policies.diagnosis.rules.host import HOST
from autotune.policies.diagnosis.rules.job import JOB
from autotune.policies.diagnosis.rules.own import OWN
from autotune.policies.diagnosis.rules.pool import HARMLESS, POOL
from autotune.policies.diagnosis.rules.rule import Rule

# The first row that matches a line wins: harmless and special wordings stand before general ones.
RULES: tuple[Rule, ...] = (*OWN, *BUILTIN, *HARMLESS, *POOL, *HOST, *DEVICE, *JOB)

BY_NAME = {rule.name: rule for rule in RULES}
_HARMLESS = tuple(rule for rule in RULES if rule.harmless)


# Which rows a literal may speak for. Its first characters find it: a line is walked once, not once for each.
_HEAD = 4
_WALKED = 600  # characters; a longer line is searched for each literal
_ROWS: dict[str, list[int]] = {}
for _at, _rule in enumerate(RULES):
    for _literal in _rule.literals:
        _ROWS.setdefault(_literal, []).append(_at)
_HEADS: dict[str, list[tuple[str, list[int]]]] = {}
for _literal, _rows in _ROWS.items():
    _HEADS.setdefault(_literal[:_HEAD], []).append((_literal, _rows))


def matching(line: str) -> Rule | None:
    """Return the first rule that a line, without its prefixes, shows."""
    for at in sorted(_spoken_for(line)):
        if RULES[at].pattern.search(line) is not None:
            return RULES[at]
    return None


def harmless(line: str) -> bool:
    """Return whether a line only looks like a failure."""
    return any(rule.matches(line) for rule in _HARMLESS)


def _spoken_for(line: str) -> set[int]:
    """Return the rows of which a literal is in a line."""
    if len(line) > _WALKED:
        return {at for literal, rows in _ROWS.items() if literal in line for at in rows}
    found: set[int] = set()
    begins = _HEADS.get
    for at in range(len(line) - _HEAD + 1):
        for literal, rows in begins(line[at : at + _HEAD], ()):
            if line.startswith(literal, at):
                found.update(rows)
    return found
