"""Read a bash script without starting anything: which programs it would run, and in which environment.

Output is known only for the programs in `text_commands`; everything else that a script reads from the machine
is unknown. If a condition depends on it, all branches are read, and a variable with different values after
them is unknown. The programs of the branch for a false condition come first.
"""

from __future__ import annotations

import contextlib
import itertools
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tree_sitter import Node

from autotune.orchestrator.init.bash import conditions, expansion
from autotune.orchestrator.init.bash.builtins import (
    BUILTINS,
    DEPTH,
    Call,
    Leave,
    places_of,
    printf_into,
    read_file,
)
from autotune.orchestrator.init.bash.model_flags import model_flags, prints_model_flags
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
from autotune.orchestrator.init.bash.text_commands import CannotTell, is_known, output_of, reads_input
from autotune.orchestrator.init.task_files import manifest_in
from autotune.policies.values.value import Value

_MOST_TURNS = 1000  # iterations of one loop
_MOST_STATEMENTS = 100_000
_IGNORED = frozenset(
    {"shopt", "trap", "ulimit", "jobs", "hash", "complete", "umask", ":", "true"}
    | {"enable", "disown", "conda", "module"}
)
_WORDS = frozenset(
    {"word", "number", "string", "raw_string", "ansi_c_string", "translated_string", "concatenation"}
    | {"simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"}
    | {"process_substitution", "brace_expression", "extglob_pattern", "regex"}
    | {"special_variable_name", "test_operator", "=", "=="}
)
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
    gpus: int | None = None,
) -> Reading:
    """Return what a script would start on a node with `gpus`; raises ValueError if nested too deeply."""
    state = State(cwd=cwd, file=str(path), now=now, inherited=environment, gpus=gpus, positional=[*arguments])
    shell = Shell(state)
    try:
        tree = parse(text)
        for node in errors_in(tree):
            state.note(node, f"syntax error: `{first_line(text_of(node))}`")
        shell.statements(tree)
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


