"""Losses of steps that several attempts trained, and what they show."""

from __future__ import annotations

import random

from autotune.policies.certificate.contents import Replayed
from autotune.policies.certificate.overlap import losses_of, outside, replay_of, step_loss
from autotune.policies.values.events import Event, Progressed, Started
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.run.view import RunView

FULL, HALF = Knobs(tokens_per_microbatch=4096), Knobs(tokens_per_microbatch=2048)


def attempt(number: int, knobs: Knobs, losses: dict[int, float], *, trial: int | None = None) -> list[Event]:
    steps = [Progressed(attempt=number, step=step, loss=loss) for step, loss in losses.items()]
    return [Started(attempt=number, knobs=knobs, trial=trial), *steps]


def noisy(steps: range, *, by: float = 0.0) -> dict[int, float]:
    return {step: 0.5 + 0.01 * (-1) ** step + by for step in steps}


def test_steps_of_both_settings_within_the_noise_of_a_step_agree() -> None:
    history = (*attempt(1, FULL, noisy(range(1, 9))), *attempt(2, HALF, noisy(range(6, 12), by=0.02)))
    losses = losses_of(RunView(history), stable=HALF)
    assert [overlap.step for overlap in losses.overlapping] == [6, 7, 8]
    assert losses.overlapping[0].losses == {"1": 0.51, "2": 0.53}
    assert losses.pairs == 7 + 5
    assert losses.band is not None and abs(losses.band - 4 * 1.4826 * 0.02) < 1e-9
    verdict, replay = replay_of(RunView(history), losses)
    assert verdict is Replayed.AGREED
    assert replay.startswith("the losses of 3 steps (6 to 8) with both settings lie within a band of 0.118")


def test_steps_outside_the_band_differ_and_the_first_is_named() -> None:
    history = (*attempt(1, FULL, noisy(range(1, 9))), *attempt(2, HALF, noisy(range(7, 11), by=0.4)))
    losses = losses_of(RunView(history), stable=HALF)
    assert [overlap.step for overlap in outside(losses.overlapping, band=losses.band)] == [7, 8]
    verdict, replay = replay_of(RunView(history), losses)
    assert verdict is Replayed.DIFFERS
    assert replay == "step 7: the losses of its attempts are 0.4 apart; the band is 0.118608"


def test_nothing_is_shown_without_a_step_of_both_settings() -> None:
    steps = noisy(range(1, 12))
    for history, why in (
        ((*attempt(1, FULL, {}), *attempt(2, HALF, {})), "the log shows no losses of steps"),
        ((*attempt(1, FULL, {}), *attempt(2, HALF, steps)), "no step was trained both"),
        ((*attempt(1, HALF, steps), *attempt(2, HALF, steps)), "no step was trained both"),
        ((*attempt(1, FULL, {1: 0.5}), *attempt(2, HALF, {1: 0.5, 2: 0.4})), "1 pairs of neighbouring steps"),
        ((*attempt(1, FULL, steps), *attempt(2, HALF, steps, trial=3)), "no step was trained both"),
    ):
        verdict, replay = replay_of(RunView(history), losses_of(RunView(history), stable=HALF))
        assert verdict is Replayed.NOT_RUN
        assert replay.startswith(why), replay


def test_steps_that_do_not_follow_each_other_tell_nothing_of_the_noise() -> None:
    history = tuple(attempt(1, FULL, {step: 0.5 + step for step in range(1, 40, 2)}))
    assert losses_of(RunView(history), stable=HALF).band is None
    assert losses_of(RunView(history), stable=HALF).pairs == 0


def test_the_band_of_a_loss_that_never_varies_is_rounding() -> None:
    history = (*attempt(1, FULL, dict.fromkeys(range(1, 10), 2.0)), *attempt(2, HALF, {9: 2.00001}))
    losses = losses_of(RunView(history), stable=HALF)
    assert losses.band is not None and abs(losses.band - 1e-5 * 2.00001) < 1e-12
    assert outside(losses.overlapping, band=losses.band) == ()


def test_the_loss_of_a_step_is_its_own_or_the_mean_of_its_updates() -> None:
    assert step_loss({"loss": 0.0}, "loss", updates=[0.5]) == 0.0
    assert step_loss({}, "loss", updates=[0.5, 1.5]) == 1.0
    assert step_loss({}, "loss", updates=[]) is None
    assert step_loss({"loss": float("nan")}, "loss", updates=[]) is None
    assert step_loss({}, "", updates=[float("inf"), 1.0]) is None


def test_losses_with_rare_spikes_are_not_taken_for_other_training() -> None:
    """Student's t with three degrees of freedom, as policy losses have them: the same training twice."""
    dice = random.Random(3)

    def drawn() -> float:
        return dice.gauss(0, 1) / (sum(dice.gauss(0, 1) ** 2 for _ in range(3)) / 3) ** 0.5

    apart = 0
    for _ in range(100):
        first = attempt(1, FULL, {step: drawn() for step in range(1, 101)})
        second = attempt(2, HALF, {step: drawn() for step in range(81, 121)})
        losses = losses_of(RunView((*first, *second)), stable=HALF)
        apart += bool(outside(losses.overlapping, band=losses.band))
    assert apart <= 10
