"""Read a bash script without starting anything: which programs it would run, and in which environment.

Output is known only for the programs in `text_commands`; everything else that a script reads from the machine
is unknown. If a condition depends on it, all branches are read, and a variable with different values after
them is unknown. The programs of the branch for a false condition come first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tree_sitter import Node

from autotune.orchestrator.init.bash import conditions, expansion
from autotune.orchestrator.init.bash.builtins import Leave
from autotune.orchestrator.init.bash.commands import WORDS, Commands
from autotune.orchestrator.init.bash.patterns import matches
from autotune.orchestrator.init.bash.state import (
    Invocation,
    Note,
    State,
    Use,
    Variable,
    as_written,
    is_unknown,
    uncertain,
)
from autotune.orchestrator.init.bash.syntax import errors_in, first_line, line_of, parse, text_of
from autotune.policies.values.value import Value

_MOST_TURNS = 1000  # iterations of one loop
_MOST_STATEMENTS = 100_000
_SEQUENCES = frozenset({"variable_assignments", "program", "do_group", "else_clause"})


class Reading(Value, frozen=True, kw_only=True):
    """What a script would do."""

    invocations: tuple[Invocation, ...]
    notes: tuple[Note, ...]
    outside: dict[str, Use]  # variables of the caller that the script reads
    assigned: dict[str, Use]  # variables that the script sets
    written: tuple[str, ...]  # files that the script would write
    depends: tuple[Note, ...]  # on variables with several possible values, and what decides between them


def read_script(
    path: Path,
    text: str,
    arguments: Sequence[str] = (),
    *,
    cwd: str,
    environment: Mapping[str, str],
    now: float,
) -> Reading:
    """Return what a script would start when called from `cwd`; raises ValueError if nested too deeply."""
    state = State(cwd=cwd, file=str(path), now=now, inherited=environment, positional=list(arguments))
    reader = _Reader(state)
    try:
        tree = parse(text)
        for node in errors_in(tree):
            state.note(node, f"syntax error: `{first_line(text_of(node))}`")
        reader.statements(tree)
    except Leave:
        pass
    except RecursionError:
        raise ValueError("the script is nested too deeply to be read") from None
    return Reading(
        invocations=tuple(state.invocations),
        notes=tuple(state.notes),
        outside=dict(state.read_from_outside),
        assigned=dict(state.assigned),
        written=tuple(state.files),
        depends=tuple(state.depends),
    )


class _Reader(Commands):
    """Walks the statements of a script."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._count = 0
        self._readers: Mapping[str, Callable[[Node], bool | None]] = {
            "command": lambda node: self.passed(self.command(node, "")),
            "pipeline": lambda node: self.passed(self.pipeline(node)),
            "redirected_statement": lambda node: self.passed(self.redirected(node, "")),
            "variable_assignment": self.assignment,
            "declaration_command": self.declaration,
            "unset_command": self.unset,
            "list": self.both,
            "compound_statement": self.group,
            "subshell": self.subshell,
            "negated_command": lambda node: conditions.opposite(self.statement(node.children[-1])),
            "test_command": lambda node: conditions.test(self.state, node),
            "if_statement": self.branch,
            "case_statement": self.case,
            "for_statement": self.loop,
            "while_statement": self.repeat,
            "c_style_for_statement": self.count,
            "function_definition": self.define,
        }

    # --------------------------------------------------------------------- statements

    def statements(self, node: Node) -> bool | None:
        """Read the statements of a node in order; returns the status of the last."""
        return self._each(node.children)

    def statement(self, node: Node) -> bool | None:
        """Read one statement; returns whether it succeeds, None if only running it would tell."""
        self._count += 1
        if self._count > _MOST_STATEMENTS:
            self.state.note(node, "the script is too long: the rest is left out")
            raise Leave("exit")
        if node.type in _SEQUENCES:
            return self.statements(node)
        self.state.line = line_of(node)
        read = self._readers.get(node.type)
        if read is not None:
            with self.state.job(node):
                self.state.status = read(node)
            return self.state.status
        self.state.note(node, f"not supported, left out: `{first_line(text_of(node))}`")
        return None

    def group(self, node: Node) -> bool | None:
        """Read `{ …; }` or `((…))`."""
        opens = node.children[0].type == "((" if node.children else False
        return conditions.calculation(self.state, node) if opens else self.statements(node)

    def subshell(self, node: Node) -> bool | None:
        """Read `( … )`, whose changes of variables and folder are undone at its end."""
        with self.state.subshell():
            return self.statements(node)

    def define(self, node: Node) -> bool:
        """Store a function for later calls."""
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.state.functions[text_of(name)] = (self.state.file, body)
        return True

    def _is_elsewhere(self, body: list[Node]) -> bool:
        """Return whether a script would exit only because a path of the cluster is not on this machine."""
        return bool(self.state.missing) and any(map(_ends, body))

    def _names(self, tests: list[Node]) -> str:
        return first_line(" ".join(sorted(self.state.missing)) or text_of(tests[-1]))

    def both(self, node: Node, *, probed: bool = False) -> bool | None:
        """Read `a && b` or `a || b`.

        A program whose success is unknown is assumed to succeed, so that what follows is read, unless the
        script handles its failure: in `probe && this || that` the probe is assumed to fail.
        """
        parts = [child for child in node.children if child.type not in ("comment", "\n")]
        left, operator, right = parts[0], parts[1].type, parts[-1]
        nested = left.type == "list"
        chosen = [child for child in left.children if child.type != "comment"] if nested else []
        if nested and operator == "||" and chosen[1].type == "&&" and _sets(right) and _sets(chosen[-1]):
            status = self.statement(chosen[0])
            if status is None:  # `probe && NAME=this || NAME=that`
                return self._either([right], [(chosen[0], chosen[-1:])])
            return self.statement(chosen[-1] if status else right)
        if not nested:
            self.state.missing.clear()
        status = self.both(left, probed=operator == "||") if nested else self.statement(left)
        if status is None and _sets(right):
            return self._either([], [(left, [right])])
        if status is None and operator == "&&" and probed:
            self.state.note(left, f"assumed to fail: `{first_line(text_of(left))}`")
            status = False
        elif status is None and operator == "||" and nested:
            status = True
        if operator == "&&":
            return self.statement(right) if status is not False else False
        if status is False and self._is_elsewhere([right]):
            self.state.note(left, f"assumed to exist where the job runs: `{self._names([left])}`")
            return True
        return self.statement(right) if status is False else status

    def branch(self, node: Node) -> bool | None:
        """Read the branch of an `if` whose condition is true, and those whose condition is unknown."""
        otherwise = next((child for child in node.children if child.type == "else_clause"), None)
        unknown: list[tuple[Node, list[Node]]] = []
        taken: list[Node] | None = None
        for arm in (node, *(child for child in node.children if child.type == "elif_clause")):
            tests, body = _arm(arm)
            status: bool | None = False
            self.state.missing.clear()
            for test in tests:
                status = self.statement(test)
            if status and self._is_elsewhere(body):
                self.state.note(tests[-1], f"assumed to exist where the job runs: `{self._names(tests)}`")
                status = False
            if status:
                taken = body
                break
            if status is None:
                unknown.append((tests[-1], body))
        waited = next(
            (n for n, (_, body) in enumerate(unknown) if any(text_of(x) == "break" for x in body)), None
        )
        if taken is None and waited is not None:
            test, taken = unknown.pop(waited)
            self.state.note(test, f"assumed true, what the loop waits for: `{first_line(text_of(test))}`")
        last = taken if taken is not None else otherwise.children if otherwise is not None else []
        return self._either(last, [(test, body) for test, body in unknown])

    def _either(self, ordinary: Sequence[Node], others: Sequence[tuple[Node, Sequence[Node]]]) -> bool | None:
        """Read all branches if only running the script would tell which one is taken.

        The programs of all branches are kept, those of `ordinary` first. A branch that leaves its loop,
        function or script is left out with a note.
        """
        if not others:
            return self._each(ordinary)
        start = self.state.fork()
        ends: list[dict[str, Variable]] = []
        more: list[Invocation] = []
        for test, body in others:
            notes = len(self.state.notes)
            try:
                self._each(body)
            except Leave:
                self.state.resume(start)
                self.state.note(test, f"assumed false: `{first_line(text_of(test))}`")
                start.notes = list(self.state.notes)
                continue
            started = self.state.invocations[len(start.invocations) :]
            ends.append(self.state.variables)
            del self.state.notes[notes:]
            self.state.resume(start)
            if started:
                more += started
                self.state.note(test, f"both branches are read: `{first_line(text_of(test))}`")
                start.notes = list(self.state.notes)
        try:
            status = self._each(ordinary)
        except Leave as leave:
            if leave.what != "exit" or not ends:
                raise
            self.state.resume(start)
            self.state.note(
                others[0][0], f"assumed true, else the script ends: `{first_line(text_of(others[0][0]))}`"
            )
            self.state.variables, status = ends.pop(0), None
        self.state.invocations += more
        self._merge(others[0][0], ends)
        self.state.noted += 1
        return status

    def _merge(self, test: Node, ends: list[dict[str, Variable]]) -> None:
        """Make the variables unknown that have different values at the ends of the branches."""
        present = self.state.variables
        for name in dict.fromkeys(name for end in ends for name in (*end, *present)):
            values: list[Variable] = [present.get(name, ""), *(end.get(name, "") for end in ends)]
            if all(value == values[0] for value in values) or any(isinstance(v, dict) for v in values):
                continue
            texts = list(dict.fromkeys(_words(value) for value in values))
            present[name] = uncertain(name, values)
            choices = f"{', '.join(map(repr, texts[:-1]))} or {texts[-1]!r}"
            condition = first_line(text_of(test))
            self.state.depends.append(
                Note(
                    file=self.state.file,
                    line=line_of(test),
                    message=f"{name} is {choices}, as `{condition}` turns out where the job runs",
                )
            )

    def _each(self, nodes: Sequence[Node]) -> bool | None:
        status: bool | None = True
        for child in nodes:
            if child.is_named and child.type not in ("comment", "heredoc_body", "heredoc_end"):
                status = self.statement(child)
        return status

    def case(self, node: Node) -> bool | None:
        """Read the items of a `case` that match: the first, and those that `;&` or `;;&` continues with."""
        value = node.child_by_field_name("value")
        subject = expansion.text(self.state, value) if value is not None else ""
        bodies: list[Sequence[Node]] = []
        otherwise: Sequence[Node] = []
        status: bool | None = True
        is_taken = False  # the previous item ended in `;&`
        for item in node.children:
            if item.type != "case_item":
                continue
            ends = next(n for n, child in enumerate(item.children) if child.type == ")")
            patterns = _patterns(item.children[:ends])
            body = item.children[ends + 1 :]
            made = [expansion.pattern(self.state, each) for each in patterns]
            is_open = is_unknown(subject) or any(map(is_unknown, made))
            fits = "*" in made or (
                not is_unknown(subject)
                and any(matches(subject, each) for each in made if not is_unknown(each))
            )
            if is_taken or (fits and not is_unknown(subject) and not bodies):
                status = self._each(body)
                is_taken = body[-1].type == ";&"
                if not is_taken and body[-1].type != ";;&":
                    return status
            elif fits:
                otherwise = body
                break
            elif is_open:
                bodies.append(body)
        return self._either(otherwise, [(value or node, body) for body in bodies]) if bodies else status

    def loop(self, node: Node) -> bool | None:
        """Read the iterations of a `for`."""
        name, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if name is None or body is None:
            return None
        has_in = any(child.type == "in" for child in node.children)
        items = [child for child in node.children if child.type in WORDS]
        values = expansion.words(self.state, items) if has_in else list(self.state.positional)
        for value in values[:_MOST_TURNS]:
            self.state.assign(text_of(name), value)
            if not self._turn(body):
                break
        return True

    def repeat(self, node: Node) -> bool | None:
        """Read the iterations of a `while` or `until` whose condition can be determined."""
        condition, body = node.child_by_field_name("condition"), node.child_by_field_name("body")
        if condition is None or body is None:
            return None
        wanted = node.children[0].type != "until"
        for _ in range(_MOST_TURNS):
            before = dict(self.state.variables), list(self.state.positional), len(self.state.input or ())
            status = self.statement(condition)
            if status is None:
                self.state.note(node, f"condition unknown, loop left out: `{first_line(text_of(node))}`")
            if status is not wanted:
                return None if status is None else True
            if not self._turn(body):
                return True
            if before == (self.state.variables, self.state.positional, len(self.state.input or ())):
                self.state.note(node, f"end unknown, loop read once: `{first_line(text_of(node))}`")
                return None
        return None

    def count(self, node: Node) -> bool | None:
        """Read the iterations of `for ((…; …; …))`."""
        body = node.child_by_field_name("body")
        condition = node.child_by_field_name("condition")

        def calculate(field: str) -> None:
            for part in node.children_by_field_name(field):
                if part.is_named:
                    conditions.calculation(self.state, part)

        calculate("initializer")
        for _ in range(_MOST_TURNS):
            holds = None if condition is None else conditions.calculation(self.state, condition)
            if holds is None:
                self.state.note(node, f"condition unknown, loop left out: `{first_line(text_of(node))}`")
            if not holds:
                return holds
            if body is not None and not self._turn(body):
                return True
            calculate("update")
        return None

    def _turn(self, body: Node) -> bool:
        try:
            self.statement(body)
        except Leave as leave:
            if leave.what not in ("break", "continue"):
                raise
            return leave.what == "continue"
        return True


