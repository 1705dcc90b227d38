"""Model flags that miles keeps in Python: derive what `model_args_utils.py NAME` prints without running it.

`scripts/models/NAME.py` has a function `model_args` that builds its result from literal texts, constants of
the file and the helpers below. Control flow and all other expressions raise CannotTell.
"""

from __future__ import annotations

import ast
import operator
import posixpath
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.orchestrator.config.own_code import is_folder
from autotune.orchestrator.config.yaml_nodes import UnreadableError, read_text
from autotune.orchestrator.init.bash.text_commands import CannotTell

_PROGRAM = "model_args_utils.py"
_FUNCTION = "model_args"
_UP = 4  # folders from the program to its checkout
_DEPTH = 5  # nested models that are derived from another one
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def prints_model_flags(words: Sequence[str]) -> bool:
    """Return whether a command prints a model's flags."""
    return len(words) == 3 and posixpath.basename(words[1]) == _PROGRAM


def model_flags(places: Sequence[Path], name: str, environment: Mapping[str, str]) -> str:
    """Return the flags of a model as one line; raises CannotTell if the files do not determine them.

    `places` are the possible paths of the program.
    """
    for place in places:
        folder = Path(*place.resolve().parts[:-_UP], "scripts", "models")
        if is_folder(folder) and "/" not in name:
            return " ".join(str(_Model(folder, environment).flags(name, {})).split()) + "\n"
    raise CannotTell(_PROGRAM)


class _Model:
    """Evaluates one Python function that only computes texts and numbers."""

    def __init__(self, folder: Path, environment: Mapping[str, str], depth: int = 0) -> None:
        self._folder, self._environment, self._depth = folder, environment, depth
        self._names: dict[str, Any] = {}

    def flags(self, name: str, given: Mapping[str, Any]) -> str:
        """Return what `model_args` of a model's file returns."""
        try:
            tree = ast.parse(read_text(self._folder / f"{name}.py"))
        except (UnreadableError, SyntaxError, ValueError):
            raise CannotTell(name) from None
        functions = [
            each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == _FUNCTION
        ]
        if not functions or self._depth > _DEPTH:
            raise CannotTell(name)
        function = functions[0]
        self._assign(tree.body)
        arguments, defaults = function.args.args, function.args.defaults
        self._names |= {
            each.arg: self._value(default)
            for each, default in zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
        }
        for each, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            self._names[each.arg] = None if default is None else self._value(default)
        self._names |= given
        self._assign(function.body)
        result = function.body[-1]
        if not isinstance(result, ast.Return) or result.value is None:
            raise CannotTell(name)
        return str(self._value(result.value))

    def _assign(self, body: Sequence[ast.stmt]) -> None:
        for each in body:
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                self._names[each.targets[0].id] = self._value(each.value)
            elif isinstance(each, (ast.If, ast.For, ast.While, ast.AugAssign, ast.Try, ast.With)):
                raise CannotTell(_FUNCTION)

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name) if name in self._names:
                return self._names[name]
            case ast.JoinedStr(values=parts):
                return "".join(str(self._value(part)) for part in parts)
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self._value(value)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self._value(left), self._value(right))
            case ast.BoolOp(op=op, values=values):
                return self._chosen(values, of_all=isinstance(op, ast.And))
            case ast.IfExp(test=test, body=body, orelse=other):
                return self._value(body if self._value(test) else other)
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[right]):
                return (self._value(left) is self._value(right)) == isinstance(op, ast.Is)
            case ast.Call(func=function, args=args, keywords=keywords):
                named = {each.arg: self._value(each.value) for each in keywords if each.arg}
                return self._called(ast.unparse(function), args, named)
        raise CannotTell(ast.unparse(node))

    def _chosen(self, values: Sequence[ast.expr], *, of_all: bool) -> Any:
        value = None
        for each in values:
            value = self._value(each)
            if bool(value) is not of_all:
                break
        return value

    def _called(self, function: str, args: Sequence[ast.expr], named: Mapping[str, Any]) -> Any:
        match function, len(args):
            case "os.environ.get", 1 | 2:
                return self._environment.get(*map(self._value, args))
            case "int" | "str", 1:
                return {"int": int, "str": str}[function](self._value(args[0]))
            case "moe_layer_freq", 0:
                layers, dense = int(named["nlayers"]), int(named["first_k_dense_replace"])
                dense = min(layers, dense)
                return f"[{','.join(['0'] * dense + ['1'] * (layers - dense))}]"
            case "load_sibling_model_args", 2:
                sibling = _Model(self._folder, self._environment, self._depth + 1)
                return sibling.flags(str(self._value(args[1])), named)
        raise CannotTell(function)
