"""Figures as people read them."""

from __future__ import annotations

import pytest

from autotune.orchestrator import messages
from autotune.orchestrator.units import show_gib, show_gpu_time, show_rate, show_time_left
from autotune.policies.values.diagnosis import Facts
from autotune.policies.values.events import Purpose, Result, Tried
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Unit


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (1638.4, "1,638"),
        (99.97, "100"),
        (99.94, "99.9"),
        (9.406, "9.41"),
        (1.0, "1"),
        (0.0123, "0.0123"),
        (0.00098765, "0.000988"),
    ],
)
def test_rates_keep_three_digits(rate: float, text: str) -> None:
    assert show_rate(rate, Unit.TOKENS) == f"{text} tok/s"


def test_a_trial_is_told_in_the_unit_of_its_speed() -> None:
    bare = {"trial": 3, "knobs": Knobs(), "purpose": Purpose.PROBE, "result": Result.FITS}
    steps = Tried(steps_per_second=0.0123, noise=0.02, **bare)  # type: ignore[arg-type]
    assert messages.trial(steps, before=None) == "probe: fits   0.0123 steps/s ±2%   as written"
    tokens = Tried(tokens_per_second=20000.4, **bare)  # type: ignore[arg-type]
    assert messages.trial(tokens, before=None) == "probe: fits   20,000 tok/s   as written"
    assert messages.trial(Tried(**bare), before=None) == "probe: fits   as written"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("least_s", "most_s", "text"),
    [
        (0.5, 8.0, "less than 10s left"),
        (11.0, 18.0, "about 10s left"),
        (0.0, 7512.0, "at most 2h 10m left"),
        (532.0, 671.0, "8m to 12m left"),
        (61.0, 95.0, "1m to 2m left"),
        (3650.0, 3700.0, "about 1h 00m left"),
        (3.0e4, 5.0e4, "8h 15m to 14h 00m left"),
    ],
)
def test_a_time_left_is_as_exact_as_it_is_known(least_s: float, most_s: float, text: str) -> None:
    assert show_time_left(least_s, most_s) == text


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (3.66, "3.7 GPU-hours"),
        (1536.2, "1,536.2 GPU-hours"),
        (0.71, "42.6 GPU-minutes"),
        (0.04, "2.4 GPU-minutes"),
        (38 / 3600, "0.6 GPU-minutes"),
    ],
)
def test_gpu_time_of_a_short_run_is_in_minutes(hours: float, text: str) -> None:
    assert show_gpu_time(hours) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.0 MiB"),
        (608, "608 bytes"),
        (2048, "2.0 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (5 * 2**30, "5.00 GiB"),
    ],
)
def test_no_size_is_shown_as_nothing(size: int, text: str) -> None:
    assert show_gib(size) == text


def test_free_memory_that_was_enough_was_not_usable() -> None:
    exact = Facts(requested_bytes=322833920, free_bytes=322833920)
    assert messages.figures(exact) == "needed 307.9 MiB, 307.9 MiB was free but not usable"
    less = Facts(requested_bytes=322833920, free_bytes=1 << 20)
    assert messages.figures(less) == "needed 307.9 MiB, 1.0 MiB was free"
