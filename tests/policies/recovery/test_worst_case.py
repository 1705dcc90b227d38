"""The longest sequences that a job allows: a warning before, the remedy for them after a late failure."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.outlook import outlook
from autotune.policies.recovery.ranking import assess, overflowing
from autotune.policies.recovery.worst_case import came_late, longest_sequences, worst_case
from autotune.policies.values.events import Event, Launch, Progressed, Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Grid, Support
from tests.policies.jobs import GIB, KNOBS, LAYOUT, SUPPORTED, accepted, fails, profile

BY_ROWS = {
    "microbatch_size": Support(setting="verl.microbatch_size", grid=Grid(values=tuple(range(32, 0, -1)))),
    **{k: v for k, v in SUPPORTED.items() if k not in ("tokens_per_microbatch", "logprob_tokens")},
}
ROWS = replace(
    KNOBS, tokens_per_microbatch=None, logprob_tokens=None, dynamic_batching=False, microbatch_size=8
)


def start(knobs: Knobs = ROWS, **means: float) -> Event:
    layout = replace(LAYOUT, ranks=8, shards=8, mini_batch=256, **means)
    return accepted(profile(knobs, layout=layout, supported=BY_ROWS))


def steps(count: int, *, tokens: float | None = None) -> list[Event]:
    rate = None if tokens is None else tokens * LAYOUT.sequences / 100.0
    return [Progressed(step=n, of=400, seconds=100.0, tokens_per_second=rate) for n in range(1, count + 1)]


def test_what_only_the_longest_sequences_overflow_is_a_warning_and_starts_as_written():
    short = start(prompt_mean=200.0, response_mean=1000.0)
    action = decide((short,))
    assert isinstance(action, Launch) and action.knobs == ROWS
    (warning,) = worst_case(fold((short,)), ROWS)
    assert "with sequences as long as the job allows it would need" in warning
    assert "kept ready for a failure: " in warning and "8 → " in warning


def test_what_fits_even_then_warns_of_nothing():
    small = replace(ROWS, microbatch_size=1)
    assert worst_case(fold((start(small),)), small) == ()
    assert worst_case(fold((accepted(model=None),)), KNOBS) == ()


def test_what_overflows_anyway_is_for_the_preflight_to_tell():
    large = replace(ROWS, microbatch_size=32, recompute="off")
    assert worst_case(fold((start(large),)), large) == ()


def test_a_late_failure_is_cured_for_the_longest_sequences():
    failed = fails(Phase.BACKWARD, requested=3 * GIB, free=2 * GIB)
    short = start(prompt_mean=200.0, response_mean=1000.0)

    def cured(count: int) -> tuple[Launch, list[tuple[str, float]]]:
        history = (short, Started(knobs=ROWS), *steps(count), *failed)
        run, action = fold(history), decide(history)
        view = outlook(run)
        assert came_late(run) == (count > 3) and view is not None and isinstance(action, Launch)
        longest = longest_sequences(view)
        return action, overflowing(longest, assess(longest, action.knobs))

    (early, early_misses), (late, late_misses) = cured(1), cured(30)
    assert early_misses and not late_misses
    assert early.knobs != late.knobs


@pytest.mark.parametrize(
    ("cause", "phase", "late"),
    [
        (Cause.GPU_OOM, Phase.BACKWARD, True),
        (Cause.GPU_OOM, Phase.LOG_PROB, True),
        (Cause.GPU_OOM, Phase.OPTIMIZER, False),
        (Cause.HOST_OOM, Phase.BACKWARD, False),
    ],
)
def test_only_a_pass_on_the_device_fails_late_by_its_lengths(cause, phase, late):
    history = (start(), Started(knobs=ROWS), *steps(30), *fails(phase, cause=cause))
    assert came_late(fold(history)) is late
    assert not came_late(fold(history[:-1]))


def test_tokens_of_the_first_steps_tell_how_long_sequences_are():
    def needed(*events: Event) -> float:
        view = outlook(fold((start(), Started(knobs=ROWS), *events)))
        assert view is not None
        return assess(view, ROWS).gpu[Phase.BACKWARD]

    short, long = needed(*steps(3, tokens=400)), needed(*steps(3, tokens=4000))
    assert short < needed() < long
    # What no sequences of the job could have is no length.
    assert needed(*steps(3, tokens=9000)) == needed(*steps(3))


def test_a_job_that_says_its_lengths_is_believed():
    def needed(**means: float) -> float:
        view = outlook(fold((start(**means),)))
        assert view is not None
        return assess(view, ROWS).gpu[Phase.BACKWARD]

    assert needed(prompt_mean=100.0, response_mean=300.0) < needed() < needed(response_mean=3800.0)
