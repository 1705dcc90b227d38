"""`[ … ]`, `[[ … ]]`, `((…))` and `test`: true, false, or undetermined (None)."""

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
_FILES = ("-e", "-f", "-d", "-s", "-r", "-w", "-x", "-L", "-h")


def test(state: State, node: Node) -> bool | None:
    """Return whether a test command holds."""
    inner = [child for child in node.children if child.type not in ("[", "]", "[[", "]]", "((", "))")]
    if node.children and node.children[0].type == "((":
        return calculation(state, node)
    return _holds(state, inner[0]) if inner else False


def calculation(state: State, node: Node) -> bool | None:
    """Return whether `((…))` or an expression in it is not zero, after the assignment that it may make."""
    source = expansion.arithmetic_of(state, node)
    step = re.fullmatch(r"(?:(\w+)\s*(\+\+|--)|(\+\+|--)\s*(\w+))", source)
    if step:
        name = step[1] or step[4]
        source = f"{name} {(step[2] or step[3])[0]}= 1"
    change = re.fullmatch(r"(\w+)\s*([-+*/%]?)=(?!=)\s*(.+)", source, re.DOTALL)
    if change:
        whole = f"({change[1]}) {change[2]} ({change[3]})" if change[2] else change[3]
        value = expansion.number(state, whole)
        state.assign(change[1], state.untold(node) if value is None else str(value))
    else:
        value = expansion.number(state, source)
    return None if value is None else bool(value)


def of_words(state: State, words: Sequence[str]) -> bool | None:
    """Return whether the words of `test` hold."""
    match list(words):
        case []:
            return False
        case ["!", *rest]:
            return opposite(of_words(state, rest))
        case [operator, operand]:
            return _unary(state, operator, operand)
        case [left, operator, right]:
            return _binary(left, operator, right, pattern=False)
        case [word]:
            return None if is_unknown(word) else bool(word)
    return None


def opposite(value: bool | None) -> bool | None:
    """Return the opposite; what is not known stays so."""
    return None if value is None else not value


def _holds(state: State, node: Node) -> bool | None:
    match node.type:
        case "binary_expression":
            return _of_two(state, node)
        case "unary_expression":
            return _of_one(state, node)
        case "parenthesized_expression":
            return _holds(state, node.children[1])
    text = expansion.text(state, node)
    return None if is_unknown(text) else bool(text)


def _of_one(state: State, node: Node) -> bool | None:
    operator = node.children[0]
    operand = node.children[-1]
    if text_of(operator) == "!":
        return opposite(_holds(state, operand))
    return _unary(state, text_of(operator), expansion.text(state, operand))


def _of_two(state: State, node: Node) -> bool | None:
    left, right = node.children[0], node.children[-1]
    operator = " ".join(text_of(child) for child in node.children[1:-1])
    if operator in ("&&", "-a"):
        first = _holds(state, left)
        return first if first is not True else _holds(state, right)
    if operator in ("||", "-o"):
        first = _holds(state, left)
        second = None if first is True else _holds(state, right)
        return True if first is True else None if None in (first, second) and second is not True else second
    quoted = right.type in ("string", "raw_string")
    return _binary(expansion.text(state, left), operator, expansion.text(state, right), pattern=not quoted)


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
        found = path.is_dir() if operator == "-d" else path.is_file() if operator == "-f" else path.exists()
    except OSError:
        found = False
    if not found:
        state.missing.add(operand)
    return found


def _binary(left: str, operator: str, right: str, *, pattern: bool) -> bool | None:
    if is_unknown(left) or is_unknown(right):
        return None
    if operator in _NUMBERS:
        try:
            return _NUMBERS[operator](int(left or 0), int(right or 0))
        except ValueError:
            return False
    match operator:
        case "=" | "==":
            return matches(left, right) if pattern else left == right
        case "!=":
            return not matches(left, right) if pattern else left != right
        case "=~":
            try:
                return re.search(re.sub(r"\[:(\w+):\]", _class, right), left) is not None
            except re.error:
                return None
        case "<":
            return left < right
        case ">":
            return left > right
    return None


def _class(found: re.Match[str]) -> str:
    classes = {"digit": "0-9", "alpha": "A-Za-z", "alnum": "A-Za-z0-9", "space": r"\s"}
    return classes.get(found[1], found[0])
