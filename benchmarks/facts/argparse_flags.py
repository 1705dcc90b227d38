"""The flags that a program adds to an argparse parser, read in its source: name, type, action, choices."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.facts.pins import versions

Fact = dict[str, Any]
_OPENRLHF = "openrlhf/cli/train_ppo_ray.py"
OPENRLHF_FILE = rf".*{_OPENRLHF}"  # some wheels have it below a folder of data
_CALLS = ("add_argument", "reset_arg")


def flags_of(source: str, *, defaults: bool = False) -> dict[str, Fact]:
    """Return the flags that a module declares, by their names; literal `defaults` if wanted."""
    left = {"dest"} if defaults else {"dest", "default"}
    return {
        name: {key: value for key, value in fact.items() if key not in left}
        for names, fact in added(source)
        for name in names
    }


def added(source: str) -> Iterator[tuple[list[str], Fact]]:
    """Yield the names of each flag that a module adds to a parser.

    A name that a loop over literals makes (`f"--{prefix}.optim"`) is given for each of them.
    """
    for node, names in _calls(ast.parse(source), {}):
        yield names, _fact({keyword.arg: keyword.value for keyword in node.keywords if keyword.arg})


def _calls(node: ast.AST, loops: dict[str, list[str]]) -> Iterator[tuple[ast.Call, list[str]]]:
    if isinstance(node, ast.For) and isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Tuple):
        words = [word.value for word in node.iter.elts if isinstance(word, ast.Constant)]
        loops = {**loops, node.target.id: [word for word in words if isinstance(word, str)]}
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _CALLS:
        names = [name[2:] for word in node.args for name in _texts(word, loops) if name.startswith("--")]
        if names:
            yield node, names
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, loops)


def _texts(node: ast.expr, loops: dict[str, list[str]]) -> list[str]:
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if not isinstance(node, ast.JoinedStr):
        return []
    made = [""]
    for part in node.values:
        inner = part.value if isinstance(part, ast.FormattedValue) else part
        ends = loops.get(inner.id, []) if isinstance(inner, ast.Name) else _texts(inner, loops)
        made = [begun + end for begun in made for end in ends]
    return made


def _fact(given: dict[str, ast.expr]) -> Fact:
    fact: Fact = {}
    action = ast.unparse(given["action"]).strip("'").rpartition(".")[2] if "action" in given else ""
    if action:
        fact["action"] = action
    elif "nargs" in given:
        fact["action"] = f"store(nargs={ast.literal_eval(given['nargs'])})"
    kind = ast.unparse(given["type"]) if "type" in given else "str"
    if kind != "str":
        fact["type"] = kind
    with contextlib.suppress(KeyError, ValueError):
        if (default := ast.literal_eval(given["default"])) is not None:
            fact["default"] = list(default) if isinstance(default, tuple) else default
    if isinstance(target := given.get("dest"), ast.Constant):
        fact["dest"] = target.value
    if isinstance(given.get("choices"), ast.List | ast.Tuple):
        fact["choices"] = ast.literal_eval(given["choices"])
    return fact


def openrlhf(root: Path) -> dict[str, Any]:
    """Return the flags of an unpacked release of OpenRLHF."""
    (file,) = root.rglob(_OPENRLHF)
    source = f"openrlhf {versions(root)['openrlhf']}, {_OPENRLHF}"
    return {"source": source, "further": [], "flags": flags_of(file.read_text(), defaults=True)}


def written(facts: dict[str, Any]) -> str:
    """Return the facts as JSON, one flag a line."""
    rows = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(fact)}" for name, fact in sorted(facts["flags"].items())
    )
    return f'{{\n"source": {json.dumps(facts["source"])},\n"further": [],\n"flags": {{\n{rows}\n}}\n}}\n'
