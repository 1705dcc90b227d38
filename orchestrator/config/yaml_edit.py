"""Edit a YAML text: replace or add values, with the reasons as comments, and keep the rest as written."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark, YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, PlainScalarString
from ruamel.yaml.tokens import CommentToken

from autotune.orchestrator.config.yaml_nodes import Document, Path, round_trip, scalar

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*|[0-9]+[KMGT]iB")
_YAML_1_1 = {"on", "off", "yes", "no", "y", "n"}  # read as booleans by other parsers
_INDENT = 2
_MAP_COMMENT, _SEQUENCE_COMMENT = 2, 0  # ruamel's index of the comment after an item


class Edit(NamedTuple):
    """A value to write at a path of a YAML text, with the reason."""

    path: Path
    value: Any
    why: str
    is_repeated: bool = False  # another edit has the reason in full
    moves_remark: bool = False  # what is said behind the old value goes with it into the comment


def edited(text: str, edits: list[Edit], *, literal: tuple[str, ...] = ()) -> str:
    """Return a YAML text with values replaced or added; a text that is not a mapping is returned unchanged.

    Comments, anchors, quotes and the order of keys are kept. If the edited text would not have the intended
    values (a section may be an alias of another), all values are written anew, without the comments.
    """
    before = Document(text, "", literal=literal)
    if not edits or before.complaints or not isinstance(before.value, dict):
        return text
    values = with_values(before.value, edits)
    edits = _with_each_reason_once(before.value, edits)
    try:
        out = _in_place(before.text, edits)
    except YAMLError:  # the writer accepts less than the reader, such as only one `<<` in a mapping
        out = ""
    if Document(out, "", literal=literal).value == values:
        return out
    return _above([_comment(edit, None, edit.path) for edit in edits], dumped(values))


def with_values(values: dict[str, Any], edits: list[Edit]) -> dict[str, Any]:
    """Return values with the edits applied."""
    out = copy.deepcopy(values)
    for *parents, name, value in ((*map(str, edit.path), edit.value) for edit in edits):
        mapping = out
        for part in parents:
            if not isinstance(mapping.get(part), dict):
                mapping[part] = {}
            mapping = mapping[part]
        mapping[name] = value
    return out


def _with_each_reason_once(values: dict[str, Any], edits: list[Edit]) -> list[Edit]:
    """Return edits in which only the first in the text has a reason in full; the others have only its name.

    A reason such as `remedy: why` has a name; a reason without a name is short and is repeated.
    """

    def place(at: int) -> tuple[int, int]:
        *parents, name = map(str, edits[at].path)
        owner: Any = values
        for part in parents:
            owner = owner.get(part) if isinstance(owner, dict) else None
        keys = list(owner) if isinstance(owner, dict) else []
        return (keys.index(name), 0) if name in keys else (len(keys), at)

    first: dict[str, int] = {}
    for at in sorted(range(len(edits)), key=place):
        first.setdefault(edits[at].why, at)
    return [edit._replace(is_repeated=first[edit.why] != at) for at, edit in enumerate(edits)]


def dumped(values: dict[str, Any]) -> str:
    """Return values as YAML, one line for each key."""
    return _dumped(round_trip(), CommentedMap((_node(name), _node(value)) for name, value in values.items()))


def _in_place(text: str, edits: list[Edit]) -> str:
    yaml = round_trip()
    root = yaml.load(text.replace("\r\n", "\n"))
    _keep_anchors(root)
    indent = _keep_layout(yaml, root)
    above = [comment for edit in edits if (comment := _apply(root, edit, indent=indent)) is not None]
    out = _above(above, _dumped(yaml, root))
    return out.replace("\n", "\r\n") if "\r\n" in text else out


def _apply(root: CommentedMap, edit: Edit, *, indent: int) -> str | None:
    """Apply one edit; returns its comment if that must go above the text because the text is in braces."""
    *parents, name = map(str, edit.path)
    owner, depth, value = root, 0, _node(edit.value)
    for part in parents:
        child = owner.get(part)
        if not isinstance(child, CommentedMap):
            break
        owner, depth = child, depth + 1
    old = owner.get(name) if depth == len(parents) and name in owner else None
    remark = _take_remark(owner, name) if edit.moves_remark and edit.why and old is not None else ""
    for below in reversed(edit.path[depth + 1 :]):
        value = CommentedMap({str(below): value})
    _put(owner, str(edit.path[depth]), value)
    if not edit.why:
        return None
    level = _deepest_block(root, parents)
    comment = _comment(edit, old, edit.path[level + 1 :], remark=remark)
    if not comment:
        return None
    if level < 0:
        return comment
    for part in parents[:level]:
        root = root[part]
    root.yaml_set_comment_before_after_key(str(edit.path[level]), before=comment, indent=level * indent)
    return None


def _deepest_block(root: CommentedMap, parents: list[str]) -> int:
    """Return how many mappings below the root are in block style along a path; -1 if the root is not."""
    level, mapping = -1, root
    for part in [*parents, None]:
        if mapping.fa.flow_style():
            break
        level += 1
        mapping = root if part is None else mapping[part]
    return level


def _take_remark(owner: CommentedMap, name: str) -> str:
    """Remove and return the comment behind a value; empty if there is none."""
    slots = owner.ca.items.get(name)
    token = None if slots is None else slots[_MAP_COMMENT]
    if token is None:
        return ""
    own, newline, following = str(token.value).partition("\n")
    token.value = f"{newline}{following}"
    return own.strip().lstrip("# ")


def _comment(edit: Edit, old: Any, below: Path, *, remark: str = "") -> str:
    """Return an edit's comment on one line; `below` is the path relative to the line that it precedes."""
    before = old if isinstance(old, str) else "" if old is None else json.dumps(old, ensure_ascii=False)
    name, named, _ = edit.why.partition(": ")
    why = name if named and edit.is_repeated else edit.why
    was = f"was {before}{f' ({remark})' if remark else ''}" if before else ""
    sentence = ": ".join(part for part in (was, why) if part)
    if not sentence:
        return ""
    where = f"{'.'.join(map(str, below))}: " if below else ""
    return " ".join(f"{where}{sentence}".split())


