"""Tries mutants in a copy of the repository: each meets the tests that can reach it, until one fails.

The tests are collected once. A mutant that changes functions alone is a fork of that process in which the
functions have the changed code; one that changes what is executed at import is a fork of a process that has
imported the libraries, but nothing of autotune, and reads the changed file.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType

import hypothesis
import msgspec
import pytest

from benchmarks.mutation.coverage_map import TESTS

_LIBRARIES = [
    "hypothesis",
    "hyperscan",
    "jinja2",
    "msgspec",
    "numpy",
    "pydantic",
    "pytest",
    "rich",
    "ruamel.yaml",
]
_START_S = 60  # CPU seconds to import and to collect
_TEST_S = 5  # CPU seconds in which a test ends, beside five times what it takes without a mutant: others loop
_MEMORY_BYTES = 8 << 30
_PASSED, _FAILED, _BROKEN = 0, 1, 2  # exit codes of a fork
_PROFILE = "mutation"


class Trial(msgspec.Struct, frozen=True):
    """A changed module and the tests that it meets."""

    number: int
    module: str  # path in the repository
    changed: str  # its text
    tests: dict[str, float]  # test -> CPU seconds without a mutant, in the order in which they are run
    lines_at_import: list[int]


class Outcome(msgspec.Struct, frozen=True):
    """What noticed a mutant: a test, the time limit, or the collection of the tests; empty for nothing."""

    number: int
    by: str


class _Chosen:
    """Runs the tests of a mutant in their order and reports the first that fails."""

    def __init__(self, tests: dict[str, float], report: Callable[[str], None]) -> None:
        self._tests = tests
        self._report = report
        self._functions: dict[str, float] = {}
        for test, cpu_s in tests.items():
            self._functions[_function(test)] = max(cpu_s, self._functions.get(_function(test), 0.0))
        self._order = {test: place for place, test in enumerate(tests)}

    def chosen(self, items: list[pytest.Item]) -> list[pytest.Item]:
        """Return the tests of the mutant in their order."""
        return sorted(
            (item for item in items if item.nodeid in self._order), key=lambda item: self._order[item.nodeid]
        )

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests of the mutant, and those whose parameters it has given other names."""
        first = self.chosen(items)
        met = {item.nodeid for item in first}
        others = [i for i in items if _function(i.nodeid) in self._functions and i.nodeid not in met]
        items[:] = first + others

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        usual_s = self._tests.get(item.nodeid, self._functions.get(_function(item.nodeid), 0.0))
        _limit_cpu(time.process_time() + _TEST_S + 5 * usual_s)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._report(report.nodeid)
            os._exit(_FAILED)


def _function(test: str) -> str:
    return test.partition("[")[0]


class _Loop:
    """Tries the mutants in the place of the tests that were collected."""

    def __init__(self, trials: list[Trial], done: Callable[[Outcome], None]) -> None:
        self._trials = trials
        self._done = done
        self._sound: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        root = Path.cwd()
        functions = functions_by_code(str(root))
        gc.freeze()
        for trial in self._trials:
            path = root / trial.module
            pairs = swaps(path.read_text(), trial.changed, set(trial.lines_at_import), functions)
            if not trial.tests:
                by = ""
            elif pairs is None:
                by = _afresh(path, trial)
            else:
                by = self._forked(session, trial.tests, pairs)
            if by in trial.tests and by not in self._sound:
                if self._forked(session, {by: trial.tests[by]}, []):
                    raise RuntimeError(f"{by} fails alone without a mutant")
                self._sound.add(by)
            self._done(Outcome(trial.number, by))
        return True

    def _forked(
        self, session: pytest.Session, tests: dict[str, float], pairs: list[tuple[FunctionType, CodeType]]
    ) -> str:
        """Return what notices that functions have other code."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            status = _BROKEN
            try:
                _restrict()
                for function, code in pairs:
                    function.__code__ = code
                chosen = _Chosen(tests, lambda test: os.write(writer, test.encode()) and None)
                session.config.pluginmanager.register(chosen)
                items = chosen.chosen(session.items)
                if len(items) < len(tests):
                    os._exit(_BROKEN)
                for item, following in zip(items, [*items[1:], None], strict=True):
                    session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                status = _PASSED
            finally:
                os._exit(status)
        os.close(writer)
        with os.fdopen(reader) as file:
            test = file.read()
        _, status = os.waitpid(child, 0)
        return _noticed(os.waitstatus_to_exitcode(status), test)


def _noticed(code: int, test: str) -> str:
    """Return what ended a fork; RuntimeError where it is this program that failed."""
    if code == _PASSED:
        return ""
    if code == _FAILED:
        return test
    if code == -signal.SIGXCPU:
        return "the time limit"
    if code < 0:
        return f"signal {-code}"
    raise RuntimeError(f"a fork ended with exit code {code}")


def _afresh(path: Path, trial: Trial) -> str:
    """Return what notices a changed file in a process that has imported nothing of autotune."""
    before, stamp = path.read_text(), path.stat().st_mtime_ns
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_LIBRARIES)
    reader, writer = context.Pipe(duplex=False)
    try:
        path.write_text(trial.changed)
        os.utime(path, ns=(stamp + 10**10, stamp + 10**10))  # the bytecode on disk is of the file before
        child = context.Process(target=_collect_and_run, args=(trial.tests, writer))
        child.start()
        writer.close()
        child.join()
    finally:
        path.write_text(before)
        os.utime(path, ns=(stamp, stamp))
    try:
        test = reader.recv()
    except EOFError:
        test = ""
    return _noticed(child.exitcode or 0, test)


def _collect_and_run(tests: dict[str, float], writer: multiprocessing.connection.Connection) -> None:
    sys.dont_write_bytecode = True
    _restrict()
    _limit_cpu(_START_S)
    files = sorted({test.partition("::")[0] for test in tests})
    status = pytest.main([*_ARGUMENTS, *files], plugins=[_Chosen(tests, writer.send), _Quick()])
    if status == pytest.ExitCode.OK:
        os._exit(_PASSED)
    if status == pytest.ExitCode.NO_TESTS_COLLECTED:
        os._exit(_BROKEN)
    writer.send("the collection of the tests")
    os._exit(_FAILED)


_ARGUMENTS = ["-q", "-s", "--tb=no", "--assert=plain", "--timeout=0"]


class _Quick:
    """Has Hypothesis stop at the first example that fails, which another would only make shorter."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile(
            _PROFILE, hypothesis.settings.get_profile("repeatable"), phases=phases, report_multiple_bugs=False
        )
        hypothesis.settings.load_profile(_PROFILE)


