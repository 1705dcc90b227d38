"""Nights in which something goes wrong that no setting is the cause of: one of each kind."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from benchmarks.nights.night import HEALTHY, OTHERS, Kind, drawn
from benchmarks.nights.play import play


def test_a_leak_costs_the_restarts_that_it_needs() -> None:
    night = drawn(Kind.DEVICE, seed=1)
    outcome = play(night)
    assert outcome.done and outcome.named and outcome.restarts >= outcome.needed > 0
    assert outcome.lost < 0.03 and outcome.slower == 1.0


def test_without_the_answer_to_growth_the_same_night_ends_with_slower_settings() -> None:
    with (
        patch("autotune.policies.recovery.decide.growth", lambda *_, **__: None),
        patch("autotune.policies.recovery.decide.restart_now", lambda *_: None),
    ):
        outcome = play(drawn(Kind.DEVICE, seed=1))
    assert not outcome.named and (not outcome.done or outcome.slower > 1.0 or outcome.lost > 0.03)


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_a_leak_changes_no_setting_that_it_has_nothing_to_do_with(kind: Kind) -> None:
    outcome = play(drawn(kind, seed=3))
    assert outcome.done and outcome.restarts >= outcome.needed
    assert outcome.lost < 0.15 and outcome.slower < 1.05


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_is_not_restarted(kind: Kind) -> None:
    outcome = play(drawn(kind, seed=3))
    assert outcome.done and outcome.restarts == 0 and outcome.lost == pytest.approx(0)
