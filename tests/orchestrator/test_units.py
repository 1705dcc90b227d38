"""Figures as people read them."""

from __future__ import annotations

import pytest

from autotune.orchestrator import messages
from autotune.orchestrator.units import show_rate
from autotune.policies.values.events import Purpose, Result, Tried, Unit
from autotune.policies.values.knobs import Knobs


@pytest.mark.parametrize(
    ("rate", "shown"),
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
def test_rates_keep_three_digits(rate: float, shown: str) -> None:
    assert show_rate(rate, Unit.TOKENS) == f"{shown} tok/s"


def test_a_trial_is_told_in_the_unit_of_its_speed() -> None:
    bare = {"trial": 3, "knobs": Knobs(), "purpose": Purpose.PROBE, "result": Result.FITS}
    steps = Tried(steps_per_second=0.0123, noise=0.02, **bare)  # type: ignore[arg-type]
    assert messages.trial(steps, before=None) == "probe: fits   0.0123 steps/s ±2%   as written"
    tokens = Tried(tokens_per_second=20000.4, **bare)  # type: ignore[arg-type]
    assert messages.trial(tokens, before=None) == "probe: fits   20,000 tok/s   as written"
    assert messages.trial(Tried(**bare), before=None) == "probe: fits   as written"  # type: ignore[arg-type]
