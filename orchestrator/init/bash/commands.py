"""Commands of a script: what they print, if it can be determined, and which programs they would start."""

from __future__ import annotations

import contextlib
import itertools
import posixpath
import re
from abc import ABC, abstractmethod

from tree_sitter import Node

from autotune.orchestrator.init.bash import expansion
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
from autotune.orchestrator.init.bash.state import Invocation, State, Variable, as_written, is_unknown
from autotune.orchestrator.init.bash.syntax import first_line, line_of, parse, text_of
from autotune.orchestrator.init.bash.text_commands import CannotTell, is_known, output_of, reads_input

_IGNORED = frozenset(
    [
        "shopt",
        "trap",
        "ulimit",
        "jobs",
        "hash",
        "complete",
        "umask",
        ":",
        "true",
        "enable",
        "disown",
        "conda",
        "module",
    ]
)
WORDS = frozenset(
    [
        "word",
        "number",
        "string",
        "raw_string",
        "ansi_c_string",
        "translated_string",
        "concatenation",
        "simple_expansion",
        "expansion",
        "command_substitution",
        "arithmetic_expansion",
        "process_substitution",
        "brace_expression",
        "extglob_pattern",
        "regex",
        "special_variable_name",
        "test_operator",
        "=",
        "==",
    ]
)


class Commands(ABC):
    """Reads commands and assignments; subclasses read statements."""

    def __init__(self, state: State) -> None:
        self.state = state
        state.capture = self.capture
        self.depth = 0
        self._printed: list[str | None] | None = None  # outputs of the statements being read; None: not kept

    @abstractmethod
    def statement(self, node: Node) -> bool | None:
        """Read one statement; returns whether it succeeds, None if only running it would tell."""

    @abstractmethod
    def statements(self, node: Node) -> bool | None:
        """Read the statements of a node in order; returns the status of the last."""

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

    def _printing_list(self, node: Node) -> tuple[bool | None, str | None]:
        parts = [child for child in node.children if child.type != "comment"]
        left, operator, right = parts[0], parts[1].type, parts[-1]
        status, output = self.printing(left, "")
        if left.type != "list" and status is None and operator == "&&":
            self.state.note(left, f"assumed to fail: `{first_line(text_of(left))}`")
            status, output = False, ""
        if status is None and operator == "||":
            return None, output
        if (status is not False) == (operator == "||"):
            return status, output
        after, more = self.printing(right, "")
        return after, _joined(output, more)

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
            if child.type == "command_name" or child.type in WORDS
        ]
        for child in node.children:
            if child.type == "herestring_redirect":
                stdin = expansion.text(self.state, child.children[-1]) + "\n"
        words = expansion.words(self.state, nodes)
        if not words:
            return True, ""
        return self.run(node, words, own, stdin)

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
        return self._program(node, words, own)

    def _program(self, node: Node, words: list[str], own: dict[str, str]) -> tuple[bool | None, str | None]:
        if prints_model_flags(words) and not any(map(is_unknown, words)):
            exported = {each: self.state.text(each) or "" for each in self.state.exported}
            with contextlib.suppress(CannotTell, KeyError, TypeError, ValueError):
                return True, model_flags(places_of(self, words[1]), words[2], {**exported, **own})
        self._start(node, words, own)
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

    def _start(self, node: Node, words: list[str], own: dict[str, str]) -> None:
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
