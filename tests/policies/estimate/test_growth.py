"""How a phase's measured peaks grew, by series whose thirds are counted by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autotune.policies.estimate.belief.growth import growth
from autotune.policies.values.events import Progressed
from autotune.policies.values.observation import Peak

MIB = 1 << 20


def result(used: Sequence[int], *, of: int | None = None, first: int = 1, upper_bound: bool = False):
    """Return the growth of a phase that used so many MiB in consecutive steps, of which one warms up."""
    steps = [
        Progressed(
            step=first + number,
            of=of,
            peaks={
                "backward": Peak(used_bytes=each * MIB, capacity_bytes=80_000 * MIB, upper_bound=upper_bound)
            },
        )
        for number, each in enumerate(used)
    ]
    grew = growth(steps, "backward")
    if grew is None:
        return None
    sizes = (grew.settled_bytes, grew.grown_bytes, grew.expected_bytes, grew.error_bytes)
    return tuple(size / MIB for size in sizes)


def test_too_few_steps_say_nothing():
    assert result([]) is None
    assert result([9000, *[1000] * 5]) is None
    assert result([9000, *[1000] * 6]) is not None
    assert result([1000] * 9, upper_bound=True) is None
    assert growth([Progressed(step=n, of=9) for n in range(9)], "backward") is None


def test_the_first_step_warms_up_wherever_it_is():
    assert result([9000, *[1000] * 6]) == pytest.approx((1000, 0, 0, 4))
    assert result([9000, *[1000] * 6], first=40) == pytest.approx((1000, 0, 0, 4))


def test_steps_that_differ_by_noise_did_not_grow():
    # Medians of 1000 and 1004: four thousandths of the largest peak.
    assert result([0, 1000, 1000, 1000, 1002, 1004, 1004]) == pytest.approx((1004, 0, 0, 4.016))
    # 5 in the four steps between the outer thirds; the second step has one behind it.
    grew = result([0, 1000, 1000, 1000, 1002, 1005, 1005], of=7)
    assert grew == pytest.approx((1000 - 5 / 4, 5 + 5 / 4, 5 + 5 / 4, 4.02))


def test_a_single_long_step_is_no_growth():
    assert result([0, 1000, 1000, 1500, 1000, 1000, 1000]) == pytest.approx((1500, 0, 0, 6))


def test_shrinking_peaks_did_not_grow():
    assert result([0, 1400, 1400, 1200, 1200, 1000, 1000], of=100) == pytest.approx((1400, 0, 0, 5.6))


@pytest.mark.parametrize(
    ("of", "ahead"),
    [
        (7, 0),
        (27, 20 * 10),  # ten MiB a step goes on for the twenty that are left
        (5, 0),
        (None, 10 * 7 * 10),  # ten times the seven steps so far
    ],
)
def test_steady_growth_goes_on(of, ahead):
    # Thirds of two steps: medians 1005, 1025 and 1045 at steps 2.5, 4.5 and 6.5.
    used = [0, 1000, 1010, 1020, 1030, 1040, 1050]
    grown, largest = 60, 1050  # ten in each of the six steps since the first
    expected = (largest - grown, grown, grown + ahead, max(0.004 * largest, 0.3 * ahead))
    assert result(used, of=of) == pytest.approx(expected)


def test_growth_goes_on_to_the_end_that_was_reported_last():
    used = [0, 1000, 1010, 1020, 1030, 1040, 1050]
    steps = [
        Progressed(
            step=number,
            of=None if number < 7 else 27,
            peaks={"backward": Peak(used_bytes=each * MIB, capacity_bytes=80_000 * MIB)},
        )
        for number, each in enumerate(used, 1)
    ]
    grew = growth(steps, "backward")
    assert grew is not None and grew.expected_bytes == pytest.approx((60 + 20 * 10) * MIB)


def test_growth_that_levels_off_is_a_geometric_series():
    # 40 and then 20 in two steps each: 20, 10, 5, ... are still to come. The fourth step has three behind it.
    used = [0, 1000, 1000, 1040, 1040, 1060, 1060]
    settled = 1040 - 3 * 15
    assert result(used, of=1000) == pytest.approx((settled, 1060 - settled, 1080 - settled, max(4.24, 6)))
    # With two steps left no more than those bring: ten each.
    assert result(used, of=8) == pytest.approx((settled, 1060 - settled, 1070 - settled, 4.24))


@pytest.mark.parametrize(("latest", "slows"), [(1063, True), (1065, False)])
def test_a_third_that_grew_by_less_than_six_tenths_of_the_one_before_levels_off(latest, slows):
    after = latest - 1040
    grew = result([0, 1000, 1000, 1040, 1040, latest, latest], of=1007)
    assert grew is not None
    series = after * (after / 40) / (1 - after / 40)
    assert grew[2] - grew[1] == pytest.approx(series if slows else 1000 * after / 2)


def test_growth_that_has_ended_expects_no_more():
    settled = 1040 - 3 * 41 / 4
    grew = result([0, 1000, 1000, 1040, 1040, 1041, 1041], of=1000)
    assert grew == pytest.approx((settled, 1041 - settled, 1041 - settled, 4.164))


def test_thirds_of_steps_that_do_not_divide_leave_the_rest_to_the_middle():
    # Eight steps: two, four and two; at steps 2.5, 5.5 and 8.5.
    used = [0, 1000, 1000, 1030, 1030, 1030, 1030, 1060, 1060]
    # Medians grow by 10 a step; the fourth step has three behind it.
    assert result(used, of=19) == pytest.approx((1000, 60, 60 + 10 * 10, 30))
