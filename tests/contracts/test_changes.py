"""The page of the settings that frameworks took."""

from __future__ import annotations

from tests.contracts import changes


def test_the_page_has_the_recorded_rows() -> None:
    page = changes.PAGE.read_text()
    rows = changes.table(changes.read(changes.CHECKED))
    assert changes.placed(page, "checked", rows) == page, "python -m tests.contracts.changes"
