"""Parse bash into a syntax tree with tree-sitter's grammar, without running anything."""

from __future__ import annotations

import re
from functools import cache

import tree_sitter
import tree_sitter_bash
from tree_sitter import Node

# Words continued on the next line, `$[...]`, variables directly after another word, and placeholders `<...>`.
_ODD_WORD = re.compile(r"<[A-Za-z]|\$\[|(?<=[^\s\\])\\\n(?=\S)|(?<=[^\s(\[\"'`|&;<>{$])\$[A-Za-z_]")
# Here-documents, quoted texts, comments and `${...}` are kept unchanged.
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
    """Return the tree of a script; parts that the grammar cannot parse are nodes of type `ERROR`."""
    text = re.sub(r"(?<!\\)\\\s*\Z", "\n", text)  # a continued last line
    return _parser().parse(_whole_words(text).encode()).root_node


def _whole_words(text: str) -> str:
    r"""Return a script with forms of words that the grammar misreads replaced, and placeholders quoted.

    Bash joins `a\` and the line `b` to `ab`; the removed line ends are added after the next one, so that all
    later lines keep their numbers. `$a-$b-c` becomes `$a-${b}-c`. A placeholder `<YOUR_DATA>`, which bash
    would read as a redirection, becomes a quoted word.
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
    """Return the parts of a tree that the grammar could not parse, the first of each line."""
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
    """Return the source text of a node."""
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
    """Return the first line of a statement, at most 100 characters."""
    first = text.strip().split("\n")[0]
    return first if len(first) <= 100 else f"{first[:99]}…"
