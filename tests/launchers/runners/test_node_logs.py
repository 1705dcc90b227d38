"""The logs of a node's workers, as Ray leaves and moves them."""

from __future__ import annotations

from pathlib import Path

from autotune.launchers.runners.node.logs import Logs

JOB = "02000000"
NAME = f"worker-{'ab' * 28}-{JOB}-4711.err"


def data_of(logs: Logs, cursor: dict[str, int]) -> bytes:
    """Read on from the cursor and return what is new."""
    pieces = logs.read(cursor, jobs=(JOB,), thorough=True)
    cursor.update((piece.path, piece.end) for piece in pieces)
    return b"".join(piece.data for piece in pieces)


def test_a_dead_workers_log_that_ray_has_moved_is_read_to_its_end(tmp_path: Path) -> None:
    logs, cursor = Logs(output=None, workers=tmp_path), dict[str, int]()
    (tmp_path / NAME).write_bytes(b"step: 1\n")
    assert data_of(logs, cursor) == b"step: 1\n"

    with (tmp_path / NAME).open("ab") as file:
        file.write(b"torch.OutOfMemoryError: CUDA out of memory\n")
    (tmp_path / "old").mkdir()
    (tmp_path / NAME).rename(tmp_path / "old" / NAME)
    assert data_of(logs, cursor) == b"torch.OutOfMemoryError: CUDA out of memory\n"
    assert data_of(logs, cursor) == b""


def test_a_log_that_ray_moved_before_it_was_first_read_is_located(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / NAME).write_bytes(b"killed\n")
    (tmp_path / "old" / NAME.replace(JOB, "03000000")).write_bytes(b"another job's\n")
    logs = Logs(output=None, workers=tmp_path)
    assert data_of(logs, {}) == b"killed\n"
