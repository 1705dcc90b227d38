"""Bash's builtins: folders, sourced files, variables and conditions."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tree_sitter import Node

from autotune.orchestrator.config.own_code import is_file
from autotune.orchestrator.config.yaml_nodes import UnreadableError, read_text
from autotune.orchestrator.init.bash import conditions, expansion
from autotune.orchestrator.init.bash.state import as_written, is_unknown, unknown
from autotune.orchestrator.init.bash.syntax import first_line, line_of, parse, text_of
from autotune.orchestrator.init.bash.text_commands import is_known
from autotune.policies.values.value import Value

if TYPE_CHECKING:
    from autotune.orchestrator.init.bash.reader import Shell

ENDS_HERE = "the script ends here"
_OF_A_MACHINE = re.compile(r"rc$|activate|conda|profile|env")  # sourced to find programs, not for settings
DEPTH = 25  # nested files and functions
_NEAR = 3  # lines between a message and the `exit` that it explains


class Call(Value, frozen=True, kw_only=True):
    """The words after a command's name, its input, and the variables set before it."""

    words: list[str]
    stdin: str | None = ""
    own: dict[str, str] = {}


class Leave(Exception):  # noqa: N818 - control flow of the script
    """The script leaves a loop, a function, a file or itself."""

    def __init__(self, what: str, status: bool | None = True) -> None:
        super().__init__(what)
        self.what = what  # exit | return | break | continue
        self.status = status
        self.printed: str | None = ""  # output of the statement that is left; None: unknown


def _cd(shell: Shell, node: Node, call: Call) -> bool | None:
    places = [word for word in call.words if word not in ("--", "-P", "-L", "-e")]
    to = places[0] if places else shell.state.text("HOME") or "/"
    return _enter(shell, node, shell.state.text("OLDPWD") or unknown(to) if to == "-" else to)


def _enter(shell: Shell, node: Node, to: str) -> bool | None:
    if is_unknown(to):
        shell.state.note(node, f"unknown folder: `{first_line(text_of(node))}`")
        return None
    shell.state.variables["OLDPWD"] = shell.state.cwd
    shell.state.cwd = posixpath.normpath(posixpath.join(shell.state.cwd, to))
    return True


def _pushd(shell: Shell, node: Node, call: Call) -> bool | None:
    before = shell.state.cwd
    entered = _enter(shell, node, call.words[0] if call.words else unknown("pushd"))
    if entered:
        shell.state.folders.append(before)
    return entered


def _popd(shell: Shell, node: Node, call: Call) -> bool | None:
    return _enter(shell, node, shell.state.folders.pop() if shell.state.folders else unknown("popd"))


def _let(shell: Shell, node: Node, call: Call) -> bool | None:
    value = [expansion.number(shell.state, word) for word in call.words][-1:]
    return bool(value[0]) if value and value[0] is not None else None


def read_file(shell: Shell, node: Node, call: Call, *, program: bool = False) -> bool | None:
    """Read a script: as part of the current one (`source`), or as a separate program (`bash FILE`)."""
    name = call.words[0] if call.words else ""
    places = [] if is_unknown(name) else places_of(shell, name)
    text = shell.state.files.get(name)
    path = next((place for place in places if is_file(place)), None)
    if text is None and path is not None:
        try:
            text = read_text(path).replace("\r\n", "\n")
        except UnreadableError:
            text = None
    if text is None or shell.depth >= DEPTH:
        of_machine = not program and _OF_A_MACHINE.search(name) is not None
        shell.state.unread = shell.state.unread or not (program or of_machine)
        what = "left out, launch from that environment" if of_machine else "file not found or not readable"
        shell.state.note(node, f"{what}: `{first_line(text_of(node))}`")
        return None
    shell.depth += 1
    try:
        with shell.state.inside(str(path or name), program=program):
            shell.statements(parse(text))
    except Leave as leave:
        if leave.what != ("exit" if program else "return"):
            raise
    finally:
        shell.depth -= 1
    return True


def _leave(shell: Shell, node: Node, call: Call) -> bool:
    verb = text_of(node).split()[0]
    if verb == "exit" and call.words[:1] not in ([], ["0"]):
        text, line = shell.state.message
        printed = first_line(as_written(text).strip()) if line_of(node) - line <= _NEAR else ""
        after = f', after it prints "{printed}"' if printed else ""
        shell.state.note(node, f"{ENDS_HERE}: `{first_line(text_of(node))}`{after}")
    raise Leave(verb, not call.words or call.words[0] == "0" if verb == "return" else True)


def _set(shell: Shell, node: Node, call: Call) -> bool:
    if "--" in call.words:
        shell.state.positional = call.words[call.words.index("--") + 1 :]
    return True


def _wait(shell: Shell, node: Node, call: Call) -> bool:
    shell.state.waits += 1
    return True


def _shift(shell: Shell, node: Node, call: Call) -> bool:
    count = int(call.words[0]) if call.words and call.words[0].isdigit() else 1
    if count > len(shell.state.positional):
        return False
    shell.state.positional = shell.state.positional[count:]
    return True


def _test(shell: Shell, node: Node, call: Call) -> bool | None:
    return conditions.of_words(shell.state, [word for word in call.words if word != "]"])


