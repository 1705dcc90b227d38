"""What a search runs next follows from its history, the forecast and the sampler's proposals alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from autotune.policies.search.feasibility import Forecast
from autotune.policies.search.next_trial import (
    Proposed,
    SearchSpace,
    forecast_of,
    next_trial,
)
from autotune.policies.search.space import Dimension, space
from autotune.policies.search.trial_history import TrialHistory, extended, trial_history
from autotune.policies.values.events import Diagnosed, Ended, Event, Purpose, Result, Started, Tried
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.observation import Completed, Crashed
from tests.policies.jobs import KNOBS, accepted

ACCEPTED = accepted()
DIMENSIONS = space(ACCEPTED.job, ACCEPTED.profile, KNOBS)
LARGER, SMALLER = replace(KNOBS, tokens_per_microbatch=24_576), replace(KNOBS, tokens_per_microbatch=5120)


class Script:
    """A sampler that proposes what it was given, and keeps what was refused."""

    def __init__(self, *proposals: Mapping[str, Setting]) -> None:
        self.proposals, self.refused = proposals, list[float]()
        self.near: Knobs | None = None
        self.seed = -1

    def __call__(
        self,
        dimensions: Sequence[Dimension],
        results: Sequence[Tried],
        running: Sequence[Knobs],
        *,
        near: Knobs | None,
        seed: int,
    ) -> Script:
        self.near, self.seed, self._left = near, seed, list(self.proposals)
        return self

    def next(self) -> Mapping[str, Setting]:
        return self._left.pop(0) if self._left else {}

    def refuse(self, *, violation: float) -> None:
        self.refused.append(violation)


class Fond(Forecast):
    """A forecast that finds some configurations worth a run, and some too large."""

    def __init__(self, *worth: Knobs, over: Sequence[Knobs] = (), slow: Sequence[Knobs] = ()) -> None:
        self._worth, self._over, self._slow = worth, over, slow

    def excess(self, knobs: Knobs) -> dict[str, float]:
        return {"backward": 0.2, "forward": 0.1} if knobs in self._over else {}

    def much_slower(self, best: Knobs, knobs: Knobs) -> float:
        return 0.5 if knobs in self._slow else 0.0

    def proposals(self, centers: Sequence[Knobs], *, gain: float) -> tuple[Knobs, ...]:
        return self._worth


def result(trial: int, knobs: Knobs, of: Result = Result.FITS, *, rate: float = 100.0) -> Tried:
    speed = rate if of is Result.FITS else None
    return Tried(trial=trial, knobs=knobs, purpose=Purpose.PROBE, result=of, tokens_per_second=speed)


def past(*events: Event) -> TrialHistory:
    return trial_history((ACCEPTED, *events))


def searched(*starts: Knobs) -> SearchSpace:
    return SearchSpace(
        profile=ACCEPTED.profile, dimensions=DIMENSIONS, starts=starts or (KNOBS,), min_gain=0.01
    )


def chosen(
    history: TrialHistory,
    *starts: Knobs,
    forecast: Forecast | None = None,
    sampler: Script | None = None,
    running: Sequence[Knobs] = (),
) -> Proposed | None:
    return next_trial(
        history,
        space=searched(*starts),
        forecast=forecast or Forecast(),
        sampler=sampler or Script(),
        running=running,
    )


def test_the_starts_come_first_and_one_that_may_not_run_goes_on_record() -> None:
    assert chosen(past(), KNOBS, LARGER) == Proposed(knobs=KNOBS, by="start")
    one = past(result(0, KNOBS))
    assert chosen(one, KNOBS, LARGER) == Proposed(knobs=LARGER, by="start")
    refused = chosen(one, KNOBS, LARGER, forecast=Fond(over=[LARGER]))
    assert refused is not None and refused.refused == "predicted to exceed memory in backward by 20.0%"
    assert refused.excess == {"backward": 0.2, "forward": 0.1}


def test_the_stable_start_runs_whatever_is_foreseen_of_it() -> None:
    assert chosen(past(), forecast=Fond(over=[KNOBS])) == Proposed(knobs=KNOBS, by="start")


def test_what_was_lost_with_the_cluster_runs_again_unless_it_is_running() -> None:
    history = past(result(0, KNOBS), result(1, LARGER, Result.LOST))
    assert chosen(history) == Proposed(knobs=LARGER, by="start")
    assert chosen(history, running=[LARGER]) is None


def test_estimate_and_sampler_take_turns() -> None:
    sampler = Script({"tokens_per_microbatch": 5120})
    by = []
    events: list[Event] = [result(0, KNOBS)]
    for trial in range(1, 7):
        proposed = chosen(
            past(*events),
            forecast=Fond(*(replace(KNOBS, concurrency=n) for n in range(8, 80, 8))),
            sampler=sampler,
        )
        assert proposed is not None
        by.append(proposed.by)
        sampler = Script({"tokens_per_microbatch": 5120 + 1024 * trial})
        events.append(result(trial, proposed.knobs))
    assert by == ["estimate", "estimate", "sampler", "estimate", "estimate", "sampler"]


def test_draws_that_may_not_run_are_refused_with_what_they_violate() -> None:
    large, slow = replace(KNOBS, concurrency=64), replace(KNOBS, concurrency=32)
    sampler = Script({}, {"concurrency": 64}, {"concurrency": 32}, {"concurrency": 16})
    forecast = Fond(over=[large], slow=[slow])
    proposed = chosen(past(result(3, KNOBS)), forecast=forecast, sampler=sampler)
    assert proposed == Proposed(knobs=replace(KNOBS, concurrency=16), by="sampler")
    assert sampler.refused == [0.01, 0.2, 0.5]
    assert (sampler.near, sampler.seed) == (KNOBS, 1)


def test_nothing_is_proposed_that_ran_runs_or_asks_for_what_failed() -> None:
    failed = (
        Started(attempt=2, knobs=LARGER, trial=1),
        Ended(attempt=2, outcome=Crashed(exit_code=1)),
        Diagnosed(attempt=2, cause=Cause.GPU_OOM, phase=Phase.BACKWARD, component=Component.TRAINER),
    )
    history = past(result(0, KNOBS), *failed, result(1, LARGER, Result.FAILS))
    larger_still = replace(LARGER, tokens_per_microbatch=32_768)
    assert chosen(history, forecast=Fond(KNOBS, LARGER, larger_still)) is None
    assert chosen(history, forecast=Fond(KNOBS, SMALLER)) == Proposed(knobs=SMALLER, by="estimate")
    assert chosen(history, forecast=Fond(KNOBS, SMALLER), running=[SMALLER]) is None


def test_a_history_folds_alike_at_once_and_row_by_row() -> None:
    events: list[Event] = [
        Started(attempt=1, knobs=KNOBS),
        Ended(attempt=1, outcome=Completed()),
        Started(attempt=2, knobs=LARGER, trial=1),
        Ended(attempt=2, outcome=Crashed(exit_code=1)),
        Diagnosed(attempt=2, cause=Cause.GPU_OOM, phase=Phase.BACKWARD, component=Component.TRAINER),
        result(1, LARGER, Result.FAILS),
        result(2, SMALLER, Result.GATED),
    ]
    whole, step_by_step = past(*events), past()
    for event in events:
        step_by_step = extended(step_by_step, [event])
    assert step_by_step == whole
    assert whole.tried == {LARGER: 1} and whole.last_attempt == 2 and list(whole.failures) == [2]
    assert [e.attempt for e in whole.evidence] == [1, 1, 2, 2, 2]


def test_without_a_known_model_nothing_is_predicted() -> None:
    unknown = trial_history((accepted(model=None),))
    assert type(forecast_of(unknown, searched())) is Forecast
    known = forecast_of(past(), searched())
    assert known.excess(replace(KNOBS, tokens_per_microbatch=131_072, recompute="off"))
