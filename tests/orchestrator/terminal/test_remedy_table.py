"""The ladder as a table: every remedy in every framework, by its own settings."""

from __future__ import annotations

import msgspec
import pytest
from click.testing import CliRunner

from autotune.launchers.base import Framework, Status
from autotune.launchers.frameworks import FRAMEWORKS
from autotune.orchestrator.cli import main
from autotune.orchestrator.cli import remedies as remedy_table
from autotune.policies.remedies.catalogue import MOVES, SAVING, turn_of
from autotune.policies.remedies.ladder import LADDER
from autotune.policies.values.knobs import KNOBS

EVERY = pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS.keys())


REMEDIES = {rung.name for rung in LADDER}
# A job may still deny these: growth is answered by a restart, and what other processes hold by waiting.
NOT_ON_THE_LADDER = {"restart_every", "free_before_relaunch", "capture_snapshot"}


def test_every_remedy_is_in_words() -> None:
    assert set(MOVES) == REMEDIES | NOT_ON_THE_LADDER
    assert {knob for move in MOVES.values() for knob in move.turns} <= set(KNOBS)


def test_a_knob_that_goes_both_ways_is_named_after_the_remedy_that_saves() -> None:
    assert SAVING["memory_fraction"] == "reduce_mem_fraction"
    for knob in MOVES["reduce_host_offload"].turns:
        assert turn_of(SAVING[knob], knob) == "on"


@EVERY
def test_every_remedy_has_a_row_that_works_or_says_why_not(framework: Framework) -> None:
    table = remedy_table.rows(framework)
    assert {row.remedy for row in table} >= REMEDIES
    for row in table:
        assert row.status in set(Status)
        assert row.status == Status.WORKS or row.reason, row
        assert row.phase and row.setting


@EVERY
def test_the_table_is_printed_for_people_and_for_programs(framework: Framework) -> None:
    done = CliRunner().invoke(main, ["remedies", framework.name])
    assert done.exit_code == 0
    assert all(name in done.output for name in REMEDIES)
    document = msgspec.json.decode(CliRunner().invoke(main, ["remedies", framework.name, "--json"]).output)
    assert document["framework"] == framework.name
    assert len(document["rows"]) == len(remedy_table.rows(framework))


def test_an_unknown_framework_is_answered() -> None:
    done = CliRunner().invoke(main, ["remedies", "bultin"])
    assert done.exit_code == 2
    assert "did you mean `builtin`?" in done.output
