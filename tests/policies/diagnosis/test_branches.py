"""The alternatives of a signature, looked for apart, say what the whole signature says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.policies.diagnosis.rules.branches import branches_of, literals_of
from autotune.policies.diagnosis.rules.catalogue import RULES, matching
from autotune.policies.diagnosis.rules.rule import Rule
from benchmarks.noise import TEMPTING
from tests.policies.diagnosis.test_literals import requires
from tests.policies.variants import variants

_LOGS = Path(__file__).parents[3] / "benchmarks" / "logs"


def slow(line: str) -> Rule | None:
    """Return the first rule whose whole signature is in a line."""
    return next((rule for rule in RULES if rule.matches(line)), None)


def texts() -> list[str]:
    labelled = [
        json.loads(path.read_text())["text"]
        for kind in ("seen", "rewritten", "from_sources")
        for path in sorted((_LOGS / kind).glob("*.json"))
    ]
    return [
        *labelled,
        *(variant.text for variant in variants()),
        *(rule.example for rule in RULES),
        *TEMPTING,
    ]


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("abc|d[|]e", [({"abc"}, "abc"), (set(), "d[|]e")]),
        (r"x(?:abc|de)\|abc y", [({"abc"}, r"x(?:abc|de)\|abc y")]),
        ("abc?|abc*|ab{2,3}c|abcc+", [(set(), "abc?|abc*|ab{2,3}c"), ({"abc"}, "abcc+")]),
        (r"\babc\b|ab\.c|ab.c|[a]bc", [({"abc"}, r"\babc\b|[a]bc"), (set(), r"ab\.c"), (set(), "ab.c")]),
        ("abc|xabc", [({"abc"}, "abc"), ({"abc"}, "xabc")]),
        ("(?i)abc|d", [(set(), "(?i)abc|d")]),
    ],
)
def test_an_alternative_needs_what_it_cannot_match_without(signature, expected):
    result = branches_of(signature, ["abc"], {"abc": 7})
    assert [(set(branch.needs), branch.signature) for branch in result] == [
        ({7} if needs else set(), text) for needs, text in expected
    ]


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        (r"abc \d+ def", [{"abc "}, {" def"}]),
        ("(?:one|other) way", [{"one way", "other way"}]),
        ("x(?:long one.*|another\\d)yyy", [{"long one", "another"}, {"yyy"}]),
        ("[Ww]atch(?:dog)? here", [{"Watch here", "watch here", "Watchdog here", "watchdog here"}]),
        ("(?:maybe)*(?i:case)(?!never)sure", [{"sure"}]),
        ("a(?:bcd|.*)e", []),
        (r"^\babcd\.?$", [{"abcd"}]),
        ("abcd{0,3}e|fgh", [{"abc"}]),
    ],
)
def test_an_alternative_names_the_words_of_which_one_is_there(signature, expected):
    words = branches_of(signature, [], {})[0].words
    assert sorted(map(sorted, words)) == sorted(map(sorted, expected))


@pytest.mark.parametrize(
    ("signature", "literals"),
    [
        (r"abc \d+ longer|short", (" longer", "short")),
        ("one way|another one way", ("one way",)),
        ("[Ww]atchdog", ("Watchdog", "watchdog")),
        ("no terminal cuts so few characters", ("no terminal cuts so ",)),
    ],
)
def test_each_alternative_gives_its_longest_text_as_a_literal(signature, literals):
    assert literals_of(signature) == literals


@pytest.mark.parametrize("signature", [r"abc|\d+", "(?i)any case", "x*"])
def test_a_signature_without_fixed_text_is_no_rule(signature):
    with pytest.raises(ValueError, match="no fixed text"):
        literals_of(signature)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_no_alternative_matches_without_its_words(rule):
    numbers = {literal: number for number, literal in enumerate(rule.literals)}
    for branch in branches_of(rule.signature, rule.literals, numbers):
        pattern = re.compile(branch.signature)
        asked = [*branch.words, *([rule.literals[number]] for number in branch.needs)]
        unproved = [words for words in asked if not requires(pattern, words)]
        if unproved:  # the proof stops where the compiler has merged beginnings, or texts are too many
            _try(pattern, unproved)


def _try(pattern: re.Pattern[str], asked: list[Iterable[str]]) -> None:
    @given(st.from_regex(pattern))
    @settings(max_examples=50, suppress_health_check=list(HealthCheck), deadline=None, database=None)
    def check(text: str) -> None:
        assert all(any(word in text for word in words) for words in asked)

    check()


def test_a_line_shows_the_same_rule_as_by_whole_signatures():
    lines = {line for text in texts() for line in text.split("\n")}
    assert len(lines) > 2500
    assert [line for line in sorted(lines) if matching(line) is not slow(line)] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_whatever_a_signature_matches_is_found(rule):
    @given(st.from_regex(re.compile(rule.signature)))
    @settings(max_examples=15, suppress_health_check=list(HealthCheck), deadline=None, database=None)
    def check(line: str) -> None:
        assert matching(line) is slow(line)

    check()
