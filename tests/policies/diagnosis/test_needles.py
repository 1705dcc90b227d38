"""A pattern's literals are in everything it matches, and rare where they can be."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.policies.diagnosis.chatter import frequency
from autotune.policies.diagnosis.needles import required, sharpest, without_covered
from autotune.policies.diagnosis.rules.catalogue import RULES
from autotune.policies.diagnosis.scan import SEARCHED

FOUND = [rule for rule in RULES if not rule.harmless]


@pytest.mark.parametrize(
    ("pattern", "literals"),
    [
        ("plain words", {"plain words"}),
        ("(one|other) way", {"one way", "other way"}),
        (r"[Ww]atchdog (ca|th)", {"Watchdog ca", "Watchdog th", "watchdog ca", "watchdog th"}),
        (r"ab.*longer literal\d", {"longer literal"}),
        (r"^(?:\w+\.)*Bad\b: x$", {"Bad: x"}),
        (r"(optional )?needed(?! never)", {"needed"}),
        (r"(twice ){2}x", {"twice "}),
        (r"a+|bcd", {"a", "bcd"}),
        (r"\d+", None),
        (r"(?i)any case", None),
        (r"(?i:any) case", {" case"}),
        (r"x*|y", None),
    ],
)  # fmt: skip
def test_literals_of_a_pattern(pattern: str, literals: set[str] | None):
    assert required(re.compile(pattern)) == literals


@pytest.mark.parametrize("rule", FOUND, ids=[rule.name for rule in FOUND])
def test_whatever_a_rule_matches_is_searched_for(rule):
    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.from_regex(rule.pattern))
    def check(text: str):
        if rule.matches(text):
            assert any(needle in text for needle in SEARCHED)

    check()


def test_the_rarer_of_pattern_and_declared_needles_is_taken():
    assert sharpest(re.compile(r"out of memory at .*cumem"), ["emory"]) == {"out of memory at "}
    assert sharpest(re.compile(r"of \w+Error"), ["QuiteRareError"]) == {"QuiteRareError"}
    assert sharpest(re.compile(r"(?i)sigquit"), ["sigquit", "SIGQUIT"]) == {"sigquit", "SIGQUIT"}


def test_a_literal_that_holds_another_is_searched_with_it():
    assert without_covered(["out of memory", "memory", "disk", "memory"]) == ("memory", "disk")


def test_words_of_healthy_logs_are_frequent():
    assert frequency("memory") > frequency("oom_kill event")
    assert frequency("step") > frequency("Zqxj")
