"""The command-line flags of a framework, read in its source as text: name, type, action, choices.

python -m benchmarks.facts.argparse_flags "radixark/miles 31f1ca96" FILE... [--only NAMES.json FILE...]

Each FILE holds `add_argument` calls or dataclasses that Megatron turns into flags. Of the files behind
`--only` those flags are kept that the named file of facts has too. Prints the JSON.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.facts.pins import versions

Fact = dict[str, Any]
_OPENRLHF = "openrlhf/cli/train_ppo_ray.py"
OPENRLHF_FILE = rf".*{_OPENRLHF}"  # some wheels have it below a folder of data
_CALLS = ("add_argument", "reset_arg")


def flags_of(source: str) -> dict[str, Fact]:
    """Return the flags that a module declares, by their names without dashes: in calls and in dataclasses."""
    found = {
        name: {key: value for key, value in fact.items() if key != "dest"}
        for names, fact in added(source)
        for name in names
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            found = dict(_fields(node)) | found
    return found


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
    if isinstance(target := given.get("dest"), ast.Constant):
        fact["dest"] = target.value
    if isinstance(given.get("choices"), ast.List | ast.Tuple):
        fact["choices"] = ast.literal_eval(given["choices"])
    return fact


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, Fact]]:
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or field.value is None:
            continue
        name, kind, value = (ast.unparse(part) for part in (field.target, field.annotation, field.value))
        written = [
            word.value
            for word in ast.walk(field.value)
            if isinstance(word, ast.Constant) and str(word.value).startswith("--")
        ]
        name = (written[0] if written else f"--{name}").replace("_", "-")[2:]
        if "bool" in kind:
            is_on = value == "True" or "default=True" in value
            yield (name if written or not is_on else f"no-{name}"), {"action": "store_true"}
        elif "Literal" in kind:
            words = [c.value for c in ast.walk(field.annotation) if isinstance(c, ast.Constant)]
            yield name, {"choices": [word for word in words if word is not None]}
        else:
            yield name, {"type": next((k for k in ("int", "float") if k in kind), "str")}


def main(words: list[str]) -> None:
    """Print the facts of the files that the command line names."""
    source, *files = words
    at = files.index("--only") if "--only" in files else len(files)
    found: dict[str, Fact] = {}
    if files[at + 1 :]:
        known = json.loads(Path(files[at + 1]).read_text())
        wanted = {*known["flags"], *known["further"]}
        for file in files[at + 2 :]:
            found |= {n: fact for n, fact in flags_of(Path(file).read_text()).items() if n in wanted}
    for file in files[:at]:
        found |= flags_of(Path(file).read_text())
    sys.stdout.write(written({"source": source, "flags": found}))


def openrlhf(root: Path) -> dict[str, Any]:
    """Return the flags of an unpacked release of OpenRLHF."""
    (file,) = root.rglob(_OPENRLHF)
    source = f"openrlhf {versions(root)['openrlhf']}, {_OPENRLHF}"
    return {"source": source, "further": [], "flags": flags_of(file.read_text())}


def written(found: dict[str, Any]) -> str:
    """Return the facts as JSON, one flag a line."""
    rows = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(fact)}" for name, fact in sorted(found["flags"].items())
    )
    return f'{{\n"source": {json.dumps(found["source"])},\n"further": [],\n"flags": {{\n{rows}\n}}\n}}\n'


if __name__ == "__main__":
    main(sys.argv[1:])
