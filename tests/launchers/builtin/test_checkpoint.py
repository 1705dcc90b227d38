from pathlib import Path

import pytest

from autotune.launchers.builtin.storage import checkpoint


def save(folder: Path, step: int, *, keep: int = 2) -> Path:
    partial = checkpoint.begin(folder, step=step)
    checkpoint.rank_file(partial, 0).write_bytes(b"x" * 100)
    return checkpoint.commit(partial, step=step, position=step * 4, ranks=1, keep=keep)


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step-000002", "step-000003"]
    newest = checkpoint.newest_complete(tmp_path)
    assert newest is not None
    manifest = checkpoint.read_manifest(newest)
    assert manifest is not None
    assert (manifest.step, manifest.position) == (3, 12)


def test_an_uncommitted_one_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 1)
    partial = checkpoint.begin(tmp_path, step=2)
    checkpoint.rank_file(partial, 0).write_bytes(b"half")
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "step-000001"
    assert list(checkpoint.begin(tmp_path, step=2).iterdir()) == []


def test_torn_ones_do_not_count(tmp_path: Path) -> None:
    save(tmp_path, 1)
    shortened = save(tmp_path, 2)
    checkpoint.rank_file(shortened, 0).write_bytes(b"x" * 99)
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "step-000001"
    cut = save(tmp_path, 3)
    manifest = cut / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:20])
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "step-000001"


def test_a_checkpoint_without_every_rank_is_not_committed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    partial = checkpoint.begin(tmp_path, step=2)
    checkpoint.rank_file(partial, 0).write_bytes(b"x" * 100)
    with pytest.raises(FileNotFoundError, match="rank-00001"):
        checkpoint.commit(partial, step=2, position=8, ranks=2, keep=1)
    assert checkpoint.complete(tmp_path) == [tmp_path / "step-000001"]


def test_a_manifest_without_every_rank_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 1)
    manifest = save(tmp_path, 2) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"ranks":1', '"ranks":2'))
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "step-000001"


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.newest_complete(tmp_path) is None
    assert checkpoint.newest_complete(tmp_path / "missing") is None
