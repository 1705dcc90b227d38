"""The code of a framework that a job would run: its location, its version, and which settings it has.

Files are only read; nothing is imported or started. The search order is Python's: working directory,
PYTHONPATH, interpreter. If none of them has the package, the nearest checkout below or above the working
directory is used, unless two are equally near. For a container, only folders mounted from this machine are
searched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlparse

from autotune.launchers import frameworks, packages
from autotune.launchers.base import Framework
from autotune.launchers.frameworks.dialects.settings import flat
from autotune.orchestrator.config.yaml_nodes import Document, UnreadableError, read_text, scalar_1_1
from autotune.orchestrator.containers import code_folders, is_container
from autotune.orchestrator.errors import UserError
from autotune.policies.values.command import Command
from autotune.policies.values.job import Job
from autotune.policies.values.provenance import CodeQuery, OwnCode

_VERSION = re.compile(r"[\w.+!-]{1,64}")
_SITES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")
_DEPTH, _MOST_FOLDERS = 3, 400  # levels and folders to search for a nested checkout
_MOST_FILES, _MOST_BYTES = 4000, 1 << 20  # files of a package; bytes of a file
_SUFFIXES = (".py", ".yaml", ".yml")
_STATED = re.compile(
    r"^_*version(?:__)?\s*(?::\s*\w+\s*)?=\s*[\"']([^\"']+)[\"']", re.MULTILINE | re.IGNORECASE
)
_OF_SETUP = {
    key: re.compile(rf"^\s*{key}\s*=\s*[\"']([^\"']+)[\"'],", re.MULTILINE) for key in ("name", "version")
}
_CLASS = "_target_"  # suffix of a Hydra key that names the class of a section
_SKIPPED = frozenset({"node_modules", "site-packages", "__pycache__", "wandb", "outputs", "checkpoints"})


class Code(NamedTuple):
    """The code that a job would run."""

    version: str = ""  # empty: unknown
    place: str = ""  # source of the version, in words
    package: Path | None = None  # the package's folder; None: not on this machine

    @property
    def is_installed(self) -> bool:
        """Whether it was installed into site-packages, so that it is the release that it claims to be."""
        return self.package is not None and self.package.parent.name in ("site-packages", "dist-packages")


def find(job: Job, framework: Framework) -> Code:
    """Return the framework code that a job would run, as far as it is on this machine."""
    module, base = framework.modules_of(job)[0], Path(job.workdir)
    if is_container(job.command):  # its interpreter and its image's packages are not on this machine
        inside = (folder / module for folder in code_folders(job))
        mounted = next((package for package in inside if _is_package(package, framework)), None)
        return Code() if mounted is None else _checkout(mounted, framework)
    paths = (base / entry for entry in str(job.env.get("PYTHONPATH", "")).split(os.pathsep) if entry)
    for folder in (base, *paths):
        if _is_package(folder / module, framework):
            return _checkout(folder / module, framework)
    installed = _distribution(framework.distribution, job.python) if framework.distribution else None
    if installed is not None:
        return _installed(installed, module, framework, job.python)
    nested = _nested(base, module, framework)
    return Code() if nested is None else _checkout(nested, framework)


def is_importable(job: Job, command: Command) -> bool:
    """Return whether autotune's interpreter can import the framework of a job that it starts on this machine.

    True if another interpreter or a container starts the job.
    """
    framework = frameworks.find(job.framework)
    is_ours = job.python is None and command.argv[0] == "{python}" and not is_container(job.command)
    if not (is_ours and framework.modules):
        return True
    code = find(job, framework)
    return bool(code.package or code.version) or not packages.missing(framework.modules[:1])


def require_importable(job: Job, command: Command) -> None:
    """Raise Failure if autotune's interpreter is to start a framework that it cannot import."""
    if not is_importable(job, command):
        raise UserError(
            f"{job.framework} is not installed: {sys.executable} does not find it",
            hint="set `python:` in the job to the interpreter that has it",
        )


