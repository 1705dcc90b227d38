"""Nights in which memory grows: what the answer to growth is worth on one of them."""

from __future__ import annotations

from unittest.mock import patch

from benchmarks.nights import Kind, drawn, oracle, play


def test_a_leak_costs_the_restarts_that_it_needs() -> None:
    night = drawn(Kind.DEVICE, seed=1)
    outcome = play(night)
    assert outcome.done and outcome.named and outcome.restarts == outcome.needed == oracle(night)[2] > 1
    assert outcome.lost < 0.03 and outcome.slower == 1.0


def test_without_the_answer_to_growth_the_same_night_ends_with_slower_settings() -> None:
    with (
        patch("autotune.policies.recovery.decide.growth", lambda *_, **__: None),
        patch("autotune.policies.recovery.decide.restart_now", lambda *_: None),
    ):
        outcome = play(drawn(Kind.DEVICE, seed=1))
    assert not outcome.named and (not outcome.done or outcome.slower > 1.0 or outcome.lost > 0.03)
