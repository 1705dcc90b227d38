"""Examine what a node offers a job before anything is started on it, without changing the node."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import msgspec

from autotune.launchers.packages import DISTRIBUTION, version_of
from autotune.launchers.runners.node import host
from autotune.launchers.runners.node.child import initial_environment, outside_ray_worker
from autotune.launchers.runners.node.memory_release import ProcessHold, hold_of
from autotune.launchers.runners.node.model_folder import CONFIG, find_folder
from autotune.policies.values.value import Value

SHM = "/dev/shm"  # noqa: S108 - used by NCCL and Ray for shared memory on Linux
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.distcp")
_LONGEST = 300  # characters of an error
_TAIL_BYTES = 65536  # of the interpreter's output
IMPORT_S = 60.0  # for the imports, which read gigabytes from a cold file system
_KILLED_S = 2.0  # for a killed interpreter to end; one that is blocked on a hung mount does not
_ALARM_S = 5.0  # beyond the limit, after which an interpreter that nobody waits for ends itself
# Runs in the job's interpreter. It prints versions first, so that a hanging import loses none of them. It
# ends with its parent process (PR_SET_PDEATHSIG), which Ray kills if a node answers too late.
_PROGRAM = """\
import importlib, json, platform, signal, sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
modules, names, limit = json.loads(sys.argv[1])
signal.alarm(limit)
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (ImportError, AttributeError, OSError):
    pass
versions = {}
for name in names:
    try:
        versions[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps([platform.python_version(), versions]), flush=True)
for name in modules:
    module = importlib.import_module(name)
    folders = [Path(path) for path in getattr(module, "__path__", ())]
    if folders and getattr(module, "__file__", None) is None:  # any folder of that name can be imported
        files = ("setup.py", "pyproject.toml")
        checkout = any((folder / file).exists() for folder in folders for file in files)
        if checkout or not any(True for folder in folders for _ in folder.rglob("*.py")):
            raise ModuleNotFoundError(f"No module named {name!r}: {folders[0]} is a folder, not a package")
"""


class Examination(Value, frozen=True, kw_only=True):
    """What to examine on a node; everything beyond the machine itself belongs to a job."""

    python: str | None = None  # the job's interpreter; None: the one that runs autotune
    modules: tuple[str, ...] = ()  # that the interpreter must import
    distributions: tuple[str, ...] = ()  # whose versions to read
    import_s: float = IMPORT_S
    workdir: str | None = None
    env: dict[str, str] = {}
    model: str | None = None  # a path or a hub name
    folders: tuple[str, ...] = ()  # that are written to, existing or not
    files: tuple[str, ...] = ()  # data files, by absolute path
    libraries: tuple[str, ...] = ()  # that a process may preload


class CardFacts(Value, frozen=True, kw_only=True):
    """A GPU as reported by NVML."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    holders: tuple[ProcessHold, ...] = ()  # empty in a container that hides processes


class FolderFacts(Value, frozen=True, kw_only=True):
    """A folder that a job writes to, or the nearest existing folder above it."""

    path: str
    nearest: str
    writable: bool
    free_bytes: int
    total_bytes: int


class ModelFacts(Value, frozen=True, kw_only=True):
    """A model on the node."""

    place: str = ""  # empty: not on this node
    error: str = ""
    weights_bytes: int = 0


class ProgramFacts(Value, frozen=True, kw_only=True):
    """The job's interpreter."""

    path: str
    python: str = ""  # its version
    versions: dict[str, str] = {}  # by distribution
    error: str = ""  # why it cannot import what the job needs
    late: bool = False  # the import exceeded its time limit


class NodeFacts(Value, frozen=True, kw_only=True):
    """The facts of a node."""

    python: str
    ray: str
    autotune: str
    driver: str = ""  # of the GPUs
    cuda: str = ""  # the newest version that the driver supports
    cards: tuple[CardFacts, ...] = ()
    faults: tuple[str, ...] = ()  # GPUs that cannot be read, and why
    host_used_bytes: int
    host_total_bytes: int
    shm_free_bytes: int
    shm_total_bytes: int
    temporary: FolderFacts  # where Ray keeps its sessions and spilled objects
    workdir_there: bool = True
    folders: tuple[FolderFacts, ...] = ()
    model: ModelFacts | None = None
    program: ProgramFacts | None = None
    files: dict[str, bool] = {}  # file -> can be read
    libraries: dict[str, bool] = {}  # library -> can be preloaded


def examine(wanted: Examination) -> NodeFacts:
    """Return the facts of this node; the job's interpreter runs for at most `import_s` seconds."""
    memory = host.read_host()
    shm = os.statvfs(SHM) if Path(SHM).is_dir() else None
    faults: list[str] = []
    return NodeFacts(
        python=platform.python_version(),
        ray=version_of("ray"),
        autotune=version_of(DISTRIBUTION),
        driver=host.driver_version(),
        cuda=host.cuda_version(),
        cards=tuple(_card(card) for card in host.read_cards(faults.append)),
        faults=tuple(faults),
        host_used_bytes=memory.used_bytes,
        host_total_bytes=memory.total_bytes,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm is not None else 0,
        shm_total_bytes=shm.f_blocks * shm.f_frsize if shm is not None else 0,
        temporary=folder_facts(_temporary()),
        workdir_there=wanted.workdir is None or _can_enter(wanted.workdir),
        folders=tuple(folder_facts(folder) for folder in wanted.folders),
        model=_model(wanted),
        program=_program(wanted),
        files={name: os.access(name, os.R_OK) for name in wanted.files},
        libraries={name: _preloads(name) for name in wanted.libraries},
    )


