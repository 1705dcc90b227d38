"""Containers in a job's command: the folders of this machine that they mount."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath

from autotune.policies.values.job import Job

CONTAINERS = frozenset({"docker", "podman", "apptainer", "singularity", "enroot", "shifter"})
SRUN = "srun"  # starts a container if given one of these options (pyxis, a plug-in of Slurm)
_OF_SRUN = ("--container-image", "--container-name")
_KEEP_FOLDER = frozenset({"apptainer", "singularity"})  # mount the caller's folder and start in it
_KEEP_NOTHING = frozenset({"docker", "podman", SRUN})  # lose what a program writes outside mounts
_FOLDER = ("-w", "--workdir", "--pwd", "--cwd", "--container-workdir")
_MOUNT = ("-v", "--volume", "--mount", "-B", "--bind", "-m", "--container-mounts")
_VARIABLE = ("-e", "--env")
_PROGRAM = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|uv|ray|ba?sh|sh)")


def is_container(words: Sequence[str]) -> bool:
    """Return whether a command line starts its program in a container."""
    name = PurePosixPath(words[0]).name if words else ""
    return name in CONTAINERS or (name == SRUN and any(option in _OF_SRUN for option, _ in _options(words)))


def code_folders(job: Job) -> tuple[Path, ...]:
    """Return the folders of this machine mounted as a container's working directory and PYTHONPATH.

    Folders of the image itself cannot be read and are left out.
    """
    options = list(_options(job.command))
    mounts = [
        (target, Path(job.workdir, source))
        for target, source in _mounted(options)
        if source.startswith(("/", "."))  # otherwise it is a named volume
    ]
    inside = [value for name, value in options if name in _FOLDER][-1:]
    for name, value in options:
        if name in _VARIABLE and value.startswith("PYTHONPATH="):
            inside += value.partition("=")[2].split(os.pathsep)
    result = [_outside(PurePosixPath(folder), mounts) for folder in inside if folder]
    if PurePosixPath(job.command[0]).name in _KEEP_FOLDER and not any(n in _FOLDER for n, _ in options):
        result.insert(0, Path(job.workdir))
    return tuple(folder for folder in result if folder is not None)


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options before the program in the container, each with its value or the next word."""
    of_container = "--container-" if PurePosixPath(words[0]).name == SRUN else "-"  # srun's `-w` names nodes
    for word, following in pairwise((*words[1:], "")):
        if _PROGRAM.fullmatch(word):
            return
        name, equals, value = word.partition("=")
        if word.startswith(of_container):
            yield name, value if equals else following


def _mounted(options: Iterable[tuple[str, str]]) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield the target folder and the source of each mount."""
    values = [value for name, value in options if name in _MOUNT]
    for part in (part for value in values for part in ([value] if "=" in value else value.split(","))):
        if "=" in part:
            fields = dict(each.partition("=")[::2] for each in part.split(","))
            source = fields.get("source") or fields.get("src", "")
            target = fields.get("target") or fields.get("destination") or fields.get("dst", "")
        else:
            source, _, rest = part.partition(":")
            target = rest.partition(":")[0] or source
        if target.startswith("/"):
            yield PurePosixPath(target), source


def with_lost_checkpoints(job: Job, folder: str | None) -> Job:
    """Return the job with a note if its checkpoints are certainly lost with its container.

    That is so for docker, podman and Slurm's containers if nothing is mounted at the checkpoint folder.
    """
    if not folder or not is_container(job.command):
        return job
    if PurePosixPath(job.command[0]).name not in _KEEP_NOTHING:
        return job
    options = list(_options(job.command))
    path = PurePosixPath(folder)
    inside = [value for name, value in options if name in _FOLDER][-1:]
    if path.is_relative_to(job.workdir) and inside:  # a relative path, which the container resolves
        path = PurePosixPath(inside[0]) / path.relative_to(job.workdir)
    if any(path.is_relative_to(target) for target, _ in _mounted(options)):
        return job
    lost = f"the container mounts nothing at the checkpoint folder `{path}`: a relaunch would start over"
    return job.with_notes(lost)


def _outside(folder: PurePosixPath, mounts: list[tuple[PurePosixPath, Path]]) -> Path | None:
    """Return the folder of this machine mounted at a folder of the container; None if it is not mounted."""
    above = [(target, source) for target, source in mounts if folder.is_relative_to(target)]
    if not above:
        return None
    target, source = max(above, key=lambda mount: len(mount[0].parts))
    return source / folder.relative_to(target)
