"""Variables, arrays and their export, as a script sets them."""

from __future__ import annotations

import re

from tree_sitter import Node

from autotune.orchestrator.init.bash import expansion
from autotune.orchestrator.init.bash.commands import Commands
from autotune.orchestrator.init.bash.state import Variable
from autotune.orchestrator.init.bash.syntax import parse, text_of

_MOST_ITEMS = 1000  # of an array that is filled by index


class Assignments(Commands):
    """Reads what sets variables."""

    def assignment(self, node: Node) -> bool:
        """Set a variable."""
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None:
            return True
        append = any(child.type == "+=" for child in node.children)
        made: Variable
        if value is None:
            made = ""
        elif value.type == "array":
            made = self.array(value)
        else:
            made = expansion.text(self.state, value)
        if target.type == "subscript":
            self._assign_item(target, made if isinstance(made, str) else " ".join(map(str, made)))
        else:
            self.state.assign(text_of(target), made, append=append)
        return True

    def array(self, node: Node) -> list[str] | dict[str, str]:
        """Return the items of `(…)`."""
        pairs = [
            re.fullmatch(r"\[([^]]+)\]=(.*)", text_of(child), re.DOTALL) for child in node.named_children
        ]
        if pairs and all(pairs):
            return {
                expansion.text(self.state, parse(found[1])) if "$" in found[1] else found[1].strip("\"'"): (
                    self._text_of_source(found[2])
                )
                for found in pairs
                if found is not None
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
        items = [*items, *[""] * (at + 1 - len(items))][:_MOST_ITEMS]
        if at < len(items):
            items[at] = value
        self.state.assign(name, items)

    def declaration(self, node: Node) -> bool:
        """Read export, declare, local, readonly and typeset."""
        verb = text_of(node.children[0])
        options = [text_of(child) for child in node.children[1:] if text_of(child).startswith("-")]
        exports = verb == "export" or any("x" in option for option in options)
        for child in node.named_children:
            name = ""
            if child.type == "variable_assignment":
                self.assignment(child)
                target = child.child_by_field_name("name")
                name = text_of(target).partition("[")[0] if target is not None else ""
            elif child.type in ("variable_name", "word", "concatenation") and not text_of(child).startswith(
                "-"
            ):
                name = text_of(child)
                if any("A" in option for option in options):
                    self.state.assign(name, {})
                elif any("a" in option for option in options) and self.state.get(name) is None:
                    self.state.assign(name, [])
            if exports and re.fullmatch(r"\w+", name) and "-n" not in options:
                self.state.exported.add(name)
        return True

    def unset(self, node: Node) -> bool:
        """Forget variables."""
        for child in node.named_children:
            name = text_of(child)
            self.state.variables.pop(name, None)
            self.state.exported.discard(name)
            if name in self.state.inherited:
                self.state.variables[name] = ""
        return True
