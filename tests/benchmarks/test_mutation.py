"""The mutation benchmark: a mutant meets the tests that can reach it, in functions that have its code."""

from __future__ import annotations

import ast
import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.mutation.coverage_map import CoverageMap
from benchmarks.mutation.essence import essence
from benchmarks.mutation.page import Reason, page
from benchmarks.mutation.regions import annotations, statement
from benchmarks.mutation.results import Mutant, Verdict, shuffled
from benchmarks.mutation.trials import functions_by_code, swaps

_SOURCE = '''"""A module."""
LIMIT = 3
TWICE = 2 * LIMIT


def small(
    value: int,
    most: int = LIMIT,
) -> bool:
    if value < most:
        return True
    return (
        value
        == 7
    )


def table() -> list[int]:
    return [TWICE]


TABLE = table()


class Box:
    width: int = 4

    def area(self) -> int:
        return self.width * self.width


def boxed() -> int:
    return Box().area()
'''
_LINE = {text.strip(): number for number, text in enumerate(_SOURCE.splitlines(), start=1)}


def _map(root: Path) -> tuple[CoverageMap, str]:
    module = "policies/estimate/module.py"
    (root / module).parent.mkdir(parents=True)
    (root / module).write_text(_SOURCE)
    folder = "tests/policies/estimate/test_module.py::"
    lines = {
        _LINE["if value < most:"]: [0],
        _LINE["== 7"]: [0],
        _LINE["return [TWICE]"]: [2],
        _LINE["return self.width * self.width"]: [1],
        _LINE["return Box().area()"]: [1],
    }
    tests = [
        (folder + "small", 0.2),
        (folder + "boxed", 0.1),
        (folder + "table", 0.3),
        (folder + "other", 0.0),
    ]
    tests.append(("tests/policies/recovery/test_a.py::a", 0.0))
    return CoverageMap(tests, {module: lines}, {module: [2, 3, 6, _LINE["return [TWICE]"]]}), module


def _names(tests: dict[str, float]) -> list[str]:
    return [test.partition("::")[2] for test in tests]


def test_a_line_of_a_function_is_reached_by_the_tests_that_run_its_statement(tmp_path: Path) -> None:
    reach, module = _map(tmp_path)
    assert _names(reach.tests_of(tmp_path, module, _LINE["value"])) == ["small"]
    assert _names(reach.tests_of(tmp_path, module, _LINE["return True"])) == []


def test_a_constant_is_reached_by_the_tests_of_whoever_reads_it_the_fastest_first(tmp_path: Path) -> None:
    reach, module = _map(tmp_path)
    assert _names(reach.tests_of(tmp_path, module, _LINE["width: int = 4"])) == ["boxed"]
    assert _names(reach.tests_of(tmp_path, module, _LINE["LIMIT = 3"])) == ["small", "table"]
    assert _names(reach.tests_of(tmp_path, module, _LINE["most: int = LIMIT,"])) == ["small"]
    assert _names(reach.tests_of(tmp_path, module, _LINE["TABLE = table()"])) == [
        "other",
        "boxed",
        "small",
        "table",
    ]


def test_a_statement_with_a_body_ends_before_it() -> None:
    tree = ast.parse(_SOURCE)
    assert statement(tree, _LINE["most: int = LIMIT,"]) == range(6, 10)
    assert list(statement(tree, _LINE["if value < most:"])) == [10]
    assert list(statement(tree, _LINE["== 7"])) == [12, 13, 14, 15]


def test_a_jump_begins_with_the_condition_that_it_is_in() -> None:
    tree = ast.parse("for a in b:\n    c()\n    if (\n        a\n    ):\n        continue\n    d()\n")
    assert statement(tree, 6) == range(3, 7)
    assert statement(tree, 7) == range(7, 8)


