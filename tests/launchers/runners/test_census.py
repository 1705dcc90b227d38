"""The processes of an attempt are found soon after they begin, without a look at all others each time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from autotune.launchers.runners.node import processes
from autotune.launchers.runners.node.processes import MARKER, Census, OwnLimit, own_limit
from tests.launchers.runners.attempts import wait_for

SLEEP = "import time; time.sleep(600)"
# The marker comes by exec, as that of a Ray worker, half a second after the process began.
LATE = f"import os, sys, time; time.sleep(0.5); os.execve(sys.executable, [sys.executable, '-c', {SLEEP!r}],"
LATE += " {**os.environ, os.environ['NAME']: os.environ['VALUE']})"


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()


def result(census: Census) -> set[int]:
    return {stat.pid for stat in census.scan()}


@pytest.mark.parametrize("source", [SLEEP, LATE])
def test_processes_are_counted_from_their_start_to_their_end(
    run: str, source: str, children: list[subprocess.Popen[bytes]]
) -> None:
    census = Census(f"{run}/1")
    assert not result(census)
    marked = {MARKER: f"{run}/1"} if source == SLEEP else {"NAME": MARKER, "VALUE": f"{run}/1"}
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", source], env={**os.environ, **marked})
        children.append(child)
        wait_for(lambda pid=child.pid: pid in result(census))
    assert result(census) == {child.pid for child in children}
    children[0].kill()
    children[0].wait()
    assert result(census) == {children[1].pid}


def test_all_processes_are_looked_at_only_when_one_has_begun(
    run: str, monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    environment = {**os.environ, MARKER: f"{run}/1"}
    children.append(subprocess.Popen([sys.executable, "-c", SLEEP], env=environment))
    looks, newest, now = list[int](), 7, 1000.0
    present = list(processes.all_pids())  # others of this machine begin and end all the time
    monkeypatch.setattr(processes, "all_pids", lambda: looks.append(newest) or present)
    monkeypatch.setattr(processes, "_newest_pid", lambda: newest)
    monkeypatch.setattr(processes.time, "monotonic", lambda: now)
    census = Census(f"{run}/1")
    wait_for(lambda: census.forget_strangers() or result(census) == {children[0].pid})
    now += processes._YOUNG_S + 1
    result(census)  # nobody is young any more
    looks.clear()
    for _ in range(20):
        now += 0.45
        assert result(census) == {children[0].pid}
    assert not looks
    for number in range(8, 28):  # others begin all the time
        newest = number
        now += 0.45
        assert result(census) == {children[0].pid}
    assert 5 <= len(looks) <= 9
    looks.clear()
    census.forget_strangers()
    assert result(census) and looks


def test_the_limit_of_a_process_is_the_one_nearest_to_full() -> None:
    def limit(ulimits: str, *, own: str = "pass") -> OwnLimit:
        code = f"import resource; {own}; print(flush=True); input()"
        command = ["bash", "-c", f'{ulimits} exec "$0" -c "$1"', sys.executable, code]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            result = own_limit(process.pid)
            process.communicate(b"\n")
        return result

    space = limit("ulimit -v 4000000;")
    assert space.bytes == 4_000_000 << 10 and 0 < space.used_bytes < space.bytes
    data = limit("ulimit -v 4000000; ulimit -d 200000;")
    assert data.bytes in {200_000 << 10, 4_000_000 << 10}
    assert limit("") == OwnLimit()
    # A soft limit of the data that the program sets simulates a device.
    simulated = "resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, resource.RLIM_INFINITY))"
    assert limit("", own=simulated) == OwnLimit()
    assert own_limit(2**22 + 1) == OwnLimit()
