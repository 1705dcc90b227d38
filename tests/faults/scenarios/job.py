"""Jobs that fail without saying so, or say so without failing."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from tests.faults.bench import Bench, Driver, Unmet
from tests.faults.program import SAVE_EVERY
from tests.faults.scenario import Scenario


def _runs_out(order: str, *, nodes: int = 1, words: tuple[str, ...] = ()) -> Callable[[Bench, Random], int]:
    """Return a scenario in which a training job runs out of memory in the way of an order."""

    def play(bench: Bench, random: Random) -> int:
        bench.job(bench.nodes(nodes).address, words=words)
        driver = bench.launch()
        bench.training(2 * SAVE_EVERY)
        time.sleep(random.uniform(0.0, 2.0))
        bench.fault()
        bench.order(order)
        return _cured(bench, driver)

    return play


def _cured(bench: Bench, driver: Driver) -> int:
    bench.until(lambda: len(bench.starts()) == 2, "no relaunch")
    bench.training(3)
    if [row["cause"] for row in bench.of("diagnosed")] != ["gpu-oom"]:
        raise Unmet(f"diagnosed as {[row['cause'] for row in bench.of('diagnosed')]}")
    bench.notice("oom|out of memory")
    return bench.finish(driver)


def _restarts(bench: Bench, random: Random) -> int:
    """Its second attempt forgets the checkpoint: a human must know, before work is lost for good."""
    _, driver = bench.launched(1)
    bench.training(2 * SAVE_EVERY)
    time.sleep(random.uniform(0.0, 2.0))
    bench.order("forget")
    bench.order("oom")
    bench.until(lambda: len(bench.starts()) == 2, "no relaunch")
    bench.fault()
    code = driver.ended(60)
    bench.notice("restarted|began anew|checkpoint")
    if "restarted at step 1" not in (bench.run / "attempts" / "0002" / "run.log").read_text():
        raise Unmet(f"nothing names the restart: {driver.last_words}")
    return code


def _exits(bench: Bench, random: Random) -> int:
    """It exits with 0 long before its last step: that is no success."""
    _, driver = bench.launched(1, words=("--of", "5000"))
    bench.training(SAVE_EVERY)
    time.sleep(random.uniform(0.0, 2.0))
    bench.fault()
    bench.order("exit")
    code = driver.ended(60)
    bench.notice("exit|ended|✗|x ")
    return code


_CURED = "an out-of-memory failure needs another configuration"
SCENARIOS = (
    Scenario(
        name="rank-hangs-after-oom",
        fault="a rank runs out of memory and dies; its peer and the program wait for it",
        play=_runs_out("rank-oom", nodes=3, words=("--ranks", "2")),
        attempts=2,
        repeated=SAVE_EVERY - 1,
        why=_CURED,
    ),
    Scenario(
        name="job-hangs-after-oom",
        fault="the program prints an out-of-memory failure and hangs",
        play=_runs_out("oom-hang"),
        attempts=2,
        repeated=SAVE_EVERY - 1,
        why=_CURED,
    ),
    Scenario(
        name="oom-swallowed",
        fault="the program prints an out-of-memory failure and exits with 0",
        play=_runs_out("oom-swallowed"),
        attempts=2,
        repeated=SAVE_EVERY - 1,
        why=_CURED,
    ),
    Scenario(
        name="silent-restart",
        fault="the second attempt forgets its checkpoint and begins at step 1",
        play=_restarts,
        attempts=2,
        repeated=20,
        verdict="needs_human",
        exit_code=1,
        why="the job itself is wrong, and only steps show it",
    ),
    Scenario(
        name="exit-without-the-end",
        fault="the program exits with 0 long before its last step",
        play=_exits,
        verdict="needs_human",
        exit_code=1,
        why="the job itself is wrong",
    ),
)
