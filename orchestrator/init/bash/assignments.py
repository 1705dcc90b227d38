"""Variables, arrays and their export, as a script sets them."""

from __future__ import annotations

import re

from tree_sitter import Node

from autotune.orchestrator.init.bash import expansion
from autotune.orchestrator.init.bash.commands import Commands
from autotune.orchestrator.init.bash.state import Variable
from autotune.orchestrator.init.bash.syntax import parse, text_of


class Assignments(Commands):
    """Reads what sets variables."""

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
        if at > len(items):  # items between are not set
            self.state.assign(name, {**{str(n): item for n, item in enumerate(items)}, key: value})
        else:
            self.state.assign(name, [*items[:at], value, *items[at + 1 :]])

    def declaration(self, node: Node) -> bool:
        """Read export, declare, local, readonly and typeset."""
        verb = text_of(node.children[0])
        children = [child for child in node.named_children if child.type != "comment"]
        options = "".join(text_of(child)[1:] for child in children if text_of(child).startswith("-"))
        is_own = verb in ("local", "declare", "typeset") and "g" not in options
        given = [(child, self._declared(child)) for child in children]  # before any of them is set
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
        """Return the name that a word of a declaration has, and its value; None if it gives none."""
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
        """Forget variables."""
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
