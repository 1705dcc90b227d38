"""tests/claims.yaml lists every claim of success that the code makes, with a test in which it is not made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from autotune.orchestrator.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
CLAIMS: list[dict[str, Any]] = yaml.safe_load((ROOT / "tests/claims.yaml").read_text())
WORDS = ("is stopped", "no process of it is left", "continues in the background", "submitted as Ray job")
# What gives a mark its colour or its form on a stream without UTF-8, and texts of the help.
_RENDERING = {
    "orchestrator/terminal/widgets.py ASCII",
    "orchestrator/terminal/widgets.py _STYLES",
    "orchestrator/cli/stop.py _CODES",
    "orchestrator/cli/shared/launch_options.py _OPTIONS",
    "orchestrator/config/schema.py RecoveryKeys",
}


def places(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield every node below with the function, class or constant of the module that holds it."""
    for child in ast.iter_child_nodes(tree):
        inner = name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}" if name else child.name
        elif not name and isinstance(child, ast.Assign | ast.AnnAssign):
            target = child.targets[0] if isinstance(child, ast.Assign) else child.target
            inner = getattr(target, "id", "")
        yield inner, child
        yield from places(child, inner)


def claimed(node: ast.AST) -> str:
    """Return what a node claims: a check mark, a word of success, exit code 0; empty for every other one."""
    if isinstance(node, ast.Attribute) and node.attr == "OK" and ast.unparse(node.value) == "ExitCode":
        return "exit code 0"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return next((word for word in ("✓", *WORDS) if word in node.value), "")
    return ""


def made() -> set[tuple[str, str]]:
    """Return the claims that the code makes, with their places."""
    names = set()
    for room in ("launchers", "orchestrator", "policies"):
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text())
            docs = {
                id(node.body[0].value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
                and node.body
                and isinstance(node.body[0], ast.Expr)
            }
            for name, node in places(tree):
                place = f"{path.relative_to(ROOT)} {name}"
                if id(node) not in docs and (claim := claimed(node)) and place not in _RENDERING:
                    names.add((claim, place))
        for path in (*(ROOT / room).rglob("*.html"), *(ROOT / room).rglob("*.js")):
            text = path.read_text()
            names |= {(word, str(path.relative_to(ROOT))) for word in ("✓", *WORDS) if word in text}
    return names


def test_every_place_that_claims_a_success_has_its_row() -> None:
    listed = set()
    for row in CLAIMS:
        word = next((each for each in ("✓", *WORDS) if each in row["claim"]), "exit code 0")
        listed |= {(word, place) for place in row.get("at", [])}
    assert made() == listed


@pytest.mark.parametrize("name", COMMANDS)
def test_exit_code_0_of_every_command_has_its_row(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    (says,) = re.findall(r"^  0 +(.+)$", command.epilog or "", re.MULTILINE)
    assert [row["says"] for row in CLAIMS if row["claim"] == f"autotune {name}"] == [says]


@pytest.mark.parametrize("row", CLAIMS, ids=lambda row: row["claim"])
def test_every_row_names_what_makes_it_true_and_a_test(row: dict[str, Any]) -> None:
    assert row["because"] and row.keys() <= {"claim", "says", "because", "not_when", "at"}
    path, _, test = row["not_when"].partition("::")
    nodes = ast.walk(ast.parse((ROOT / path).read_text()))
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert test in functions
