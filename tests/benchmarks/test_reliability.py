"""The table of reliability: chances that came true, chances that did not, and a few simulated jobs."""

from __future__ import annotations

import random

from benchmarks.reliability import Forecast, bins_of, forecasts_of, table
from benchmarks.simulation.world import Stratum


def forecasts(count: int, *, truth: float) -> list[Forecast]:
    """Return chances of which the share `truth` times the chance comes."""
    rng = random.Random(3)
    chances = [rng.random() for _ in range(count)]
    return [
        Forecast(
            phase="backward",
            placement="colocated",
            first=False,
            chance=chance,
            failed=rng.random() < truth * chance,
        )
        for chance in chances
    ]


def test_chances_that_come_true_leave_no_gap_and_others_show_one():
    assert max(b.gap for b in bins_of(forecasts(3000, truth=1.0))) < 0.06
    assert max(b.gap for b in bins_of(forecasts(3000, truth=0.5))) > 0.3


def test_bins_have_equal_counts_of_at_least_300():
    bins = bins_of(forecasts(1100, truth=1.0))
    assert [b.count for b in bins] == [367, 367, 366]
    assert [b.predicted for b in bins] == sorted(b.predicted for b in bins)
    assert len(bins_of(forecasts(40, truth=1.0))) == 1 and bins_of([]) == []


def test_every_launch_of_a_job_is_forecast_for_the_phases_that_it_met():
    result = [f for seed in range(12) for f in forecasts_of((Stratum.NEAR, seed))]
    assert sum(f.failed for f in result) > 0 and all(0 <= f.chance <= 1 for f in result)
    assert any(f.first for f in result) and not all(f.first for f in result)
    assert "| backward |" in table(result) and "| first launch |" in table(result)