class Shell:
    """Reads the statements of a script."""

    def __init__(self, state: State) -> None:
        self.state = state
        state.capture = self.capture
        self.depth = 0
        self._printed: list[str | None] | None = None  # outputs of the statements being read; None: not kept
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
        """Read one statement; returns whether it succeeds, None if only running it would tell.

        Raises Leave where the script ends, or leaves a loop, a function or a file.
        """
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
        items = [child for child in node.children if child.type in _WORDS]
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
                self._perhaps(node, condition, body)
                return None
            if status is not wanted:
                return True
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
            if condition is not None and body is not None and holds is None:
                self._perhaps(node, condition, body)
                return None
            if not holds:
                return holds
            if body is not None and not self._turn(body):
                return True
            calculate("update")
        return None

    def _perhaps(self, node: Node, condition: Node, body: Node) -> None:
        """Read the body of a loop once if its condition is unknown: what it changes is unknown afterwards."""
        self.state.note(node, f"condition unknown, loop read once: `{first_line(text_of(node))}`")
        start = self.state.fork()
        try:
            self._turn(body)
        except Leave:
            self.state.resume(start)
            return
        changed, self.state.variables = self.state.variables, start.variables
        self._merge(condition, [changed])

    def _turn(self, body: Node) -> bool:
        try:
            self.statement(body)
        except Leave as leave:
            if leave.what not in ("break", "continue"):
                raise
            return leave.what == "continue"
        return True

    # --------------------------------------------------------------------- commands

    def capture(self, node: Node) -> str:
        """Return what a command substitution prints."""
        inner = [child for child in node.children if child.is_named and child.type != "comment"]
        printed = ""
        with self.state.subshell():
            before = len(self.state.invocations)
            for child in inner:
                ends = False
                try:
                    _, output = self.printing(child, "")
                except Leave as leave:
                    output, ends = leave.printed, True
                if output is None:
                    del self.state.invocations[before:]
                    return self.state.untold(node)
                printed += output
                if ends:
                    break
            del self.state.invocations[before:]
        return printed

    def printing(self, node: Node, stdin: str | None) -> tuple[bool | None, str | None]:
        """Read a statement; returns its status and what it prints, None if that is unknown."""
        with self.state.job(node):
            return self._printing(node, stdin)

    def _printing(self, node: Node, stdin: str | None) -> tuple[bool | None, str | None]:
        match node.type:
            case "command":
                return self.command(node, stdin)
            case "redirected_statement":
                return self.redirected(node, stdin)
            case "pipeline":
                return self.pipeline(node)
            case "list":
                return self._printing_list(node)
            case "compound_statement" | "subshell":
                with self.state.subshell():
                    results = [self.printing(child, stdin) for child in node.children if child.is_named]
                if not results:
                    return True, ""
                outputs = [output for _, output in results]
                return results[-1][0], None if None in outputs else "".join(map(str, outputs))
            case "file_redirect":
                return True, self._content(node)
        return self._collected(node, stdin)

    def _collected(self, node: Node, stdin: str | None) -> tuple[bool | None, str | None]:
        """Read a statement that contains others; returns its status and their joint output.

        The output is None if it depends on an assumption, which a note states.
        """
        before, self._printed = self._printed, []
        around = self.state.input
        if stdin != "":
            self.state.input = None if stdin is None or is_unknown(stdin) else stdin.splitlines()
        noted = self.state.noted

        def together() -> str | None:
            parts = self._printed or []
            return None if None in parts or self.state.noted > noted else "".join(map(str, parts))

        try:
            return self.statement(node), together()
        except Leave as leave:
            leave.printed = _joined(together(), leave.printed)
            raise
        finally:
            self._printed, self.state.input = before, around

    def passed(self, read: tuple[bool | None, str | None]) -> bool | None:
        """Return the status of a command, and add its output to that of the enclosing statement."""
        status, output = read
        if self._printed is not None and output != "":
            self._printed.append(output)
        return status

    def _content(self, node: Node) -> str | None:
        """Return the content of `$(< file)` if the script itself wrote the file; otherwise None."""
        name = expansion.text(self.state, node.children[-1])
        return self.state.files.get(name)

    def _printing_list(self, node: Node, *, probed: bool = False) -> tuple[bool | None, str | None]:
        """Read `a && b` or `a || b` with the assumptions of `both`, and return what it prints."""
        parts = [child for child in node.children if child.type != "comment"]
        left, operator, right = parts[0], parts[1].type, parts[-1]
        if left.type == "list":
            status, output = self._printing_list(left, probed=operator == "||")
        else:
            status, output = self.printing(left, "")
        if status is None and operator == "&&" and probed:
            self.state.note(left, f"assumed to fail: `{first_line(text_of(left))}`")
            status, output = False, ""
        if status is None and operator == "||":
            return None, output
        if (status is not False) == (operator == "||"):
            return status, output
        after, more = self.printing(right, "")
        return after, _joined(output, None if status is None and more else more)

    def pipeline(self, node: Node) -> tuple[bool | None, str | None]:
        """Read the parts of a pipeline, each with the output of the previous one as input."""
        output: str | None = ""
        status: bool | None = True
        with self.state.subshell():
            for child in node.children:
                if child.is_named and child.type != "comment":
                    status, output = self.printing(child, output)
        return status, output

    def redirected(self, node: Node, stdin: str | None) -> tuple[bool | None, str | None]:
        """Read a statement with redirections; what it writes into a file is kept for later commands."""
        target, append, to_errors = "", False, False
        behind: list[Node] = []  # in `cat <<EOF | tee file` the grammar puts the pipe into the redirection
        for redirect in node.children:
            if redirect.type == "heredoc_redirect":
                stdin = self._here_document(redirect)
                behind += [child for child in redirect.children if child.type in ("pipeline", "list")]
            elif redirect.type == "herestring_redirect":
                stdin = expansion.text(self.state, redirect.children[-1]) + "\n"
            for piece in _file_redirects(redirect):
                to, kinds = expansion.text(self.state, piece.children[-1]), {c.type for c in piece.children}
                if "<" in kinds and piece.children[-1].type == "process_substitution":
                    stdin = self.capture(piece.children[-1])
                elif "<" in kinds:
                    stdin = self.state.files.get(to)
                elif _is_output(piece) and ">&" in kinds:
                    to_errors = to == "2"
                elif _is_output(piece):
                    target, append = to, bool(kinds & {">>", "&>>"})
        body = node.child_by_field_name("body")
        if body is None:
            return True, ""
        status, output = self.printing(body, stdin)
        for more in behind:
            status, output = self.printing(more, output)
        if target and not target.startswith("/dev/"):
            present = self.state.files.get(target, "") if append else ""
            self.state.files[target] = present + as_written(output or "")
        return status, "" if target or to_errors else output

    def _here_document(self, redirect: Node) -> str:
        result = {child.type: child for child in redirect.children}
        body, start = result.get("heredoc_body"), result.get("heredoc_start")
        if body is None:
            return ""
        is_quoted = start is not None and text_of(start)[:1] in "'\"\\"
        return text_of(body) if is_quoted else expansion.joined(self.state, body)

    def command(self, node: Node, stdin: str | None) -> tuple[bool | None, str | None]:
        """Read one command; returns its status and what it prints."""
        own: dict[str, str] = {}
        apart = _line_before(node)
        for child in node.children:
            if child.type == "variable_assignment" and child.end_byte <= apart:
                self.statement(child)
            elif child.type == "variable_assignment":
                name, value = child.child_by_field_name("name"), child.child_by_field_name("value")
                if name is not None:
                    own[text_of(name)] = "" if value is None else expansion.text(self.state, value)
        nodes = [
            child.children[0] if child.type == "command_name" else child
            for child in node.children
            if child.type == "command_name" or child.type in _WORDS
        ]
        for child in node.children:
            if child.type == "herestring_redirect":
                stdin = expansion.text(self.state, child.children[-1]) + "\n"
        words = expansion.words(self.state, nodes)
        return self.run(node, words, own, stdin) if words else (True, "")

    def run(
        self, node: Node, words: list[str], own: dict[str, str], stdin: str | None
    ) -> tuple[bool | None, str | None]:
        """Read a command by its words; returns its status and what it prints."""
        name = words[0]
        if own and (name in self.state.functions or name in ("source", ".", "eval")):
            before = {key: self.state.variables.get(key) for key in own}
            self.state.variables |= own
            try:
                return self.run(node, words, {}, stdin)
            finally:
                for key, value in before.items():
                    if value is None:
                        self.state.variables.pop(key, None)
                    else:
                        self.state.variables[key] = value
        if name in self.state.functions:
            return self._call(node, name, words[1:], stdin)
        if name in ("bash", "sh") and len(words) > 1 and not words[1].startswith("-"):
            with self.state.subshell():
                self.state.enter(words[2:], own)
                if read_file(self, node, Call(words=words[1:2]), program=True):
                    return True, None
        if name == "printf" and words[1:2] == ["-v"]:
            return printf_into(self, node, Call(words=words[1:])), ""
        if name in BUILTINS:
            status = BUILTINS[name](self, node, Call(words=words[1:], stdin=stdin, own=own))
            return status, f"{self.state.cwd}\n" if name == "pwd" else ""
        if name in _IGNORED and words[:2] != ["conda", "run"]:
            return True, ""
        if is_known(name) and not any(is_unknown(word) for word in words[:1]):
            return self.text_command(node, words, stdin)
        if name in ("realpath", "readlink") and words[1:] and not words[-1].startswith("-"):
            return True, posixpath.normpath(posixpath.join(self.state.cwd, words[-1])) + "\n"
        return self._program(node, words, own, stdin)

    def _program(
        self, node: Node, words: list[str], own: dict[str, str], stdin: str | None
    ) -> tuple[bool | None, str | None]:
        if prints_model_flags(words) and not any(map(is_unknown, words)):
            exported = {each: self.state.text(each) or "" for each in self.state.exported}
            with contextlib.suppress(CannotTell, KeyError, TypeError, ValueError):
                return True, model_flags(places_of(self, words[1]), words[2], {**exported, **own})
        if self.state.gpus and words in (["nvidia-smi", "-L"], ["nvidia-smi", "--list-gpus"]):
            return True, "GPU\n" * self.state.gpus
        self._start(node, words, own, stdin=self.state.files.get(manifest_in(words), stdin) or "")
        return None, None

    def text_command(self, node: Node, words: list[str], stdin: str | None) -> tuple[bool | None, str | None]:
        """Return the status and output of a program whose output follows from its words and input."""
        reads = reads_input(words[0])
        takes_input = reads and words[1:2] != ["-d"]
        if words[0] == "cat" and len(words) == 2 and words[1] in self.state.files:
            return True, self.state.files[words[1]]
        if reads and stdin is None:
            return None, None
        held = [word for word in words if is_unknown(word)]
        if (held and words[0] not in ("echo", "printf")) or (
            is_unknown(stdin or "") and takes_input and words[0] != "cat"
        ):
            return None, None
        try:
            output = output_of(words, stdin or "", now=self.state.now)
        except (CannotTell, ValueError, IndexError):
            return None, None
        if words[0] in ("echo", "printf"):
            self.state.message = output, line_of(node)
        return True, output

    def _start(self, node: Node, words: list[str], own: dict[str, str], *, stdin: str) -> None:
        exported = {name: self.state.text(name) or "" for name in sorted(self.state.exported, key=self._age)}
        self.state.invocations.append(
            Invocation(
                argv=tuple(words),
                env={**exported, **own},
                cwd=self.state.cwd,
                file=self.state.file,
                line=line_of(node),
                jobs=self.state.jobs,
                waits=self.state.waits,
                stdin=stdin,
            )
        )

    def _age(self, name: str) -> int:
        names = list(self.state.variables)
        return names.index(name) if name in self.state.variables else len(names)

    def _call(
        self, node: Node, name: str, arguments: list[str], stdin: str | None
    ) -> tuple[bool | None, str | None]:
        file, body = self.state.functions[name]
        if self.depth >= DEPTH:
            self.state.note(node, f"`{name}`: calls are nested too deeply, left out")
            return None, None
        self.depth += 1
        own = self.state.subshell() if body.type == "subshell" else contextlib.nullcontext()
        try:
            with own, self.state.function(arguments), self.state.inside(file):
                parts = [child for child in body.children if child.is_named and child.type != "comment"]
                status: bool | None = True
                output: str | None = ""
                for part in parts:
                    status, more = self.printing(part, stdin)
                    output = _joined(output, more)
                return status, output
        except Leave as leave:
            output, leave.printed = _joined(output, leave.printed), ""
            if leave.what != "return":
                leave.printed = output
                raise
            return leave.status, output
        finally:
            self.depth -= 1

    # --------------------------------------------------------------------- assignments

    def assignment(self, node: Node) -> bool:
        """Set a variable."""
        self._set(node, self._value(node))
        return True

    def _value(self, node: Node) -> Variable:
        value = node.child_by_field_name("value")
        if value is None:
            return ""
        return self.array(value) if value.type == "array" else expansion.text(self.state, value)

    def _set(self, node: Node, made: Variable) -> None:
        target = node.child_by_field_name("name")
        append = any(child.type == "+=" for child in node.children)
        if target is None:
            return
        name = text_of(target)
        if target.type == "subscript":
            self._assign_item(target, made if isinstance(made, str) else " ".join(map(str, made)))
        elif name in self.state.integers and isinstance(made, str):
            value = expansion.number(self.state, f"({name}) + ({made or 0})" if append else made or "0")
            self.state.assign(name, self.state.untold(node) if value is None else str(value))
        else:
            self.state.assign(name, made, append=append)

    def array(self, node: Node) -> list[str] | dict[str, str]:
        """Return the items of `(…)`."""
        pairs = [
            re.fullmatch(r"\[([^]]+)\]=(.*)", text_of(child), re.DOTALL) for child in node.named_children
        ]
        if pairs and all(pairs):
            return {
                expansion.text(self.state, parse(match[1])) if "$" in match[1] else match[1].strip("\"'"): (
                    self._text_of_source(match[2])
                )
                for match in pairs
                if match is not None
            }
        return expansion.words(
            self.state, (child for child in node.named_children if child.type != "comment")
        )

    def _text_of_source(self, source: str) -> str:
        tree = parse(f"x={source}")
        value = tree.children[0].child_by_field_name("value") if tree.children else None
        return "" if value is None else expansion.text(self.state, value)

    def _assign_item(self, target: Node, value: str) -> None:
        name, index = text_of(target).partition("[")[0], target.child_by_field_name("index")
        key = expansion.text(self.state, index) if index is not None else "0"
        present = self.state.get(name)
        at = expansion.number(self.state, key)
        if isinstance(present, dict) or at is None:
            self.state.assign(name, {**(present if isinstance(present, dict) else {}), key: value})
            return
        items = self.state.items(name)
        at += len(items) if at < 0 else 0
        if at > len(items):  # items in between are unset
            self.state.assign(name, {**{str(n): item for n, item in enumerate(items)}, key: value})
        else:
            self.state.assign(name, [*items[:at], value, *items[at + 1 :]])

    def declaration(self, node: Node) -> bool:
        """Read export, declare, local, readonly and typeset."""
        verb = text_of(node.children[0])
        children = [child for child in node.named_children if child.type != "comment"]
        options = "".join(text_of(child)[1:] for child in children if text_of(child).startswith("-"))
        is_own = verb in ("local", "declare", "typeset") and "g" not in options
        given = [(child, self._declared(child)) for child in children]  # evaluate all before setting any
        for child, (name, value) in given:
            if re.fullmatch(r"\w+", name) is None:
                continue
            if is_own:
                self.state.declare(name)
            if "i" in options:
                self.state.integers.add(name)
            if "n" in options and is_own:
                self._refer(name, value)
            elif value is not None and child.type == "variable_assignment":
                self._set(child, value)
            elif value is not None:
                self.state.assign(name, value)
            elif "A" in options:
                self.state.assign(name, {})
            elif "a" in options and self.state.get(name) is None:
                self.state.assign(name, [])
            elif verb == "local":
                self.state.variables.pop(name, None)
            if (verb == "export" or "x" in options) and "n" not in options:
                self.state.exported.add(name)
        return True

    def _declared(self, child: Node) -> tuple[str, Variable | None]:
        """Return the name and the value in a word of a declaration; the value is None if it has none."""
        if child.type == "variable_assignment":
            target = child.child_by_field_name("name")
            return "" if target is None else text_of(target).partition("[")[0], self._value(child)
        word = text_of(child) if child.type == "variable_name" else expansion.text(self.state, child)
        name, equals, value = word.partition("=")
        return name, value if equals else None

    def _refer(self, name: str, target: Variable | None) -> None:
        if isinstance(target, str) and re.fullmatch(r"\w+", target) and target != name:
            self.state.references[name] = self.state.references.get(target, target)

    def unset(self, node: Node) -> bool:
        """Unset variables."""
        for child in node.named_children:
            name, _, index = text_of(child).strip("'\"").partition("[")
            if index:
                self._unset_item(name, expansion.text(self.state, parse(index.rstrip("]"))))
                continue
            self.state.variables.pop(name, None)
            self.state.exported.discard(name)
            if name in self.state.inherited:
                self.state.variables[name] = ""
        return True

    def _unset_item(self, name: str, key: str) -> None:
        present = self.state.get(name)
        items = dict(enumerate(self.state.items(name))) if not isinstance(present, dict) else present
        kept = {str(each): value for each, value in items.items()}
        at = expansion.number(self.state, key)
        kept.pop(key if isinstance(present, dict) or at is None else str(at % max(1, len(kept))), None)
        self.state.assign(name, kept)


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


def _joined(first: str | None, second: str | None) -> str | None:
    """Return two outputs concatenated; None if one of them is unknown."""
    return None if first is None or second is None else first + second


def _line_before(node: Node) -> int:
    """Return the end byte of assignments on an earlier line that the grammar adds to a command; 0 if none."""
    source, end = node.text or b"", 0
    for child, following in itertools.pairwise(node.children):
        between = source[child.end_byte - node.start_byte : following.start_byte - node.start_byte]
        if child.type == "variable_assignment" and b"\n" in between.replace(b"\\\n", b""):
            end = child.end_byte
    return end


def _file_redirects(redirect: Node) -> list[Node]:
    pieces = redirect.children if redirect.type == "heredoc_redirect" else [redirect]
    return [piece for piece in pieces if piece.type == "file_redirect"]


def _is_output(piece: Node) -> bool:
    """Return whether a redirection is of stdout, not of stderr."""
    first = piece.children[0]
    return first.type != "file_descriptor" or text_of(first) == "1"
