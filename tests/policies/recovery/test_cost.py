"""What a decision costs: as much after weeks of steps as after a thousand, counted in function calls."""

from __future__ import annotations

import cProfile
import pstats

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.decide import decide_on
from autotune.policies.values.events import Event, Progressed, Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import Folding
from autotune.policies.values.job import Forecasting, Recovery
from tests.policies.forecast.test_last_checkpoint import foreseen
from tests.policies.jobs import GIB, KNOBS, accepted, fails, peaks

ENDS = {
    "failure": fails(Phase.BACKWARD, requested=14 * GIB, free=10 * GIB),
    "full host": fails(Phase.OPTIMIZER, cause=Cause.HOST_OOM),
    "forecast": (foreseen(attempt=1, seen_at=900, step=10**6, earliest=10**6),),
}


def calls(steps: int, end: tuple[Event, ...], *, per_step: int) -> int:
    """Return the function calls of the decision after so many steps, whose peaks grow by bytes per step."""
    history = Folding(
        (accepted(recovery=Recovery(forecast=Forecasting.ACT)), Started(attempt=1, knobs=KNOBS))
    )
    for step in range(1, steps + 1):
        used = peaks(backward=40 * GIB + per_step * step, log_prob=30 * GIB, optimizer=50 * GIB)
        saved = step // 100 * 100 or None
        history.take(
            Progressed(attempt=1, step=step, of=10**7, seconds=90.0 + step % 7, peaks=used, saved=saved)
        )
    for event in end:
        history.take(replace(event, attempt=1))
    history.run()  # what the driver holds already
    with cProfile.Profile() as profile:
        decide_on(history)
    return int(pstats.Stats(profile).total_calls)


@pytest.mark.parametrize(("end", "per_step"), [("failure", 0), *((end, 20_000) for end in ENDS)])
def test_a_decision_after_two_hundred_thousand_steps_costs_what_one_after_a_thousand_does(end, per_step):
    few, many = (calls(steps, ENDS[end], per_step=per_step) for steps in (1_000, 200_000))
    assert many <= 2 * few
