"""YAML text as nodes that know their place, read by the rules of YAML 1.2 and within limits.

YAML 1.1 reads `off` as false and `3e-3` as text; both are everyday values of a training job.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, TypeAlias

import yaml

from autotune.orchestrator.errors import Complaint

Path: TypeAlias = tuple[str | int, ...]

LARGEST_BYTES = 256 * 1024
DEEPEST = 32
MOST_NODES = 10_000  # after aliases are expanded

_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?\d+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:seq", "tag:yaml.org,2002:map"}


class Place(NamedTuple):
    """Where something stands in the text."""

    line: int  # 0-based
    column: int
    width: int


class Document:
    """A text with its tree of nodes; mistakes of form are collected in `complaints`."""

    def __init__(self, text: str, file: str) -> None:
        self.text = text.removeprefix("\ufeff")
        self.file = file
        self.lines = self.text.split("\n")
        self.complaints: list[Complaint] = []
        self.root: Any = None
        self._count = 0
        self._open: set[int] = set()
        if self._bounded():
            self._compose()

    def complain(self, message: str, place: Place, *, hint: str = "") -> None:
        """Record a mistake at a place."""
        text = self.lines[place.line] if place.line < len(self.lines) else ""
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

    def place(self, node: Any) -> Place:
        """Return where a node stands; of a node of several lines, its first."""
        start, end = node.start_mark, node.end_mark
        line = min(start.line, len(self.lines) - 1)
        width = (
            end.column - start.column
            if end.line == start.line
            else len(self.lines[line].rstrip()) - start.column
        )
        return Place(line, start.column, max(1, width))

    def find(self, path: Path) -> tuple[Any, Any]:
        """Return the key node and value node of the deepest part of `path` that is written."""
        key, node = None, self.root
        for part in path:
            entry = _entry(node, part)
            if entry is None:
                break
            key, node = entry[0] or key, entry[1]
        return key, node

    def plain(self, node: Any) -> Any:
        """Return a node as Python values, numbers and booleans by YAML 1.2; mistakes are recorded."""
        self._count += 1
        if self._count > MOST_NODES:
            raise TooLargeError
        if node.tag not in _TAGS:
            name = node.tag.replace("tag:yaml.org,2002:", "!!")
            self.complain(f"tag `{name}` is not read here", self.place(node), hint="remove it")
            return None
        if isinstance(node, yaml.ScalarNode):
            return scalar(node.value) if node.style is None else node.value
        if id(node) in self._open:
            self.complain("this value contains itself", self.place(node))
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.plain(item) for item in node.value]
            return {key.value: self.plain(value) for key, value in self.entries(node)}
        finally:
            self._open.discard(id(node))

    def entries(self, node: Any) -> list[tuple[Any, Any]]:
        """Return the key and value nodes of a mapping; keys that are not text or repeat are recorded."""
        seen: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.complain("a key must be text", self.place(key))
            elif key.value in seen:
                first = seen[key.value][0].start_mark.line + 1
                self.complain(
                    f"duplicate key `{key.value}`", self.place(key), hint=f"it is already set in line {first}"
                )
            else:
                seen[key.value] = (key, value)
        return list(seen.values())

    def _bounded(self) -> bool:
        if len(self.text.encode(errors="replace")) > LARGEST_BYTES:
            self.complain(f"the file is larger than {LARGEST_BYTES // 1024} KiB", Place(0, 0, 1))
            return False
        depth = 0
        try:
            for event in yaml.parse(self.text, Loader=yaml.BaseLoader):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                    event, yaml.CollectionEndEvent
                )
                if depth > DEEPEST:
                    mark = event.start_mark
                    self.complain(f"nested more than {DEEPEST} levels deep", Place(mark.line, mark.column, 1))
                    return False
        except yaml.YAMLError as error:
            self._misformed(error)
            return False
        return True

    def _compose(self) -> None:
        try:
            self.root = yaml.compose(self.text, Loader=yaml.BaseLoader)
        except yaml.YAMLError as error:
            self._misformed(error)

    def _misformed(self, error: yaml.YAMLError) -> None:
        mark = getattr(error, "problem_mark", None)
        if mark is None:
            position = min(getattr(error, "position", 0), len(self.text))
            line = self.text.count("\n", 0, position)
            column = position - (self.text.rfind("\n", 0, position) + 1)
            self.complain("a character that YAML does not allow", Place(line, column, 1))
            return
        line = min(mark.line, len(self.lines) - 1)
        before = self.lines[line][: mark.column + 1]
        if "\t" in before and not before.strip():
            self.complain(
                "a tab indents this line", Place(line, before.index("\t"), 1), hint="YAML indents with spaces"
            )
            return
        problem = str(getattr(error, "problem", None) or error)
        context = getattr(error, "context", None)
        self.complain(f"not YAML: {f'{context}, ' if context else ''}{problem}", Place(line, mark.column, 1))


class TooLargeError(Exception):
    """A text whose aliases expand to more nodes than a job can need."""


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


def _entry(node: Any, part: str | int) -> tuple[Any, Any] | None:
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == str(part)), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return None, node.value[part]
    return None
