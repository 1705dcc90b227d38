"""The error printed beside a prediction, against recorded runs."""

from autotune.policies.estimate.constants import constant
from benchmarks.coverage import RECORDED, cases_below, share_within


def test_nine_of_ten_measured_peaks_lie_within_the_printed_error() -> None:
    cases = cases_below(*RECORDED)
    assert len(cases) >= 50 and len({case.run for case in cases}) >= 7
    assert share_within(cases, constant("interval")) >= 0.9
    assert share_within(cases, 1.0) < 0.8  # one standard deviation would promise too much
