"""Whole-number arithmetic as bash writes it."""

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
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def arithmetic(text: str, value_of: Callable[[str], str]) -> int | None:
    """Return the value of an expression without `$`; None if it is none that can be determined."""
    condition = re.fullmatch(r"([^?]+)\?([^:]+):(.+)", text, re.DOTALL)
    if condition:
        chosen = arithmetic(condition[1], value_of)
        return None if chosen is None else arithmetic(condition[2 if chosen else 3], value_of)
    plain = text.replace("&&", " and ").replace("||", " or ")
    plain = re.sub(r"!(?!=)", " not ", plain).strip()
    try:
        return _value(ast.parse(plain or "0", mode="eval").body, value_of)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.AST, value_of: Callable[[str], str], depth: int = 0) -> int:
    match node:
        case ast.Constant(value=int() as number):
            return int(number)
        case ast.Name(id=name) if depth < 10:
            return _value(ast.parse(value_of(name) or "0", mode="eval").body, value_of, depth + 1)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, value_of, depth)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner, value_of, depth)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return int(not _value(inner, value_of, depth))
        case ast.BoolOp(op=ast.And(), values=values):
            return int(all(_value(each, value_of, depth) for each in values))
        case ast.BoolOp(op=ast.Or(), values=values):
            return int(any(_value(each, value_of, depth) for each in values))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            power = _value(right, value_of, depth)
            if not 0 <= power < _BITS:
                raise ValueError(power)
            return int(_value(left, value_of, depth) ** power)
        case ast.BinOp(left=left, op=how, right=right) if type(how) in _OPERATORS:
            return _OPERATORS[type(how)](_value(left, value_of, depth), _value(right, value_of, depth))
        case ast.Compare(left=left, ops=[how], comparators=[right]) if type(how) in _OPERATORS:
            return int(_OPERATORS[type(how)](_value(left, value_of, depth), _value(right, value_of, depth)))
    raise ValueError(ast.dump(node)[:40])
