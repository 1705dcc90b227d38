"""What the tests of real frameworks share: `make real` runs them and keeps what came of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.e2e.test_driver import Head, started_head
from tests.real import logs, results


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make real`."""
    parser.addoption("--results", type=Path, help="JSON lines: replace each case's row by that of this run")


@pytest.fixture(scope="session")
def ray_head() -> Iterator[tuple[int, int]]:
    """Start a Ray head of our own, with the GPU and the CPUs that a framework asks Ray for: numbers alone."""
    with started_head("--num-gpus", "1", "--num-cpus", "32", env={"RAY_worker_niceness": "0"}) as ports:
        yield ports


@pytest.fixture
def head(ray_head: tuple[int, int], tmp_path: Path) -> Head:
    """Return that head for `cluster: {address: auto}`, and an empty folder to call autotune in."""
    made = Head(tmp_path, *ray_head)
    made.env["RAY_ADDRESS"] = made.address
    return made


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return a function that writes down a row and logs by name, where `--results` names a file."""
    path: Path | None = request.config.getoption("--results", None)

    def write(row: results.Row, kept: Mapping[str, Path] = MappingProxyType({})) -> None:
        if path is not None:
            results.keep(path, row)
            for name, log in kept.items():
                logs.keep(name, log)

    return write


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say where the logs of a failed case are, and how to run it alone."""
    reports = [report for kind in ("failed", "error") for report in terminalreporter.stats.get(kind, [])]
    if not reports or config.getoption("--results", None) is None:
        return
    names = dict.fromkeys(report.nodeid.rpartition("::")[2].partition("[")[0] for report in reports)
    folder = config.option.basetemp or "pytest's folder"
    terminalreporter.section("what to do")
    terminalreporter.write_line(
        f"Each case has a folder below {folder}: job.yaml, runs/*/events.jsonl, runs/*/attempts/*/run.log.\n"
        "A row of docs/measured/real.md is replaced only by a case that passed. To run one again, alone:"
    )
    for name in names:
        terminalreporter.write_line(f"    make real CASES='-k {name}'")
