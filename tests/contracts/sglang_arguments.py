"""The arguments that a version of SGLang takes, read as text in its wheel: most cannot be imported here."""

from __future__ import annotations

import ast
import fcntl
import functools
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

from tests.contracts.environments import cache

_PYTHON = "3.12"  # of the wheels, which hold the same Python text for all versions


class Arguments(NamedTuple):
    """What a version of SGLang takes."""

    fields: frozenset[str]  # of ServerArgs
    flags: frozenset[str]  # of its command line, without dashes


@functools.cache
def arguments(version: str) -> Arguments:
    """Return the arguments of a version, downloaded once into the tests' cache."""
    fields: set[str] = set()
    hidden: set[str] = set()
    flags: set[str] = set()
    with zipfile.ZipFile(_wheel(version)) as wheel:
        for name in wheel.namelist():
            groups = name.startswith("sglang/srt/arg_groups/") and name.endswith(".py")
            if not groups and name != "sglang/srt/server_args.py":
                continue
            for node in ast.walk(ast.parse(wheel.read(name))):
                if isinstance(node, ast.ClassDef) and (node.name == "ServerArgs" or "/fields/" in name):
                    found = [s for s in node.body if isinstance(s, ast.AnnAssign)]
                    fields |= {ast.unparse(s.target) for s in found}
                    hidden |= {ast.unparse(s.target) for s in found if "no_cli=True" in ast.unparse(s)}
                elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                    words = [a.value for a in node.args if isinstance(a, ast.Constant)]
                    flags |= {word[2:] for word in words if isinstance(word, str) and word.startswith("--")}
                elif isinstance(node, ast.keyword) and node.arg == "aliases":
                    flags |= {word[2:] for word in ast.literal_eval(node.value) if word.startswith("--")}
    flags |= {name.replace("_", "-") for name in fields - hidden}
    return Arguments(fields=frozenset(fields), flags=frozenset(flags))


def _wheel(version: str) -> Path:
    folder = cache() / f"sglang-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("sglang-*.whl")):
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            download += ["--disable-pip-version-check", "--python-version", _PYTHON]
            download += ["--only-binary=:all:", "--dest", str(folder), f"sglang=={version}"]
            subprocess.run(download, check=True)
    (wheel,) = folder.glob("sglang-*.whl")
    return wheel
