"""The scenarios that CI plays: the same functions as `make faults`, with waits of a fifth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.bench import Bench
from tests.faults.page import placed, table
from tests.faults.scenario import Row, Scenario, play
from tests.faults.scenarios import EVERY

SCALE = 0.2


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", [s for s in EVERY if s.ci], ids=lambda s: s.name)
def test_a_run_survives(scenario: Scenario) -> None:
    row = play(scenario, seed=1, scale=SCALE, version="")
    assert row.survived, row.reason
    assert row.left == 0


def row(**changes: object) -> Row:
    known = {"scenario": "disk-full", "seed": 1, "survived": True, "attempts": 1, "repeated": 0, "left": 0}
    known |= {"verdict": "completed", "exit_code": 0, "notice_s": 1.5, "seconds": 20.0, "scale": 1.0}
    known |= {"version": "abc", "at": "2026-11-22T12:00:00Z"}
    return Row(**{**known, **changes})  # type: ignore[arg-type]


def test_the_table_hides_nothing() -> None:
    text = table(
        [row(), row(seed=2, survived=False, attempts=3, notice_s=4.0, reason="it was started anew")],
    )
    (line,) = (line for line in text.splitlines() if line.startswith("| `disk-full`"))
    assert "| 1 of 2 | 1 to 3 | 0 | 0 | completed | 1.5 to 4 |" in line
    assert "`disk-full`, seed 2: it was started anew" in text
    assert all(f"| `{s.name}` |" in text for s in EVERY)
    assert text.count("not played") == len(EVERY) - 1


def test_rows_of_shortened_waits_are_not_displayed() -> None:
    assert "not played" in next(
        line for line in table([row(scale=SCALE)]).splitlines() if "`disk-full`" in line
    )


def test_only_the_marked_part_of_a_page_changes() -> None:
    page = "# Title\n\n<!-- faults -->\nold\n<!-- end of faults -->\n\nAfter.\n"
    assert placed(page, "faults", "new") == page.replace("old", "new")
    with pytest.raises(ValueError, match="no part"):
        placed(page, "soak", "new")


def test_an_attempt_that_ended_before_it_began_is_distinguished_from_one_that_the_job_does_not_know() -> None:
    with Bench() as bench:
        folder = bench.runs / "night"
        folder.mkdir(parents=True)
        by_user, lost = {"outcome": "cancelled", "by": "user"}, {"outcome": "lost", "reason": ""}
        ends = (
            {"attempt": 1, "outcome": by_user, "unwatched": False, "step": None},
            {"attempt": 2, "outcome": lost, "unwatched": True, "step": None},
            {"attempt": 3, "outcome": lost, "unwatched": False, "step": None},  # its driver watched it begin
            {"attempt": 4, "outcome": by_user, "unwatched": False, "step": 2},  # and so did the job
            {"attempt": 5, "outcome": by_user, "unwatched": False, "step": None},
        )
        lines = (json.dumps({"type": "ended", **end}) + "\n" for end in ends)
        (folder / "events.jsonl").write_text("".join(lines))
        (bench.folder / "starts.txt").write_text("5 4711\n")
        assert bench.unbegun() == {1, 2}


def test_names_are_unique() -> None:
    assert len({s.name for s in EVERY}) == len(EVERY)


def test_what_is_allowed_beyond_one_attempt_has_its_reason() -> None:
    for scenario in EVERY:
        plain = scenario.attempts == 1 and scenario.repeated == 0 and scenario.verdict == "completed"
        assert plain or scenario.why, scenario.name


def test_every_page_of_results_is_whole() -> None:
    from tests.faults.__main__ import PAGE, RESULTS, read

    names = {s.name for s in EVERY}
    assert {r.scenario for r in read(RESULTS)} <= names
    assert Path(PAGE).exists()
