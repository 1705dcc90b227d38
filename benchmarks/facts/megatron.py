"""The flags of Megatron-LM and of the trainers on it, read in clones of their repositories.

python -m benchmarks.facts.megatron megatron NVIDIA/Megatron-LM CLONE@1dcf0daf
python -m benchmarks.facts.megatron megatron radixark/Megatron-LM CLONE@2e64d788
python -m benchmarks.facts.megatron slime THUDM/slime CLONE@624b824a
python -m benchmarks.facts.megatron miles radixark/miles CLONE@31f1ca96

Megatron adds fields of its configurations as flags: those of the dataclasses that its `arguments.py` hands
to an ArgumentGroupFactory, without the excluded ones, under the names that their `argparse_meta` has, if any.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.facts.argparse_flags import Fact, flags_of, written
from benchmarks.facts.sources import Commit, Source, source_of

_FOLDER = Path("launchers/frameworks")
_ARGUMENTS = "megatron/training/arguments.py"
FILES = {
    "megatron": _ARGUMENTS,
    "slime": r"slime/(?:utils|backends/(?:sglang|megatron)_utils)/arguments\.py",
    "miles": r"miles/(?:(?:utils|backends/\w+)/arguments|dashboard/args|rollout/generate_hub/\w+)\.py",
}


def flags(name: str, source: Source) -> dict[str, Fact]:
    """Return the flags of a commit by their names without dashes."""
    result: dict[str, Fact] = {}
    for path in source.files(FILES[name]):
        result |= flags_of(source.read(path))
    return _of_configurations(source) | result if name == "megatron" else result


def _of_configurations(source: Source) -> dict[str, Fact]:
    classes: dict[str, ast.ClassDef] = {}
    for path in source.files(r"megatron/(?:core|training)/.*\.py"):
        if "@dataclass" in (text := source.read(path)):
            nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
            classes |= {node.name: node for node in nodes if node.name not in classes}
    result: dict[str, Fact] = {}
    for function in ast.parse(source.read(_ARGUMENTS)).body:
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ArgumentGroupFactory":
                excluded = next((word.value for word in node.keywords if word.arg == "exclude"), None)
                result |= _fields(classes, ast.unparse(node.args[0]), _listed(function, excluded))
    return result


def _listed(function: ast.stmt, excluded: ast.expr | None) -> set[str]:
    """Return the words of a list, which may have a name in its function."""
    if isinstance(excluded, ast.Name):
        values = (node for node in ast.walk(function) if isinstance(node, ast.Assign))
        excluded = next(
            node.value for node in values if [ast.unparse(each) for each in node.targets] == [excluded.id]
        )
    return set() if excluded is None else set(ast.literal_eval(excluded))


def _fields(classes: dict[str, ast.ClassDef], name: str, excluded: set[str]) -> dict[str, Fact]:
    own = classes.get(name)
    result: dict[str, Fact] = {}
    for base in () if own is None else own.bases:
        result |= _fields(classes, ast.unparse(base), excluded)
    for field in () if own is None else own.body:
        if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) not in excluded:
            result |= dict(_flags(field))
    return result


def _flags(field: ast.AnnAssign) -> Iterator[tuple[str, Fact]]:
    name, kind, default = ast.unparse(field.target), ast.unparse(field.annotation), field.value
    meta: dict[str, ast.expr] = {}
    if isinstance(default, ast.Call):
        given = {word.arg: word.value for word in default.keywords}
        default = given.get("default")
        if isinstance(data := given.get("metadata"), ast.Dict) and isinstance(data.values[0], ast.Dict):
            meta = {ast.literal_eval(key): value for key, value in zip(*_pairs(data.values[0]), strict=True)}
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
    kind = kind.removesuffix(" | None")
    is_on = default is None or ast.unparse(default) != "False"
    names = (
        [f"--{prefix}{name}" for prefix in ("no_", "disable_")] if kind == "bool" and is_on else [f"--{name}"]
    )
    if "arg_names" in meta:
        names = ast.literal_eval(meta["arg_names"])
    for flag in names:
        yield flag[2:].replace("_", "-") if "arg_names" not in meta else flag[2:], _fact(kind, field, meta)


def _pairs(node: ast.Dict) -> tuple[list[ast.expr], list[ast.expr]]:
    return [key for key in node.keys if key is not None], node.values


def _fact(kind: str, field: ast.AnnAssign, meta: dict[str, ast.expr]) -> Fact:
    if kind == "bool":
        return {"action": "store_true"}
    fact: Fact = {}
    nargs = (
        ast.literal_eval(meta["nargs"])
        if "nargs" in meta
        else "+"
        if kind.lower().startswith("list[")
        else ""
    )
    if nargs:
        fact["action"] = f"store(nargs={nargs})"
    element = kind.partition("[")[2].removesuffix("]") if kind.lower().startswith("list[") else kind
    if element in ("int", "float") and "type" not in meta:
        fact["type"] = element
    elif "type" in meta and ast.unparse(meta["type"]) != "str":
        fact["type"] = ast.unparse(meta["type"])
    if element.startswith("Literal"):
        words = [node.value for node in ast.walk(field.annotation) if isinstance(node, ast.Constant)]
        fact["choices"] = [word for word in words if word is not None]
    if "choices" in meta and isinstance(meta["choices"], ast.List | ast.Tuple):
        fact["choices"] = list(ast.literal_eval(meta["choices"]))
    return fact


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(sorted(FILES)))
@click.argument("repository", metavar="OWNER/NAME")
@click.argument("place", metavar="CLONE@COMMIT")
def main(name: str, repository: str, place: str) -> None:
    """Write the flags of a commit."""
    source = source_of(place)
    assert isinstance(source, Commit)
    facts = flags(name, source)
    path = _FOLDER / name / "facts" / f"{source.id[:8]}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(written({"source": f"{repository} {source.id}", "flags": facts}))
    click.echo(f"{path}: {len(facts)} flags")


if __name__ == "__main__":
    main()
