"""The arguments that a version of SGLang takes, read as text in its wheel: most cannot be imported here."""

from __future__ import annotations

import ast
import functools
import zipfile
from typing import NamedTuple

from tests.contracts.wheels import wheel


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
    with zipfile.ZipFile(wheel("sglang", version)) as archive:
        for name in archive.namelist():
            groups = name.startswith("sglang/srt/arg_groups/") and name.endswith(".py")
            if not groups and name != "sglang/srt/server_args.py":
                continue
            for node in ast.walk(ast.parse(archive.read(name))):
                if isinstance(node, ast.ClassDef) and (node.name == "ServerArgs" or "/fields/" in name):
                    items = [s for s in node.body if isinstance(s, ast.AnnAssign)]
                    fields |= {ast.unparse(s.target) for s in items}
                    hidden |= {ast.unparse(s.target) for s in items if "no_cli=True" in ast.unparse(s)}
                elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
                    words = [a.value for a in node.args if isinstance(a, ast.Constant)]
                    flags |= {word[2:] for word in words if isinstance(word, str) and word.startswith("--")}
                elif isinstance(node, ast.keyword) and node.arg == "aliases":
                    flags |= {word[2:] for word in ast.literal_eval(node.value) if word.startswith("--")}
    flags |= {name.replace("_", "-") for name in fields - hidden}
    return Arguments(fields=frozenset(fields), flags=frozenset(flags))
