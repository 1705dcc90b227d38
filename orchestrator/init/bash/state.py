"""What a script has set so far, what it would start, and what could not be determined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from tree_sitter import Node

from autotune.orchestrator.init.bash.syntax import is_background, line_of, text_of
from autotune.policies.values.value import Value

# OPEN and CLOSE enclose a text that only running the script would determine; no script contains them.
UNSET = "is not set in the script or your environment: assumed empty"
_OF_BASH = {"IFS": " \t\n", "OPTIND": "1", "OSTYPE": "linux-gnu"}  # set by bash itself
OPEN, CLOSE = "\ue000", "\ue001"
# What the statements of a branch may change.
_OF_BRANCH = (
    *("variables", "exported", "positional", "cwd", "functions", "files"),
    *("invocations", "notes", "depends"),
)

Variable = str | list[str] | dict[str, str]


class Note(Value, frozen=True, kw_only=True):
    """A note on something in a script that was not understood, or was assumed."""

    file: str  # path of the script or configuration file
    line: int  # from 1
    message: str  # what was not understood, assumed or left out, in one sentence


class Use(Value, frozen=True, kw_only=True):
    """The place where a script first reads a variable of its caller, or last sets one of its own."""

    value: str = ""
    file: str
    line: int  # from 1


class Invocation(Value, frozen=True, kw_only=True):
    """A program that a script would start."""

    argv: tuple[str, ...]
    env: dict[str, str]  # exported variables, and assignments before the program
    cwd: str
    file: str
    line: int
    jobs: tuple[int, ...] = ()  # background jobs that contain the program, outermost first
    waits: int = 0  # number of earlier `wait` commands of the script
    stdin: str = ""  # the text of a here-document or of a file that the script writes, as `kubectl` reads it


def unknown(text: str) -> str:
    """Mark a text as one that only running the script would determine."""
    return f"{OPEN}{text.replace(OPEN, '').replace(CLOSE, '')}{CLOSE}"


def is_unknown(text: str) -> bool:
    """Return whether part of a text could not be determined."""
    return OPEN in text


def as_written(text: str) -> str:
    """Return a text with its undetermined parts as written in the script."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def to_edit(text: str) -> str:
    """Return a text with each undetermined part as a substitution `$(…)`."""

    def substituted(match: re.Match[str]) -> str:
        return match[1] if "$(" in match[1] or "`" in match[1] else f"$({match[1].strip('${}')})"

    return re.sub(f"{OPEN}([^{CLOSE}]*){CLOSE}", substituted, text)


def uncertain(name: str, values: Sequence[Variable]) -> Variable:
    """Return a variable's first value, with the items in which the values differ marked as unknown."""
    mark = unknown(f"$({name})")
    if not isinstance(values[0], list):
        return mark
    made = [item if all(item in value for value in values) else mark for item in values[0]]
    return made if made != values[0] else [*made, unknown(f"$({name}[@])")]


def _copy(value: Any) -> Any:
    return value if isinstance(value, str) else type(value)(value)


