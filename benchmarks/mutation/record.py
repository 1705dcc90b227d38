"""Records which test runs which line of the policies: `python -m benchmarks.mutation.record FILE`."""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import coverage
import msgspec
import pytest

from benchmarks.mutation.coverage_map import TESTS, CoverageMap


class _Recorder:
    """Notes under which test a line runs, and what each test takes."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured
        self.tests: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count what runs from here as this test's; results that an earlier test left are computed anew."""
        _forget()
        self._measured.switch_context(item.nodeid)
        begun = time.process_time()
        result = yield
        self.tests[item.nodeid] = time.process_time() - begun
        return result


def _forget() -> None:
    """Empty the bounded caches of functions, which keep results; an unbounded one holds what is made once."""
    for each in _caches():
        each.cache_clear()


@functools.cache
def _caches() -> list[functools._lru_cache_wrapper[object]]:
    return [
        each
        for each in gc.get_objects()
        if isinstance(each, functools._lru_cache_wrapper)
        and each.__module__.startswith("autotune.policies")
        and each.cache_parameters()["maxsize"] is not None
    ]


def record(root: Path, kept: Path) -> None:
    """Run the tests in this process and write their map; SystemExit where one fails."""
    measured = coverage.Coverage(data_file=None, config_file=False, include=[str(root / "policies" / "*")])
    recorder = _Recorder(measured)
    measured.start()
    status = pytest.main(["-q", "--tb=short", TESTS], plugins=[recorder])
    measured.stop()
    if status != pytest.ExitCode.OK:
        sys.exit(f"{TESTS} fails without a mutant")
    data = measured.get_data()
    places = {test: place for place, test in enumerate(recorder.tests)}
    lines: dict[str, dict[int, list[int]]] = {}
    at_import: dict[str, list[int]] = {}
    for file in sorted(data.measured_files()):
        module = str(Path(file).relative_to(root))
        ran = data.contexts_by_lineno(file)
        lines[module] = {
            line: sorted(places[test] for test in set(tests) - {""}) for line, tests in sorted(ran.items())
        }
        at_import[module] = sorted(line for line, tests in ran.items() if "" in tests)
    kept.write_bytes(msgspec.json.encode(CoverageMap(list(recorder.tests.items()), lines, at_import)))


if __name__ == "__main__":
    record(Path.cwd().resolve(), Path(sys.argv[1]))
