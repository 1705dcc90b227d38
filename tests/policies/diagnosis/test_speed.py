"""What makes reading fast changes no answer, and does what it is for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autotune.policies.diagnosis import unknown_errors
from autotune.policies.diagnosis.unknown_errors import WRONG, LastErrors, Suspects


def _suspected(block: bytes) -> tuple[LastErrors, list[int]]:
    searched: list[int] = []

    def match(part: bytes) -> tuple[list[int], list[int]]:
        searched.append(len(part))
        return [], sorted(result.end() for word in WRONG for result in re.finditer(word.encode(), part))

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
