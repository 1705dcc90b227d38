"""The table of docs/measured/real.md."""

from __future__ import annotations

from pathlib import Path

from tests.real import results


def test_the_page_has_the_recorded_rows() -> None:
    page = results.PAGE.read_text()
    assert results.written(results.read(results.RESULTS), page) == page, "python -m tests.real.results"


def test_a_case_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = results.Row(framework="verl 0.9.1", case="backward", outcome="cured", seconds=200)
    for seconds in (200, 100):
        results.keep(path, results.Row(framework="TRL", case="backward", outcome="", seconds=1))
        results.keep(
            path, results.Row(framework="verl 0.9.1", case="backward", outcome="cured", seconds=seconds)
        )
    kept = results.read(path)
    assert [(each.framework, each.seconds) for each in kept] == [("TRL", 1), (row.framework, 100)]
