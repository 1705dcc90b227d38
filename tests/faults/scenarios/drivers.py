"""The driver: killed, asleep, with a clock that steps, twice at once, with a damaged journal."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from random import Random

from tests.faults.bench import Bench, Unmet
from tests.faults.program import SAVE_EVERY
from tests.faults.scenario import Scenario

LINE_END = b"\n"
_KILLS = 40
_LONGEST_LIFE_S = 6.0  # of a driver at random: it needs about 3 s to attach
_STEP_S = 3 * 3600.0
_LONGEST_S = 600.0  # about 20 drivers, each of which waits at most 30 s before a relaunch


def _killed_at_random(kills: int) -> Callable[[Bench, Random], int]:
    def play(bench: Bench, random: Random) -> int:
        _, driver = bench.launched(1)
        bench.training(1)
        for _ in range(kills):
            time.sleep(random.uniform(0.0, _LONGEST_LIFE_S))
            driver.kill()
            driver = bench.resume()
        bench.training(3)
        return bench.finish(driver)

    return play


def _killed_at_every_event(bench: Bench, random: Random) -> int:
    """Kill it as soon as the journal has a new row, each time, through a failure, its cure and the end.

    Every other start is let go: what was only meant to begin is begun by the next driver.
    """
    _, driver = bench.launched(1)
    known = starts = 0
    ordered = False
    begun = time.monotonic()
    while True:
        bench.until(
            lambda known=known, driver=driver: len(bench.events()) > known or not driver.running,
            "nothing more was recorded",
        )
        if not driver.running:
            break
        events = bench.events()
        starts += sum(event["type"] == "started" for event in events[known:])
        if events[-1]["type"] == "started" and starts % 2 == 0:
            known = len(events)
            continue
        driver.kill()
        events = bench.events()
        known = len(events)
        failed = any(event["type"] == "diagnosed" for event in events)
        trained = sum(event["type"] == "progressed" for event in events)
        if trained > random.randrange(3) and not ordered:
            ordered = True
            bench.order("oom")
        if failed and events[-1]["type"] == "progressed":
            bench.order("finish")
        if time.monotonic() - begun > _LONGEST_S:
            raise Unmet(
                f"no end after {_LONGEST_S:.0f} s and {len(bench.drivers)} drivers: {driver.last_words}"
            )
        driver = bench.resume()
    code = driver.ended(1)
    if code == 0 or bench.verdict:
        return code
    raise Unmet(f"exit {code}: {driver.last_words}")


def _continued(bench: Bench, random: Random) -> int:
    """Repeat the same command, as a requeued job does."""
    nodes = bench.nodes(1)
    bench.job(nodes.address)
    words = ("launch", "--continue", "job.yaml")
    driver = bench.autotune(*words)
    bench.training(3)
    time.sleep(random.uniform(0.0, 3.0))
    bench.fault()
    driver.kill()
    second = bench.autotune(*words)
    bench.training(3)
    code = bench.finish(second)
    third = bench.autotune(*words)  # the run is complete: its result once more
    if third.ended(60) != 0:
        raise Unmet(f"continued after its end: exit {third.process.returncode}: {third.last_words}")
    return code


def _asleep(*, clock_step_s: float) -> Callable[[Bench, Random], int]:
    def play(bench: Bench, random: Random) -> int:
        nodes = bench.nodes(1)
        if clock_step_s:
            bench.clock.write_text("0")
        bench.job(nodes.address)
        driver = bench.launch()
        bench.training(3)
        time.sleep(random.uniform(0.0, 2.0))
        bench.fault()
        driver.signal(signal.SIGSTOP)
        time.sleep(max(120.0 * bench.scale, 5.0))
        if clock_step_s:
            bench.clock.write_text(str(clock_step_s))
        driver.signal(signal.SIGCONT)
        bench.training(10)
        return bench.finish(driver)

    return play


def _clock_steps(seconds: float) -> Callable[[Bench, Random], int]:
    def play(bench: Bench, random: Random) -> int:
        nodes = bench.nodes(1)
        bench.clock.write_text("0")
        bench.job(nodes.address)
        driver = bench.launch()
        bench.training(3)
        time.sleep(random.uniform(0.0, 2.0))
        bench.fault()
        bench.clock.write_text(str(seconds))
        bench.training(20)
        return bench.finish(driver)

    return play


def _two_drivers(bench: Bench, random: Random) -> int:
    _, driver = bench.launched(1)
    bench.training(1)
    time.sleep(random.uniform(0.0, 3.0))
    bench.fault()
    others = [bench.resume() for _ in range(2)]
    for other in others:
        if other.ended(60) == 0 or "another autotune" not in other.story:
            raise Unmet(f"a second driver was not refused: {other.last_words}")
    bench.notice("another autotune")
    bench.training(5)
    return bench.finish(driver)


def _reader_gone(bench: Bench, random: Random) -> int:
    """The program that reads its `--json` ends: the driver writes into a broken pipe."""
    nodes = bench.nodes(1)
    bench.job(nodes.address)
    driver = bench.autotune("--json", "launch", "job.yaml", reader=True)
    bench.training(3)
    time.sleep(random.uniform(0.0, 2.0))
    bench.fault()
    driver.close_output()
    bench.training(10)
    return bench.finish(driver)


def _journal_damaged(bench: Bench, random: Random) -> int:
    """Damage a copy of the journal at every byte of its last line; go on with the run from three of them."""
    _, driver = bench.launched(1)
    bench.training(2 * SAVE_EVERY)
    driver.kill()
    path = bench.run / "events.jsonl"
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for place in range(last, len(whole)):
        flipped = bytes([whole[place] ^ (1 << random.randrange(8))])
        for damaged in (whole[:place], whole[:place] + b"\0" * (len(whole) - place)):
            _read(bench, damaged, before=whole[:last], refusable=False)
        _read(bench, whole[:place] + flipped + whole[place + 1 :], before=whole[:last], refusable=True)
    driver = None
    for _ in range(3):
        place = random.randrange(last, len(whole))
        path.write_bytes(whole[:place])
        driver = bench.resume()
        bench.training(3)
        driver.kill()
        whole = path.read_bytes()
        last = whole.rstrip(b"\n").rfind(b"\n") + 1
    return bench.finish(bench.resume())


def _read(bench: Bench, data: bytes, *, before: bytes, refusable: bool) -> None:
    """Ask that a journal opens with every line before the last one, or is refused with the line's number.

    A crash leaves a line that is cut or zeroed. One that was changed may be of a newer version: it stays.
    """
    from autotune.orchestrator.errors import Failure
    from autotune.orchestrator.run.journal import Journal

    folder = bench.folder / "copies" / "copy"
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    file = folder / "events.jsonl"
    file.write_bytes(data)
    file.chmod(0o600)
    try:
        with Journal(folder) as journal:
            count = len(journal.history())
    except Failure as failure:
        if refusable and f"line {before.count(LINE_END) + 1} " in failure.message:
            return
        raise Unmet(f"a last line of {len(data) - len(before)} bytes: {failure.message}") from None
    lines = before.count(LINE_END)
    if not lines <= count <= lines + 1:
        raise Unmet(f"{count} of {lines} whole lines were read")


_CLOCK = "the driver's own clock is set; the machine's stays"
SCENARIOS = (
    Scenario(
        name="driver-killed-every-event",
        fault="the driver is killed after each row of its journal, through a failure and its cure",
        play=_killed_at_every_event,
        attempts=2,
        repeated=SAVE_EVERY - 1,
        why="the out-of-memory failure needs another configuration",
    ),
    Scenario(
        name="driver-killed-random",
        fault=f"the driver is killed at {_KILLS} random instants, and resumed each time",
        play=_killed_at_random(_KILLS),
    ),
    Scenario(
        name="driver-killed",
        fault="the driver is killed at 3 random instants, and resumed each time",
        play=_killed_at_random(3),
        ci=True,
    ),
    Scenario(
        name="launch-continue",
        fault="the driver is killed; `launch --continue` is called again, and once more after the end",
        play=_continued,
        ci=True,
    ),
    Scenario(
        name="driver-asleep",
        fault="the driver's machine sleeps for 120 s",
        play=_asleep(clock_step_s=0.0),
        how="SIGSTOP to the driver",
    ),
    Scenario(
        name="driver-asleep-clock",
        fault="the driver's machine sleeps, its clock 3 h ahead afterwards",
        play=_asleep(clock_step_s=_STEP_S),
        how=f"SIGSTOP to the driver; {_CLOCK}",
    ),
    Scenario(
        name="clock-forward",
        fault="the driver's clock steps 3 h forward",
        play=_clock_steps(_STEP_S),
        how=_CLOCK,
        ci=True,
    ),
    Scenario(
        name="clock-back", fault="the driver's clock steps 3 h back", play=_clock_steps(-_STEP_S), how=_CLOCK
    ),
    Scenario(
        name="two-drivers",
        fault="two more drivers resume a run that is driven",
        play=_two_drivers,
    ),
    Scenario(
        name="reader-gone",
        fault="the program that reads `launch --json` ends",
        play=_reader_gone,
    ),
    Scenario(
        name="journal-damaged",
        fault="the journal's last line is cut, zeroed and flipped at every byte; three cuts are resumed",
        play=_journal_damaged,
    ),
)
