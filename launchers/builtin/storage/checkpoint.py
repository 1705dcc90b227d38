"""Checkpoint folders: written beside their place, made durable, renamed; torn ones do not count.

Each rank writes its own file and makes it durable (`tensor_file`); when all have said so, the main program
commits: it writes the manifest, makes manifest and folder durable, and renames the folder. A machine that
stops anywhere in between has the checkpoint before; nothing is removed until the new one is durable.

The ranks write their files through `tensor_file` and not `torch.distributed.checkpoint`, which reports a
full disk as a RuntimeError without errno (torch 2.13): the failure record could not name the cause.
"""

import errno
import os
import re
import shutil
from pathlib import Path

import msgspec

_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{6,})")
_PARTIAL = ".partial-"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a complete checkpoint says about itself."""

    schema: int = 1
    step: int
    position: int  # of the data: prompts consumed
    ranks: int
    files: dict[str, int]  # name: size in bytes


def begin(folder: Path, *, step: int) -> Path:
    """Return an empty folder for the ranks to write into; what killed runs left unfinished goes."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in created:
        _sync_folder(path.parent)
    for left in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left)
    partial = folder / f"{_PARTIAL}step-{step:06d}"
    partial.mkdir()
    return partial


def commit(partial: Path, *, step: int, position: int, ranks: int, keep: int) -> Path:
    """Make a written checkpoint the newest one, and remove torn ones and the oldest beyond `keep`.

    Raises FileNotFoundError where a rank's file is missing, and FileExistsError where a complete checkpoint
    has its place; the checkpoints before it stay.
    """
    for rank in range(ranks):
        if not rank_file(partial, rank).is_file():
            raise FileNotFoundError(
                errno.ENOENT,
                "a rank's file is missing; can every node see checkpoint_dir?",
                str(rank_file(partial, rank)),
            )
    final = partial.parent / f"step-{step:06d}"
    if final.exists():
        if read_manifest(final) is not None:
            raise FileExistsError(
                errno.EEXIST, "this step is saved already; does another run use checkpoint_dir?", str(final)
            )
        shutil.rmtree(final)
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    manifest = Manifest(step=step, position=position, ranks=ranks, files=files)
    with (partial / _MANIFEST).open("wb") as file:
        file.write(msgspec.json.encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    partial.rename(final)
    _sync_folder(final.parent)
    kept = complete(final.parent)[-keep:]
    for path in _named(final.parent):
        if path not in (*kept, final):
            shutil.rmtree(path)
    return final


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    return [path for path in _named(folder) if read_manifest(path)] if folder.is_dir() else []


def newest_complete(folder: Path) -> Path | None:
    """Return the checkpoint to continue from."""
    return next(reversed(complete(folder)), None)


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if it is torn."""
    try:
        manifest = msgspec.json.decode((path / _MANIFEST).read_bytes(), type=Manifest)
        intact = all((path / name).stat().st_size == size for name, size in manifest.files.items())
        intact &= all(rank_file(path, rank).name in manifest.files for rank in range(manifest.ranks))
    except (OSError, msgspec.DecodeError):
        return None
    return manifest if intact else None


def rank_file(folder: Path, rank: int) -> Path:
    """Return where a rank keeps its part."""
    return folder / f"rank-{rank:05d}.safetensors"


def _named(folder: Path) -> list[Path]:
    result = (path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    return sorted(result, key=lambda path: int(path.name[5:]))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
