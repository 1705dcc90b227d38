"""Signals to the driver at every stage of a run: a terminal that hangs up, SIGTERM, Ctrl-C twice."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from random import Random

from tests.faults.bench import Bench, Driver, Unmet, frozen
from tests.faults.program import SAVE_EVERY
from tests.faults.scenario import Scenario

STAGES = {
    "start": "while it starts",
    "training": "while the job trains",
    "stop": "while a job is stopped that ignores SIGTERM",
    "drain": "while memory of the card is awaited",
    "wait": "while a relaunch waits for its time",
}
_HEARD_S = 20.0  # a second Ctrl-C is heard within 2 s; the end of Python and Ray takes the rest
_LONG_GRACE_S = 120.0  # so that a second Ctrl-C that is not heard shows, however slow the machine is
_SLURM_GRACE_S = 45.0  # so that a driver still stops its job when Slurm's KillWait of 30 s is over
_TERM_S = 40.0  # the job has 10 s, its processes and its memory some more
_LEFT_S = 50.0  # 41 s where the cluster does not answer, however slow the machine is
_APART_S = 0.7
_CONTINUE = ("launch", "--continue", "job.yaml")


def _to_stage(bench: Bench, stage: str, random: Random, *, terminal: bool) -> Driver:
    """Start a run and return its driver at a moment of the stage that the seed chooses."""
    nodes = bench.nodes(1, cards=stage == "drain")
    bench.job(nodes.address)
    driver = bench.launch(terminal=terminal)
    if stage == "start":
        time.sleep(random.uniform(0.5, 4.0))
        return driver
    bench.training(2 * SAVE_EVERY)
    if stage == "stop":
        bench.order("oom-hang")
        bench.until(lambda: bench.of("stop_requested"), "the failure was not seen")
    elif stage == "drain":
        bench.order("card-kept")
        bench.order("oom")
        bench.until(lambda: bench.of("failure_seen") or len(bench.left()) == 0, "the failure was not seen")
        time.sleep(3.0)
    elif stage == "wait":
        bench.order("killed")
        bench.until(lambda: bench.of("decided"), "the loss was not seen")
    time.sleep(random.uniform(0.0, 2.0))
    return driver


def _free_card(bench: Bench) -> None:
    (bench.cards / "0").unlink(missing_ok=True)


def _relaunchable(bench: Bench) -> Driver:
    """Go on with the run, or begin it where the signal came before there was one."""
    if bench.runs.exists() and any(bench.runs.iterdir()):
        return bench.resume()
    return bench.launch()


def _hang_up(stage: str) -> Callable[[Bench, Random], int]:
    def play(bench: Bench, random: Random) -> int:
        driver = _to_stage(bench, stage, random, terminal=True)
        bench.fault()
        driver.hang_up()
        time.sleep(3.0)
        _free_card(bench)
        if not driver.running:
            raise Unmet(f"the driver ended with its terminal: {driver.process.returncode}")
        bench.training(3)
        return bench.finish(driver)

    return play


def _terminated(stage: str) -> Callable[[Bench, Random], int]:
    def play(bench: Bench, random: Random) -> int:
        driver = _to_stage(bench, stage, random, terminal=False)
        bench.fault()
        driver.signal(signal.SIGTERM)
        return _resumed(bench, driver, code=143, within_s=_TERM_S)

    return play


def _interrupted_twice(stage: str) -> Callable[[Bench, Random], int]:
    def play(bench: Bench, random: Random) -> int:
        bench.grace_s = _LONG_GRACE_S
        driver = _to_stage(bench, stage, random, terminal=False)
        _interrupt_twice(bench, driver)
        return _resumed(bench, driver, code=130, within_s=_HEARD_S)

    return play


def _interrupt_twice(bench: Bench, driver: Driver) -> None:
    driver.signal(signal.SIGINT)
    time.sleep(_APART_S)
    bench.fault()
    driver.signal(signal.SIGINT)


def _deaf_at_start(bench: Bench, random: Random) -> int:
    nodes = bench.nodes(1)
    bench.job(nodes.address)
    with frozen(nodes.gcs()):
        driver = bench.launch()
        bench.until(lambda: bench.runs.exists() and any(bench.runs.iterdir()), "no run was begun")
        time.sleep(random.uniform(0.5, 8.0))
        _interrupt_twice(bench, driver)
        _left(bench, driver, within_s=_HEARD_S)
    second = _relaunchable(bench)
    bench.training(3)
    return bench.finish(second)


def _deaf_in_training(bench: Bench, random: Random) -> int:
    bench.grace_s = _LONG_GRACE_S
    nodes, driver = bench.launched(1)
    bench.training(2 * SAVE_EVERY)
    with frozen(nodes.gcs()):
        time.sleep(random.uniform(0.0, 4.0))  # after 60 s its nodes would give it up
        _interrupt_twice(bench, driver)
        _left(bench, driver, within_s=_LEFT_S)
    second = bench.resume()
    bench.training(3)
    return bench.finish(second)


def _left(bench: Bench, driver: Driver, *, within_s: float) -> None:
    """Ask that the driver ends in time by Ctrl-C, whatever it leaves."""
    assert bench.fault_at is not None
    code = driver.ended(within_s)
    bench.noticed_s = time.time() - bench.fault_at
    _ask_for(130, code, driver)


def _ask_for(wanted: int, ended_with: int, driver: Driver) -> None:
    # The latter before it has begun: a shell counts it as the former.
    if ended_with not in (wanted, 128 - wanted):
        raise Unmet(f"exit code {ended_with}, not {wanted}: {driver.last_words}")


def _killed_while_stopping(
    earliest_s: float, latest_s: float, *, grace_s: float | None = None
) -> Callable[[Bench, Random], int]:
    """SIGTERM, SIGKILL while the driver stops its job, and the same command again: a requeued Slurm job."""

    def play(bench: Bench, random: Random) -> int:
        bench.grace_s = grace_s
        nodes = bench.nodes(1)
        bench.job(nodes.address)
        driver = bench.autotune(*_CONTINUE)
        bench.training(2 * SAVE_EVERY)
        bench.order("stubborn")
        bench.until(lambda: not (bench.folder / "orders" / "stubborn").exists(), "the job took no order")
        bench.training(3)
        driver.signal(signal.SIGTERM)
        time.sleep(random.uniform(earliest_s, latest_s))
        if not driver.running:
            raise Unmet(f"the driver had ended before SIGKILL: {driver.process.returncode}")
        driver.kill()
        second = bench.autotune(*_CONTINUE)
        bench.training(3)
        return bench.finish(second)

    return play


def _resumed(bench: Bench, driver: Driver, *, code: int, within_s: float) -> int:
    """Ask that the driver ends in time with its code and leaves nothing, then go on to the end."""
    assert bench.fault_at is not None
    try:
        ended_with = driver.ended(within_s)
    except Unmet:
        begun = bench.fault_at
        driver.ended(150)
        raise Unmet(
            f"it ended {time.time() - begun:.0f} s after the signal, not within {within_s:.0f}"
        ) from None
    bench.noticed_s = time.time() - bench.fault_at
    _ask_for(code, ended_with, driver)
    bench.gone()
    _free_card(bench)
    second = _relaunchable(bench)
    bench.training(3)
    return bench.finish(second)


_ENDS = "a signal to end ends the attempt"
SCENARIOS = (
    *(
        Scenario(
            name=f"sighup-{stage}",
            fault=f"the terminal hangs up {when}",
            play=_hang_up(stage),
            attempts=1 if stage in ("start", "training") else 2,
            repeated=0 if stage in ("start", "training") else SAVE_EVERY - 1,
            why="" if stage in ("start", "training") else "the stage is that of an attempt that failed",
            ci=stage == "training",
        )
        for stage, when in STAGES.items()
    ),
    *(
        Scenario(
            name=f"sigterm-{stage}",
            fault=f"SIGTERM {when}, then `resume`",
            play=_terminated(stage),
            attempts=2,
            repeated=SAVE_EVERY - 1,
            why=_ENDS,
        )
        for stage, when in STAGES.items()
    ),
    *(
        Scenario(
            name=f"ctrl-c-twice-{stage}",
            fault=f"Ctrl-C twice {when}, then `resume`",
            play=_interrupted_twice(stage),
            attempts=2,
            repeated=SAVE_EVERY - 1,
            why=_ENDS,
            ci=stage == "stop",
        )
        for stage, when in STAGES.items()
    ),
    Scenario(
        name="ctrl-c-twice-start-deaf",
        fault="Ctrl-C twice while it connects to a head that does not answer, then `resume`",
        play=_deaf_at_start,
        how="SIGSTOP to its GCS",
    ),
    Scenario(
        name="ctrl-c-twice-training-deaf",
        fault="Ctrl-C twice while the job trains and the head does not answer, then `resume`",
        play=_deaf_in_training,
        attempts=2,
        repeated=SAVE_EVERY - 1,
        why=_ENDS,
        how="SIGSTOP to its GCS",
    ),
    Scenario(
        name="sigterm-then-sigkill",
        fault="SIGTERM, SIGKILL 1 to 8 s later while the driver stops its job, then `launch --continue`",
        play=_killed_while_stopping(1.0, 8.0),
        attempts=2,
        repeated=SAVE_EVERY - 1,
        why=_ENDS,
        how="a job that ignores SIGTERM",
    ),
    Scenario(
        name="sigterm-then-sigkill-30",
        fault="SIGTERM, SIGKILL 30 s later while the driver stops its job, then `launch --continue`",
        play=_killed_while_stopping(30.0, 30.0, grace_s=_SLURM_GRACE_S),
        attempts=2,
        repeated=SAVE_EVERY - 1,
        why=_ENDS,
        how=f"a job that ignores SIGTERM and is given {_SLURM_GRACE_S:.0f} s instead of 10",
    ),
)
