"""The benchmark of rehearsals: its events take what some configuration frees."""

from __future__ import annotations

import pytest

from benchmarks.late_events import CALM, Kind, incurable
from benchmarks.rehearsal import cases, curable, rehearsed


@pytest.mark.parametrize("kind", [Kind.RELOAD, Kind.OPTIMIZER])
def test_some_configuration_gets_through_every_event(kind: Kind) -> None:
    drawn = [*cases(kind, 2, seed=3)]
    assert len(drawn) == 2
    assert all(case.more > 0 and curable(case) for case, _ in drawn)


def test_draws_that_nothing_cures_are_counted() -> None:
    drawn = [*cases(Kind.RELOAD, 2, seed=3)]
    left_out = sum(before for _, before in drawn)
    row = [*incurable(drawn)][-1]
    assert row.startswith(f"| reload | {2 + left_out} |")


def test_a_job_without_an_event_is_not_changed() -> None:
    case, left_out = next(cases(CALM[0], 1, seed=3))
    assert left_out == 0
    outcome = rehearsed(case)
    assert outcome.holds and not outcome.changed
