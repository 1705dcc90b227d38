"""What measured step times say of other configurations: counted by hand, without knobs or with one."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.policies.recovery.step_times import (
    Offered,
    Pace,
    expected_s,
    pace_of,
    slower,
    unmeasured,
)


def parts(*rows: tuple[float, float, float, float], places: tuple[float, ...] = ()) -> Offered:
    """Return configurations by their seconds of generation, log probabilities, training and weight sync."""
    return Offered(rows=np.array(rows), codes=np.array(places).reshape(len(rows), -1))


def before(*, overlapped: bool, knobs: int = 0) -> Pace:
    return unmeasured(10.0, knobs, overlapped=overlapped)


@pytest.mark.parametrize(
    ("row", "in_turn", "at_once"),
    [
        ((10, 1, 3, 2), 16, 10 + 2),
        ((3, 1, 4, 2), 10, 1 + 4 + 2),
        ((5, 1, 4, 2), 12, 5 + 2),  # as long as what it overlaps with
        ((0, 0, 0.1, 0), 0.5, 0.5),  # a twentieth of a usual step is the least
    ],
)
def test_generation_and_training_at_once_take_as_long_as_the_longer(row, in_turn, at_once):
    assert expected_s(before(overlapped=False), parts(row)) == pytest.approx([in_turn])
    assert expected_s(before(overlapped=True), parts(row)) == pytest.approx([at_once])


def test_two_values_of_a_knob_differ_by_what_no_roofline_predicts():
    """6 % of a step by the knob alone and 6 % by all together; its ends have little of that in common."""
    same = (4, 0, 5, 1)
    there, here = parts(same, places=(1.0,)), parts(same, places=(0.0,))
    more, error = slower(before(overlapped=False, knobs=1), there, here)
    assert more == pytest.approx([0.0])
    assert error == pytest.approx([(2 * 2 * 0.06**2 * (1 - np.exp(-0.5 / 0.4**2))) ** 0.5])
    _, none = slower(before(overlapped=False, knobs=1), here, here)
    assert none == pytest.approx([0.0])


def test_a_part_that_takes_longer_is_uncertain_by_two_fifths_of_what_it_takes():
    more, error = slower(before(overlapped=False), parts((8, 0, 5, 1)), parts((4, 0, 5, 1)))
    assert more == pytest.approx([0.4])
    assert error == pytest.approx([0.4 * (8 - 4) / 10])


def test_the_factors_of_parts_that_overlap_are_measured_where_they_are_the_longer():
    # A step takes 1.5 times the predicted seconds, so that these took 6.7 and 13.3 predicted ones.
    pieces = parts((10, 0, 4, 0), (4, 0, 10, 0))
    pace = pace_of(pieces, np.array([10.0, 10.0]), [1 / 10, 1 / 20], [0.0, 0.0], overlapped=True)
    assert pace.scale == pytest.approx(1.5)
    # A factor of 1 ± 0.4 before, 3 % of a step's time as the error after: precisions 6.25, 2500 and 625.
    generation = (6.25 + 2500 * 2 / 3) / 2506.25
    training = (6.25 + 625 * 4 / 3) / 631.25
    assert pace.factors == pytest.approx([generation, 1.0, training, 1.0])


def test_what_was_measured_is_expected_again():
    pieces = parts((10, 0, 4, 0), (4, 0, 10, 0))
    pace = pace_of(pieces, np.array([14.0, 14.0]), [1 / 10, 1 / 20], [0.0, 0.0], overlapped=False)
    assert expected_s(pace, pieces) * pace.scale == pytest.approx([10, 20], rel=0.01)
    noisy = pace_of(pieces, np.array([14.0, 14.0]), [1 / 10, 1 / 20], [0.5, 0.5], overlapped=False)
    first, second = expected_s(noisy, pieces) * noisy.scale
    assert 10.5 < first < second < 19.5
