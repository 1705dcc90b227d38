"""Memory that grows from step to step: said while the job trains, and avoided where it wants that."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from autotune.launchers.base import Exit
from autotune.orchestrator import messages
from autotune.orchestrator.cli.shared.run_status import RunReader, RunStatus
from autotune.orchestrator.cli.status import table
from autotune.orchestrator.driver.memory import Forecaster, growing
from autotune.orchestrator.terminal.console import Console
from autotune.policies.values.command import Command
from autotune.policies.values.events import (
    Decided,
    Ended,
    Event,
    Foreseen,
    Policy,
    Progressed,
    Started,
    TrainingCompleted,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.observation import Cancelled, Completed, Crashed, Peak, ProcessMemory, StepDone
from tests.orchestrator.driver.test_monitor import Followed, sample
from tests.orchestrator.driver.test_reconcile import Case
from tests.orchestrator.scripted import JOB, Script, World, failure, settings, step

MIB = 1 << 20
STEPS = 160
GROWING = JOB.replace("steps: 4", f"steps: {STEPS}").replace("save_every: 1", "save_every: 10")


def leaking(world: World, command: Command) -> tuple[Script, Exit | None]:
    """The forward pass leaks half a MiB a step where it takes all at once: full at step 120."""
    tokens, first = settings(command)["tokens_per_microbatch"], world.saved + 1
    assert isinstance(tokens, int)
    script: Script = []
    if world.saved:
        script.append(f"builtin: resumed step={world.saved} path=/c/{world.saved}\n")
    for n in range(first, STEPS + 1):
        used = 40 * MIB + n * MIB // 2 if tokens > 2048 else 30 * MIB
        script.append(step(n, STEPS, used=used, saves=n % 10 == 0))
    return [*script, f"builtin: done steps={STEPS}\n"], Exit(code=0)


def test_the_job_is_stopped_at_the_checkpoint_before_and_goes_on_with_a_remedy(tmp_path: Path) -> None:
    text = GROWING + "recovery: {forecast: act}\n"
    case = Case(tmp_path, World(leaking), text, policy=Policy.LADDER)
    assert isinstance(case.drive(), TrainingCompleted)
    forecasts = next(e for e in case.history if isinstance(e, Foreseen))
    assert forecasts.phase is Phase.FORWARD and forecasts.cause is Cause.GPU_OOM
    first, second = (e for e in case.history if isinstance(e, Ended))
    assert first.outcome == Cancelled(by="forecast") and second.outcome == Completed()
    assert first.saved is not None and 90 <= first.saved <= 110
    one, two = (e for e in case.history if isinstance(e, Started))
    assert one.knobs != two.knobs and two.resume
    decided = next(e for e in case.history if isinstance(e, Decided))
    assert decided.remedy is not None
    again = [e.step for e in case.history if isinstance(e, Progressed) and e.attempt == 2]
    assert again[0] == first.saved + 1 and again[-1] == STEPS


def test_by_default_a_forecast_is_reported_and_nothing_changes(tmp_path: Path) -> None:
    case = Case(tmp_path, World(leaking), GROWING, policy=Policy.LADDER)
    assert isinstance(case.drive(), TrainingCompleted)
    assert sum(isinstance(e, Started) for e in case.history) == 1
    forecasts = [e for e in case.history if isinstance(e, Foreseen)]
    assert forecasts and forecasts[0].holds


def test_off_says_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path, World(leaking), GROWING + "recovery: {forecast: off}\n", policy=Policy.LADDER)
    assert isinstance(case.drive(), TrainingCompleted)
    assert not any(isinstance(e, Foreseen) for e in case.history)


def test_a_driver_that_attaches_repeats_no_forecast(tmp_path: Path) -> None:
    lines = [step(n, STEPS, used=40 * MIB + n * MIB // 2) for n in range(1, 90)]
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    first = Followed(tmp_path / "one", GROWING)
    known = first.see(*lines)
    assert sum(isinstance(e, Foreseen) for e in known) == 1
    second = Followed(tmp_path / "two", GROWING, known=known)
    assert not any(isinstance(e, Foreseen) for e in second.see(*lines))


def test_the_host_is_watched_too(tmp_path: Path) -> None:
    followed = Followed(tmp_path, GROWING)
    events = []
    for n in range(1, 70):
        events += followed.see(samples=(sample(1000.0 + n, host=0.5 + 0.005 * n),), after=1.0)
        events += followed.see(step(n, STEPS))
    forecasts = next(e for e in events if isinstance(e, Foreseen))
    assert forecasts.cause is Cause.HOST_OOM and forecasts.step is not None and 85 <= forecasts.step <= 95
    assert forecasts.upper_bound, "caches and other users' processes are in it: it is told and not acted on"


@pytest.mark.parametrize(("steps", "is_expected"), [(80, False), (200, True)])
def test_the_last_step_of_the_settings_bounds_the_forecast(
    tmp_path: Path, steps: int, is_expected: bool
) -> None:
    text = f"name: q\nframework: slime\nsettings: {{colocate: true, num-rollout: {steps}}}\n"
    followed = Followed(tmp_path, text)
    events: list[Event] = []
    for n in range(70):  # full after 90
        events += followed.see(samples=(sample(1000.0 + n, host=0.5 + 0.005 * n),), after=1.0)
        events += followed.see(f"perf {n}: {{'perf/train_time': 1.0, 'perf/step_time': 2.0}}\n")
    forecasts = [e for e in events if isinstance(e, Foreseen)]
    assert bool(forecasts) is is_expected and all(e.of == steps for e in forecasts)


def test_a_training_that_ends_by_itself_while_it_is_stopped_is_complete(tmp_path: Path) -> None:
    def ended(name: str, text: str, line: str, code: int = 0) -> object:
        (tmp_path / name).mkdir()
        followed = Followed(tmp_path / name, text)
        followed.see(line)
        assert followed.watch.step is not None
        followed.watch.expect_end()
        return followed.watch.outcome(Exit(code=code), lost="", stopped_by="forecast")

    stopped, perf = Cancelled(by="forecast"), "perf 7: {'perf/train_time': 1.0, 'perf/step_time': 2.0}\n"
    slime = "name: q\nframework: slime\nsettings: {colocate: true, num-epoch: 1}\n"
    assert ended("end", slime, perf) == Completed()
    assert ended("killed", slime, perf, code=143) == stopped
    assert ended("early", GROWING, step(90, STEPS)) == stopped
    assert ended("last", GROWING, step(STEPS, STEPS)) == Completed()
    # A script without a known end may save and exit so when it is told to end.
    script = "name: q\nframework: command\ncommand: [python, a.py]\n"
    assert ended("script", script, "step: 7, loss: 0.5\n") == stopped


def test_the_growth_of_a_job_is_that_of_its_own_processes() -> None:
    forecaster = Forecaster(known=None, longest_response=None)
    for n in range(1, 41):
        own = ProcessMemory(pid=7, name="python", rss_bytes=1000 * MIB + n * 40 * MIB)
        host = 8000 * MIB + n * 110 * MIB  # another job of the machine grows too
        taken = replace(
            sample(float(n)), host_used_bytes=host, host_total_bytes=24000 * MIB, processes=(own,)
        )
        forecaster.take(taken, Phase.NONE)
        forecaster.stepped(StepDone(step=n, of=400), {}, attempt=1, of=400, new=True)
    assert forecaster.host_growth == pytest.approx(40 * MIB, rel=0.01)


def test_a_process_that_nears_its_own_limit_is_forecast_on_a_host_with_free_memory() -> None:
    forecaster = Forecaster(known=None, longest_response=None)
    forecasts: list[Foreseen] = []
    for n in range(1, 31):
        used = 400 * MIB + n * 40 * MIB
        own = ProcessMemory(
            pid=7, name="train.py", rss_bytes=used, limit_bytes=2048 * MIB, limited_bytes=used
        )
        other = ProcessMemory(pid=8, name="free", rss_bytes=9000 * MIB)
        taken = replace(
            sample(float(n)),
            host_used_bytes=10 * MIB + used,
            host_total_bytes=24000 * MIB,
            processes=(own, other),
        )
        forecaster.take(taken, Phase.NONE)
        events = forecaster.stepped(StepDone(step=n, of=400), {}, attempt=1, of=400, new=True)
        forecasts += [event for event in events if isinstance(event, Foreseen)]
    assert forecaster.process_limit_bytes == 2048 * MIB
    first = forecasts[0]
    assert (first.cause, first.process, first.own_limit) == (Cause.HOST_OOM, "train.py", True)
    assert first.step == pytest.approx(39, abs=3) and first.per_step_bytes == pytest.approx(40 * MIB, rel=0.1)
    words = "process train.py is expected to run out of the memory that its own limit allows (`ulimit -v`)"
    assert messages.forecast(first).startswith(f"{words} at step ")
    certain = replace(first, earliest=39, step=39, latest=39, chance=1.0)
    assert messages.forecast(certain) == f"{words} at step 39/400 (chance 100%)"


@pytest.mark.parametrize("length", ["nan", "inf"])
def test_a_length_that_is_no_number_is_left_out(length: str) -> None:
    forecaster = Forecaster(known=None, longest_response=6000.0)
    forecasts: list[Event] = []
    for n in range(1, 91):
        tokens = min(6000.0, 2000.0 + 40 * n + n % 3)
        peak = Peak(used_bytes=int((0.3 + 0.0001 * tokens) * 1e9), capacity_bytes=10**9)
        displayed_status = float(length) if n % 20 == 0 else tokens
        done = StepDone(step=n, of=400, metrics={"response_length/mean": displayed_status})
        forecasts += forecaster.stepped(done, {"backward": peak}, attempt=1, of=400, new=True)
    assert not forecasts


@pytest.mark.parametrize(("mode", "hint"), [("tell", True), ("act", False)])
def test_terminal_and_status_say_step_phase_and_how_sure(tmp_path: Path, mode: str, hint: bool) -> None:
    case = Case(tmp_path, World(leaking), GROWING + f"recovery: {{forecast: {mode}}}\n", policy=Policy.LADDER)
    stream = io.StringIO()
    console = Console(stream, runs_dir=tmp_path / "runs")
    displayed_status: list[RunStatus] = []

    def look(event: Event) -> None:
        console.print_event(event)
        if isinstance(event, Foreseen):
            displayed_status.append(RunReader(case.run, keeps=False).look(now=case.clock.now()))

    case.on_event = look
    case.drive()
    forecasts = next(e for e in case.history if isinstance(e, Foreseen))
    text = " ".join(stream.getvalue().split())
    line = f"forecast: forward is expected to run out of GPU memory at step {forecasts.step}/{STEPS}"
    assert line in text and f"chance {forecasts.chance:.0%}" in text
    assert "more each step since step" in text
    assert ("recovery: {forecast: act}" in text) is hint
    assert displayed_status[0].attempts[-1].foreseen == (forecasts,)
    assert b'"foreseen":[{"type":"foreseen"' in msgspec.json.encode(displayed_status[0])
    assert line in table(displayed_status[:1], now=case.clock.now(), attempts=True)


def test_the_processes_that_gain_most_of_a_host_are_named() -> None:
    held = [{"driver": 4000, "ray::Reward": 1000 + 100 * step} for step in range(30)]
    assert growing(held, per_step_bytes=110) == "ray::Reward"
    assert growing(held, per_step_bytes=1000) == ""  # of the object store, or of others
    assert growing([{"driver": 4000}] * 30, per_step_bytes=100) == growing([], per_step_bytes=1) == ""


def test_a_process_that_leaks_is_restarted_with_the_same_settings_until_the_training_is_done(
    tmp_path: Path,
) -> None:
    """Each process is full after 80 steps: the first one fails, those after it are stopped before."""
    text = GROWING.replace(f"steps: {STEPS}", "steps: 300")
    case = Case(tmp_path, World(leaking_afresh), text, policy=Policy.LADDER)
    stream = io.StringIO()
    console = Console(stream, runs_dir=tmp_path / "runs")
    case.on_event = console.print_event
    verdict = case.drive()
    assert isinstance(verdict, TrainingCompleted) and verdict.growth is not None
    assert verdict.growth.memory == "forward" and verdict.growth.per_step_bytes == pytest.approx(MIB, rel=0.1)
    ended = [e for e in case.history if isinstance(e, Ended)]
    assert isinstance(ended[0].outcome, Crashed) and ended[-1].outcome == Completed()
    assert [e.outcome for e in ended[1:-1]] == [Cancelled(by="restart")] * 3
    assert {e.knobs for e in case.history if isinstance(e, Started)} == {ended_with(case).knobs}
    printed = " ".join(stream.getvalue().split())
    assert "GPU memory in forward of the trainer grows by 1.0 MiB a step" in printed
    displayed_status = RunReader(case.run, keeps=False).look(now=case.clock.now())
    assert "grows by 1.0 MiB a step" in table([displayed_status], now=case.clock.now(), attempts=True)


def ended_with(case: Case) -> Started:
    return next(e for e in reversed(case.history) if isinstance(e, Started))


def leaking_afresh(world: World, command: Command) -> tuple[Script, Exit | None]:
    """The forward pass leaks a MiB a step from the start of a process, whatever the settings are."""
    script: Script = []
    if world.saved:
        script.append(f"builtin: resumed step={world.saved} path=/c/{world.saved}\n")
    for age in range(1, 301 - world.saved):
        n = world.saved + age
        if age > 80:
            return [*script, failure("forward", n)], Exit(code=1)
        row = step(n, 300, used=20 * MIB + age * MIB, saves=n % 10 == 0)
        script.append(row.replace("seconds=2.5", "seconds=250.0"))
    return [*script, "builtin: done steps=300\n"], Exit(code=0)
