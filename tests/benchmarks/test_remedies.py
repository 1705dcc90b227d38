"""The page of the settings behind the remedies, and the check for settings that no row has."""

from __future__ import annotations

import pytest

from benchmarks import remedies
from tests.faults.page import placed


def test_the_page_is_that_of_the_rows() -> None:
    page = remedies.PAGE.read_text()
    assert placed(page, "remedies", remedies.table()) == page, "python -m benchmarks.remedies"


def test_every_setting_on_record_that_is_a_knob_elsewhere_has_a_row_or_a_reason() -> None:
    assert not list(remedies.holes())


def test_a_row_that_is_missing_is_reported_with_the_setting_on_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    framework = remedies.frameworks()["skyrl"]
    rows = tuple(row for row in framework.table.rows if row.knob not in ("logprob_chunk", "memory_fraction"))
    monkeypatch.setattr(type(framework), "table", framework.table._replace(rows=rows))
    assert {(hole.knob, hole.setting) for hole in remedies.holes()} == {
        ("logprob_chunk", "trainer.logprobs_chunk_size"),
        ("memory_fraction", "generator.inference_engine.engine_init_kwargs.gpu_memory_utilization"),
    }
