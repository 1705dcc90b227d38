"""A module without what no test of its behaviour can notice."""

from __future__ import annotations

import ast
from typing import Any

_CACHES = {"cache", "lru_cache"}
_FORM = {"frozen", "slots", "kw_only", "gc"}  # of a dataclass or msgspec.Struct: its values stay the same


def essence(source: str) -> str:
    """Return the syntax tree of a module as text; equal for two that no caller can tell apart.

    Left out are the decorators that only keep results, the keywords of a record that change how it is built
    and stored but none of its values, and whether a parameter may be named or must be. Raises SyntaxError.
    """
    return ast.dump(_Essence().visit(ast.parse(source)))


class _Essence(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [each for each in node.decorator_list if _called(each) not in _CACHES]
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.keywords = _without_form(node.keywords)
        for each in node.decorator_list:
            if isinstance(each, ast.Call):
                each.keywords = _without_form(each.keywords)
        return self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        node.args = [*node.posonlyargs, *node.args, *node.kwonlyargs]
        node.defaults += [default for default in node.kw_defaults if default is not None]
        node.posonlyargs, node.kwonlyargs, node.kw_defaults = [], [], []
        return self.generic_visit(node)


def _without_form(keywords: list[ast.keyword]) -> list[ast.keyword]:
    return [each for each in keywords if each.arg not in _FORM]


def _called(node: Any) -> str:
    function = node.func if isinstance(node, ast.Call) else node
    return str(getattr(function, "id", getattr(function, "attr", "")))
