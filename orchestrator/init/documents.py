"""Files passed to `init` or named by a command: their kind, their content, and the files next to them."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from autotune.orchestrator.config.own_code import is_file, is_folder, is_there
from autotune.orchestrator.config.referenced_files import with_extended
from autotune.orchestrator.config.yaml_nodes import Document, UnreadableError, read_text, scalar_1_1
from autotune.orchestrator.errors import Failure, JobErrors, UserError
from autotune.orchestrator.init.bash.builtins import same_ending
from autotune.orchestrator.init.bash.state import is_unknown
from autotune.orchestrator.init.entry_points import Program, program_in
from autotune.orchestrator.init.settings import areal_settings

_BUILDS_ON = "defaults"


def areal_script(path: Path) -> str:
    """Return the script next to a configuration file that probably uses it; empty if there is none."""
    scripts = [each for each in sorted(path.parent.glob("*.py")) if not each.name.startswith("_")]
    stem = path.stem.split("_")[0]
    near = [s for s in scripts if s.stem == path.stem] or [
        s for s in scripts if s.stem.startswith(stem) and re.search(r"rl|train|grpo|ppo", s.stem)
    ]
    chosen = near[0] if near else scripts[0] if len(scripts) == 1 else None
    if chosen is None:
        return ""
    base = repository_of(path)
    return str(chosen.absolute().relative_to(base)) if base is not None else chosen.name


def repository_of(path: Path) -> Path | None:
    """Return the nearest folder above a file with a `.git` or a pyproject.toml; None if there is none."""
    return next(
        (p for p in path.absolute().parents if is_there(p / ".git") or is_file(p / "pyproject.toml")), None
    )


def document_of(program: Program, cwd: str) -> dict[str, Any] | None:
    """Return the content of the file of `--config`; None if it is not on this machine."""
    config = areal_settings(program.argv).config
    return None if config is None or is_unknown(config) else readable_document(Path(cwd, config))


def readable_document(path: Path) -> dict[str, Any] | None:
    """Return the mapping in a YAML file; None if the file cannot be read or holds none."""
    try:
        return read_document(path)
    except Failure:
        return None


def read_document(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; raises Failure with the reason, for syntax errors with the place.

    Files that it extends by file name are read too (NeMo-RL's recipes); Hydra's groups have no suffix.
    """
    document = Document(read_text(path), str(path), read=scalar_1_1)
    if document.complaints:
        raise JobErrors(tuple(document.complaints))
    if document.value is None:
        raise UserError(f"`{path}` is empty", hint="name the configuration file of the training")
    if not isinstance(document.value, dict):
        raise UserError(f"`{path}` is no mapping of settings")
    named = document.value.get(_BUILDS_ON)
    names = named if isinstance(named, list) else [named]
    if all(str(name).endswith((".yaml", ".yml")) for name in names):
        return with_extended(document.value, path, builds_on=_BUILDS_ON)
    return document.value


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a mapping's values by dotted key, without Hydra's own sections."""
    result: dict[str, Any] = {}
    for key, value in document.items():
        if key in (_BUILDS_ON, "hydra"):
            continue
        if isinstance(value, dict) and value:
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


_FILE = re.compile(r"(?!/)[\w./-]+\.(?:py|ya?ml)")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")


def folder_of(cwd: str, command: Sequence[str], config: str | None, script: Path | None) -> str:
    """Return the folder that the program's relative paths start from: one where they exist, else `cwd`."""
    if script is not None:
        for name in _relative(command, config):
            result = _above(cwd, script, name)
            if result is not None:
                return str(result)
    return cwd


def trainer_of(framework: str, argv: Sequence[str], cwd: str, script: Path | None) -> str:
    """Return the framework of a program by its code: what `train.py` belongs to, who parses TRL's flags."""
    if framework == "trl" and script is not None:
        return "command:" if _has_own_parser(program_in(argv), cwd, script) else framework
    if framework != "slime":
        return framework
    name = next((word for word in argv if re.fullmatch(r"(?:.*/)?train(?:_async)?\.py", word)), "")
    result = _above(cwd, script, name) if script is not None else Path(cwd)
    checkout = Path(result, name).parent if result is not None else None
    if checkout is None or is_folder(checkout / "slime"):
        return framework
    if is_folder(checkout / "miles"):
        return "miles"
    return "command: vime" if is_folder(checkout / "vime") else framework


def _has_own_parser(name: str, cwd: str, script: Path) -> bool:
    """Return whether a program's flags are those of its own argparse parser, which refuses all others."""
    places = same_ending(name, script) if name.startswith("/") else [f / name for f in _folders(cwd, script)]
    try:
        text = next((read_text(path) for path in (Path(cwd, name), *places) if is_file(path)), "")
    except UnreadableError:
        return False
    return (
        re.search(r"(?<!\w)ArgumentParser\(", text) is not None
        and re.search(r"\b(?:Hf|Trl)\w*Parser\b", text) is None
    )


def _folders(cwd: str, script: Path) -> tuple[Path, ...]:
    return (Path(cwd), *script.resolve().parents)


def _above(cwd: str, script: Path, name: str) -> Path | None:
    """Return the folder that contains a file: the program's start folder, otherwise one above the script."""
    return next((folder for folder in _folders(cwd, script) if is_file(folder / name)), None)


def _relative(command: Sequence[str], config: str | None) -> Iterator[str]:
    """Yield the relative paths of a program's script, config file and module."""
    yield from (word for word in (*command[1:4], config or "") if _FILE.fullmatch(word))
    for flag, word in itertools.pairwise(command[:4]):
        if flag == "-m" and _MODULE.fullmatch(word):
            yield f"{word.replace('.', '/')}.py"


_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh", "ash"})
_READ_BYTES = 256 * 1024
_KEY = re.compile(r"---|%YAML|['\"]?[\w./+-]+['\"]?:(?:\s|$)")  # the beginning of a YAML mapping
_DOCUMENT_NAME = re.compile(r".*\.ya?ml")
_PYTHON_NODES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Call)


class Kind(Enum):
    """The kind of a file's content."""

    SHELL = "shell script"
    PYTHON = "Python program"
    DOCUMENT = "configuration file"
    PROGRAM = "program"


def kind_of(path: Path) -> Kind:
    """Return the kind of a file; text of no other kind is a shell script."""
    try:
        data = path.open("rb").read(_READ_BYTES)
    except OSError:
        return Kind.SHELL  # its reader reports the error
    if data.startswith(b"\x7fELF"):
        return Kind.PROGRAM
    text = data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
    if text.startswith("#!"):
        return _of_interpreter(text.partition("\n")[0][2:].split())
    first = next((line for line in text.splitlines() if line.strip() and line[0] != "#"), "")
    if _KEY.match(first):
        return Kind.DOCUMENT
    if _is_python(text):
        return Kind.PYTHON
    # A broken or empty file has no recognisable beginning: its name decides which reader reports the error.
    begins_command = re.match(r"[A-Za-z_./$]", first) is not None
    return Kind.DOCUMENT if not begins_command and _DOCUMENT_NAME.fullmatch(path.name) else Kind.SHELL


def _of_interpreter(words: list[str]) -> Kind:
    names = [word.rpartition("/")[2] for word in words if not word.startswith("-") and "=" not in word]
    name = next((name for name in names if name != "env"), "")
    if name in _SHELLS:
        return Kind.SHELL
    return Kind.PYTHON if name.startswith("python") else Kind.PROGRAM


def _is_python(text: str) -> bool:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, _PYTHON_NODES) for node in ast.walk(tree))
