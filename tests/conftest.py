"""What every test shares."""

import fcntl
import gc
import os
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, so that a failure is always somebody's; `make properties` draws others.
# How long one takes is the machine's: the timeout of pytest ends what loops.
for name, derandomize in (("drawn", False), ("repeatable", True)):
    settings.register_profile(
        name, derandomize=derandomize, deadline=None, suppress_health_check=(HealthCheck.too_slow,)
    )
settings.load_profile("repeatable")

# Output is as wide as a pipe's, wherever the tests run: pytest-xdist sets COLUMNS in its workers.
os.environ.pop("COLUMNS", None)


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Put the signal handlers back: a driver that was asked to stop ignores what comes later."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        if handler is not None:  # not Python's
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def beside_others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run an e2e test that is marked `alone` while no other process of pytest runs one."""
    if request.node.get_closest_marker("e2e") is None or "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    alone = request.node.get_closest_marker("alone") is not None
    folder = tmp_path_factory.getbasetemp().parent
    with (folder / "turn").open("w") as turn, (folder / "running").open("w") as running:
        fcntl.flock(turn, fcntl.LOCK_EX)  # who waits to be alone lets no other begin
        fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="module")
def normal_niceness() -> Iterator[None]:
    """Let Ray's workers run at normal niceness: its own 15 starves a job beside other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among what lives to the end: modules, and eleven thousand tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the pages, which take minutes: at the end, one process would work on them alone."""
    items.sort(key=lambda item: item.path.name != "test_documentation.py")
