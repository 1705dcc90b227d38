"""What a file is that `init` is given: told by its first line and its content."""

from __future__ import annotations

import ast
import re
from enum import Enum
from pathlib import Path

_SHELLS = frozenset({"sh", "bash", "dash", "ksh", "zsh", "ash"})
_READ_BYTES = 256 * 1024
_KEY = re.compile(r"---|%YAML|['\"]?[\w./+-]+['\"]?:(?:\s|$)")  # how a YAML mapping begins
_DOCUMENT_NAME = re.compile(r".*\.ya?ml")
_PYTHON_NODES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Call)


class Kind(Enum):
    """What a file holds."""

    SHELL = "shell script"
    PYTHON = "Python program"
    DOCUMENT = "configuration file"
    PROGRAM = "program"


def kind_of(path: Path) -> Kind:
    """Return what a file holds; text that begins like nothing else is taken for a shell script."""
    try:
        data = path.open("rb").read(_READ_BYTES)
    except OSError:
        return Kind.SHELL  # whoever reads it says why it cannot
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
    # A broken or empty file begins like nothing: its name says which reader is to complain.
    return Kind.DOCUMENT if not _begins_command(first) and _DOCUMENT_NAME.fullmatch(path.name) else Kind.SHELL


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


def _begins_command(line: str) -> bool:
    return re.match(r"[A-Za-z_./$]", line) is not None
