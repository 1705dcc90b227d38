"""Expand words of a script to the texts that programs receive."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence

from tree_sitter import Node

from autotune.orchestrator.init.bash.arithmetic import arithmetic
from autotune.orchestrator.init.bash.patterns import braces, changed, has_braces, sliced, sliced_text
from autotune.orchestrator.init.bash.state import CLOSE, OPEN, UNSET, State, as_written, is_unknown, unknown
from autotune.orchestrator.init.bash.syntax import parse, pieces, text_of
from autotune.orchestrator.init.bash.text_commands import unescaped

_PLAIN_PARTS = {"word", "number", "brace_expression"}

# A piece of a word: a text that is not split ("whole"), a text that is ("split"), or items of an array.
Piece = tuple[str, str | list[str]]

# Names in capitals come from a scheduler or the user's environment: if one is not set here, its value where
# the job runs is not bash's default 0.
_FROM_OUTSIDE = re.compile(r"(?<![\w${#!:])[A-Z][A-Z0-9_]+\b(?!\s*(?:=(?!=)|\+\+|--|\[))")
_PLAIN = re.compile(r"^\s*\$\{?(\w+)\}?$")


def words(state: State, nodes: Iterable[Node]) -> list[str]:
    """Return the words that several words of a script expand to."""
    result: list[str] = []
    torn: Node | None = None  # the grammar splits `*$N` after its `$`
    for node in nodes:
        if torn is not None and torn.end_byte == node.start_byte:
            result += _mended(state, torn, node).split()
            torn = None
            continue
        if torn is not None:
            result += fields(state, torn)
        torn = node if node.type == "concatenation" and node.children[-1].type == "$" else None
        if torn is None:
            result += fields(state, node)
    return result if torn is None else [*result, *fields(state, torn)]


def _mended(state: State, torn: Node, rest: Node) -> str:
    """Return a word that the grammar split between a `$` and the name after it."""
    left = "".join(text(state, child) for child in torn.children[:-1])
    name, *others = rest.children if rest.type == "concatenation" else [rest]
    right = re.sub(r"^\w+", lambda match: _value(state, match[0]) or "", text_of(name))
    return left + right + "".join(text(state, child) for child in others)


def fields(state: State, node: Node) -> list[str]:
    """Return the words that one word of a script expands to: none, one or several."""
    if node.type == "word" and has_braces(text_of(node)):
        return [_unquoted(state, each) for each in braces(text_of(node))]
    plain = node.type == "concatenation" and {c.type for c in node.children} <= _PLAIN_PARTS
    if plain and has_braces(text_of(node)):
        return [_unquoted(state, each) for each in braces(text_of(node))]
    if node.type == "brace_expression":
        return braces(text_of(node))
    result: list[str] = []
    current: str | None = None
    separators = state.text("IFS") or ""
    field = f"(?:{OPEN}[^{CLOSE}]*{CLOSE}|[^{re.escape(separators)}])+" if separators else "(?s:.+)"
    for kind, value in _pieces(state, node):
        if kind == "items":
            items = list(value)
            if items:
                current = (current or "") + items[0]
                for item in items[1:]:
                    result.append(current)
                    current = item
            continue
        assert isinstance(value, str)
        if kind == "whole":
            current = (current or "") + value
            continue
        parts = [match[0] for match in re.finditer(field, value)]
        if current is not None and parts and value[0] in separators:
            result.append(current)
            current = None
        for part in parts:
            current = (current or "") + part
            result.append(current)
            current = None
        if parts and value[-1] not in separators:
            current = result.pop()
    return result if current is None else [*result, current]


def text(state: State, node: Node) -> str:
    """Return a word as one text, without splitting, as in an assignment."""
    return "".join(value if isinstance(value, str) else " ".join(value) for _, value in _pieces(state, node))


def joined(state: State, node: Node) -> str:
    """Return a here-document's text; the grammar leaves variables behind `$@` as they are written."""
    whole = {"@": " ".join(state.positional), "#": str(len(state.positional))}

    def replaced(match: re.Match[str]) -> str:
        name = match[2] or ""
        return match[1] or whole.get(name.replace("*", "@")) or _value(state, name) or ""

    # Bash removes backslashes only before these characters.
    parts = (
        re.sub(r"\\([$`\\])|\$([@*#\d]|[A-Za-z_]\w*)", replaced, part.replace("\\\n", ""))
        if isinstance(part, str)
        else text(state, part)
        for part in pieces(node)
    )
    return "".join(parts)


