"""One of a rule's literals is in everything that its pattern matches: a search for them misses no line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from re import _constants as op
from re import _parser
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.policies.diagnosis import message_figures
from autotune.policies.diagnosis.literal_search import Naming, minimal
from autotune.policies.diagnosis.phase_patterns import STAGE, STAGE_LITERALS
from autotune.policies.diagnosis.rules.catalogue import RULES
from autotune.policies.diagnosis.scan import SEARCHED
from autotune.policies.diagnosis.software import stages
from autotune.policies.diagnosis.software.components import COMPONENTS
from autotune.policies.diagnosis.software.phases import PHASES
from benchmarks.explain import lines

_MOST = 64  # texts written out of one stretch of a pattern
_LONGEST = 24  # characters of a searched literal: a row's end would break a longer one more often
_ZERO_WIDTH = (op.AT, op.ASSERT, op.ASSERT_NOT)


def requires(pattern: re.Pattern[str], literals: Iterable[str]) -> bool:
    """Return whether a pattern's structure proves that each match contains one of the literals."""
    tree = _parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE)
    return _requires(tree, tuple(literals), ignoring_case=bool(pattern.flags & re.IGNORECASE))


def _requires(items: Any, literals: tuple[str, ...], *, ignoring_case: bool) -> bool:
    """Split the sequence into stretches of known text; one of them, or one item between, must suffice."""
    stretch = {""}
    for kind, value in items:
        if kind in _ZERO_WIDTH:
            continue
        texts = _texts(kind, value, ignoring_case=ignoring_case)
        longer = set() if texts is None else {before + text for before in stretch for text in texts}
        if longer and len(longer) <= _MOST:
            stretch = longer
            continue
        if _contained(stretch, literals) or _item_requires(
            kind, value, literals, ignoring_case=ignoring_case
        ):
            return True
        stretch = texts or {""}
    return _contained(stretch, literals)


def _contained(texts: set[str], literals: tuple[str, ...]) -> bool:
    return all(any(literal in text for literal in literals) for text in texts)


def _item_requires(kind: Any, value: Any, literals: tuple[str, ...], *, ignoring_case: bool) -> bool:
    if kind is op.SUBPATTERN:
        return _requires(value[3], literals, ignoring_case=ignoring_case or bool(value[1] & re.IGNORECASE))
    if kind is op.BRANCH:
        return all(_requires(branch, literals, ignoring_case=ignoring_case) for branch in value[1])
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        return value[0] > 0 and _requires(value[2], literals, ignoring_case=ignoring_case)
    return False


def _texts(kind: Any, value: Any, *, ignoring_case: bool) -> set[str] | None:
    """Return every text that an item matches, None where they are too many or not known."""
    if kind is op.LITERAL:
        character = chr(value)
        return None if ignoring_case and character.lower() != character.upper() else {character}
    if kind is op.IN and all(part[0] is op.LITERAL for part in value):
        return None if ignoring_case else {chr(part[1]) for part in value}
    if kind is op.SUBPATTERN:
        return _sequence_texts(value[3], ignoring_case=ignoring_case or bool(value[1] & re.IGNORECASE))
    if kind is op.BRANCH:
        branches = [_sequence_texts(branch, ignoring_case=ignoring_case) for branch in value[1]]
        known = [texts for texts in branches if texts is not None]
        return set().union(*known) if len(known) == len(branches) else None
    if kind is op.MAX_REPEAT and value[:2] == (0, 1):
        texts = _sequence_texts(value[2], ignoring_case=ignoring_case)
        return None if texts is None else texts | {""}
    return None


def _sequence_texts(items: Any, *, ignoring_case: bool) -> set[str] | None:
    whole = {""}
    for kind, value in items:
        if kind in _ZERO_WIDTH:
            continue
        texts = _texts(kind, value, ignoring_case=ignoring_case)
        if texts is None or len(whole) * len(texts) > _MOST:
            return None
        whole = {before + text for before in whole for text in texts}
    return whole


@pytest.mark.parametrize(
    ("pattern", "literals", "proved"),
    [
        ("plain words", ["in wor"], True),
        ("(one|other) way", ["one way", "other way"], True),
        ("(one|other) way", ["one way"], False),
        (r"[Ww]atchdog (ca|th)", ["atchdog ca", "atchdog th"], True),
        (r"[Ww]atchdog (ca|th)", ["Watchdog"], False),
        (r"ab.*longer literal\d", ["longer"], True),
        (r"^(?:\w+\.)*Bad\b: x$", ["Bad: x"], True),
        (r"(optional )?needed(?! never)", ["optional"], False),
        (r"(optional )?needed(?! never)", ["needed"], True),
        (r"(twice \d){2}x", ["twice "], True),
        (r"(never )*x", ["never"], False),
        (r"a+|bcd", ["bcd"], False),
        (r"\d+", ["1"], False),
        (r"(?i)any case", ["any case"], False),
        (r"(?i:any) case", [" case"], True),
        (r"x*|y", ["y"], False),
    ],
)  # fmt: skip
def test_a_proof_holds_for_every_alternative(pattern: str, literals: list[str], *, proved: bool):
    assert requires(re.compile(pattern), literals) is proved


@pytest.mark.parametrize("rule", RULES, ids=[rule.name for rule in RULES])
def test_whatever_a_rule_matches_contains_one_of_its_literals(rule):
    assert requires(rule.pattern, rule.literals)
    assert any(literal in rule.example for literal in rule.literals)

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.from_regex(rule.pattern))
    def check(text: str):
        assert any(literal in text for literal in rule.literals)
        assert rule.harmless or any(literal in text for literal in SEARCHED)

    check()


def test_every_line_of_a_stage_contains_one_of_its_literals():
    assert requires(STAGE, STAGE_LITERALS)
    assert all(any(short in literal for short in SEARCHED) for literal in STAGE_LITERALS)


def test_a_line_that_a_table_passes_over_holds_none_of_what_its_patterns_match():
    figures = itertools.chain.from_iterable(message_figures._COMPILED.values())
    patterns = [*figures, *(pattern for _, pattern in (*PHASES, *COMPONENTS, *stages._COMPILED))]
    named = [pattern for pattern in patterns if pattern.literals]
    assert len(named) > 0.8 * len(patterns)
    assert [pattern.text for pattern in named if not requires(pattern.compiled, pattern.literals)] == []


def test_searched_literals_are_short_and_none_contains_another():
    assert all(len(literal) <= _LONGEST for literal in SEARCHED)
    assert minimal(SEARCHED) == SEARCHED


def test_hardly_a_line_of_a_healthy_log_contains_a_literal():
    """One that is a common word costs more than all others: each line with it is read."""
    log = list(itertools.islice(lines(1), 20_000))
    counts = Naming(SEARCHED).counted("\n".join(log))
    assert sum(counts.values()) <= 0.001 * len(log), counts


def test_a_literal_that_contains_another_is_searched_with_it():
    assert minimal(["out of memory", "memory", "disk", "memory"]) == ("memory", "disk")