def _arm(node: Node) -> tuple[list[Node], list[Node]]:
    """Return the conditions and the statements of an `if` or `elif`."""
    skipped = ("comment", "heredoc_body", "heredoc_end", "elif_clause", "else_clause")
    parts = [child for child in node.children if child.type not in skipped]
    at = next((n for n, child in enumerate(parts) if child.type == "then"), len(parts))
    return [part for part in parts[:at] if part.is_named], [part for part in parts[at:] if part.is_named]


def _sets(node: Node) -> bool:
    """Return whether a statement only sets variables."""
    if node.type == "compound_statement":
        return all(map(_sets, node.named_children))
    return node.type in ("variable_assignment", "variable_assignments", "declaration_command", "comment")


def _words(value: Variable) -> str:
    return as_written(" ".join(value) if isinstance(value, list) else str(value))


def _ends(node: Node) -> bool:
    """Return whether a statement, or one in its braces, exits the script with an error."""
    inside = node.children if node.type == "compound_statement" else ()
    return re.fullmatch(r"exit\s+[1-9]\d*", text_of(node)) is not None or any(map(_ends, inside))


def _patterns(nodes: Sequence[Node]) -> list[list[Node]]:
    """Return the patterns of an item of a `case`, each as its nodes."""
    result: list[list[Node]] = [[]]
    for node in nodes:
        if node.type == "|":
            result.append([])
        elif node.type != "(":
            result[-1].append(node)
    return [each for each in result if each]
