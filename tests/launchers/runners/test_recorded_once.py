"""Drivers that follow one attempt on Ray, one killed after another: its log is recorded once and whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.launchers.runners.cluster.runner import RayRunner
from autotune.orchestrator.driver import log_writer
from autotune.orchestrator.driver.log_writer import LogWriter
from autotune.orchestrator.run import log_parts
from tests.launchers.runners.attempts import Program, wait_for

pytestmark = pytest.mark.timeout(300)

LINES = 24_000
# A line at a time and a torn one, so that drivers are killed within lines; two files are read.
TALKS = f"""
    import os, ray, sys, time

    ray.init(log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Rank:
        def talk(self):
            for number in range({LINES // 8}):
                print("rank", number, flush=True)
                if number % 100 == 0:
                    time.sleep(0.02)

    talking = Rank.remote().talk.remote()
    for number in range({LINES}):
        line = b"%08d %s\\n" % (number, b"x" * (number % 700))
        os.write(1, line[:5])
        os.write(1, line[5:])
        if number % 100 == 0:
            time.sleep(0.02)
    ray.get(talking)
    print("a line without an end", end="", flush=True)
"""
FOLLOW = """
import sys, time
from pathlib import Path
from autotune.launchers.runners.cluster.runner import RayRunner
from autotune.orchestrator.driver import log_writer
from autotune.orchestrator.driver import log_writer

log_writer._ACKNOWLEDGED_BYTES = 1 << 20
log_writer._CURSOR_EVERY_S = 0.05
folder = Path(sys.argv[3])
runner = RayRunner.open(sys.argv[1])
handle = runner.attach(run=sys.argv[2], attempt=1, read=log_writer.read_cursor(folder).offsets)
writer = log_writer.LogWriter(folder / "run.log")
while not writer.caught_up:
    writer.catch_up()
while True:
    observed = handle.poll()
    writer.write(observed.chunks, observed.samples)
    handle.acknowledge(writer.acknowledged)
    if observed.exit is not None:
        writer.finish()
        print("over", flush=True)
        time.sleep(600)
    time.sleep(0.05)
"""


@pytest.fixture
def runner(ray_address: str) -> Iterator[RayRunner]:
    runner = RayRunner.open(ray_address)
    yield runner
    runner.close()


def recorded(folder: Path) -> dict[str, list[bytes]]:
    result: dict[str, list[bytes]] = {}
    if (folder / "run.log").exists():
        for line in log_parts.read(folder / "run.log"):
            result.setdefault(line.source, []).append(line.data)
    return result


def test_killed_drivers_record_every_byte_once(
    ray_address: str, runner: RayRunner, program: Program, run: str, tmp_path: Path
) -> None:
    folder = tmp_path / "0001"
    folder.mkdir()
    handle = runner.start(program(textwrap.dedent(TALKS)), run=run, attempt=1, python=None)

    def lines() -> int:
        return sum(map(len, recorded(folder).values()))

    for killed_at in (50, 3000, 3500, 9000, 15_000, None):
        driver = subprocess.Popen(
            [sys.executable, "-c", FOLLOW, ray_address, run, str(folder)], stdout=subprocess.PIPE
        )
        if killed_at is None:
            assert driver.stdout is not None
            assert driver.stdout.readline() == b"over\n"
        else:
            wait_for(lambda at=killed_at: lines() >= at, seconds=120)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    result = recorded(folder)
    printed = [b"%08d %s" % (number, b"x" * (number % 700)) for number in range(LINES)]
    own = result.pop("")
    assert own[own.index(printed[0]) :] == [*printed, b"a line without an end"]  # after what Ray says
    (rank,) = (text for source, text in result.items() if source.startswith("worker-") and b"rank 0" in text)
    assert rank[rank.index(b"rank 0") :] == [b"rank %d" % number for number in range(LINES // 8)]
    (file,) = (name for name in log_writer.read_cursor(folder).offsets if name.endswith("/output.log"))
    output = Path(file[file.index(":/") + 1 :])
    assert output.stat().st_size > 8 << 20
    assert output.stat().st_blocks * 512 < 5 << 20, "what is recorded takes the node's disk"
    again = LogWriter(folder / "run.log")
    assert [line.data for line in again.catch_up(1 << 30) if line.source == ""][-1].endswith(
        b"without an end"
    )
    handle.release()