def _restrict() -> None:
    """Let this fork write nowhere, and end it before it takes the machine's memory."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.RLIM_INFINITY))


def _limit_cpu(until_s: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (round(until_s), resource.RLIM_INFINITY))


def functions_by_code(folder: str) -> dict[CodeType, list[FunctionType]]:
    """Return the functions of this process whose files are below a folder."""
    result: dict[CodeType, list[FunctionType]] = defaultdict(list)
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(folder):
            result[each.__code__].append(each)
    return dict(result)


def swaps(
    before: str, after: str, at_import: set[int], functions: dict[CodeType, list[FunctionType]]
) -> list[tuple[FunctionType, CodeType]] | None:
    """Return the functions of a module that a change gives other code.

    None where it changes more than functions, or one that was called when its module was imported.
    """
    result = []
    try:
        one, two = (compile(text, "", "exec", dont_inherit=True) for text in (before, after))
        for old, new in _changes(one, two, at_import):
            result += [(function, new) for function in functions[old]]
    except _AtImportError:
        return None
    except KeyError:
        return None  # the tests import it when they run
    return result


class _AtImportError(Exception):
    """A change reaches further than functions that are yet to be called."""


def _changes(old: CodeType, new: CodeType, at_import: set[int]) -> Iterator[tuple[CodeType, CodeType]]:
    if old == new:
        return
    if old.co_flags & 1:  # CO_OPTIMIZED: a function, not the body of a module or a class
        own = _lines(old) - {old.co_firstlineno}
        if not own or own & at_import:
            raise _AtImportError
        yield old, new
        return
    inner, other = ([c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new))
    if _without_functions(old) != _without_functions(new) or len(inner) != len(other):
        raise _AtImportError
    for one, two in zip(inner, other, strict=True):
        yield from _changes(one, two, at_import)


def _lines(code: CodeType) -> set[int]:
    result = {line for _, _, line in code.co_lines() if line is not None}
    return result.union(*(_lines(each) for each in code.co_consts if isinstance(each, CodeType)))


def _without_functions(code: CodeType) -> tuple[object, ...]:
    constants = [None if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, code.co_names, constants


def main() -> None:
    """Read trials from standard input, a JSON document per line, and print their outcomes."""
    trials = [msgspec.json.decode(line, type=Trial) for line in sys.stdin.buffer]
    out = os.fdopen(os.dup(1), "wb")

    def done(outcome: Outcome) -> None:
        out.write(msgspec.json.encode(outcome) + b"\n")
        out.flush()

    with contextlib.redirect_stdout(sys.stderr):
        status = pytest.main([*_ARGUMENTS, TESTS], plugins=[_Loop(trials, done), _Quick()])
    sys.exit(status)


if __name__ == "__main__":
    main()
