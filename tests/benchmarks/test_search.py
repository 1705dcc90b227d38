"""The comparison of searches: every method sees the same, the counts are what happened."""

from __future__ import annotations

import pytest

from autotune.policies.search.trials import keeps_limits
from autotune.policies.values.events import Diagnosed, Result
from autotune.policies.values.knobs import Knobs
from benchmarks.search import table
from benchmarks.searches.harness import Night, Start, attempt, keeps, play, started, tried
from benchmarks.searches.methods import METHODS
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.world import Stratum


@pytest.fixture(scope="module")
def start() -> Start:
    for seed in range(11, 40):
        world, _ = drawn(Stratum.LATE, seed=seed)
        results = started(world, timid=True)
        if results is not None:
            return results
    raise AssertionError("no timid start held")


def test_a_start_holds_and_late_events_are_gone(start: Start) -> None:
    assert start.world.late == ()
    assert keeps(start.world, [start.knobs])[0]
    assert not any(isinstance(e, Diagnosed) for e in start.events)


def test_a_probe_shows_what_the_simulation_holds_true(start: Start) -> None:
    rows = attempt(start.world, start.knobs, 2, steps=5, trial=0)
    result = tried(start.world, start.knobs, rows, trial=0)
    assert result.result is Result.FITS and keeps_limits(result)
    assert result == tried(start.world, start.knobs, rows, trial=0)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_begins_with_the_start_and_can_be_repeated(start: Start, name: str) -> None:
    one, again = (play(start, name, METHODS[name], seed=5, budget=6) for _ in range(2))
    assert one == again
    assert one.runs == 6 and one.failures <= 5
    assert one.best > 0


def test_our_method_wastes_less_than_half_of_the_runs_that_any_other_wastes(start: Start) -> None:
    nights = {name: play(start, name, METHODS[name], seed=5, budget=15) for name in METHODS}
    ours = nights.pop("autotune")
    assert ours.repeats == 0
    assert 2 * ours.failures < min(night.failures for night in nights.values())


def test_a_method_that_repeats_itself_is_counted_so(start: Start) -> None:
    def stubborn(of: Start, book: object, seed: int):
        def choose() -> Knobs | None:
            return of.knobs

        return choose

    assert play(start, "stubborn", stubborn, seed=1, budget=3).repeats == 2


def test_what_never_got_there_is_more_than_every_run() -> None:
    def night(found_at: int | None) -> Night:
        return Night(
            world="w", start="timid", method="m", found_at=found_at, runs=40, failures=2, repeats=0,
            best=0.9, refused=4,
        )  # fmt: skip

    text = table([night(3), night(None), night(None)], seed=7)
    assert "| timid | m | > 40 / > 40 | 33% |" in text
    assert "| 5.0% | 10.0% | 0 |" in text