def pattern(state: State, nodes: Sequence[Node]) -> str:
    """Return the shell pattern of adjacent nodes of a test or a `case`, with quoted parts escaped.

    The grammar splits `*"72B"*` in three there, and leaves quotes in others; parsed as a word of a command it
    is one word. Unknown if it is not a word, as with `@(a|b)"c"`.
    """
    source = "".join(map(text_of, nodes))
    if not re.search(r"[\"'$`\\]", source):
        return source
    commands = parse(f": {source}").named_children
    words = [child for child in commands[0].children if child.type != "command_name"] if commands else []
    if len(commands) != 1 or len(words) != 1 or commands[0].has_error:
        return unknown(source)
    parts = words[0].children if words[0].type == "concatenation" else words
    return "".join(_pattern_part(state, part) for part in parts)


def _pattern_part(state: State, node: Node) -> str:
    if node.type in ("simple_expansion", "expansion", "command_substitution"):
        return text(state, node)
    if node.type == "word":
        return re.sub(r"\\(.)", lambda quoted: glob.escape(quoted[1]), text_of(node))
    value = text(state, node)
    return value if is_unknown(value) else glob.escape(value)


def number(state: State, source: str) -> int | None:
    """Return the value of an arithmetic expression whose `$` are already expanded; None if unknown."""
    if is_unknown(source):
        return None

    def value_of(name: str) -> str:
        name, _, index = name.partition("[")
        return (_indexed(state, name, index.rstrip("]")) if index else state.text(name)) or "0"

    return arithmetic(
        source, value_of, lambda name, made: state.assign(name, made or unknown(f"$(({source}))"))
    )


def _pieces(state: State, node: Node, *, quoted: bool = False) -> list[Piece]:
    split = "whole" if quoted else "split"
    blank = len(text_of(node)) - len(text_of(node).lstrip())
    if blank and node.type.endswith("expansion"):  # the grammar includes a blank before it
        return [(split, text_of(node)[:blank]), *_expanded(state, node, split)]
    return _expanded(state, node, split)


def _expanded(state: State, node: Node, split: str) -> list[Piece]:
    match node.type:
        case "concatenation":
            return [piece for child in node.children for piece in _pieces(state, child)]
        case "string" | "translated_string":
            return _string(state, node)
        case "raw_string":
            return [("whole", text_of(node)[1:-1])]
        case "ansi_c_string":
            return [("whole", unescaped(text_of(node)[2:-1]))]
        case "simple_expansion":
            return _variable(state, node, text_of(node).lstrip()[1:], split)
        case "expansion":
            return _expansion(state, node, split)
        case "command_substitution":
            if text_of(node).startswith("$((") and (value := _calculated(state, node)) is not None:
                return [("whole", value)]  # the grammar parses `$((a - b))` inside `${…}` as a subshell
            return [(split, state.capture(node).rstrip("\n"))]
        case "arithmetic_expansion":
            return [("whole", _arithmetic(state, node))]
        case "process_substitution":
            return [("whole", state.untold(node))]
    return [("whole", _unquoted(state, text_of(node)))]


def _unquoted(state: State, source: str) -> str:
    source = source.replace("\\\n", "")
    source = re.sub(
        r"^([A-Za-z_]\w*=)?~(?=/|$)", lambda match: (match[1] or "") + (state.text("HOME") or "~"), source
    )
    return re.sub(r"\\(.)", r"\1", source, flags=re.DOTALL)


def _string(state: State, node: Node) -> list[Piece]:
    result: list[Piece] = [("whole", "")]
    source = [part for part in pieces(node) if isinstance(part, str) or part.type != '"']
    if isinstance(source[0], str):
        source[0] = source[0].removeprefix("$").removeprefix('"')
    if isinstance(source[-1], str):
        source[-1] = source[-1].removesuffix('"')
    for part in source:
        if isinstance(part, str):
            result.append(("whole", re.sub(r'\\([$`"\\])', r"\1", part.replace("\\\n", ""))))
        else:
            result += _pieces(state, part, quoted=True)
    if any(kind == "items" and not value for kind, value in result) and not any(
        value for kind, value in result if kind == "whole"
    ):
        return [piece for piece in result if piece[0] == "items"]
    return result


