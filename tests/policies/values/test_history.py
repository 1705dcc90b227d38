"""What the history says of a run as a whole."""

from __future__ import annotations

import sys

from msgspec.structs import replace

from autotune.policies.recovery.decide import decide_on
from autotune.policies.values.events import (
    CuredInPlace,
    Decided,
    Ended,
    Event,
    Finished,
    Infrastructure,
    Interrupted,
    Progressed,
    Started,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import RESUMED, Folding, elapsed_s, fold
from autotune.policies.values.observation import Cancelled, Lost
from tests.policies.stories import KNOBS, accepted

_TYPES = {"started": Started(attempt=1, knobs=KNOBS), "step": Progressed(attempt=1, step=1)}


def at(minute: int, event: Event | str) -> Event:
    row = _TYPES[event] if isinstance(event, str) else event
    return replace(row, at=f"2026-11-22T{minute // 60:02}:{minute % 60:02}:00.000Z")


STOPPED = Ended(attempt=1, outcome=Cancelled(by="user"))
HEAD = (at(0, accepted()), at(1, "started"), at(6, "step"))


def test_the_time_until_the_user_resumes_does_not_count():
    rows = (
        *HEAD,
        at(7, STOPPED),
        at(7, Finished(verdict=Interrupted(by="user"))),
        at(600, Decided(reason=RESUMED)),
        at(601, "started"),
        at(611, "step"),
    )
    assert elapsed_s(rows[:5]) == 6 * 60
    assert elapsed_s(rows) == 16 * 60


def test_the_wait_before_a_relaunch_counts_and_no_longer_one():
    lost = at(7, Ended(attempt=1, outcome=Lost(reason="node gone")))
    again = (at(7, Decided(not_before_s=120.0)), at(9, "started"), at(10, "step"))
    assert elapsed_s((*HEAD, lost, *again)) == 9 * 60
    late = (at(7, Decided(not_before_s=120.0)), at(90, "started"), at(91, "step"))
    assert elapsed_s((*HEAD, lost, *late)) == 9 * 60


def test_an_attempt_that_nobody_saw_end_counts_to_its_last_row():
    unseen = at(500, Ended(attempt=1, outcome=Lost(reason="the driver ended"), unwatched=True))
    again = (at(500, Decided(reason=RESUMED)), at(500, "started"), at(505, "step"))
    assert elapsed_s((*HEAD, unseen, *again)) == 10 * 60


def test_an_attempt_that_went_on_without_a_driver_counts():
    assert elapsed_s((*HEAD, at(300, "step"))) == 299 * 60


def test_a_run_that_the_cluster_ended_is_resumed_with_the_time_it_had_left():
    rows = (
        *HEAD,
        at(7, Ended(attempt=1, outcome=Lost(reason="node gone"))),
        at(7, Finished(verdict=Infrastructure(reason="node gone"))),
        at(900, Decided(reason=RESUMED)),
    )
    assert elapsed_s(rows) == 6 * 60


def test_rows_without_a_time_count_for_nothing():
    assert elapsed_s((accepted(), _TYPES["started"], _TYPES["step"])) == 0.0


def test_what_was_folded_stays_as_it_was_while_the_attempt_goes_on():
    cure = CuredInPlace(
        attempt=1,
        cause=Cause.GPU_OOM,
        step=3,
        phase=Phase.BACKWARD,
        knob="tokens_per_microbatch",
        before=4096,
        after=2048,
    )
    history = (
        accepted(),
        Started(attempt=1, knobs=KNOBS),
        *(Progressed(attempt=1, step=number) for number in (1, 2, 3)),
        cure,
        *(Progressed(attempt=1, step=number) for number in (4, 5)),
        Ended(attempt=1, outcome=Lost(reason="node gone")),
        Started(attempt=2, knobs=KNOBS, resume=True),
        Progressed(attempt=2, step=5),
    )
    folding, runs = Folding(), []
    for event in history:
        folding.take(event)
        runs.append(folding.run())
    assert runs == [fold(history[:count]) for count in range(1, len(history) + 1)]
    assert [len(a.progress) for a in runs[-1].attempts] == [2, 3, 1]
    assert [done.step for done in runs[3].attempts[0].progress] == [1, 2]
    assert runs[3].attempts[0].progress[-1].step == 2 and runs[3].attempts[0].progress[5:] == ()


def test_a_decision_costs_the_same_after_any_number_of_steps():
    def calls(steps: int) -> int:
        folding = Folding((accepted(), Started(attempt=1, knobs=KNOBS)))
        for number in range(1, steps + 1):
            folding.take(Progressed(attempt=1, step=number))
        count = 0

        def profile(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(profile)
        try:
            folding.take(Progressed(attempt=1, step=steps + 1))
            decide_on(folding)
        finally:
            sys.setprofile(None)
        return count

    calls(10)  # what the first decision of a process does once
    assert calls(20_000) == calls(1000)
