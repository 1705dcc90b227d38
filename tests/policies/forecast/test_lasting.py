"""Growth that ended no process yet: memory that returns, or grows ever more slowly, is not acted on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from autotune.policies.forecast.last_checkpoint import lasts
from autotune.policies.values.events import Foreseen, Progressed, Started
from autotune.policies.values.failure import Phase
from autotune.policies.values.history import fold
from tests.policies.forecast.test_last_checkpoint import foreseen
from tests.policies.jobs import GIB, KNOBS, accepted, peaks


def acted_on(
    used: Callable[[int], float], *message: Foreseen, steps: int = 150, of: int | None = 2000
) -> bool:
    """Return whether growth of these GiB in the backward pass is acted on after so many steps."""
    rows = [
        Progressed(attempt=1, step=step, of=of, peaks=peaks(backward=int(used(step) * GIB)))
        for step in range(1, steps + 1)
    ]
    run = fold((accepted(), Started(attempt=1, knobs=KNOBS), *rows, *message))
    return lasts(run, run.attempts[-1], foreseen(attempt=1))


def leak(step: int) -> float:
    return 60 + 0.1 * step


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("a sawtooth of 40 steps", lambda step: 60 + 0.3 * (step % 40)),
        ("a sawtooth of 90 steps", lambda step: 60 + 0.15 * (step % 90)),
        ("a cache that fills", lambda step: 60 - 15 * math.expm1(-step / 60)),
        ("no growth", lambda step: 60.0),
    ],
)
def test_a_sawtooth_and_a_cache_are_left_alone(name: str, used: Callable[[int], float]) -> None:
    assert acted_on(leak) and not acted_on(used), name


def test_a_leak_under_a_small_sawtooth_is_acted_on() -> None:
    assert acted_on(lambda step: leak(step) + 0.1 * (step % 15))


def test_a_first_rise_is_too_short_but_where_the_training_is_short_too() -> None:
    assert not acted_on(leak, steps=99) and not acted_on(leak, steps=99, of=None)
    assert acted_on(leak, steps=100) and acted_on(leak, steps=50, of=100)


def test_a_forecast_that_was_withdrawn_is_believed_no_more() -> None:
    before = foreseen(attempt=1)
    assert acted_on(leak, before)
    assert not acted_on(leak, replace(before, holds=False), before)
    other = replace(before, phase=Phase.LOG_PROB)
    assert acted_on(leak, replace(other, holds=False), before)