def _variable(state: State, node: Node, name: str, split: str) -> list[Piece]:
    match name:
        case "@" | "*":
            if split == "whole" and name == "@":
                return [("items", list(state.positional))]
            return [(split, _between(state, split).join(state.positional))]
        case "#":
            return [("whole", str(len(state.positional)))]
        case "?":
            return [("whole", "1" if state.status is False else "0")]
        case _ if name[:1] in ("$", "!"):
            return [("whole", state.untold(node))]
        case "0":
            return [(split, state.program or state.file)]
        case "RANDOM" | "SECONDS" | "HOSTNAME" if name not in state.variables and name not in state.inherited:
            return [(split, unknown(f"${name}"))]
    value = _value(state, name)
    if value is None:
        state.note(node, f"${name} {UNSET}")
    return [(split, value or "")]


def _between(state: State, split: str) -> str:
    """Return the separator of the items of `"$*"`."""
    return (state.text("IFS") or "")[:1] if split == "whole" else " "


def _value(state: State, name: str) -> str | None:
    if name.isdigit():
        at = int(name)
        if at == 0:
            return state.program or state.file
        return state.positional[at - 1] if at <= len(state.positional) else ""
    return state.text(name)


def _expansion(state: State, node: Node, split: str) -> list[Piece]:
    """Expand `${…}`."""
    source = text_of(node).lstrip()[2:-1]
    inner = [child for child in node.children if child.type not in ("${", "}")]
    first = inner[0].type if inner else ""
    if first in ("#", "!") and len(inner) > 1 and inner[1].type in ("variable_name", "subscript"):
        return _counted_or_pointed(state, node, first, inner[1], split)
    if not inner or inner[0].type not in ("variable_name", "subscript", "special_variable_name"):
        return (
            _variable(state, node, source, split)
            if re.fullmatch(r"[@*#?]|\d+", source)
            else _odd(state, node)
        )
    head = inner[0]
    name, index = _name_and_index(state, head)
    whole = index in ("@", "*") or name in ("@", "*")
    operator, argument = _operator(state, node, head)
    items = list(state.positional) if name in ("@", "*") else state.items(name)
    if index == "@" and state.unread and state.get(name) is None:
        items = [unknown(f"$({name}[@])")]
    if index == "*" or name == "*":
        items = [_between(state, split).join(items)] if items else []
    if whole and operator == ":":
        items = sliced(lambda source: number(state, source), items, argument, positional=name in ("@", "*"))
        operator = ""
    if whole and operator in ("", "-", ":-", "+", ":+"):
        if operator in ("+", ":+"):
            return (
                [(split, argument if items else "")]
                if not items or split == "split"
                else _alternative(state, node, head)
            )
        if items or not operator:
            return [("items", items)] if split == "whole" else [("split", " ".join(items))]
        return [(split, argument)] if argument else [("items", [])]
    if whole:
        items = [changed(each, operator, argument) for each in items]
        return [("items", items)] if split == "whole" else [("split", " ".join(items))]
    value = _indexed(state, name, index) if index else _value(state, name)
    if operator in (":-", "-") and not value and node.children[-2].type in ("string", "raw_string"):
        split = "whole"  # `${X:-"a b"}` is one word
    return [(split, _applied(state, node, name, value, operator, argument))]


def _alternative(state: State, node: Node, head: Node) -> list[Piece]:
    """Expand `"${A[@]+"${A[@]}"}"`, the idiom for an array that may be empty."""
    return [
        piece
        for child in node.children
        if child.start_byte > head.end_byte and child.type in ("string", "expansion", "simple_expansion")
        for piece in _pieces(state, child, quoted=True)
    ]


def _applied(state: State, node: Node, name: str, value: str | None, operator: str, argument: str) -> str:
    filled = bool(value) if operator.startswith(":") else value is not None
    match operator:
        case "":
            if value is None:
                state.note(node, f"${name} {UNSET}")
            return value or ""
        case ":-" | "-":
            return value or "" if filled else argument
        case ":=" | "=":
            if not filled:
                state.assign(name, argument)
            return value or "" if filled else argument
        case ":+" | "+":
            return argument if filled else ""
        case ":?" | "?":
            if not filled:
                state.note(node, f"the caller of the script must set ${name}")
                return unknown(f"${{{name}}}")
            return value or ""
        case ":":
            sliced = sliced_text(lambda source: number(state, source), value or "", argument)
            return state.untold(node) if sliced is None else sliced
    if is_unknown(value or "") or is_unknown(argument):
        return state.untold(node)
    return changed(value or "", operator, argument)


