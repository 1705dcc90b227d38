"""What a line of a module belongs to: its statement, and the names by which other modules use it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Position = tuple[int, int]  # line from 1, column from 0


class Unit(NamedTuple):
    """A function's body, or a statement that is executed when its module is imported."""

    names: frozenset[str]  # what it defines
    uses: frozenset[str]
    lines: range
    once: bool  # executed at import, or once per process


def annotations(tree: ast.Module) -> list[tuple[Position, Position]]:
    """Return where the annotations of a module begin and end."""
    result: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign):
            result.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            result.append(node.returns)
    return [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in result
        if node is not None
    ]


def statement(tree: ast.Module, line: int) -> range:
    """Return the lines of the innermost statement at a line; of one with a body, those before the body.

    Coverage.py misses some jumps to the head of a loop: a `break` or `continue` begins with what it is in.
    """
    span = range(line, line + 1)
    around = span
    for node in ast.walk(tree):  # outer statements first
        if not isinstance(node, ast.stmt | ast.ExceptHandler):
            continue
        lines = _lines(node)
        if line not in lines:
            continue
        if isinstance(node, ast.Break | ast.Continue):
            return range(around.start, line + 1)
        around = lines
        body = getattr(node, "body", None)
        if body:
            lines = range(lines.start, max(lines.start + 1, _lines(body[0]).start))
        if line in lines:
            span = lines
    return span


def units(tree: ast.Module) -> Iterator[Unit]:
    """Yield the functions of a module and what it executes at import, in no overlapping lines."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            own = frozenset({node.name})
            yield Unit(
                own, _identifiers(_head(node)), range(_lines(node).start, _lines(node.body[0]).start), True
            )
            for inner in node.body:
                yield from _of_statement(inner, own)
        else:
            yield from _of_statement(node, frozenset())


def _of_statement(node: ast.stmt, owner: frozenset[str]) -> Iterator[Unit]:
    lines = _lines(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        head, begun = _head(node), _lines(node.body[0]).start
        names, cached = frozenset({node.name}), "cache" in _identifiers(node.decorator_list)
        yield Unit(names, _identifiers(head), range(lines.start, max(lines.start + 1, begun)), True)
        yield Unit(names, _identifiers(node.body), range(begun, lines.stop), cached)
        return
    bound = {
        inner.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }
    if isinstance(node, ast.Import | ast.ImportFrom):
        bound = {alias.asname for alias in node.names if alias.asname}
        yield Unit(frozenset(bound), frozenset(alias.name for alias in node.names), lines, True)
        return
    yield Unit(owner or frozenset(bound), _identifiers([node]), lines, True)


def _head(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.AST]:
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *node.keywords]
    defaults = [default for default in node.args.kw_defaults if default is not None]
    return [*node.decorator_list, *node.args.defaults, *defaults]


def _identifiers(nodes: Iterable[ast.AST] | Sequence[ast.stmt]) -> frozenset[str]:
    result = set()
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name):
                result.add(inner.id)
            elif isinstance(inner, ast.Attribute):
                result.add(inner.attr)
    return frozenset(result)


def _lines(node: ast.stmt | ast.ExceptHandler) -> range:
    """Return the lines of a statement from its first decorator."""
    decorators = getattr(node, "decorator_list", None) or []
    return range(
        min([node.lineno, *(each.lineno for each in decorators)]), (node.end_lineno or node.lineno) + 1
    )
