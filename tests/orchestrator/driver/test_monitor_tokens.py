"""What AReaL's lines and tables say of a step: its tokens after it, and the steps of all epochs."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.launchers.base import Exit
from autotune.policies.values.events import Event, GoalReached, Progressed
from autotune.policies.values.observation import Completed, Crashed
from tests.orchestrator.driver.test_monitor import Followed

JOB = f"""\
name: gsm8k
framework: areal
command: [python, train.py]
config: {Path(__file__).parents[3] / "configs" / "areal" / "gsm8k.yaml"}
goal: {{steps: 2}}
"""
SPOKEN = "(AReaL) 20261121-10:00:00.000 StatsLogger INFO: "


def done(step: int) -> str:
    return f"{SPOKEN}Epoch 1/1 Step {step}/9 Train step {step}/9 done.\n"


def table(tokens: float) -> str:
    cells = (f"ppo_actor/update/n_tokens │ {tokens:.4e}", "timeperf/rollout │ 1.2346e+01")
    return f"{SPOKEN}\n│ {' │ '.join(cells)} │\n"


@pytest.fixture
def followed(tmp_path: Path) -> Followed:
    return Followed(tmp_path, JOB)


def rates(events: tuple[Event, ...]) -> list[float | None]:
    return [e.tokens_per_second for e in events if isinstance(e, Progressed | GoalReached)]


def test_a_step_is_reported_with_the_tokens_of_the_table_below_it(followed: Followed) -> None:
    assert rates(followed.see(done(1), table(40_000))) == [None]  # how long the first took is not known
    events = followed.see(done(2), table(60_000), after=20.0)
    assert isinstance(events[0], Progressed) and isinstance(events[1], GoalReached)
    assert rates(events) == [3000.0, 3000.0]
    assert followed.watch.progress.tokens_per_second == 3000.0
    assert rates(followed.see(done(3), after=10.0)) == [None]


def test_two_steps_at_one_look_keep_their_own_tokens(followed: Followed) -> None:
    followed.see(done(1), table(10_000))
    followed.see(done(2), table(50_000), after=10.0)
    events = followed.see(done(3), table(60_000), done(4), table(70_000), after=10.0)
    assert rates(events) == [6000.0, None]  # both were seen at once: the second took no time


def test_a_table_that_comes_at_a_later_look_changes_no_other_step(followed: Followed) -> None:
    followed.see(done(1), table(10_000))
    assert rates(followed.see(done(2), after=10.0)) == [None, None]
    assert rates(followed.see(table(50_000))) == []
    assert followed.watch.progress.tokens_per_second == 5000.0
    assert rates(followed.see(done(3), table(80_000), after=10.0)) == [8000.0]


def test_a_limit_of_steps_ends_a_training_before_its_epochs_end(tmp_path: Path) -> None:
    followed = Followed(tmp_path, JOB + "settings: {total_train_steps: 2}\n")
    for step, outcome in ((1, Crashed(exit_code=0)), (2, Completed())):
        (progressed,) = (event for event in followed.see(done(step)) if isinstance(event, Progressed))
        assert (progressed.step, progressed.of) == (step, 2)
        assert followed.watch.outcome(Exit(code=0), lost="", stopped_by="") == outcome
