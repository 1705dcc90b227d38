"""What the default policy decides is what was recorded; `python -m benchmarks.golden` compares all of it."""

from __future__ import annotations

import pytest

from benchmarks.golden.parts import PARTS, difference, kept, recorded

_AGAIN = "python -m benchmarks.golden --part {0} compares all cases; with --write it records them anew"


@pytest.mark.parametrize("name", PARTS)
def test_decisions_are_as_recorded(name: str) -> None:
    cases, golden = PARTS[name].fast_cases(), kept(name)
    assert cases and golden.keys() == set(PARTS[name].cases()), _AGAIN.format(name)
    text = difference({case: golden[case] for case in cases}, recorded(name, cases))
    assert not text, f"{text}\n{_AGAIN.format(name)}"


def test_a_difference_is_displayed_by_case_and_line() -> None:
    before = {"1": ["job", "  finish: completed"], "2": ["other"]}
    text = difference(before, before | {"1": ["job", "  finish: gave up"]})
    assert "-  finish: completed\n+  finish: gave up" in text and "1 of 2 cases differ" in text
    assert difference(before, dict(before)) == ""
    assert "-== 2" in difference(before, {"1": before["1"]})
