"""Which test runs which line of the policies, and so which tests a change of a line can reach."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import msgspec

from benchmarks.mutation.regions import Unit, statement, units

TESTS = "tests/policies"


class CoverageMap(msgspec.Struct, frozen=True):
    """The tests, and for each module of the policies which of them run each line."""

    tests: list[tuple[str, float]]  # with the CPU seconds that each took while it was recorded
    lines: dict[str, dict[int, list[int]]]  # path in the repository -> line -> places in `tests`
    at_import: dict[str, list[int]]  # path -> lines that run when the tests are collected

    def tests_of(self, root: Path, module: str, line: int) -> dict[str, float]:
        """Return the tests that a change at a line can reach and their CPU seconds, the fastest first.

        They are those that run its statement. What is executed once per process, such as the constants of a
        module or the defaults of a function, is reached by the tests of functions that have or read its name,
        directly or through other such statements; where no function does, by every test of the module's room.
        """
        ran = self.lines.get(module, {})
        places = {place for each in statement(_tree(root / module), line) for place in ran.get(each, ())}
        own = [unit for unit in _units(root / module) if line in unit.lines]
        early = [unit for unit in own if self._early(module, unit)]
        if early:
            places |= self._users(root, frozenset().union(*(unit.names for unit in early)))
        if early and not places:
            folder = f"{TESTS}/{Path(module).parts[1]}/"
            places = {place for place, (test, _) in enumerate(self.tests) if test.startswith(folder)}
        return dict(sorted((self.tests[place] for place in places), key=lambda row: row[::-1]))

    def _early(self, module: str, unit: Unit) -> bool:
        return unit.once or any(line in unit.lines for line in self.at_import.get(module, ()))

    def _users(self, root: Path, names: frozenset[str]) -> set[int]:
        every = [(module, unit) for module in self.lines for unit in _units(root / module)]
        result: set[int] = set()
        new = names
        known = set(names)
        while new:
            users = [(module, unit) for module, unit in every if (unit.uses | unit.names) & new]
            for module, unit in users:
                result.update(*(self.lines[module].get(line, ()) for line in unit.lines))
            early = (unit.names for module, unit in users if self._early(module, unit))
            new = frozenset().union(*early) - known
            known |= new
        return result


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


@functools.cache
def _units(path: Path) -> tuple[Unit, ...]:
    return tuple(units(_tree(path)))
