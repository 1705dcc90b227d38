"""A block of lines is passed over only where none of its lines reports progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.launchers.frameworks import FRAMEWORKS

LOGS = sorted(path for path in (Path(__file__).parent / "logs").rglob("*") if path.is_file())
OWN = [
    "builtin: step 3/6 seconds=1.5",
    "trl: phase start name=backward step=2",
    "Iteration 12/100: loss 0.3",
    "{'train_runtime': 12.0, 'step': 4}",
    "resuming training from step 7",
    "nothing of the kind",
]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_line_with_a_marker_is_never_passed_over(name: str) -> None:
    framework = FRAMEWORKS[name]
    lines = [line for log in LOGS for line in log.read_text(errors="replace").split("\n")] + OWN
    marked = [line for line in lines if framework.marker(line) is not None]

    assert all(framework.marks(line.encode()) for line in marked)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_block_without_progress_is_passed_over(name: str) -> None:
    assert not FRAMEWORKS[name].marks(b"INFO: POST /generate 200 OK\nloss 0.4213, gradient norm 1.8\n")
