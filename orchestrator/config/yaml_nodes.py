"""Read a YAML text as plain values with their places, by the core schema of YAML 1.2 and within size limits.

YAML 1.1 reads `off` as false and `3e-3` as text; both are common values in a training job.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path as FilePath
from shlex import quote
from typing import Any, NamedTuple, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.resolver import BaseResolver

from autotune.orchestrator.errors import Complaint, UserError, reason_of

Path: TypeAlias = tuple[str | int, ...]

LARGEST_BYTES = 256 * 1024
DEEPEST = 32
MOST_NODES = 10_000  # after aliases are expanded

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_BOOL_1_1 = {
    form: value
    for value, words in ((True, ("yes", "on")), (False, ("no", "off")))
    for word in words
    for form in (word, word.capitalize(), word.upper())
}
_INT_1_1 = re.compile(r"[-+]?[1-9][\d_]*")
_INT = re.compile(r"[-+]?\d+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"


class Place(NamedTuple):
    """A range on one line of the text."""

    line: int  # 0-based
    column: int  # 0-based
    width: int


class Entry(NamedTuple):
    """The places of a value and, in a mapping, of its key."""

    key: Place | None
    value: Place
    is_scalar: bool = False  # and not empty


class _TooLargeError(Exception):
    """The aliases of a text expand to more than `MOST_NODES` nodes."""


class _TooManyNodesError(MarkedYAMLError):
    """A text has more than `MOST_NODES` keys and values."""


class _Composer(Composer):
    """Stops at the first node above the limit: composing 256 KiB of nodes takes many seconds."""

    _composed = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._composed += 1
        if self._composed > 2 * MOST_NODES:  # keys and values
            raise _TooManyNodesError(problem_mark=self.parser.peek_event().start_mark)
        return super().compose_node(parent, index)


class _TextResolver(BaseResolver):
    """Keeps every plain scalar as text; only `<<` is resolved."""

    def __init__(self, version: object = None, loader: Any = None, loadumper: Any = None) -> None:
        super().__init__(loader or loadumper)

    @property
    def processing_version(self) -> tuple[int, int]:
        return 1, 2


_TextResolver.add_implicit_resolver_base(_MERGE, re.compile(r"<<\Z"), ["<"])


class UnreadableError(UserError):
    """A file named by the user is absent, unreadable or not text."""

    def __init__(self, path: str | FilePath, reason: str, *, hint: str = "", absent: bool = False) -> None:
        super().__init__(f"cannot read `{path}`: {reason}", hint=hint)
        self.reason = reason
        self.absent = absent


def read_text(path: str | FilePath) -> str:
    """Return the text of a UTF-8 file without its byte order mark; raises UnreadableError."""
    try:
        return FilePath(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_text(path, error.object, error.start) from None
    except OSError as error:
        reason, file = reason_of(error), quote(str(path))
        hint = "name a file in it" if isinstance(error, IsADirectoryError) else ""
        hint = f"`ls -l {file}` shows who may read it" if isinstance(error, PermissionError) else hint
        absent = isinstance(error, FileNotFoundError)
        raise UnreadableError(path, reason, hint=hint, absent=absent) from None


def _not_text(path: str | FilePath, data: bytes, wrong: int) -> UnreadableError:
    """Return the error for a file whose first invalid UTF-8 byte is at offset `wrong`."""
    begin = data.rfind(b"\n", 0, wrong) + 1
    line, column = data.count(b"\n", 0, wrong) + 1, len(data[begin:wrong].decode()) + 1
    encoding = "UTF-16" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "ISO-8859-1"
    hint = f"`iconv -f {encoding} -t UTF-8 {quote(str(path))}` converts it from {encoding}"
    if encoding != "UTF-16" and b"\0" in data:
        hint = "name a text file"
    return UnreadableError(path, f"not UTF-8 text (line {line}, column {column})", hint=hint)


def round_trip() -> YAML:
    """Return a YAML reader and writer that keeps comments, anchors, quotes and the spelling of scalars."""
    yaml = _limited("rt")
    yaml.preserve_quotes = True
    yaml.width = LARGEST_BYTES  # never wrap a line
    return yaml


def _limited(kind: str) -> YAML:
    yaml = YAML(typ=kind, pure=True)
    yaml.Resolver = _TextResolver
    yaml.Composer = _Composer
    yaml.max_depth = DEEPEST
    yaml.composer.warn_double_anchors = False
    return yaml


class Document:
    """The values of a YAML text; syntax errors are collected in `complaints`.

    Scalars below the keys in `literal` are not converted: `01` stays the text `01`. `read` converts every
    other plain scalar.
    """

    def __init__(
        self,
        text: str,
        file: str,
        *,
        literal: tuple[str, ...] = (),
        read: Callable[[str], Any] | None = None,
    ) -> None:
        self.text = text.removeprefix("\ufeff")
        self.file = file
        self.lines = self.text.split("\n")
        self.complaints: list[Complaint] = []
        self.value: Any = None
        self._literal = literal
        self._scalar = read or scalar
        self._entries: dict[Path, Entry] = {}
        self._count = 0
        root = self._compose()
        if root is not None:
            with suppress(_TooLargeError):
                self.value = self._read(root, (), ())

    def complain(self, message: str, place: Place, *, hint: str = "", hides: bool = False) -> None:
        """Record a mistake at a place; with `hides` the line is shown only up to that place."""
        text = self.lines[place.line] if place.line < len(self.lines) else ""
        text = f"{text[: place.column]}***" if hides else text
        self.complaints.append(
            Complaint(
                message=message,
                file=self.file,
                line=place.line + 1,
                column=place.column + 1,
                width=place.width,
                text=text,
                hint=hint,
            )
        )

    def entry(self, path: Path) -> Entry:
        """Return the places of the deepest part of `path` that exists in the text."""
        while path and path not in self._entries:
            path = path[:-1]
        return self._entries.get(path, Entry(None, Place(0, 0, 1)))

    def line_of(self, path: Path) -> str:
        """Return the text of the line on which the value at a path begins."""
        return self.lines[self.entry(path).value.line]

    def holds(self, path: Path) -> bool:
        """Return whether the text has a value at a path."""
        return path in self._entries

    def _compose(self) -> Node | None:
        if len(self.text.encode(errors="replace")) > LARGEST_BYTES:
            self.complain(f"the file is larger than {LARGEST_BYTES // 1024} KiB", Place(0, 0, 1))
            return None
        try:
            root: Node | None = _limited("safe").compose(self.text)
        except YAMLError as error:
            self._misformed(error)
            return None
        return root

    def _read(self, node: Node, path: Path, within: tuple[Node, ...], key: Node | None = None) -> Any:
        """Return the value of the node at `path`, inside the nodes `within`."""
        place = self._place(node)
        self._entries[path] = Entry(
            key=None if key is None else self._place(key),
            value=place,
            is_scalar=isinstance(node, ScalarNode) and node.value != "",
        )
        self._count_node(path)
        if any(node is each for each in within):
            self.complain("this value contains itself", place)
            return None
        if str(node.tag) not in (f"{_TAG}str", f"{_TAG}seq", f"{_TAG}map", _MERGE):
            name = str(node.tag).replace(_TAG, "!!")
            self.complain(f"tag `{name}` is not read here", place, hint="remove it")
            return None
        if isinstance(node, ScalarNode):
            literal = len(path) > 1 and path[0] in self._literal
            return node.value if literal or node.style is not None else self._scalar(node.value)
        inside = (*within, node)
        if isinstance(node, MappingNode):
            entries = self._entries_of(node, within, path)
            return {key.value: self._read(item, (*path, key.value), inside, key) for key, item in entries}
        return [self._read(item, (*path, index), inside) for index, item in enumerate(node.value)]

    def _count_node(self, path: Path) -> None:
        self._count += 1
        if self._count > MOST_NODES:
            top = path[:1]
            place = self._entries[top].key or self._entries[top].value
            self.complain(f"`{'.'.join(map(str, top))}` expands to more values than a job can need", place)
            raise _TooLargeError

    def _entries_of(
        self, node: MappingNode, within: tuple[Node, ...], path: Path
    ) -> list[tuple[ScalarNode, Node]]:
        """Return the keys and values of a mapping, those of `<<` last; invalid keys are recorded."""
        own: dict[str, tuple[ScalarNode, Node]] = {}
        merged: list[Node] = []
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                self.complain("a key must be text", self._place(key))
            elif str(key.tag) == _MERGE:
                merged += value.value if isinstance(value, SequenceNode) else [value]
            elif key.value in own:
                line = own[key.value][0].start_mark.line + 1
                self.complain(
                    f"duplicate key `{key.value}`", self._place(key), hint=f"it is already set in line {line}"
                )
            else:
                own[key.value] = key, value
        for base in merged:
            self._count_node(path)
            if not isinstance(base, MappingNode) or any(base is each for each in (node, *within)):
                self.complain("`<<` takes mappings", self._place(base), hint="such as `<<: *anchor`")
                continue
            for key, value in self._entries_of(base, (*within, node), path):
                own.setdefault(key.value, (key, value))
        return list(own.values())

    def _place(self, node: Node) -> Place:
        """Return the place of a node; if it spans several lines, its part on the first."""
        start, end = node.start_mark, node.end_mark
        line = min(start.line, len(self.lines) - 1)
        to = end.column if end.line == start.line else len(self.lines[line].rstrip())
        return Place(line, start.column, max(1, to - start.column))

    def _misformed(self, error: YAMLError) -> None:
        mark = getattr(error, "problem_mark", None)
        if not isinstance(error, MarkedYAMLError) or mark is None:
            position = min(getattr(error, "position", 0), len(self.text))
            line = self.text.count("\n", 0, position)
            column = position - (self.text.rfind("\n", 0, position) + 1)
            self.complain("a character that YAML does not allow", Place(line, column, 1))
            return
        line = min(mark.line, len(self.lines) - 1)
        before = self.lines[line][: mark.column + 1]
        if isinstance(error, _TooManyNodesError):
            self.complain(
                f"more than {MOST_NODES:,} values: more than a job can need", Place(line, mark.column, 1)
            )
        elif isinstance(error, MaxDepthExceededError):
            self.complain(f"nested more than {DEEPEST} levels deep", Place(line, mark.column, 1))
        elif "\t" in before and not before.strip():
            self.complain(
                "a tab indents this line", Place(line, before.index("\t"), 1), hint="YAML indents with spaces"
            )
        else:
            problem = ", ".join(part for part in (error.context, error.problem) if part)
            self.complain(f"not YAML: {problem or error}", Place(line, mark.column, 1))


def scalar_1_1(text: str) -> Any:
    """Return the value of a plain scalar as PyYAML and OmegaConf read it, by YAML 1.1."""
    if text in _BOOL_1_1:
        return _BOOL_1_1[text]
    if _INT_1_1.fullmatch(text) and "_" in text:
        return scalar(text.replace("_", ""))
    return scalar(text)


def scalar(text: str) -> Any:
    """Return the value of a plain scalar by the core schema of YAML 1.2."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        if len(text) > 40:
            return float(text)
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    special = _SPECIAL.fullmatch(text)
    return text if special is None else float("nan") if special[3] else float(f"{special[1]}inf")
