"""Cards that report errors, belong to others, or keep memory after the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from tests.faults.bench import Bench, Unmet
from tests.faults.program import SAVE_EVERY
from tests.faults.scenario import Scenario

_SCRIPTED = "a scripted NVML"
_USED = str(70 << 30)


def _nvml_error(text: str) -> Callable[[Bench, Random], int]:
    def play(bench: Bench, random: Random) -> int:
        _, driver = bench.launched(1, cards=True)
        bench.training(3)
        time.sleep(random.uniform(0.0, 2.0))
        bench.fault()
        (bench.cards / "error").write_text(text)
        bench.training(10)
        (bench.cards / "error").unlink()
        bench.training(3)
        _samples_again(bench)
        code = bench.finish(driver)
        bench.notice("NVML|GPU is lost|card|GPU 0")
        return code

    return play


def _samples_again(bench: Bench) -> None:
    """Ask that readings of the node are recorded again."""
    folder = bench.run / "attempts" / "0001"

    def newest() -> float:
        return max((path.stat().st_mtime for path in folder.glob("samples*")), default=0.0)

    since = time.time()
    bench.until(
        lambda: _size(bench) and newest() > since, "no readings after the error was over", within_s=20
    )
    before = _size(bench)
    bench.until(lambda: _size(bench) != before, "no readings after the error was over", within_s=20)


def _size(bench: Bench) -> int:
    return sum(path.stat().st_size for path in (bench.run / "attempts" / "0001").glob("samples*"))


def _unsupported(bench: Bench, random: Random) -> int:
    (bench.cards / "unsupported").touch()
    _, driver = bench.launched(1, cards=True)
    bench.training(5)
    time.sleep(random.uniform(0.0, 2.0))
    return bench.finish(driver)


def _foreign(bench: Bench, random: Random) -> int:
    """Others hold memory of the card before the run, more of it later, and keep it."""
    (bench.cards / "0").write_text(str(random.randrange(10, 40) << 30))
    _, driver = bench.launched(1, cards=True)
    bench.training(5)
    return bench.finish(driver)


def _stale_for_a_while(bench: Bench, random: Random) -> int:
    _, driver = bench.launched(1, cards=True)
    bench.training(2 * SAVE_EVERY)
    bench.order("card-kept")
    bench.order("oom")
    bench.fault()
    time.sleep(random.uniform(15.0, 40.0))
    (bench.cards / "0").unlink(missing_ok=True)
    bench.training(3)
    code = bench.finish(driver)
    bench.notice("oom|memory")
    return code


def _stale_for_good(bench: Bench, random: Random) -> int:
    _, driver = bench.launched(1, cards=True)
    bench.training(2 * SAVE_EVERY)
    bench.order("card-kept")
    bench.order("oom")
    bench.fault()
    code = driver.ended(180)
    bench.notice("GPU 0 has")
    if code != 3 or "GPU 0 has" not in driver.story:
        raise Unmet(f"exit {code}, the card is not named: {driver.last_words}")
    (bench.cards / "0").unlink(missing_ok=True)
    second = bench.resume()
    bench.training(3)
    return bench.finish(second)


_CURED = "an out-of-memory failure needs another configuration"
SCENARIOS = (
    Scenario(
        name="nvml-gpu-lost",
        fault="every reading of the card fails for some steps: GPU is lost",
        play=_nvml_error("GPU is lost"),
        how=_SCRIPTED,
        ci=True,
    ),
    Scenario(
        name="nvml-unsupported",
        fault="the card supports no list of processes and no utilisation",
        play=_unsupported,
        how=_SCRIPTED,
    ),
    Scenario(
        name="foreign-memory",
        fault="others hold memory of the card before and after the attempt",
        play=_foreign,
        how=_SCRIPTED,
    ),
    Scenario(
        name="stale-context",
        fault="memory of the card comes back 15 to 40 s after the attempt",
        play=_stale_for_a_while,
        attempts=2,
        repeated=SAVE_EVERY - 1,
        why=_CURED,
        how=_SCRIPTED,
    ),
    Scenario(
        name="stale-context-stays",
        fault="memory of the card does not come back; it is freed by hand, then `resume`",
        play=_stale_for_good,
        attempts=2,
        repeated=SAVE_EVERY - 1,
        why=f"{_CURED}; nothing can start on a card that is full",
        how=_SCRIPTED,
    ),
)
