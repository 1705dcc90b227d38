"""Where the Python of a program in a container looks for code, as folders of this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from autotune.policies.values.job import Job

CONTAINERS = frozenset({"docker", "podman", "apptainer", "singularity", "enroot", "shifter"})
_KEEP_FOLDER = frozenset({"apptainer", "singularity"})  # they start in the caller's folder, which they mount
_FOLDER = ("-w", "--workdir", "--pwd", "--cwd")
_MOUNT = ("-v", "--volume", "--mount", "-B", "--bind", "-m")
_VARIABLE = ("-e", "--env")
_PROGRAM = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|uv|ray|ba?sh|sh)")


def is_container(job: Job) -> bool:
    """Return whether the command of a job starts its program in a container."""
    return bool(job.command) and PurePosixPath(job.command[0]).name in CONTAINERS


def code_folders(job: Job) -> tuple[Path, ...]:
    """Return the working directory of the container and its PYTHONPATH, as far as they are mounted from here.

    What the image holds cannot be read: a folder of it is left out.
    """
    options = list(_options(job.command[1:]))
    mounts = [mount for name, value in options if name in _MOUNT for mount in _mounts(value, job.workdir)]
    inside = [value for name, value in options if name in _FOLDER][-1:]
    for name, value in options:
        if name in _VARIABLE and value.startswith("PYTHONPATH="):
            inside += value.partition("=")[2].split(os.pathsep)
    found = [_outside(PurePosixPath(folder), mounts) for folder in inside if folder]
    if PurePosixPath(job.command[0]).name in _KEEP_FOLDER and not any(n in _FOLDER for n, _ in options):
        found.insert(0, Path(job.workdir))
    return tuple(folder for folder in found if folder is not None)


def _options(words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the options in front of the program in the container, each with its value or the next word."""
    for word, following in zip(words, (*words[1:], ""), strict=True):
        if _PROGRAM.fullmatch(word):
            return
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            yield name, value if equals else following


def _mounts(text: str, workdir: str) -> Iterator[tuple[PurePosixPath, Path]]:
    """Yield the folder in the container and that of this machine of each mount; named volumes are skipped."""
    for part in [text] if "=" in text else text.split(","):
        if "=" in part:
            fields = dict(each.partition("=")[::2] for each in part.split(","))
            source = fields.get("source") or fields.get("src", "")
            target = fields.get("target") or fields.get("destination") or fields.get("dst", "")
        else:
            source, _, rest = part.partition(":")
            target = rest.partition(":")[0] or source
        if source.startswith(("/", ".")) and target.startswith("/"):
            yield PurePosixPath(target), Path(workdir, source)


def _outside(folder: PurePosixPath, mounts: list[tuple[PurePosixPath, Path]]) -> Path | None:
    """Return the folder of this machine that is mounted where a folder of the container lies."""
    above = [(target, source) for target, source in mounts if folder.is_relative_to(target)]
    if not above:
        return None
    target, source = max(above, key=lambda mount: len(mount[0].parts))
    return source / folder.relative_to(target)