def read(query: CodeQuery, package: Path) -> OwnCode:
    """Return which of the query's names occur in a package's code, and the defaults of its configuration."""
    left, names, unread = set(query.names), set[str](), list[object]()
    patterns = {name: re.compile(pattern) for name, pattern in query.patterns.items()}
    for text in _texts(package, unread.append) if package.is_dir() else (_text(package, unread.append),):
        if left:
            hits = {match[0] for match in _any_of(left, as_flags=query.as_flags).finditer(text)}
            names |= hits
            left -= hits
        names |= {name for name, pattern in patterns.items() if pattern.search(text)}
    return OwnCode(
        folder=str(package),
        names=tuple(sorted(names)),
        defaults=_defaults(query, package),
        is_partial=bool(unread),
    )


def installed_version(distribution: str, python: str | None) -> str:
    """Return the version of a distribution for an interpreter; empty if it is not installed."""
    result = _distribution(distribution, python)
    return "" if result is None else _release(result)


def _any_of(names: Iterable[str], *, as_flags: bool) -> re.Pattern[str]:
    any_name = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    if as_flags:
        return re.compile(rf"(?<=[\"']--)(?:{any_name})(?=[\"'])")
    return re.compile(rf"(?<!\w)(?<!\w-)(?:{any_name})(?![\w-])")


def _texts(package: Path, missed: Callable[[object], None]) -> Iterator[str]:
    """Yield the texts of a package; files that are skipped or truncated are reported to `missed`."""
    files = 0
    for folder, inner, names in os.walk(package, onerror=missed):
        inner[:] = sorted(name for name in inner if name not in _SKIPPED and not name.startswith("."))
        for link in (name for name in inner if Path(folder, name).is_symlink()):
            missed(link)  # os.walk does not follow it
        for name in sorted(names):
            if not name.endswith(_SUFFIXES):
                continue
            files += 1
            if files > _MOST_FILES:
                missed(name)
                return
            yield _text(Path(folder, name), missed)


def _text(file: Path, missed: Callable[[object], None] = lambda _: None) -> str:
    """Return the first MiB of a regular file; empty if it cannot be read."""
    try:
        if not file.is_file():  # opening a pipe would block until it has a writer
            return ""
        with file.open("rb") as stream:
            text = stream.read(_MOST_BYTES)
            if stream.read(1):
                missed(file)
            return text.decode(errors="replace")
    except OSError as error:
        missed(error)
        return ""


def _defaults(query: CodeQuery, package: Path) -> dict[str, object]:
    """Return the values of the configuration; empty if it is composed of other files."""
    file = next((package / name for name in query.configs if is_file(package / name)), None)
    if file is None:
        return {}
    try:
        document = Document(read_text(file), str(file), read=scalar_1_1)
    except UnreadableError:
        return {}
    value = document.value
    if document.complaints or not isinstance(value, dict) or "defaults" in value:
        return {}
    return {key: each for key, each in flat(value).items() if not key.endswith(_CLASS)}


def _is_package(folder: Path, framework: Framework) -> bool:
    if not is_file(folder / "__init__.py"):
        return _version_file(folder, framework) != "" and is_folder(folder)
    return True


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file; false if this user cannot access it."""
    return _holds(path.is_file)


def is_there(path: Path) -> bool:
    """Return whether a path exists; false if this user cannot access it."""
    return _holds(path.exists)


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; false if this user cannot access it."""
    return _holds(path.is_dir)


