"""Where on this machine the program of a command line lies, and what that says of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.orchestrator.config.own_code import is_file, is_folder

_FILE = re.compile(r"(?!/)[\w./-]+\.(?:py|ya?ml)")
_MODULE = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")


def folder_of(cwd: str, command: Sequence[str], config: str | None, script: Path | None) -> str:
    """Return the folder that the program's relative paths start from: where they exist, if any is seen."""
    if script is not None:
        for name in _relative(command, config):
            result = _above(cwd, script, name)
            if result is not None:
                return str(result)
    return cwd


def trainer_of(framework: str, argv: Sequence[str], cwd: str, script: Path | None) -> str:
    """Return the framework whose checkout holds `train.py`: slime, miles and vime name theirs alike."""
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


def _above(cwd: str, script: Path, name: str) -> Path | None:
    """Return the folder in which a file is: where the program starts, else above the script."""
    folders = (Path(cwd), *script.resolve().parents)
    return next((folder for folder in folders if is_file(folder / name)), None)


def _relative(command: Sequence[str], config: str | None) -> Iterator[str]:
    """Yield the files of a program by their paths in its folder: of its script, its module, its settings."""
    yield from (word for word in (*command[1:4], config or "") if _FILE.fullmatch(word))
    for flag, word in itertools.pairwise(command[:4]):
        if flag == "-m" and _MODULE.fullmatch(word):
            yield f"{word.replace('.', '/')}.py"
