"""Tables, glyphs and colours of the terminal output."""

from __future__ import annotations

import io

import pytest

from autotune.orchestrator.driver.monitor import Progress
from autotune.orchestrator.terminal.live_view import live_lines
from autotune.orchestrator.terminal.widgets import (
    ASCII,
    ascii_text,
    echo,
    encodable,
    folded,
    memory_bar,
    rendered,
    sparkline,
    table,
    width_of,
)
from autotune.policies.values.observation import ProcessMemory, Sample

ROWS = [("a", "memory_fraction 0.8 → 0.64, concurrency 256 → 128", "exact"), ("bb", "one", "numeric")]


def test_a_table_aligns_its_columns_and_does_not_wrap_without_a_width() -> None:
    lines = rendered(table(ROWS, head=("X", "CHANGE", "EFFECT"), wrap={1: 10}), width=None).split("\n")
    assert lines[0].index("EFFECT") == lines[1].index("exact") == lines[2].index("numeric")
    assert len(lines) == 3 and all(line == line.rstrip() for line in lines)


def test_only_the_named_columns_wrap() -> None:
    output = rendered(table(ROWS, wrap={1: 20}), width=40)
    assert max(map(len, output.split("\n"))) <= 40 and "…" not in output
    assert " ".join(output.split()).startswith("a memory_fraction 0.8 → 0.64, exact concurrency")
    whole = rendered(table(ROWS), width=20)
    assert ROWS[0][1] in whole


def test_markup_and_emoji_codes_in_cells_are_text() -> None:
    assert rendered(table([("[red]x", ":warning:")]), width=None) == "[red]x  :warning:"


def test_every_glyph_has_one_ascii_form() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text = "".join(ASCII)
    assert encodable(text, stream) == "".join(ASCII.values())
    assert encodable("ü", stream) == "?"
    bar = memory_bar("host", used_bytes=1 << 30, total_bytes=2 << 30)
    assert ascii_text(bar).plain == f"    host  {'#' * 12}{'.' * 12}  1.00 GiB / 2.00 GiB"


def test_the_width_is_the_terminals_or_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert width_of(io.StringIO()) is None
    monkeypatch.setenv("COLUMNS", "72")
    assert width_of(io.StringIO()) == 72


def test_a_sparkline_begins_at_zero() -> None:
    assert sparkline([0.0, 1.0, 7.0, 3.5]) == "▁▂█▅"
    assert sparkline([5.0]) == sparkline([]) == sparkline([0.0, 0.0]) == ""
    assert sparkline([10.0, 10.0]) == "██"


def test_no_text_controls_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    echo("error: \x1b]0;title\x07 of\trun\r\nhint: \x9b31m", color="never", err=True)
    assert capsys.readouterr().err == "error: ?]0;title? of\trun?\nhint: ?31m\n"


def test_sentences_wrap_below_their_first_word_and_what_is_copied_stays_whole() -> None:
    sentence, log, command = (
        "help: lower `a` or `b`",
        "7 | help: a line of a log",
        "      verl  a.b.c.d.e.f=3",
    )
    text = "\n".join([sentence, "      why   it saves memory", log, command, "hint: do: autotune x"])
    assert folded(text, None) == text
    assert folded(text, 100) == text
    assert folded(text, 18).split("\n") == [
        "help: lower `a` or",
        "      `b`",
        "      why   it",
        "            saves",
        "            memory",
        log,
        command,
        "hint: do:",
        "      autotune x",
    ]


def test_the_live_region_has_the_process_that_is_nearest_to_its_own_limit() -> None:
    processes = tuple(
        ProcessMemory(pid=n, name=name, rss_bytes=1, limit_bytes=limit << 30, limited_bytes=1 << 30)
        for n, (name, limit) in enumerate({"bash": 8, "train.py": 2}.items())
    )
    sample = Sample(at=0.0, node="n", host_used_bytes=1 << 30, host_total_bytes=24 << 30, processes=processes)
    progress = Progress(step=3, of=40, samples={"n": sample}, scores={"loss": 0.25})
    lines = live_lines(progress, title="#1", seconds=3.0, goal=None, width=80)
    texts = [line.plain for line in lines]
    assert any(text.startswith("    train.py █") and "1.00 GiB / 2.00 GiB" in text for text in texts)
    assert any(text.startswith("    host     █") for text in texts) and "loss 0.25" in texts[1]