def _holds(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except OSError:
        return False


def _version_file(package: Path, framework: Framework) -> str:
    if not framework.version_file:
        return ""
    return _version(_text(package.parent / framework.version_file))


def _version(text: str | None) -> str:
    """Return a text if it is a version, otherwise empty."""
    text = (text or "").strip()
    return text if _VERSION.fullmatch(text) else ""


def _stated(file: Path) -> str:
    match = _STATED.search(_text(file))
    return _version(match[1]) if match else ""


def _of_project(file: Path, names: Container[str]) -> str:
    """Return the version in a pyproject.toml if its project has one of the names; otherwise empty."""
    try:
        project = tomllib.loads(_text(file)).get("project")
    except (tomllib.TOMLDecodeError, RecursionError):
        return ""
    if not isinstance(project, dict) or str(project.get("name")).lower().replace("_", "-") not in names:
        return ""  # another project that contains the framework's code
    version = project.get("version")
    return _version(version) if isinstance(version, str) else ""


def _of_setup(file: Path, names: Container[str]) -> str:
    """Return the literal version in a setup.py if its project has one of the names; otherwise empty."""
    text = _text(file)
    name, version = (pattern.search(text) for pattern in _OF_SETUP.values())
    if name is None or version is None or name[1].lower().replace("_", "-") not in names:
        return ""
    return _version(version[1])


def _checkout(package: Path, framework: Framework) -> Code:
    """Return the package of a checkout, with the version in its files."""
    if version := _version_file(package, framework):
        return Code(version, str(package.parent / framework.version_file), package)
    for file in (package / name for name in ("__init__.py", "_version.py", "version.py")):
        if version := _stated(file):
            return Code(version, str(file), package)
    names = {name.replace("_", "-") for name in (framework.distribution, package.name) if name}
    for folder in (package.parent, package.parent.parent):
        for file, read in ((folder / "pyproject.toml", _of_project), (folder / "setup.py", _of_setup)):
            if version := read(file, names):
                return Code(version, str(file), package)
    return Code("", str(package), package)


def _distribution(name: str, python: str | None) -> Distribution | None:
    root = _interpreter(python).parent.parent
    places = sys.path if python is None else [str(each) for way in _SITES for each in root.glob(way)]
    return next((each for each in distributions(name=name, path=places) if _release(each)), None)


def _release(dist: Distribution) -> str:
    """Return the version of a distribution; empty if it is left over from an interrupted installation."""
    try:
        return _version(dist.version)
    except (KeyError, TypeError, ValueError, OSError):
        return ""


def _installed(dist: Distribution, module: str, framework: Framework, python: str | None) -> Code:
    """Return an installed package; for an editable installation, the checkout that it points to."""
    place = f"installed for {_interpreter(python)}"
    package = Path(str(dist.locate_file(module)))
    for source in _editable(dist):
        for folder in (source / module, source / "src" / module):
            if _is_package(folder, framework):
                code = _checkout(folder, framework)
                return code if code.version else Code(_release(dist), place, folder)
    return Code(_release(dist), place, package if is_folder(package) else None)


def _editable(dist: Distribution) -> Iterator[Path]:
    try:
        url = json.loads(dist.read_text("direct_url.json") or "{}")
        parts = urlparse(str(url["url"]) if url["dir_info"]["editable"] else "")
    except (ValueError, KeyError, TypeError, OSError):
        return
    if parts.scheme == "file":
        yield Path(unquote(parts.path))


def _nested(base: Path, module: str, framework: Framework) -> Path | None:
    """Return the nearest package of a checkout above or below a folder; None if two are equally near."""
    level, opened = [base, *_above(base)], 0
    for _ in range(_DEPTH):
        below: list[Path] = []
        for folder in level:
            opened += 1
            if opened > _MOST_FOLDERS:
                return None
            below += _folders(folder)
        # Other folders may have the framework's name: only a checkout has a version.
        named = [each for each in below if each.name == module and _is_package(each, framework)]
        result = [each for each in named if _checkout(each, framework).version]
        if result:
            return result[0] if len(result) == 1 else None
        level = below
    return None


def _above(base: Path) -> Iterator[Path]:
    """Yield the folders above `base`, up to its repository's root; none outside a repository."""
    above = [base, *base.parents]
    root = next((n for n, folder in enumerate(above) if is_there(folder / ".git")), 0)
    yield from above[1 : root + 1]


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.name not in _SKIPPED and e.name[0] != "."]
    except OSError:
        return []
    return [folder / name for name in sorted(names) if is_folder(folder / name)]


def _interpreter(python: str | None) -> Path:
    if python is None:
        return Path(sys.executable)
    return Path(shutil.which(python) or python).expanduser()