def test_annotations_are_located_in_signatures_and_assignments() -> None:
    lines = _SOURCE.splitlines()
    result = [lines[a[0] - 1][a[1] : b[1]] for a, b in annotations(ast.parse(_SOURCE))]
    assert sorted(result) == ["bool", "int", "int", "int", "int", "int", "list[int]"]


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        (
            "@dataclass(frozen=True, slots=True)\nclass A: x: int = 1",
            "@dataclass()\nclass A: x: int = 1",
            False,
        ),
        ("class A(Struct, frozen=True): x: int = 1", "class A(Struct, frozen=False): x: int = 1", False),
        ("class A(Struct, tag=True): x: int = 1", "class A(Struct, tag=False): x: int = 1", True),
        ("@cache\ndef f(): pass", "def f(): pass", False),
        ("@functools.lru_cache(1024)\ndef f(): pass", "def f(): pass", False),
        ("@property\ndef f(): pass", "def f(): pass", True),
        ("def f(a, *, b=1): pass", "def f(a, /, b=1): pass", False),
        ("def f(a, *, b=1): pass", "def f(a, *, b=2): pass", True),
    ],
)
def test_only_changes_of_form_are_left_out(before: str, after: str, *, differs: bool) -> None:
    assert (essence(before) != essence(after)) is differs


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutated", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions_get_the_code_of_a_mutant_unless_they_have_run(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(_SOURCE)
    module = _imported(path)
    functions = functions_by_code(str(tmp_path))
    at_import = {_LINE["return [TWICE]"]}

    def result(before: str, after: str) -> list[tuple[object, object]] | None:
        return swaps(_SOURCE, _SOURCE.replace(before, after), at_import, functions)  # type: ignore[return-value]

    assert result("", "") == []
    for before, after in (("LIMIT = 3", "LIMIT = 4"), ("[TWICE]", "[-TWICE]"), ("int = 4", "int = 5")):
        assert result(before, after) is None
    for before, after in (("value < most", "value <= most"), ("self.width * ", "self.width + ")):
        for function, code in result(before, after) or []:
            function.__code__ = code  # type: ignore[attr-defined]
    assert module.small(3)
    assert module.boxed() == 8


def _mutants(lines: list[str], operator: str = "core/NumberReplacer") -> list[Mutant]:
    return [
        Mutant("estimate", "policies/estimate/a.py", operator, place, place + 1, "")
        for place in range(len(lines))
    ]


def test_a_mutant_keeps_its_place_in_the_sample_when_other_lines_change() -> None:
    lines = [f"x{number} = {number}" for number in range(40)]
    before = shuffled(_mutants(lines), {"policies/estimate/a.py": lines}, seed=1)
    more = ["new = 1", *lines]
    after = shuffled(_mutants(more), {"policies/estimate/a.py": more}, seed=1)
    texts = [more[mutant.line - 1] for mutant in after]
    assert [text for text in texts if text != "new = 1"] == [lines[mutant.line - 1] for mutant in before]
    assert texts != more
    other = shuffled(_mutants(lines), {"policies/estimate/a.py": lines}, seed=2)
    assert sorted(other, key=lambda m: m.line) == sorted(before, key=lambda m: m.line) and other != before


@pytest.mark.parametrize(
    ("by", "tests", "limit_s", "budget_s", "holds"),
    [
        ("a test", "old", 20.0, math.inf, True),
        ("", "old", None, 20.0, False),
        ("", "now", None, math.inf, True),
        ("", "now", 20.0, 20.0, True),
        ("", "now", 20.0, 60.0, False),
        ("", "now", 20.0, math.inf, False),
    ],
)
def test_a_mutant_is_tried_again_where_more_or_other_tests_may_notice_it(
    by: str, tests: str, limit_s: float | None, budget_s: float, *, holds: bool
) -> None:
    (mutant,) = _mutants(["x = 1"])
    assert Verdict(mutant, by, "", tests, limit_s).holds("now", budget_s) is holds


def test_the_page_lists_what_is_not_noticed_with_its_reason() -> None:
    one, two, three = _mutants(["a", "b", "c"])
    change = "-    return first | second\n+    return first & second"
    verdicts = [Verdict(one, "a test", "", ""), Verdict(two, "", change, ""), Verdict(three, "", "-x\n", "")]
    reason = Reason(one.module, "- return first | second\n+ return first & second\n", "speed", "It waits.")
    lines = page(verdicts, {reason.key: reason}, measured="On a day.").splitlines()
    assert "| `policies/estimate` | 3 | 1 | 33.3% |" in lines
    assert "| `policies/recovery` | 0 | 0 | 0.0% |" in lines
    assert lines[-2:] == [
        "| 2 | `return first \\| second` → `return first & second` | speed: It waits. |",
        "| 3 | `x` → nothing | gap: no reason is known yet |",
    ]
