"""What every test shares."""

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
