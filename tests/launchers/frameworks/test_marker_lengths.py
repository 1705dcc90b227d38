"""A line of any length costs a marker's search no more than its length."""

from __future__ import annotations

import pytest

from autotune.launchers.frameworks import FRAMEWORKS

_LINE = 64 * 1024  # as long as a line of a log can be
_PARTS = ("x", "1", " ", "-", "=", "'", "a1 ", "{'a': ", "step ", "1/", "[", "(x pid=1) ", "0.1,", "/", ":")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_long_line_is_searched_at_once(name: str) -> None:
    for part in _PARTS:
        FRAMEWORKS[name].marker((part * _LINE)[:_LINE])