def _operator(state: State, node: Node, head: Node) -> tuple[str, str]:
    """Return the operator after a parameter's name, and its expanded argument."""
    source = (node.text or b"")[head.end_byte - node.start_byte : -1].decode(errors="replace")
    match = re.match(r":[-=+?]|##|%%|//|/[#%]|\^\^|,,|[-=+?#%/:^,@]", source)
    if match is None:
        return "", ""
    start = head.end_byte - node.start_byte + len(match[0].encode())
    result, at = [], start
    raw = node.text or b""
    for child in node.children:
        begin, end = child.start_byte - node.start_byte, child.end_byte - node.start_byte
        if begin < at or child.type == "}":
            continue
        result += [raw[at:begin].decode(errors="replace"), _argument(state, child)]
        at = end
    result.append(raw[at:-1].decode(errors="replace"))
    return match[0], "".join(result)


def _argument(state: State, child: Node) -> str:
    if child.type in ("regex", "word", "number", "extglob_pattern") or not child.is_named:
        return _unquoted(state, text_of(child)) if child.type == "word" else text_of(child)
    return text(state, child)


def _name_and_index(state: State, node: Node) -> tuple[str, str]:
    if node.type != "subscript":
        return text_of(node), ""
    name = node.child_by_field_name("name")
    index = node.child_by_field_name("index")
    if name is None or index is None:
        return text_of(node).partition("[")[0], "0"
    return text_of(name), text_of(index) if text_of(index) in ("@", "*") else text(state, index)


def _indexed(state: State, name: str, index: str) -> str | None:
    if name == "BASH_SOURCE":
        depth = number(state, index)
        return state.source(depth if depth is not None and depth >= 0 else 0)
    value = state.get(name)
    at = number(state, index)
    if isinstance(value, dict):
        return value[index] if index in value else value.get(str(at))
    items = state.items(name)
    return items[at] if at is not None and -len(items) <= at < len(items) else None


def _counted_or_pointed(state: State, node: Node, kind: str, head: Node, split: str) -> list[Piece]:
    name, index = _name_and_index(state, head)
    if kind == "#":
        size = len(state.items(name)) if index in ("@", "*") else len(as_written(_value(state, name) or ""))
        return [("whole", str(size))]
    value = state.get(name)
    if index in ("@", "*"):
        keys = list(value) if isinstance(value, dict) else [str(n) for n in range(len(state.items(name)))]
        return [("items", keys)] if split == "whole" else [("split", " ".join(keys))]
    pointed = state.text(name) or ""
    if not re.fullmatch(r"\w+", pointed):
        return _odd(state, node)
    operator, argument = _operator(state, node, head)
    return [(split, _applied(state, node, pointed, _value(state, pointed), operator, argument))]


def _odd(state: State, node: Node) -> list[Piece]:
    return [("whole", state.untold(node))]


def _arithmetic(state: State, node: Node) -> str:
    value = _calculated(state, node)
    return state.untold(node) if value is None else value


def _calculated(state: State, node: Node) -> str | None:
    plain = (part if isinstance(part, str) else _PLAIN.sub(r"\1", text_of(part)) for part in _leaves(node))
    if any(state.get(name) is None for part in plain for name in _FROM_OUTSIDE.findall(part)):
        return None
    source = "".join(part if isinstance(part, str) else _inside(state, part) for part in _leaves(node))
    value = number(state, re.sub(r"^\$?\(\(|\)\)$", "", source.strip()))
    return None if value is None else str(value)


def _inside(state: State, node: Node) -> str:
    value = text(state, node)
    return value if is_unknown(value) or re.fullmatch(r"-?\w+", value) else f"({value or 0})"


def _leaves(node: Node) -> Iterable[Node | str]:
    """Yield the literal texts and the expansion nodes of an arithmetic expression."""
    raw, at = node.text or b"", 0
    for child in node.children:
        begin = child.start_byte - node.start_byte
        yield raw[at:begin].decode(errors="replace")
        if child.type in ("simple_expansion", "expansion", "command_substitution", "string"):
            yield child
        elif child.children:
            yield from _leaves(child)
        else:
            yield text_of(child)
        at = child.end_byte - node.start_byte
    yield raw[at:].decode(errors="replace")


def arithmetic_of(state: State, node: Node) -> str:
    """Return the text of `((…))` with its expansions replaced."""
    source = "".join(part if isinstance(part, str) else _inside(state, part) for part in _leaves(node))
    return re.sub(r"^\(\(|\)\)$", "", source.strip()).strip()
