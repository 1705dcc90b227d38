"""Bash text to a syntax tree, by tree-sitter's grammar; nothing here runs anything."""

from __future__ import annotations

from functools import cache

import tree_sitter
import tree_sitter_bash
from tree_sitter import Node


@cache
def _parser() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def parse(text: str) -> Node:
    """Return the tree of a script; what the grammar cannot read are nodes of type `ERROR`."""
    return _parser().parse(text.encode()).root_node


def errors_in(tree: Node) -> list[Node]:
    """Return the parts of a tree that the grammar could not read, the first of each line."""
    found: dict[int, Node] = {}
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if node.is_error or node.is_missing:
            found.setdefault(line_of(node), node)
        elif node.has_error:
            waiting += reversed(node.children)
    return list(found.values())


def text_of(node: Node) -> str:
    """Return a node as it is written."""
    return (node.text or b"").decode(errors="replace")


def line_of(node: Node) -> int:
    """Return the line of a node, from 1."""
    return int(node.start_point[0]) + 1


def pieces(node: Node) -> list[Node | str]:
    """Return the children of a quoted text or here-document, with the literal text between them."""
    source = node.text or b""
    result: list[Node | str] = []
    at, start = 0, node.start_byte
    for child in node.children:
        if child.type in ("string_content", "heredoc_content", '"', "heredoc_start", "heredoc_end"):
            continue
        if child.start_byte - start > at:
            result.append(source[at : child.start_byte - start].decode(errors="replace"))
        result.append(child)
        at = child.end_byte - start
    if at < len(source):
        result.append(source[at:].decode(errors="replace"))
    return result


def first_line(text: str) -> str:
    """Return the first line of a statement, cut where it is long."""
    first = text.strip().split("\n")[0]
    return first if len(first) <= 100 else f"{first[:99]}…"