def folder_facts(path: str) -> FolderFacts:
    """Return the facts of a folder on this machine, or of the nearest existing one above it."""
    folder = _expanded(path).absolute()
    nearest = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    status = os.statvfs(nearest)
    return FolderFacts(
        path=str(folder),
        nearest=str(nearest),
        writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK),
        free_bytes=status.f_bavail * status.f_frsize,
        total_bytes=status.f_blocks * status.f_frsize,
    )


def _temporary() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # no temporary folder is writable
        return os.environ.get("TMPDIR", "/tmp")  # noqa: S108 - the examined folder


def _expanded(path: str) -> Path:
    """Return a path with `~` expanded; unchanged if the user has no home."""
    with contextlib.suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def _can_enter(folder: str) -> bool:
    return os.access(folder, os.R_OK | os.X_OK)


def _card(card: host.Card) -> CardFacts:
    return CardFacts(
        index=card.index,
        name=host.card_name(card.index),
        used_bytes=host.held_bytes(card),
        total_bytes=card.total_bytes,
        holders=tuple(hold_of(holder.pid, holder.used_bytes) for holder in card.holders),
    )


def _program(wanted: Examination) -> ProgramFacts | None:
    """Return the facts of the job's interpreter; None if there is nothing to examine."""
    if wanted.python is None and not wanted.modules and not wanted.distributions:
        return None
    named = _interpreter(wanted)
    environment = {**outside_ray_worker(dict(os.environ), initial=initial_environment()), **wanted.env}
    path = shutil.which(named, path=environment.get("PATH"))
    if path is None:
        return ProgramFacts(path=named, error="no such interpreter")
    try:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = _run(path, wanted, environment=environment, out=out, err=err)
            out.seek(0)
            python, versions = _parsed(out.readline(_TAIL_BYTES))
            error = _last_line(_tail(err)) or f"exit code {code}" if code else ""
    except OSError as failure:  # such as `Exec format error`, or a script with a wrong `#!` line
        return ProgramFacts(path=path, error=(failure.strerror or str(failure)).lower())
    return ProgramFacts(path=path, python=python, versions=versions, error=error, late=code is None)


def _interpreter(wanted: Examination) -> str:
    """Return the interpreter as an attempt would start it: by PATH, or as a path relative to `workdir`."""
    if wanted.python is None:
        return sys.executable
    named = str(_expanded(wanted.python))
    return str(Path(wanted.workdir or ".") / named) if "/" in named else named


def _run(
    path: str, wanted: Examination, *, environment: dict[str, str], out: BinaryIO, err: BinaryIO
) -> int | None:
    """Return the exit code of the imports; None if they exceeded their time limit.

    They write to files, because a process that an import leaves behind would keep pipes open.
    """
    asked = [wanted.modules, wanted.distributions, math.ceil(wanted.import_s + _ALARM_S)]
    there = wanted.workdir is not None and _can_enter(wanted.workdir)
    child = subprocess.Popen(
        [path, "-c", _PROGRAM, msgspec.json.encode(asked).decode()],
        cwd=wanted.workdir if there else None,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        start_new_session=True,
    )
    code = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = child.wait(wanted.import_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # including processes that the imports started
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_KILLED_S)
    return code


def _tail(file: BinaryIO) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
    return file.read()


def _parsed(output: bytes) -> tuple[str, dict[str, str]]:
    """Return the versions of Python and of distributions that the interpreter printed first."""
    try:
        return msgspec.json.decode(output, type=tuple[str, dict[str, str]])
    except msgspec.DecodeError:
        return "", {}


def _last_line(data: bytes) -> str:
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")[:_LONGEST]


def _model(wanted: Examination) -> ModelFacts | None:
    """Return the facts of the model on this node; None if the job names none."""
    if wanted.model is None:
        return None
    place = None
    try:
        place = find_folder(wanted.model, wanted.workdir or ".", {**os.environ, **wanted.env})
        if place is None:
            return ModelFacts()
        with (place / CONFIG if place.is_dir() else place).open("rb") as file:
            file.read(1)
        files = {file for kind in _WEIGHTS for file in place.glob(kind)}
        unreadable = next((file for file in sorted(files) if not os.access(file, os.R_OK)), None)
        weights = sum(file.stat().st_size for file in files)
    except OSError as error:
        return ModelFacts(
            place=str(place or wanted.model), error=f"{error.filename}: {(error.strerror or '').lower()}"
        )
    except RuntimeError as error:  # a user without a home
        return ModelFacts(place=wanted.model, error=str(error))
    if unreadable is not None:
        return ModelFacts(place=str(place), error=f"{unreadable}: permission denied")
    return ModelFacts(place=str(place), weights_bytes=weights)


def _preloads(library: str) -> bool:
    """Return whether a process on this node can preload a library, by trying it."""
    try:
        done = subprocess.run(
            ["true"],
            env={"PATH": os.environ.get("PATH", os.defpath), "LD_PRELOAD": library, "LC_ALL": "C"},
            capture_output=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"cannot be preloaded" not in done.stderr
