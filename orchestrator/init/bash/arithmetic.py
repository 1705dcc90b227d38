"""Bash's integer arithmetic."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

_BITS = 64
_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.RShift: lambda a, b: a >> (b % _BITS),
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_SIGNS: Mapping[type[ast.AST], Callable[[int], int]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Not: lambda a: int(not a),
}
_STEP = re.compile(r"(\w+)\s*(\+\+|--)|(\+\+|--)\s*(\w+)")
_ASSIGNMENT = re.compile(r"(\w+)\s*([-+*/%&|^]?)=(?!=)\s*(.+)", re.DOTALL)


def arithmetic(
    text: str, value_of: Callable[[str], str], assign: Callable[[str, str], None] | None = None
) -> int | None:
    """Return the value of an expression without `$`; None if it cannot be determined.

    `value_of` returns the text of a variable or of an item `NAME[INDEX]`. `assign` receives what `=`, `+=`
    and `++` set, also in expressions separated by commas.
    """
    if assign is not None and "," in text and "(" not in text:
        return [arithmetic(part, value_of, assign) for part in text.split(",")][-1]
    step, change = _STEP.fullmatch(text.strip()), _ASSIGNMENT.fullmatch(text.strip())
    if assign is not None and step is not None:
        name, sign = step[1] or step[4], (step[2] or step[3])[0]
        before = _plain(name, value_of)
        after = None if before is None else before + (1 if sign == "+" else -1)
        assign(name, "" if after is None else str(after))
        return before if step[1] else after
    if assign is not None and change is not None:
        name, sign, source = change.groups()
        value = arithmetic(source, value_of, assign)
        if sign and value is not None:
            value = _plain(f"({name}) {sign} ({value})", value_of)
        assign(name, "" if value is None else str(value))
        return value
    return _plain(text, value_of)


def _plain(text: str, value_of: Callable[[str], str]) -> int | None:
    condition = re.fullmatch(r"([^?]+)\?([^:]+):(.+)", text, re.DOTALL)
    if condition:
        chosen = _plain(condition[1], value_of)
        return None if chosen is None else _plain(condition[2 if chosen else 3], value_of)
    plain = text.replace("&&", " and ").replace("||", " or ")
    plain = re.sub(r"(?<![\w.#])0(?=[0-7]+\b)", "0o", re.sub(r"!(?!=)", " not ", plain)).strip()
    try:
        plain = re.sub(r"\b(\d+)#(\w+)", lambda match: str(int(match[2], int(match[1]))), plain)
        return _value(ast.parse(plain or "0", mode="eval").body, value_of)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST, value_of: Callable[[str], str], depth: int = 0) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return int(number)
        case ast.Name(id=name) if depth < 10:
            return _value(ast.parse(value_of(name) or "0", mode="eval").body, value_of, depth + 1)
        case ast.Subscript(value=ast.Name(id=name), slice=index) if depth < 10:
            item = value_of(f"{name}[{ast.unparse(index)}]")
            return _value(ast.parse(item or "0", mode="eval").body, value_of, depth + 1)
        case ast.UnaryOp(op=how, operand=inner) if type(how) in _SIGNS:
            return _SIGNS[type(how)](_value(inner, value_of, depth))
        case ast.BoolOp(op=ast.And(), values=values):
            return int(all(_value(each, value_of, depth) for each in values))
        case ast.BoolOp(op=ast.Or(), values=values):
            return int(any(_value(each, value_of, depth) for each in values))
        case ast.BinOp(left=left, op=ast.Pow() | ast.LShift() as how, right=right):
            power = _value(right, value_of, depth)
            if not 0 <= power < _BITS:
                raise ValueError(power)
            base = _value(left, value_of, depth)
            return int(base**power) if isinstance(how, ast.Pow) else base << power
        case ast.BinOp(left=left, op=how, right=right) if type(how) in _OPERATORS:
            return _OPERATORS[type(how)](_value(left, value_of, depth), _value(right, value_of, depth))
        case ast.Compare(left=left, ops=[how], comparators=[right]) if type(how) in _OPERATORS:
            return int(_OPERATORS[type(how)](_value(left, value_of, depth), _value(right, value_of, depth)))
    raise ValueError(ast.dump(node)[:40])
