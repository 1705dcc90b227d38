"""How each state of a run is shown."""

from __future__ import annotations

from typing import get_args

from autotune.orchestrator.errors import ExitCode
from autotune.orchestrator.run_states import DISPLAYS, METRIC_STATES, display_of
from autotune.policies.values.events import Interrupted, Stable, Verdict
from autotune.policies.values.run.state import ENDS, RunState


def test_every_state_is_shown_and_every_verdict_is_a_terminal_state() -> None:
    assert list(DISPLAYS) == list(RunState)
    assert set(ENDS) == set(get_args(Verdict))
    assert {state for state in RunState if state.is_terminal} == set(ENDS.values())
    assert {DISPLAYS[state].tone for state in ENDS.values()} == {"good", "warn", "bad"}


def test_the_public_words_stay() -> None:
    words = (
        "NOT STARTED,STARTING,REHEARSING,RUNNING,RECOVERING,STABLE,SEARCHING,INTERRUPTED,DAMAGED,"
        "COMPLETED,REHEARSED,GAVE UP,FAILED,LOST,STOPPED"
    )
    metrics = "starting,running,recovering,stable,searching,completed,gave_up,failed,lost,stopped"
    reports = "completed,stable,rehearsed,gave_up,needs_human,infrastructure,interrupted,unfinished"
    assert {display.word for display in DISPLAYS.values()} >= set(words.split(","))
    assert tuple(metrics.split(",")) == METRIC_STATES
    assert {display.report for display in DISPLAYS.values()} == set(reports.split(","))
    for verdict, state in ENDS.items():
        assert DISPLAYS[state].report == verdict.__struct_config__.tag


def test_a_success_exits_with_0_and_nothing_else_does() -> None:
    for state in RunState:
        assert (DISPLAYS[state].exit_code is ExitCode.OK) == state.is_success


def test_a_narrow_success_warns_and_an_interrupt_exits_as_one() -> None:
    assert (display_of(Stable()).tone, display_of(Stable(marginal=True)).tone) == ("good", "warn")
    assert display_of(Stable(marginal=True)).exit_code is ExitCode.OK
    codes = [display_of(Interrupted(by=by)).exit_code for by in ("user", "SIGINT", "SIGTERM")]
    assert codes == [ExitCode.INTERRUPTED, ExitCode.INTERRUPTED, ExitCode.TERMINATED]