@dataclass
class State:
    """The state of a script while it is read."""

    cwd: str
    file: str
    now: float  # Unix seconds, for `date`
    inherited: Mapping[str, str]
    gpus: int | None = None  # of a node, for `nvidia-smi -L`; None: not known
    capture: Callable[[Node], str] = lambda _: ""
    variables: dict[str, Variable] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    positional: list[str] = field(default_factory=list)
    functions: dict[str, tuple[str, Node]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # files written by the script itself
    notes: list[Note] = field(default_factory=list)
    references: dict[str, str] = field(default_factory=dict)  # `declare -n`: name -> referenced name
    integers: set[str] = field(default_factory=set)  # `declare -i`
    locals: list[dict[str, tuple[Variable | None, str | None]]] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)  # stack of `pushd`
    letter: int = 1  # index that `getopts` reads next in a word of options such as `-ab`
    status: bool | None = True  # of the last statement; None if only running it would tell
    depends: list[Note] = field(default_factory=list)  # on variables that only running it would determine
    input: list[str] | None = None  # input lines of a loop or group, for `read`; None if unknown
    unread: bool = False  # a sourced file could not be read: it may set variables that seem unset
    noted: int = 0  # number of things not understood or assumed, except unset variables
    message: tuple[str, int] = ("", 0)  # the last output of `echo` or `printf`, and its line
    invocations: list[Invocation] = field(default_factory=list)
    jobs: tuple[int, ...] = ()  # background jobs that contain the current statement
    started: int = 0  # background jobs so far
    waits: int = 0  # `wait` commands so far
    program: str = ""  # the script that was started; empty while it is `file`
    callers: tuple[str, ...] = ()  # files that sourced or called the current one, innermost first
    missing: set[str] = field(default_factory=set)  # paths that conditions tested and that are absent here
    line: int = 1  # of the current statement
    read_from_outside: dict[str, Use] = field(default_factory=dict)  # variables of the caller
    assigned: dict[str, Use] = field(default_factory=dict)  # variables that the script sets

    def get(self, name: str) -> Variable | None:
        """Return a variable's value; None if it is not set."""
        name = self.references.get(name, name)
        if name in self.variables:
            return self.variables[name]
        if name in ("PWD", *_OF_BASH):
            return self.cwd if name == "PWD" else _OF_BASH[name]
        if name in self.inherited:
            value = self.inherited[name]
            self.read_from_outside.setdefault(name, Use(value=value, file=self.file, line=self.line))
            return value
        return None

    def text(self, name: str) -> str | None:
        """Return a variable as a text, for an array its first item; None if it is not set."""
        value = self.get(name)
        if isinstance(value, list):
            return value[0] if value else None
        if isinstance(value, dict):
            return value.get("0")
        return value

    def items(self, name: str) -> list[str]:
        """Return a variable's items."""
        value = self.get(name)
        if value is None:
            return []
        return (
            list(value.values()) if isinstance(value, dict) else [value] if isinstance(value, str) else value
        )

    def assign(self, name: str, value: Variable, *, append: bool = False) -> None:
        """Set a variable; `append` is `+=`."""
        name = self.references.get(name, name)
        if append:
            present = self.get(name)
            if isinstance(value, list):
                value = [*self.items(name), *value] if present is not None else value
            elif isinstance(present, list) and isinstance(value, str):
                value = [(present[0] if present else "") + value, *present[1:]]
            elif isinstance(value, str):
                value = (self.text(name) or "") + value
        self.variables[name] = value
        self.assigned[name] = Use(file=self.file, line=self.line)

    def declare(self, name: str) -> None:
        """Declare a local variable of the current function."""
        if self.locals:
            self.locals[-1].setdefault(name, (self.variables.get(name), self.references.pop(name, None)))

    @contextmanager
    def function(self, arguments: list[str]) -> Iterator[None]:
        """Read a function's body; its local variables are removed afterwards."""
        before, self.positional = self.positional, arguments
        self.locals.append({})
        try:
            yield
        finally:
            self.positional = before
            for name, (value, target) in self.locals.pop().items():
                self.variables.pop(name, None)
                self.references.pop(name, None)
                if value is not None:
                    self.variables[name] = value
                if target is not None:
                    self.references[name] = target

    def note(self, node: Node, message: str) -> None:
        """Record a note at a place; the same message is kept once per file."""
        self.noted += not message.endswith(UNSET)
        if not any(each.file == self.file and each.message == message for each in self.notes):
            self.notes.append(Note(file=self.file, line=line_of(node), message=message))

    def untold(self, node: Node) -> str:
        """Return the text for a node that only running the script would determine."""
        return unknown(text_of(node))

    @contextmanager
    def subshell(self) -> Iterator[None]:
        """Undo changes of variables and the folder afterwards."""
        kept = dict(self.variables), set(self.exported), list(self.positional), self.cwd
        try:
            yield
        finally:
            self.variables, self.exported, self.positional, self.cwd = kept

    @contextmanager
    def job(self, node: Node) -> Iterator[None]:
        """Read a statement that may end in `&`."""
        around = self.jobs
        if is_background(node):
            self.started += 1
            self.jobs = (*around, self.started)
        try:
            yield
        finally:
            self.jobs = around

    def enter(self, arguments: list[str], own: Mapping[str, str]) -> None:
        """Start a program with the exported variables and `own`; call it in a subshell."""
        self.exported |= set(own)
        kept = {name: value for name, value in self.variables.items() if name in self.exported}
        self.variables = kept | dict(own)
        self.positional = arguments

    def fork(self) -> State:
        """Return a copy of the state, so that another branch can start from it."""
        kept = copy(self)
        kept.resume(self)
        kept.variables = {name: _copy(value) for name, value in self.variables.items()}
        return kept

    def resume(self, kept: State) -> None:
        """Restore what the statements of a branch may have changed since `fork`."""
        for name in _OF_BRANCH:
            setattr(self, name, _copy(getattr(kept, name)))

    @contextmanager
    def inside(self, file: str, *, program: bool = False) -> Iterator[None]:
        """Read another file meanwhile, as a separate program or as part of the current one."""
        before = self.file, self.program, self.callers
        self.program = file if program else self.program or self.file
        self.callers = () if program else (self.file, *self.callers)
        self.file = file
        try:
            yield
        finally:
            self.file, self.program, self.callers = before

    def source(self, depth: int) -> str:
        """Return the current file (`depth` 0, BASH_SOURCE) or the one that called it (1, …)."""
        files = (self.file, *self.callers)
        return files[depth] if depth < len(files) else ""