def _above(comments: list[str], text: str) -> str:
    return "".join(f"# {comment}\n" for comment in comments) + text


def _put(mapping: CommentedMap, name: str, value: Any) -> None:
    """Set a key, and keep the comment lines after the mapping's last value behind it."""
    own = [key for key, _ in mapping.non_merged_items()]
    last = name if name in own else own[-1] if own else None
    following = None if last is None else _take_following(mapping, last)
    mapping[name] = value
    while isinstance(value, CommentedMap) and not value.fa.flow_style():
        mapping, (name, value) = value, next(iter(value.items()))
    if following is not None:
        slots = mapping.ca.items.setdefault(name, [None, None, None, None])
        token = slots[_MAP_COMMENT]
        if token is None:
            slots[_MAP_COMMENT] = CommentToken(f"\n{following}", CommentMark(0))
        else:
            token.value += following


def _take_following(owner: Any, key: Any) -> str | None:
    """Remove and return the comment lines after the last line of a value, except the comment on that line."""
    value = owner[key]
    if isinstance(value, (CommentedMap, CommentedSeq)) and len(value) and not value.fa.flow_style():
        return _take_following(value, list(value)[-1] if isinstance(value, CommentedMap) else len(value) - 1)
    index = _MAP_COMMENT if isinstance(owner, CommentedMap) else _SEQUENCE_COMMENT
    slots = owner.ca.items.get(key)
    token = None if slots is None else slots[index]
    if token is None:
        return None
    own, _, following = token.value.partition("\n")
    token.value = f"{own}\n"
    return following or None


def _node(value: Any) -> Any:
    """Return a value as a one-line node that all YAML parsers read the same way."""
    match value:
        case dict():
            mapping = CommentedMap((_node(str(name)), _node(item)) for name, item in value.items())
            mapping.fa.set_flow_style()
            return mapping
        case list() | tuple():
            sequence = CommentedSeq(_node(item) for item in value)
            sequence.fa.set_flow_style()
            return sequence
        case str():
            plain = _PLAIN.fullmatch(value) and scalar(value) == value and value.lower() not in _YAML_1_1
            return PlainScalarString(value) if plain else DoubleQuotedScalarString(value)
        case float() if math.isfinite(value):
            # YAML 1.1 reads 1e-06 as text.
            return PlainScalarString(re.sub(r"^(-?\d+)e", r"\1.0e", repr(value)))
        case _:
            return PlainScalarString(json.dumps(value))


def _keep_anchors(value: Any) -> None:
    """Make the writer keep unused anchors."""
    if isinstance(value, (CommentedMap, CommentedSeq)):
        value.anchor.always_dump = True
        for item in value.values() if isinstance(value, CommentedMap) else value:
            _keep_anchors(item)


def _keep_layout(yaml: YAML, root: CommentedMap) -> int:
    """Set the writer's indentation to that of the text; returns the indentation of mappings in columns."""
    mapping = sequence = offset = None
    for value in root.values():
        if not isinstance(value, (CommentedMap, CommentedSeq)) or value.fa.flow_style() or not len(value):
            continue
        if isinstance(value, CommentedMap):
            mapping = mapping or min((place[1] for place in (value.lc.data or {}).values()), default=None)
        elif sequence is None:
            offset, sequence = value.lc.col, value.lc.item(0)[1]
    mapping = mapping or _INDENT
    yaml.indent(mapping=mapping, sequence=sequence or _INDENT, offset=offset or 0)
    return mapping


def _dumped(yaml: YAML, root: CommentedMap) -> str:
    out = io.StringIO()
    yaml.dump(root, out)
    return out.getvalue()
