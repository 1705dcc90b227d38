"""Blocks do not hang on the chunking; pieces, lines and numbers are exact in both directions."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.policies.diagnosis import log_blocks as module
from autotune.policies.diagnosis.log_blocks import Backward, Cursor, blocks, last_lines
from autotune.policies.diagnosis.log_prefixes import LONGEST

TEXT = st.text(st.sampled_from("ab\n\r "), max_size=300).map(str.encode)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(module, "_CUT_REACH", 16)


@settings(max_examples=200, deadline=None)
@given(TEXT, st.integers(1, 200))
def test_blocks_are_the_same_in_any_chunking(data: bytes, size: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 64)
        patch.setattr(module, "_CUT_REACH", 16)
        whole = list(blocks([data]))
        assert list(blocks(data[at : at + size] for at in range(0, len(data), size))) == whole
        assert b"".join(whole) == data
        assert all(len(block) <= 64 for block in whole[:-1])


def test_a_block_ends_at_a_line_else_at_a_piece_else_at_a_word(small_blocks):
    assert [len(b) for b in blocks([b"x" * 40 + b"\n" + b"y" * 40 + b"\n"])] == [41, 41]
    assert [len(b) for b in blocks([b"x" * 40 + b"\r" + b"y" * 90])] == [41, 64, 26]
    assert [len(b) for b in blocks([b"x" * 60 + b" " + b"y" * 60])] == [61, 60]


@settings(max_examples=200, deadline=None)
@given(TEXT.filter(bool), st.data())
def test_pieces_and_numbers_are_exact(data: bytes, choice: st.DataObject):
    positions = sorted(
        choice.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=8, unique=True))
    )
    expected = [
        pieces(data, position) for position in positions if data[position : position + 1] not in b"\r\n"
    ]
    positions = [position for position in positions if data[position : position + 1] not in b"\r\n"]
    cursor, result = Cursor(data, number=7), []
    for position in positions:
        if position < cursor.at:
            result.append(result[-1])
            continue
        start, stop = cursor.piece_of(position)
        cursor.pass_to(start)
        result.append((cursor.number, start, stop))
        cursor.pass_to(stop)
    assert result == expected
    walk, outcome = Backward(data, number=7 + data.count(b"\n")), []
    for position in reversed(positions):
        piece = walk.piece_of(position)
        if piece is not None:
            outcome.append(piece)
    assert outcome == list(dict.fromkeys(reversed(expected)))


def pieces(data: bytes, position: int) -> tuple[int, int, int]:
    for match in re.finditer(rb"[^\r\n]+", data):
        if match.start() <= position < match.end():
            return 7 + data.count(b"\n", 0, position), match.start(), match.end()
    raise AssertionError(position)


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_whole_lines_show_what_a_terminal_shows(data: bytes):
    cursor, output = Cursor(data, number=1), []
    while (line := cursor.next_line(len(data))) is not None:
        number, start, stop = line
        output.append((number, data[start:stop]))
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    expected = [(at, line.rstrip(b"\r").rpartition(b"\r")[2]) for at, line in enumerate(lines, start=1)]
    assert output == expected


def test_of_a_very_long_piece_the_part_around_the_place_is_read():
    data = b"x" * 50000 + b"HERE" + b"y" * 50000
    start, stop = Cursor(data, number=1).piece_of(50003)
    assert b"HERE" in data[start:stop]
    assert stop - start == LONGEST
    _, start, stop = Backward(data, number=1).piece_of(50003) or (0, 0, 0)
    assert b"HERE" in data[start:stop]


def test_of_a_very_long_line_a_terminal_shows_the_end():
    line = b"a\n" + b"x" * 20_000 + b"end\r\n"
    cursor = Cursor(line, number=1)
    assert cursor.next_line(len(line)) == (1, 0, 1)
    number, start, stop = cursor.next_line(len(line)) or (0, 0, 0)
    assert (number, stop, stop - start) == (2, len(line) - 2, LONGEST)


def test_last_lines_are_whole_and_few():
    data = b"".join(b"line %d\n" % n for n in range(100))
    assert last_lines(data, reach=25, most=9) == ["line 97", "line 98", "line 99"]
    assert last_lines(data, reach=10**6, most=2) == ["line 98", "line 99"]
    assert last_lines(b"10%\r20%\r30%\r\nx\n", reach=100, most=9) == ["30%", "x"]
    assert last_lines(b"", reach=100, most=9) == []
