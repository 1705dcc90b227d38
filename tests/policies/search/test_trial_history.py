"""What a search's history says when it is folded."""

from __future__ import annotations

import pytest

from autotune.policies.search import trial_history as th


@pytest.mark.parametrize("count", [0, 5, 100])
def test_few_attempts_are_remembered_the_failures_among_them(count: int) -> None:
    numbers = range(1, count + 1)
    failed = [n for n in numbers if n % 10 == 0]
    kept = th.informative(failed, [n for n in numbers if n % 10])
    assert len(kept) <= 40
    assert kept >= {n for n in failed if n > count - 20}
    assert not count or {1, count} <= kept
