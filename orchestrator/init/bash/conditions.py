"""Evaluate `[ … ]`, `[[ … ]]`, `((…))` and `test`: true, false, or None if undetermined."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tree_sitter import Node

from autotune.orchestrator.init.bash import expansion
from autotune.orchestrator.init.bash.patterns import matches
from autotune.orchestrator.init.bash.state import State, is_unknown
from autotune.orchestrator.init.bash.syntax import text_of

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_COMPARISONS = ("=", "==", "!=", "=~", "<", ">")
_EQUALITIES = ("=", "==", "!=")
_SIGNS = ("&&", "||", ")")
_FILES = ("-e", "-f", "-d", "-s", "-r", "-w", "-x", "-L", "-h")
# What numbers the nodes and processes of a job; where nothing numbers them, the first one is meant.
_RANK = re.compile(r"\"?\$\{?(\w*(?:rank|node_?id|procid|node_?index)\w*)\}?\"?", re.IGNORECASE)


def test(state: State, node: Node) -> bool | None:
    """Return whether a test command holds."""
    if node.children and node.children[0].type == "((":
        return calculation(state, node)
    inner = [child for child in node.children if child.type not in ("[", "]", "[[", "]]")]
    has_patterns = bool(node.children) and node.children[0].type == "[["
    leaves = [leaf for child in inner for leaf in _leaves(child)]
    return _Test(state, leaves, has_patterns=has_patterns).holds()


def calculation(state: State, node: Node) -> bool | None:
    """Return whether `((…))` or an expression in it is not zero, and apply its assignments."""
    value = expansion.number(state, expansion.arithmetic_of(state, node))
    return None if value is None else bool(value)


def of_words(state: State, words: Sequence[str]) -> bool | None:
    """Return whether the words of `test` hold."""
    return _Test(state, words).holds()


def opposite(value: bool | None) -> bool | None:
    """Return the negation; None stays None."""
    return None if value is None else not value


def _leaves(node: Node) -> list[Node]:
    """Return the operands and operators of a test in order: the grammar nests them differently from bash."""
    if node.type in ("binary_expression", "unary_expression", "parenthesized_expression"):
        return [leaf for child in node.children for leaf in _leaves(child)]
    return [node]


class _Test:
    """Reads the operands and operators of a test, the loosest operator first."""

    def __init__(self, state: State, parts: Sequence[Node | str], *, has_patterns: bool = False) -> None:
        self._state, self._parts, self._at, self._has_patterns = state, parts, 0, has_patterns

    def holds(self) -> bool | None:
        return self._any()() if self._parts else False

    def _sign(self, ahead: int = 0) -> str:
        """Return the part at a position if it can be an operator; empty at the end and for a quoted text."""
        at = self._at + ahead
        part = self._parts[at] if at < len(self._parts) else ""
        if isinstance(part, str):
            return part
        return "" if part.type in ("string", "raw_string") else text_of(part)

    def _any(self) -> Callable[[], bool | None]:
        left = self._all()
        while self._sign() in ("||", "-o"):
            self._at += 1
            left = _either(left, self._all())
        return left

    def _all(self) -> Callable[[], bool | None]:
        left = self._one()
        while self._sign() in ("&&", "-a"):
            self._at += 1
            left = _both(left, self._one())
        return left

    def _one(self) -> Callable[[], bool | None]:
        remain = len(self._parts) - self._at
        if self._sign() == "!" and remain > 1:
            self._at += 1
            inner = self._one()
            return lambda: opposite(inner())
        if self._sign() == "(" and remain > 2:
            self._at += 1
            inner = self._any()
            self._at += 1
            return inner
        operator = self._sign(1)
        if remain > 2 and (operator in _NUMBERS or operator in _COMPARISONS):
            left, right = self._parts[self._at], self._parts[self._at + 2]
            self._at += 3
            if operator in _EQUALITIES and self._has_patterns and not isinstance(right, str):
                nodes = [right, *self._adjacent(right)]
                return lambda: _fits(
                    self._value(left, right), expansion.pattern(self._state, nodes), wanted=operator != "!="
                )
            return lambda: _binary(self._state, self._value(left, right), operator, self._value(right, left))
        if remain > 1 and re.fullmatch("-[a-zA-Z]", self._sign()) and operator not in ("&&", "||"):
            sign, operand = self._sign(), self._parts[self._at + 1]
            self._at += 2
            return lambda: _unary(self._state, sign, self._text(operand))
        word = self._parts[self._at] if remain else ""
        self._at += 1
        return lambda: _filled(self._text(word))

    def _adjacent(self, node: Node) -> list[Node]:
        """Take the nodes that follow `node` without a blank, which belong to the same word."""
        nodes: list[Node] = []
        while self._at < len(self._parts):
            part, before = self._parts[self._at], nodes[-1] if nodes else node
            if isinstance(part, str) or part.start_byte != before.end_byte or part.type in _SIGNS:
                break
            nodes.append(part)
            self._at += 1
        return nodes

    def _value(self, part: Node | str, other: Node | str) -> str:
        """Return the text of an operand: 0 for a rank that is empty where it is compared with a number."""
        notes = len(self._state.notes)
        text = self._text(part)
        name = None if text or isinstance(part, str) else _RANK.fullmatch(text_of(part))
        if name is None or isinstance(part, str) or not self._text(other).isdigit():
            return text
        del self._state.notes[notes:]  # that it is unset is part of the note below
        self._state.note(part, f"${name[1]} is empty: read as 0, the first node or process")
        return "0"

    def _text(self, part: Node | str) -> str:
        return part if isinstance(part, str) else expansion.text(self._state, part)


def _filled(text: str) -> bool | None:
    return None if is_unknown(text) else bool(text)


def _both(left: Callable[[], bool | None], right: Callable[[], bool | None]) -> Callable[[], bool | None]:
    def holds() -> bool | None:
        first = left()
        return right() if first is True else first

    return holds


def _either(left: Callable[[], bool | None], right: Callable[[], bool | None]) -> Callable[[], bool | None]:
    def holds() -> bool | None:
        first = left()
        second = None if first is True else right()
        return True if first is True else None if None in (first, second) and second is not True else second

    return holds


def _unary(state: State, operator: str, operand: str) -> bool | None:
    if operator in ("-n", "-z") and is_unknown(operand):
        return None
    match operator:
        case "-n":
            return bool(operand)
        case "-z":
            return not operand
        case "-v":
            return state.get(operand) is not None
        case "-t":
            return False
    if operator not in _FILES or is_unknown(operand):
        return None
    if operand in state.files:
        return operator != "-d"
    path = Path(state.cwd, operand)
    try:
        result = path.is_dir() if operator == "-d" else path.is_file() if operator == "-f" else path.exists()
    except OSError:
        result = False
    if not result:
        state.missing.add(operand)
    return result


def _fits(value: str, pattern: str, *, wanted: bool) -> bool | None:
    return None if is_unknown(value) or is_unknown(pattern) else matches(value, pattern) is wanted


def _binary(state: State, left: str, operator: str, right: str) -> bool | None:
    if is_unknown(left) or is_unknown(right):
        return None
    if operator in _NUMBERS:
        try:
            return _NUMBERS[operator](int(left or 0), int(right or 0))
        except ValueError:
            return False
    match operator:
        case "=" | "==":
            return left == right
        case "!=":
            return left != right
        case "=~":
            try:
                match = re.search(re.sub(r"\[:(\w+):\]", _class, right), left)
            except re.error:
                return None
            state.assign("BASH_REMATCH", [] if match is None else [match[0], *(match.groups(""))])
            return match is not None
        case "<":
            return left < right
        case ">":
            return left > right
    return None


def _class(match: re.Match[str]) -> str:
    classes = {"digit": "0-9", "alpha": "A-Za-z", "alnum": "A-Za-z0-9", "space": r"\s"}
    return classes.get(match[1], match[0])
