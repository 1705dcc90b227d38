"""The benchmark of the forecast: its series are what their kinds say, and the tables count them."""

from __future__ import annotations

import pytest

from benchmarks.forecast import (
    CALM,
    DRIFTS,
    HELD_OUT,
    METHODS,
    SEEN,
    WITH_LENGTHS,
    WITHOUT_LENGTHS,
    Base,
    Series,
    drawn_series,
    injected_series,
    recorded_bases,
    simulated_bases,
    watched,
)
from benchmarks.forecast_jobs import jobs, recorded_runs, rows_of
from benchmarks.forecast_tables import Outcome, compared, resampled

EVEN = Base(phase="backward", noise=[1.0] * 60)


def test_drifts_end_where_they_run_out_and_the_others_never_do() -> None:
    every = [*drawn_series([EVEN], 3, seed=1)]
    assert {series.kind for series in every} == {*DRIFTS, *CALM}
    for series in every:
        assert (series.fails is not None) is (series.kind in DRIFTS)
        assert max(series.used) <= 1.0
        assert series.fails is None or len(series.used) == series.fails - 1 < series.of


def test_most_drifts_are_forecast_in_time_and_few_others() -> None:
    every = [*drawn_series([EVEN, *simulated_bases(2, 3)], 3, seed=3)]
    forecasts = [watched(series, METHODS["forecast"]) for series in every]
    failing = [each for each in forecasts if each.fails is not None]
    in_time = [
        e
        for e in failing
        if e.warned_after is not None and e.fails is not None and e.fails - e.warned_after >= 5
    ]
    assert len(in_time) >= 0.6 * len(failing)
    calm = [each for each in forecasts if each.fails is None]
    assert sum(each.warned_after is not None for each in calm) <= 0.2 * len(calm)


def test_recorded_steps_are_there_and_drifts_are_put_on_them() -> None:
    bases = [*recorded_bases()]
    assert bases and all(len(base.noise) >= 60 for base in bases)
    kinds = {series.kind for series in injected_series(bases, 1, seed=1)}
    assert kinds == {*DRIFTS, "as recorded"}


def test_runs_with_lengths_are_split_into_fitted_and_held_out() -> None:
    for seeds in (SEEN, HELD_OUT):
        bases = [*recorded_bases(WITH_LENGTHS, seeds=seeds)]
        assert bases
        for base in bases:
            assert {len(values) for values in base.lengths.values()} == {len(base.noise)}


def test_growing_lengths_are_injected_with_the_memory_that_they_need() -> None:
    lengths = [100.0 + 40.0 * (step % 3) for step in range(60)]
    follows = Base(
        phase="backward", noise=[0.5 + length / 280 for length in lengths], lengths={"max": lengths}
    )
    every = [*injected_series([follows], 2, seed=1)]
    for series in every:
        ratio = series.lengths["max"][30] / lengths[30]
        assert (ratio > 1.0) is series.kind.startswith("lengths")


def test_a_leak_under_varying_lengths_is_forecast_earlier_with_them() -> None:
    lengths = [100.0 + 40.0 * (step * 7 % 11) / 11 for step in range(90)]
    used = [0.3 + 0.002 * length + 0.004 * step for step, length in enumerate(lengths)]
    series = Series("leak", "backward", used, 91, 180, {"response_length/max": lengths})
    forecasts = watched(series, METHODS["forecast"]).warned_after
    without = watched(series, WITHOUT_LENGTHS["forecast, lengths unknown"]).warned_after
    assert forecasts is not None and (without is None or forecasts < without)


@pytest.mark.parametrize(("forecast_step", "share"), [(95, "100.0%"), (96, "0.0%"), (None, "0.0%")])
def test_five_steps_ahead_count(forecast_step: int | None, share: str) -> None:
    forecasts = {"forecast": [Outcome("leak", 100, forecast_step), Outcome("noise", None, None)]}
    assert f"| forecast | {share} | 0.0% (0 of 1) |" in list(compared("simulated", forecasts))


def test_a_drift_raises_every_phase_of_its_process_until_one_runs_out() -> None:
    runs = [*recorded_runs(WITH_LENGTHS, seeds=SEEN)]
    every = [*jobs(runs, 2, seed=1)]
    assert {job.kind for job in every} == {*DRIFTS, "as recorded"}
    for job in every:
        most = max(max(values) for values in job.peaks.values())
        assert most <= 1.0 and (job.fails is not None) is (job.kind in DRIFTS)
        assert {len(values) for values in job.peaks.values()} == {len(rows_of(job))}
        assert job.fails is None or len(rows_of(job)) == job.fails - 1


def test_intervals_come_from_runs_not_from_series() -> None:
    alike = [
        Outcome("as recorded", None, 5 if run == 0 else None, run) for run in range(4) for _ in range(50)
    ]
    forecasts = {"forecast": [*alike, *(Outcome("leak", 50, 40, run) for run in range(4))]}
    row = list(resampled(forecasts))[2]
    assert row == "| forecast | 100.0% to 100.0% | 0.0% to 75.0% |"
    assert list(resampled({"forecast": [Outcome("leak", 50, 40)]})) == []