def _read(shell: Shell, node: Node, call: Call) -> bool | None:
    names = [word for word in call.words if not word.startswith("-") and re.fullmatch(r"\w+", word)]
    if any(re.fullmatch(r"-\w*d", a) and not b for a, b in pairwise(call.words)) and call.stdin and names:
        shell.state.assign(names[-1], call.stdin.strip())  # `read -d ''` reads to the end, as a here-document
        return False
    lines = shell.state.input if call.stdin == "" else (call.stdin or "").split("\n")[:1]
    if lines is not None and not lines:
        for name in names:
            shell.state.assign(name, "")
        return False
    if not lines or is_unknown(lines[0]) or not (lines is shell.state.input or call.stdin):
        shell.state.note(node, f"input unknown: `{first_line(text_of(node))}`")
        for name in names:
            shell.state.assign(name, unknown(f"${name}"))
        return None
    separators = call.own.get("IFS", shell.state.text("IFS") or "")
    line = lines.pop(0)
    parts = [part for part in re.split(f"[{re.escape(separators)}]+", line) if part] if separators else [line]
    if any(word.startswith("-") and "a" in word for word in call.words):
        shell.state.assign(names[-1], parts)
    else:
        for at, name in enumerate(names):
            last = at == len(names) - 1
            shell.state.assign(name, " ".join(parts[at:]) if last else parts[at] if at < len(parts) else "")
    return True


def _mapfile(shell: Shell, node: Node, call: Call) -> bool | None:
    name = next((word for word in call.words if re.fullmatch(r"[A-Za-z_]\w*", word)), "MAPFILE")
    if call.words[:-1] not in ([], ["-t"]) or call.stdin is None or is_unknown(call.stdin):
        shell.state.assign(name, [unknown(f"${name}")])
        return None
    shell.state.assign(name, call.stdin.splitlines())
    return True


def _getopts(shell: Shell, node: Node, call: Call) -> bool | None:
    options, name, words = call.words[0], call.words[1], call.words[2:] or shell.state.positional
    at, letter = int(shell.state.text("OPTIND") or 1), shell.state.letter
    word = words[at - 1] if at <= len(words) else ""
    if is_unknown(word):
        shell.state.note(node, f"arguments unknown: `{first_line(text_of(node))}`")
        return None
    if not re.match("-.", word) or word == "--":
        shell.state.assign("OPTIND", str(at + (word == "--")))
        shell.state.assign(name, "?")
        return False
    option, rest = word[letter], word[letter + 1 :]
    shell.state.variables.pop("OPTARG", None)
    is_last = not rest
    if option != ":" and f"{option}:" in options:
        value, is_last = rest or "".join(words[at : at + 1]), True
        at += not rest
        if at > len(words):
            option, value = (":", option) if options.startswith(":") else ("?", "")
        shell.state.assign("OPTARG", value)
    elif option not in options or option == ":":
        shell.state.assign("OPTARG", option if options.startswith(":") else "")
        option = "?"
    shell.state.letter = 1 if is_last else letter + 1
    shell.state.assign("OPTIND", str(at + is_last))
    shell.state.assign(name, option)
    return True


def _eval(shell: Shell, node: Node, call: Call) -> bool | None:
    source = " ".join(call.words)
    if is_unknown(source) or shell.depth >= DEPTH:
        shell.state.note(node, f"command unknown, left out: `{first_line(text_of(node))}`")
        return None
    shell.depth += 1
    try:
        return shell.statements(parse(source))
    finally:
        shell.depth -= 1


def printf_into(shell: Shell, node: Node, call: Call) -> bool | None:
    """Set a variable as `printf -v NAME` does."""
    _, output = shell.text_command(node, ["printf", *call.words[2:]], "")
    shell.state.assign(call.words[1], shell.state.untold(node) if output is None else output)
    return True


def _export(shell: Shell, node: Node, call: Call) -> bool:
    for word in call.words:
        name, equals, value = word.partition("=")
        if equals:
            shell.state.assign(name, value)
        shell.state.exported.add(name)
    return True


def _command(shell: Shell, node: Node, call: Call) -> bool | None:
    if call.words[:1] in (["-v"], ["-V"]):
        return True if call.words[-1] in shell.state.functions or is_known(call.words[-1]) else None
    return shell.run(node, call.words, call.own, call.stdin)[0] if call.words else True


def _exec(shell: Shell, node: Node, call: Call) -> bool | None:
    words = list(call.words)
    while words and words[0].startswith("-"):
        words = words[2:] if words[0].endswith("a") else words[1:]  # `-a NAME`, `-c`, `-l`
    return shell.run(node, words, call.own, call.stdin)[0] if words else True


def places_of(shell: Shell, name: str) -> list[Path]:
    """Return the possible paths on this machine of a file that a script names."""
    file = Path(shell.state.file)
    above = [] if name.startswith("/") else [folder / name for folder in file.resolve().parents[1:]]
    return [Path(shell.state.cwd, name), file.parent / name, *above, *same_ending(name, file)]


def same_ending(name: str, script: Path) -> list[Path]:
    """Return the possible paths of a file with an absolute path if the script's repository was moved."""
    parts = Path(name).parts[1:] if name.startswith("/") else ()
    return [
        folder.joinpath(*parts[at:]) for at in range(len(parts) - 1) for folder in script.resolve().parents
    ]


BUILTINS: Mapping[str, Callable[[Shell, Node, Call], bool | None]] = {
    "cd": _cd,
    "getopts": _getopts,
    "let": _let,
    "popd": _popd,
    "pushd": _pushd,
    "pwd": lambda *_: True,
    "source": read_file,
    ".": read_file,
    "exit": _leave,
    "return": _leave,
    "break": _leave,
    "continue": _leave,
    "false": lambda *_: False,
    "set": _set,
    "shift": _shift,
    "wait": _wait,
    "test": _test,
    "[": _test,
    "mapfile": _mapfile,
    "read": _read,
    "readarray": _mapfile,
    "eval": _eval,
    "export": _export,
    "command": _command,
    "exec": _exec,
}
