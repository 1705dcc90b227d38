"""Public regressions of an upgrade: `plan --against` names what changed, and which way the peaks go."""

from __future__ import annotations

import pytest

from benchmarks.upgrades import CASES, Case, answer, named, rise


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_upgrade_that_changed_memory_is_named_before_it_is_made(case: Case) -> None:
    document = answer(case)
    assert named(document, case.changed), document
    if case.more is not None:
        assert (rise(document)[1] > 0) is case.more, document["phases"]


def test_an_engine_that_moves_onto_the_trainer_s_gpus_is_told() -> None:
    (case,) = (case for case in CASES if case.name == "trl-colocated")
    assert answer(case)["placement"] == ["separate", "colocated"]
