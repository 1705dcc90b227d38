"""A line of any length costs a marker's search no more than its length."""

from __future__ import annotations

import pytest

from autotune.launchers.frameworks import FRAMEWORKS

_LINE = 64 * 1024  # as long as a line of a log can be
_BEGINNINGS = (  # of lines whose metrics are searched too
    "",
    "step 3/100 loss",
    "step:3 - ",
    "(WorkerDict pid=1) step:3 - ",
    "{'loss': 0.1",
    "perf 3: {",
    "Global step 3: {",
    "Step 3/100 ",
    "saved checkpoint ",
    "  1%|",
)
_PARTS = (
    *("x", "1", " ", "-", "=", "'", "|", "(", "[", "/", ":", "a-", "a/", "a_", "a.", "a1 ", "e1", "1.", "1/"),
    *("{'a': ", "step ", "step:1 ", "loss: ", "(x pid=1) ", "0.1,"),
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_long_line_is_searched_at_once(name: str) -> None:
    for beginning in _BEGINNINGS:
        for part in _PARTS:
            FRAMEWORKS[name].marker((beginning + part * _LINE)[:_LINE])
