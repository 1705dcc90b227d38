"""RULES: one row per failure signature, each with an example line; `matching` finds a line's rule."""

from __future__ import annotations

import functools

from autotune.policies.diagnosis.literal_search import Naming
from autotune.policies.diagnosis.rules.branches import Branch, branches_of
from autotune.policies.diagnosis.rules.builtin import BUILTIN
from autotune.policies.diagnosis.rules.cluster import CLUSTER
from autotune.policies.diagnosis.rules.device import DEVICE
from autotune.policies.diagnosis.rules.host import HOST
from autotune.policies.diagnosis.rules.job import JOB
from autotune.policies.diagnosis.rules.own import OWN
from autotune.policies.diagnosis.rules.pool import HARMLESS, POOL
from autotune.policies.diagnosis.rules.rule import Rule, compiled

# The first row that matches a line wins: harmless and special wordings precede general ones.
RULES: tuple[Rule, ...] = (*OWN, *BUILTIN, *HARMLESS, *POOL, *HOST, *DEVICE, *CLUSTER, *JOB)

BY_NAME = {rule.name: rule for rule in RULES}
_HARMLESS = tuple(rule for rule in RULES if rule.harmless)

# Literal -> numbers of the rows whose signatures may match a line with it.
_ROWS: dict[str, list[int]] = {}
for _at, _rule in enumerate(RULES):
    for _literal in _rule.literals:
        _ROWS.setdefault(_literal, []).append(_at)
_NAMING = Naming(_ROWS)
_NUMBERS = {literal: number for number, literal in enumerate(_ROWS)}
_SPEAKS_FOR = tuple(_ROWS.values())


def matching(line: str) -> Rule | None:
    """Return the first rule that matches a line without its prefixes; None if none does."""
    for rule, branch in _candidates(frozenset(_NAMING.named(line))):
        for words in branch.words:
            for word in words:
                if word in line:
                    break
            else:
                break
        else:
            if compiled(branch.signature).search(line) is not None:
                return rule
    return None


@functools.lru_cache(4096)  # most lines contain one of a few words
def _candidates(named: frozenset[int]) -> tuple[tuple[Rule, Branch], ...]:
    """Return the alternatives that may match a line with these literals, in the order of the rules."""
    rows = sorted({at for literal in named for at in _SPEAKS_FOR[literal]})
    return tuple((RULES[at], branch) for at in rows for branch in _branches(at) if branch.needs <= named)


@functools.cache
def _branches(at: int) -> tuple[Branch, ...]:
    """Return a row's alternatives, each with the numbers of the literals that it requires."""
    return branches_of(RULES[at].signature, RULES[at].literals, _NUMBERS)


def harmless(line: str) -> bool:
    """Return whether a line only looks like a failure."""
    return any(rule.matches(line) for rule in _HARMLESS)
