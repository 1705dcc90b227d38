"""RULES: one row per failure signature, each with an example line."""

from __future__ import annotations

from policies.rule import Rule
from policies.rules_builtin import BUILTIN
from policies.rules_device import DEVICE
from policies.rules_host import HOST
from policies.rules_job import JOB
from policies.rules_own import OWN
from policies.rules_pool import HARMLESS, POOL

# The first row that matches a line wins: harmless and special wordings stand before general ones.
RULES: tuple[Rule, ...] = (*OWN, *BUILTIN, *HARMLESS, *POOL, *HOST, *DEVICE, *JOB)

BY_NAME = {rule.name: rule for rule in RULES}


def matching(line: str) -> Rule | None:
    """Return the first rule that a line, without its prefixes, shows."""
    for rule in RULES:
        if rule.matches(line):
            return rule
    return None
