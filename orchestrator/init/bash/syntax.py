"""Bash text to a syntax tree, by tree-sitter's grammar; nothing here runs anything."""

from __future__ import annotations

import re
from functools import cache

import tree_sitter
import tree_sitter_bash
from tree_sitter import Node

# Words that go over the end of a line, variables that another word stands directly before, and places to be
# filled in.
_ODD_WORD = re.compile(r"<[A-Za-z]|\$\[|(?<=[^\s\\])\\\n(?=\S)|(?<=[^\s(\[\"'`|&;<>{$])\$[A-Za-z_]")
# Here-documents, quoted texts, comments and `${...}` stay as they are.
_LEXEME = re.compile(
    r"""(?P<heredoc><<-?[ \t]*(?P<mark>['"]?)(?P<end>\w+)(?P=mark)[^\n]*\n
        (?:[^\n]*\n)*?[ \t]*(?P=end)(?=\n|\Z))
    |(?P<raw>'[^']*')|(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<comment>(?<![^\s;])\#[^\n]*)|(?P<braced>\$\{[^{}]*\})
    |(?P<sum>\$\[[^\]\[\n]+\])|(?P<placeholder>(?<=[\s=])<[A-Za-z][\w-]*(?:[\ /][\w-]+)*>(?=[\s"']|\Z))
    |(?<=[^\s\\])(?P<broken>\\\n(?=\S))(?:\$(?P<joined>[A-Za-z_]\w*))?|(?P<escaped>\\.)
    |(?<=[^\s(\["'`|&;<>{$])\$(?P<inside>[A-Za-z_]\w*)|.""",
    re.VERBOSE | re.DOTALL,
)


@cache
def _parser() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def parse(text: str) -> Node:
    """Return the tree of a script; what the grammar cannot read are nodes of type `ERROR`."""
    text = re.sub(r"(?<!\\)\\\s*\Z", "\n", text)  # a line that goes on behind the end of the file
    return _parser().parse(_whole_words(text).encode()).root_node


def _whole_words(text: str) -> str:
    r"""Return a script without two forms of words that the grammar reads wrongly, and with places as words.

    Bash joins `a\` and the line `b` to `ab`; the line ends that are left out follow behind the next one, so
    that every later line keeps its number. And `$a-$b-c` becomes `$a-${b}-c`. A place to be filled in,
    `<YOUR_DATA>`, which bash would take for a file, becomes a quoted word.
    """
    if not _ODD_WORD.search(text):
        return text
    result, owed = list[str](), 0
    for lexeme in _LEXEME.finditer(text):
        piece = lexeme[0]
        if lexeme["broken"]:
            owed += 1
            result.append(f"${{{lexeme['joined']}}}" if lexeme["joined"] else "")
        elif lexeme.lastgroup == "sum":  # an old way to write `$((...))`
            result.append(f"$(({piece[2:-1]}))")
        elif lexeme.lastgroup == "placeholder":
            result.append(f"'{piece}'")
        elif lexeme.lastgroup == "inside":
            result.append(f"${{{lexeme['inside']}}}")
        elif piece == "\n" and owed:
            result.append("\n" * (owed + 1))
            owed = 0
        else:
            result.append(piece)
    return "".join(result)


def errors_in(tree: Node) -> list[Node]:
    """Return the parts of a tree that the grammar could not read, the first of each line."""
    result: dict[int, Node] = {}
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if node.is_error or node.is_missing:
            result.setdefault(line_of(node), node)
        elif node.has_error:
            waiting += reversed(node.children)
    return list(result.values())


def text_of(node: Node) -> str:
    """Return a node as it is written."""
    return (node.text or b"").decode(errors="replace")


def line_of(node: Node) -> int:
    """Return the line of a node, from 1."""
    return int(node.start_point[0]) + 1


def is_background(node: Node) -> bool:
    """Return whether a statement ends in `&`."""
    return node.next_sibling is not None and node.next_sibling.type == "&"


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
