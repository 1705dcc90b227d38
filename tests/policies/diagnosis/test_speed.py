"""What makes reading fast changes no answer, and does what it is for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from autotune.policies.diagnosis import message_figures, unknown_errors
from autotune.policies.diagnosis.software import components, stages
from autotune.policies.diagnosis.software.patterns import Pattern
from autotune.policies.diagnosis.unknown_errors import WRONG, LastErrors, Suspects

_LOGS = Path(__file__).parents[3] / "benchmarks" / "logs"
_PATTERNS = [
    *(pattern for patterns in message_figures._COMPILED.values() for pattern in patterns),
    *(pattern for patterns in message_figures._UNSPACED.values() for pattern in patterns),
    *(pattern for _, pattern in components.COMPONENTS),
    *(pattern for _, pattern in stages._COMPILED),
]


def _often(pattern: Pattern) -> Pattern:
    """Return the same pattern, searched so often that it goes by its words."""
    used = Pattern(pattern.text, pattern.flags)
    for _ in range(20):
        used.search("")
    return used


def test_no_match_is_missed_by_the_words_that_a_pattern_needs():
    texts = [
        json.loads(path.read_text())["text"]
        for kind in ("seen", "rewritten", "from_sources")
        for path in sorted((_LOGS / kind).glob("*.json"))
    ]
    lines = sorted({line for text in texts for line in (*text.split("\n"), "".join(text.split()))})
    for pattern in map(_often, _PATTERNS):
        matching = [line for line in lines if pattern.compiled.search(line)]
        assert all(pattern.search(line) for line in matching), pattern.text


def test_a_line_without_its_words_is_not_searched_for_a_pattern(monkeypatch: pytest.MonkeyPatch):
    pattern = _often(Pattern(r"(?:of which|only have) (\d+) GiB"))
    assert pattern.search("of which 3 GiB is free")
    monkeypatch.setattr(pattern, "compiled", None)
    assert pattern.search("step:12 - actor/loss:0.1") is None


@pytest.mark.parametrize(
    ("text", "flags"), [("cuda error", re.IGNORECASE), (r"\d+ of \w", 0), ("(?i)oom", 0)]
)
def test_a_pattern_whose_words_are_not_known_is_always_searched(text: str, flags: int):
    assert _often(Pattern(text, flags)).search("12 of x, a CUDA Error, OOM")


def _suspected(block: bytes) -> tuple[LastErrors, list[int]]:
    searched: list[int] = []

    def match(part: bytes) -> tuple[list[int], list[int]]:
        searched.append(len(part))
        return [], sorted(found.end() for word in WRONG for found in re.finditer(word.encode(), part))

    errors = LastErrors(lambda _: False, match)
    errors.suspect(Suspects(block, None, [], block.count(b"\n") + 1, 0))
    return errors, searched


def test_a_block_is_searched_for_errors_no_further_than_the_last_ones_reach():
    lines = b"".join(b"step %d\n" % number for number in range(100_000))
    wrong = b"".join(b"error: %s\n" % (b"abcdefghijklmnopqrstuvwxy"[at : at + 1] * 3) for at in range(25))
    errors, searched = _suspected(lines + wrong)
    assert [line.text for line in errors.lines()] == [f"error: {c * 3}" for c in "fghijklmnopqrstuvwxy"]
    assert sum(searched) < len(lines) / 4


@pytest.mark.parametrize("shift", range(8))
def test_an_error_between_two_parts_of_a_block_is_found_once(shift: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unknown_errors, "_SEARCHED", 16)
    block = b"x" * 12 + b" error\n" + b"y" * (27 + shift) + b"\n"
    patched: Any = _suspected(block)[0]
    patched._look()
    assert [line.text for line in patched.lines()] == ["x" * 12 + " error"]
