"""NeMo-RL's settings as the configuration says them that it takes without `--config`.

python -m benchmarks.facts.nemo_rl CHECKOUT VERSION     write the facts of a checkout of that version

PyPI has a placeholder under its name only, so the facts are read from a checkout.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import click
import yaml

FILE = "examples/configs/grpo_math_1B.yaml"
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_NOT_REQUIRED = re.compile(r"^NotRequired\[(.*)\]$", re.DOTALL)
_SCALARS = ("int", "float", "bool", "str")
_FOLDER = Path("launchers/frameworks/nemo_rl/facts")


def facts(root: Path, commit: str) -> dict[str, Any]:
    """Return types and defaults by key; a number may be whole or not, as the file does not say it.

    The type of a key whose default is null is what every annotation of that name in the source says.
    """
    values = dict(_leaves(yaml.safe_load((root / FILE).read_text()), ""))
    noted = _annotated(root / "nemo_rl")
    return {
        "source": f"https://github.com/NVIDIA-NeMo/RL/blob/{commit}/{FILE}",
        "types": {
            key: noted.get(key.rpartition(".")[2], "any") if value is None else _kind(value, values)
            for key, value in sorted(values.items())
        },
        "defaults": {key: value for key, value in sorted(values.items()) if value is not None},
    }


def _leaves(tree: dict[str, Any], node: str) -> list[tuple[str, Any]]:
    result: list[tuple[str, Any]] = []
    for name, value in tree.items():
        path = f"{node}{name}"
        result += _leaves(value, f"{path}.") if isinstance(value, dict) and value else [(path, value)]
    return result


def _annotated(source: Path) -> dict[str, str]:
    """Return the types of names that every class which has them says to be one plain type, or null."""
    kinds: dict[str, set[str]] = {}
    for file in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            for entry in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(entry, ast.AnnAssign):
                    text = _NOT_REQUIRED.sub(r"\1", ast.unparse(entry.annotation))
                    parts = [part.strip() for part in text.split("|")]
                    kinds.setdefault(ast.unparse(entry.target), set()).update({*parts} - {"None"})
    return {name: f"{kind}?" for name, types in kinds.items() for kind in _SCALARS if types == {kind}}


def _kind(value: Any, settings: dict[str, Any]) -> str:
    """Return the type of a default; one that refers to another setting is of that one's type."""
    if isinstance(value, str) and (match := _REFERENCE.fullmatch(value)):
        return _kind(settings.get(match[1]), settings)
    if isinstance(value, str) and value.startswith("${mul:"):
        return "float"
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int | float):
        return "float"
    return "str" if isinstance(value, str) else "any"


@click.command(help=__doc__)
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("version")
def main(checkout: Path, version: str) -> None:
    """Write the facts of a checkout."""
    words = ["git", "-C", str(checkout), "rev-parse", f"v{version}^{{commit}}"]
    commit = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    path = _FOLDER / f"{version}.json"
    path.write_text(json.dumps(facts(checkout, commit), indent=0, ensure_ascii=False) + "\n")
    click.echo(f"{path}: {len(facts(checkout, commit)['types'])} settings")


if __name__ == "__main__":
    main()
