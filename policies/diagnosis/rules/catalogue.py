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


def matching(line: str) -> Rule | None:
    """Return the first rule that a line, without its prefixes, shows."""
    for rule in RULES:
        if rule.matches(line):
            return rule
    return None


def harmless(line: str) -> bool:
    """Return whether a line only looks like a failure."""
    return any(rule.matches(line) for rule in _HARMLESS)
