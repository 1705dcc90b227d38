"""`expr`, `bc` and the subset of `awk` that scripts calculate with, as functions of words and input."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from decimal import ROUND_DOWN, Decimal, localcontext
from typing import Any

_LIBRARY_SCALE = 20  # decimal places of a division in `bc -l`
_DIGITS = 100  # of every intermediate value; more than any launch script needs
_MOST_POWER = 64
_COMPARED: Mapping[type[ast.AST], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FLOATS: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": math.fmod,
    "**": operator.pow,
}
_MOST_WHOLE = 2**31  # versions of awk print larger numbers differently
_SIGNS: Mapping[type[ast.AST], Any] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.UAdd: 1,
    ast.USub: -1,
}
_STATEMENT = re.compile(r"(print|printf)\b\s*(.*)|([A-Za-z_]\w*)\s*([-+*/]?)=(?!=)\s*(.+)", re.DOTALL)
_RULE = re.compile(r"\s*(BEGIN|END|NR\s*[=<>!]=?\s*\d+|/[^/]*/)?\s*\{([^{}]*)\}\s*;?")


class UnreadableError(ValueError):
    """A calculation has an unsupported form."""


def expr(words: list[str]) -> str:
    """Return what `expr WORD...` prints for arithmetic and comparisons; raises UnreadableError for more."""
    if not words or any(re.fullmatch(r"-?\d+|[-+*/%()]|[<>]=?|!?=", word) is None for word in words):
        raise UnreadableError("expr")
    joined = " ".join("==" if word == "=" else word for word in words)
    return f"{int(_value(_parsed(joined), whole=True))}\n"


def bc(words: list[str], text: str) -> str:
    """Return what `bc` prints for `scale=N` and expressions; raises UnreadableError for anything else."""
    if any(word not in ("-l", "-q", "-ql", "-lq") for word in words):
        raise UnreadableError("bc")
    scale = _LIBRARY_SCALE if any("l" in word for word in words) else 0
    printed = ""
    for statement in filter(None, map(str.strip, re.split(r"[;\n]", text))):
        setting = re.fullmatch(r"scale\s*=\s*(\d+)", statement)
        if setting:
            scale = min(int(setting[1]), _DIGITS // 2)
            continue
        if re.fullmatch(r"[\d.\s()+*/%^<>=!-]+", statement) is None:
            raise UnreadableError("bc")
        value = _value(_parsed(statement.replace("^", "**")), scale=scale)
        printed += _as_bc(value) + "\n"
    return printed


def awk(words: list[str], text: str) -> str:
    """Return what `awk [-F SEPARATOR] [-v NAME=VALUE] PROGRAM` prints; raises UnreadableError for more."""
    names: dict[str, Any] = {}
    separator = None
    while len(words) > 1 and words[0].startswith("-"):
        option, words = words[0], words[1:]
        value = option[2:]
        if not value:
            value, words = words[0], words[1:]
        if option[:2] == "-v":
            name, _, given = value.partition("=")
            names[name] = _number(given)
        elif option[:2] == "-F":
            separator = value
        else:
            raise UnreadableError("awk")
    if len(words) != 1:
        raise UnreadableError("awk")
    rules = list(_RULE.finditer(words[0]))
    if "".join(rule[0] for rule in rules).strip() != words[0].strip():
        raise UnreadableError("awk")
    lines = text.splitlines() if any(rule[1] != "BEGIN" for rule in rules) else []
    printed = "".join(_run(rule[2], names, [""]) for rule in rules if rule[1] == "BEGIN")
    fields = [""]
    for names["NR"], line in enumerate(lines, start=1):
        parts = line.split() if separator in (None, " ") else re.split(_splits(separator), line)
        fields = [line, *parts]
        names["NF"] = len(parts)
        for rule in rules:
            if rule[1] not in ("BEGIN", "END") and _applies(rule[1], names, line):
                printed += _run(rule[2], names, fields)
    return printed + "".join(_run(rule[2], names, fields) for rule in rules if rule[1] == "END")


def _splits(separator: str | None) -> str:
    text = str(separator)
    if len(text) > 1 and re.search(r"[][(){}*+?|^$\\]", text):
        raise UnreadableError("awk")
    return re.escape(text)


def _applies(pattern: str | None, names: Mapping[str, Any], line: str) -> bool:
    if not pattern:
        return True
    if pattern.startswith("/"):
        if re.search(r"[][(){}*+?|^$\\.]", pattern):
            raise UnreadableError("awk")
        return pattern[1:-1] in line
    return bool(_value(_parsed(pattern), names=names))


def _run(body: str, names: dict[str, Any], fields: list[str]) -> str:
    printed = ""
    for statement in filter(None, map(str.strip, re.split(r"[;\n]", body))):
        match = _STATEMENT.fullmatch(statement)
        if match is None:
            raise UnreadableError("awk")
        if match[3]:
            value = _evaluated(match[5], names, fields)
            if match[4]:
                value = _combined(match[4], names.get(match[3], 0), value)
            names[match[3]] = value
            continue
        given = match[2].strip()
        if given.startswith("(") and given.endswith(")"):
            given = given[1:-1]
        values = [_evaluated(part, names, fields) for part in _arguments(given)] if given else [fields[0]]
        printed += _formatted(values) if match[1] == "printf" else " ".join(map(_as_awk, values)) + "\n"
    return printed


def _arguments(text: str) -> list[str]:
    """Split a text at the commas outside quotes and parentheses."""
    parts, depth, quoted, start = list[str](), 0, False, 0
    for at, letter in enumerate(text):
        quoted ^= letter == '"' and text[at - 1 : at] != "\\"
        depth += 0 if quoted else (letter == "(") - (letter == ")")
        if letter == "," and not quoted and not depth:
            parts.append(text[start:at])
            start = at + 1
    return [*parts, text[start:]]


def _evaluated(text: str, names: Mapping[str, Any], fields: list[str]) -> Any:
    """Return the value of one expression of awk; raises UnreadableError for concatenated texts."""
    literals = re.findall(r'"(?:[^"\\]|\\.)*"', text)
    if len(literals) > 1 and re.fullmatch(r"\s*" + r"\s*".join(map(re.escape, literals)) + r"\s*", text):
        raise UnreadableError("awk")
    plain = re.sub(r"\$\(?NF\)?", "field(NF)", re.sub(r"\$(\d+)", r"field(\1)", text)).replace("^", "**")
    chosen = re.fullmatch(r"([^?\"]+)\?([^:]+):(.+)", plain, re.DOTALL)
    if chosen:
        plain = f"({chosen[2]}) if ({chosen[1]}) else ({chosen[3]})"
    return _value(_parsed(plain), names={**names, "field": fields})


def _formatted(values: list[Any]) -> str:
    template, *rest = values or [""]
    template = str(template)
    kinds = re.findall(r"%[-0-9.]*([a-zA-Z%])", template)
    if set(kinds) - set("disfeg") or len(kinds) != len(rest):
        raise UnreadableError("awk")
    made = [
        int(value) if kind in "di" else _as_awk(value) if kind == "s" else float(value)
        for kind, value in zip(kinds, rest, strict=True)
    ]
    return str(template % tuple(made))


def _as_awk(value: Any) -> str:
    if isinstance(value, str):
        return value
    if abs(value) >= _MOST_WHOLE:
        raise UnreadableError("awk")
    return str(int(value)) if value == int(value) else f"{float(value):.6g}"


def _as_bc(value: Decimal) -> str:
    text = f"{value:f}"
    return re.sub(r"^(-?)0\.", r"\1.", text) if value else "0"


def _number(text: str) -> Any:
    return Decimal(text) if re.fullmatch(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", text.strip()) else text


def _parsed(text: str) -> ast.AST:
    # Numbers become texts: so their digits are not rounded, and a leading zero is no syntax error.
    source = (
        re.sub(r"(?<![\w.\"])(\d+\.?\d*|\.\d+)(?![\w\"])", r'number("\1")', text) if '"' not in text else text
    )
    source = source.replace("&&", " and ").replace("||", " or ")
    try:
        return ast.parse(re.sub(r"!(?!=)", " not ", source).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UnreadableError(text) from None


def _value(
    node: ast.AST, *, names: Mapping[str, Any] = {}, scale: int | None = None, whole: bool = False
) -> Any:
    """Return the value of an expression.

    `scale` is bc's number of decimal places, None for awk's numbers; `whole`: divide as expr does.
    """

    def inner(part: ast.AST) -> Any:
        return _value(part, names=names, scale=scale, whole=whole)

    try:
        with localcontext() as context:
            context.prec = _DIGITS
            return _calculated(node, inner, names, scale, whole)
    except (ArithmeticError, TypeError, KeyError, IndexError, ValueError) as error:
        raise UnreadableError(str(error)) from None


def _calculated(
    node: ast.AST, inner: Callable[[ast.AST], Any], names: Mapping[str, Any], scale: int | None, whole: bool
) -> Any:
    match node:
        case ast.Constant() | ast.Name() | ast.Call():
            return _atom(node, inner, names)
        case ast.UnaryOp(op=how, operand=operand):
            value = inner(operand)
            return (
                Decimal(not value) if isinstance(how, ast.Not) else _combined("*", _SIGNS[type(how)], value)
            )
        case ast.BoolOp(op=how, values=values):
            return Decimal((all if isinstance(how, ast.And) else any)(map(inner, values)))
        case ast.IfExp(test=test, body=body, orelse=otherwise):
            return inner(body if inner(test) else otherwise)
        case ast.Compare(left=left, ops=[how], comparators=[right]):
            sides = [inner(left), inner(right)]
            if any(isinstance(side, str) for side in sides):
                sides = [_as_awk(side) for side in sides]
            return Decimal(_COMPARED[type(how)](*sides))
        case ast.BinOp(left=left, op=how, right=right):
            return _combined(_SIGNS[type(how)], inner(left), inner(right), scale=scale, whole=whole)
    raise UnreadableError(ast.dump(node)[:40])


def _atom(
    node: ast.Constant | ast.Name | ast.Call, inner: Callable[[ast.AST], Any], names: Mapping[str, Any]
) -> Any:
    match node:
        case ast.Constant(value=str() as text):
            return text.replace("\\n", "\n")
        case ast.Constant(value=int() | float() as number):
            return Decimal(str(number))
        case ast.Name(id=name):
            return names.get(name, Decimal(0))
        case ast.Call(func=ast.Name(id="number"), args=[ast.Constant(value=str() as text)]):
            return Decimal(text)
        case ast.Call(func=ast.Name(id="field"), args=[index]):
            at, fields = int(inner(index)), names["field"]
            return _number(fields[at]) if at < len(fields) else ""
        case ast.Call(func=ast.Name(id="int"), args=[argument]):
            return Decimal(math.trunc(_decimal(inner(argument))))
        case ast.Call(func=ast.Name(id="length"), args=[argument]):
            return Decimal(len(_as_awk(inner(argument))))
    raise UnreadableError(ast.dump(node)[:40])


def _decimal(value: Any) -> Decimal:
    return value if isinstance(value, Decimal) else Decimal(str(value) or "0")


def _combined(sign: str, left: Any, right: Any, *, scale: int | None = None, whole: bool = False) -> Decimal:
    one, two = _decimal(left), _decimal(right)
    if scale is None and not whole:  # awk calculates with 64-bit floats
        return Decimal(_FLOATS[sign](float(one), float(two)))
    match sign:
        case "+":
            return one + two
        case "-":
            return one - two
        case "*":
            digits = [-int(value.as_tuple().exponent) for value in (one, two)]
            return _cut(one * two, min(sum(digits), max(scale or 0, *digits)))
        case "**" if two == int(two) and abs(two) <= _MOST_POWER:
            return one**two
        case "/":
            return _cut(one / two, scale or 0)
        case "%":
            return one - two * _cut(one / two, scale or 0)
    raise UnreadableError(sign)


def _cut(value: Decimal, digits: int) -> Decimal:
    return value.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_DOWN)
