import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from autotune.launchers.builtin.storage import checkpoint, tensor_file


def save(folder: Path, step: int, *, keep: int = 2) -> Path:
    partial = checkpoint.begin(folder, step=step)
    checkpoint.rank_file(partial, 0).write_bytes(b"x" * 100)
    return checkpoint.commit(partial, step=step, position=step * 4, ranks=1, keep=keep)


def test_the_newest_is_located_and_old_ones_go(tmp_path: Path) -> None:
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


def test_a_complete_one_is_never_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(FileExistsError, match="does another run use checkpoint_dir"):
        save(tmp_path, 1)
    assert checkpoint.newest_complete(tmp_path) == tmp_path / "step-000001"


def test_everything_is_durable_before_the_rename_and_that_before_anything_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path, 1)
    done: list[tuple[str, str]] = []
    for module, name in ((os, "fsync"), (Path, "rename"), (shutil, "rmtree")):
        original = getattr(module, name)

        def noted(subject: Any, *arguments: Any, _call: Any = original, _name: str = name) -> Any:
            path = Path(f"/proc/self/fd/{subject}").readlink() if isinstance(subject, int) else Path(subject)
            done.append((_name, path.name))
            return _call(subject, *arguments)

        monkeypatch.setattr(module, name, noted)
    write_step(tmp_path, 2)
    assert done == [
        ("fsync", "rank-00000.safetensors"),
        ("fsync", "rank-00001.safetensors"),
        ("fsync", "manifest.json"),
        ("fsync", ".partial-step-000002"),
        ("rename", ".partial-step-000002"),
        ("fsync", tmp_path.name),
        ("rmtree", "step-000001"),
    ]


def test_a_new_folder_is_durable_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(checkpoint, "_sync_folder", synced.append)
    checkpoint.begin(tmp_path / "a" / "b", step=1)
    assert synced == [tmp_path / "a", tmp_path]


def test_a_kill_at_any_line_leaves_a_checkpoint_and_the_next_save_works(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert before > 50  # so many kills left the old one as the newest
    assert after > 5  # and so many the new one


def write_step(folder: Path, step: int) -> Path:
    """Save a step of two ranks, keeping one checkpoint."""
    partial = checkpoint.begin(folder, step=step)
    for rank in range(2):
        entries = [tensor_file.Entry(name, "U8", (1000,)) for name in ("weight/a", "first/a")]
        blocks = [np.full(1000, step, dtype=np.uint8) for _ in entries]
        tensor_file.write(checkpoint.rank_file(partial, rank), entries, blocks)
    return checkpoint.commit(partial, step=step, position=step, ranks=2, keep=1)


def kill_at_every_line(root: Path) -> None:
    """Kill a save at each line that it runs, removal included, until one gets to its end."""
    newest = {1: 0, 2: 0}
    for line in count(1):
        folder = root / f"{line}"
        write_step(folder, 1)
        child = os.fork()
        if child == 0:
            kill_at(line)
            write_step(folder, 2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        result = checkpoint.newest_complete(folder)
        assert result is not None, f"killed at line {line}: no checkpoint is left"
        manifest = checkpoint.read_manifest(result)
        assert manifest is not None
        for rank in range(2):
            content = checkpoint.rank_file(result, rank).read_bytes()
            assert content.endswith(bytes([manifest.step]) * 2000)
        newest[manifest.step] += 1
        write_step(folder, manifest.step + 1)
        assert [path.name for path in folder.iterdir()] == [f"step-{manifest.step + 1:06d}"]
        if not os.WIFSIGNALED(status):
            break
    sys.stdout.write(f"{newest[1]} {newest[2]}")


def kill_at(line: int) -> None:
    left = line
    files = {checkpoint.__file__, tensor_file.__file__, shutil.__file__}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        left -= event == "line"
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


if __name__ == "__main__":
    kill_at_every_line(Path(sys.argv[1]))
