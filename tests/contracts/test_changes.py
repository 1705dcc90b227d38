"""The page of the settings that frameworks took."""

from __future__ import annotations

from pathlib import Path

from autotune.launchers.frameworks.areal.adapter import Areal
from tests.contracts import changes
from tests.launchers.frameworks.areal_jobs import CLUSTER, JOBS


def test_the_page_has_the_recorded_rows() -> None:
    page = changes.PAGE.read_text()
    rows = changes.table(changes.read(changes.CHECKED))
    assert changes.placed(page, "checked", rows) == page, "python -m tests.contracts.changes"


def test_knobs_of_one_setting_have_a_row_each(tmp_path: Path) -> None:
    profile, path = Areal().profile(JOBS["megatron"], CLUSTER), tmp_path / "rows.jsonl"
    changes.keep(path, profile, [("context_parallel", 2), ("tensor_parallel", 4)], "its parser")
    rows = {row.knob: (row.setting, row.values) for row in changes.read(path)}
    assert rows == {
        "context_parallel": ("actor.backend", ("2",)),
        "tensor_parallel": ("actor.backend", ("4",)),
    }
