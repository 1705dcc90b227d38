"""`python -m benchmarks.overhead`: what autotune itself costs, measured in one run on this machine.

The job replays recorded rollouts, so that its steps are short and equal; no inference engine runs. It is the
same program with the same settings on the same Ray head, once started by `autotune launch` and once by hand.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pty
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.figures import Reading, interval95, paired_ratios, rates, recoveries, spread, table
from benchmarks.place import AUTOTUNE, DRIVER, RAY, SUPERVISOR, Head, Lookout, Meter, ray_head
from launchers.frameworks.builtin import Builtin
from launchers.runners.host import read_host
from orchestrator import journal
from orchestrator.cli.driving import versions
from orchestrator.cli.starting import first_command, prepare
from orchestrator.clock import seconds_of
from policies.events import Diagnosed, Finished, History, Progressed
from policies.evidence import StepDone

# The recorded rollouts serve both models: 16 prompts, 8 samples each, 32 tokens: 4,096 tokens a step.
DATA: dict[str, Any] = {"prompts": 16, "samples": 8, "prompt_tokens": 8, "response_tokens": 24}
SMALL = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 512, "vocab": 2048}
LARGE = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "intermediate": 1024, "vocab": 2048}
# As written the larger model needs 88 MiB to score, 486 to train and 88 for the optimizer step.
BUDGET = "80MiB"
RECORDED_STEPS = 2
WARM_UP_STEPS = 5
OOM_STEPS = 3
IDLE_S = 15.0
LONGEST_RUN_S = 240.0

_IDLE = """
import os, sys, ray
class Nothing:
    def pid(self): return os.getpid()
ray.init(address=os.environ["RAY_ADDRESS"], namespace="idle", log_to_driver=False, logging_level="ERROR")
nothing = ray.remote(Nothing).options(num_cpus=0).remote()
print(ray.get(nothing.pid.remote()), flush=True)
sys.stdin.read()
"""


class Run(NamedTuple):
    """One run of the job that went well."""

    steps: list[float]  # seconds each, without the first ones
    steady: dict[str, float]  # CPU seconds per second of each group, while those steps ran
    whole: dict[str, float]  # the same from the start to the end of the run
    seconds: float


class Measured(NamedTuple):
    """Everything that the tables show."""

    idle: dict[str, float]
    supervised: list[Run]
    alone: list[Run]
    history: History
    written: list[float]
    launched: list[float]


def main() -> int:
    """Measure, print the tables, and return 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--pairs", type=int, default=4, help="runs with and without autotune (default: 4)")
    parser.add_argument("--steps", type=int, default=30, help="training steps of each (default: 30)")
    options = parser.parse_args()
    if options.pairs < 1 or options.steps < 2 * WARM_UP_STEPS:
        parser.error(f"at least 1 pair of runs of {2 * WARM_UP_STEPS} steps")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends what was started
    begun, load = time.monotonic(), os.getloadavg()
    folder = Path(tempfile.mkdtemp(prefix="autotune-overhead-"))
    try:
        with ray_head() as head:
            measured = measure(head, folder, pairs=options.pairs, steps=options.steps)
        print("\n".join(report(measured, options, load=load, took_s=time.monotonic() - begun)))
    finally:
        shutil.rmtree(folder)
    return 0


def measure(head: Head, folder: Path, *, pairs: int, steps: int) -> Measured:
    """Return what one pass over all parts measures."""
    rollouts = folder / "rollouts"
    _say("recording rollouts with the light engine")
    recording = {"engine": "light", "record_path": str(rollouts), "steps": RECORDED_STEPS, "save_every": 0}
    _alone(head, _job(head, folder / "record", DATA | recording | {"model_shape": SMALL}))
    for step in range(RECORDED_STEPS + 1, max(steps, OOM_STEPS) + 1):
        source = rollouts / f"step-{(step - 1) % RECORDED_STEPS + 1:06d}.json"
        shutil.copy(source, rollouts / f"step-{step:06d}.json")
    replay = DATA | {"engine": "replay", "replay_path": str(rollouts)}
    _say(f"{IDLE_S:.0f} s of an idle Ray program")
    idle = _idle(head)
    settings = replay | {"model_shape": SMALL, "steps": steps, "save_every": 0}
    supervised, alone = [], []
    for pair in range(1, pairs + 1):
        _say(f"pair {pair} of {pairs}")
        supervised.append(_supervised(head, _job(head, folder / f"{pair}-a", settings)))
        alone.append(_alone(head, _job(head, folder / f"{pair}-b", settings)))
    _say(f"a job that does not fit into {BUDGET}")
    tight = replay | {"model_shape": LARGE, "steps": OOM_STEPS, "save_every": 1, "trainer_budget": BUDGET}
    lookout = Lookout(head.logs)
    with _launched(head, _job(head, folder / "oom", tight)) as child, Meter(head, driver=child.pid) as meter:
        lookout.watch(child, longest_s=LONGEST_RUN_S)
    history = _history(folder / "oom")
    return Measured(idle, supervised, alone, history, lookout.written, sorted(meter.shims.values()))


# ------------------------------------------------------------------ runs


def _job(head: Head, folder: Path, settings: dict[str, Any]) -> Path:
    """Return a folder with a job.yaml in it."""
    folder.mkdir()
    job = {
        "name": "overhead",
        "framework": "builtin",
        "settings": settings,
        "workdir": str(folder),
        "cluster": {"address": head.address},
        "goal": {"steps": 3},
        "recovery": {"relaunches": 12},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    return folder


@contextlib.contextmanager
def _launched(head: Head, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield `autotune launch` on a terminal; what it shows there is kept in a file."""
    ours, terminal = pty.openpty()
    argv = [
        sys.executable,
        "-m",
        "orchestrator.cli",
        "--runs-dir",
        str(folder / "runs"),
        "launch",
        "job.yaml",
    ]
    child = subprocess.Popen(
        argv,
        cwd=folder,
        env={**head.env, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    os.close(terminal)
    reader = threading.Thread(target=_keep, args=(ours, folder / "terminal"), daemon=True)
    reader.start()
    try:
        yield child
    finally:
        _end(child)
        reader.join()
        os.close(ours)


def _keep(descriptor: int, path: Path) -> None:
    with path.open("wb") as file:
        while True:
            try:
                data = os.read(descriptor, 65536)
            except OSError:
                return  # the other side has closed its terminal
            file.write(data)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a program that still runs, as Ctrl-C does: autotune stops its job first."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _supervised(head: Head, folder: Path) -> Run:
    begun = time.time()
    with _launched(head, folder) as child, Meter(head, driver=child.pid) as meter:
        child.wait(LONGEST_RUN_S)
    if child.returncode:
        raise RuntimeError(f"autotune exited with {child.returncode}:\n{(folder / 'terminal').read_text()}")
    done = [event for event in _history(folder) if isinstance(event, Progressed)][WARM_UP_STEPS:]
    return _run(
        meter.readings,
        steps=[event.seconds for event in done if event.seconds is not None],
        since=seconds_of(done[0].at),
        until=seconds_of(done[-1].at),
        begun=begun,
    )


def _alone(head: Head, folder: Path) -> Run:
    """Run the command of the first attempt by hand."""
    job = prepare(folder / "job.yaml", overrides=(), relaunches=None).job
    command = first_command(job)
    for file in command.files:
        (folder / file.name).write_text(file.text.replace("{attempt}", str(folder)))
    argv = [
        word.replace("{attempt}", str(folder)).replace("{python}", sys.executable) for word in command.argv
    ]
    environment = {
        **head.env,
        "RAY_ADDRESS": head.address,
        "RAY_DEDUP_LOGS": "0",
        "PYTHONUNBUFFERED": "1",
        **command.env,
    }
    begun = time.time()
    stamps: list[float] = []
    steps: list[float] = []
    said = []
    child = subprocess.Popen(
        argv,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        with Meter(head) as meter:
            assert child.stdout is not None
            for line in child.stdout:
                text = line.decode("utf-8", "replace")
                said.append(text)
                marker = Builtin().marker(text)
                if isinstance(marker, StepDone) and marker.seconds is not None:
                    stamps.append(time.time())
                    steps.append(marker.seconds)
            child.wait(LONGEST_RUN_S)
    finally:
        _end(child)
    if child.returncode:
        raise RuntimeError(f"the job exited with {child.returncode}:\n{''.join(said)}")
    warm = min(WARM_UP_STEPS, len(steps) - 1)
    return _run(meter.readings, steps=steps[warm:], since=stamps[warm], until=stamps[-1], begun=begun)


def _run(readings: Sequence[Reading], *, steps: list[float], since: float, until: float, begun: float) -> Run:
    return Run(
        steps=steps,
        steady=rates(readings, since=since, until=until),
        whole=rates(readings, since=0.0, until=math.inf),
        seconds=time.time() - begun,
    )


def _idle(head: Head) -> dict[str, float]:
    """Return what a driver and an actor cost that do nothing, and Ray's daemons meanwhile."""
    child = subprocess.Popen(
        [sys.executable, "-c", _IDLE],
        env={**head.env, "RAY_ADDRESS": head.address},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        actor = int(child.stdout.readline())
        time.sleep(3.0)  # what starting it set off is over by then
        with Meter(head, driver=child.pid, supervisor=actor) as meter:
            time.sleep(IDLE_S)
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()
    return rates(meter.readings, since=0.0, until=math.inf)


def _history(folder: Path) -> History:
    (path,) = (folder / "runs").glob("*/events.jsonl")
    return journal.read(path)


def _say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ tables


def report(
    measured: Measured, options: argparse.Namespace, *, load: tuple[float, ...], took_s: float
) -> list[str]:
    """Return the lines of the tables."""
    cores = len(os.sched_getaffinity(0))
    return [
        "Overhead of autotune",
        table(_circumstances(options, cores=cores, load=load, took_s=took_s)),
        "",
        "1. CPU of autotune's own processes, in % of one core (of all cores)",
        table(_cpu_rows(measured, cores)),
        "",
        "2. Step times of the same job on the same Ray head, with and without autotune",
        table(_step_rows(measured)),
        "",
        "3. Recovery from real out-of-memory failures: median (range, attempts)",
        table(_recovery_rows(measured)),
    ]


def _circumstances(
    options: argparse.Namespace, *, cores: int, load: tuple[float, ...], took_s: float
) -> list[tuple[str, str]]:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = names[0].partition(":")[2].strip() if names else os.uname().machine
    found = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "sglang")
    return [
        ("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("command", f"python -m benchmarks.overhead --pairs {options.pairs} --steps {options.steps}"),
        ("hardware", f"{cores} cores, {model}, {read_host().total_bytes / (1 << 30):.1f} GiB"),
        ("versions", f"{found}; Linux {os.uname().release}"),
        ("load before", " ".join(f"{value:.2f}" for value in load) + " (1, 5, 15 minutes)"),
        ("took", f"{took_s:.0f} s"),
    ]


def _cpu_rows(measured: Measured, cores: int) -> list[tuple[str, str]]:
    def shown(values: Sequence[float]) -> str:
        return f"{100 * statistics.fmean(values):6.2f} %   ({100 * statistics.fmean(values) / cores:.2f} %)"

    def own(rates_: dict[str, float]) -> float:
        return sum(rates_.get(name, 0.0) for name in AUTOTUNE)

    idle, runs = measured.idle, measured.supervised
    whole = shown([own(run.whole) for run in runs])
    floor = idle.get(DRIVER, 0.0) + idle.get(SUPERVISOR, 0.0)
    rows = [(f"{name}, while steps run", shown([r.steady.get(name, 0.0) for r in runs])) for name in AUTOTUNE]
    shares = [own(run.steady) for run in runs]
    return [
        *rows,
        ("all three", shown(shares)),
        ("  lowest and highest run", f"{100 * min(shares):6.2f} % to {100 * max(shares):.2f} %"),
        ("idle floor: a Ray driver that does nothing", shown([idle.get(DRIVER, 0.0)])),
        ("idle floor: a Ray actor that does nothing", shown([idle.get(SUPERVISOR, 0.0)])),
        ("all three above the floor", shown([share - floor for share in shares])),
        (
            "all three, whole run with start and end",
            f"{whole}   of {statistics.fmean(run.seconds for run in runs):.0f} s",
        ),
        ("Ray's own daemons, job with autotune", shown([run.steady.get(RAY, 0.0) for run in runs])),
        ("Ray's own daemons, job alone", shown([run.steady.get(RAY, 0.0) for run in measured.alone])),
        ("Ray's own daemons, no job", shown([idle.get(RAY, 0.0)])),
    ]


def _step_rows(measured: Measured) -> list[tuple[str, str]]:
    a, b = [run.steps for run in measured.supervised], [run.steps for run in measured.alone]
    ratios = paired_ratios(a, b)
    mean, low, high = interval95(ratios)
    return [
        ("steps counted", f"{len(a[0])} of each run, the first {WARM_UP_STEPS} left out"),
        ("median step with autotune", " ".join(f"{statistics.median(steps):.3f}" for steps in a) + " s"),
        ("median step without", " ".join(f"{statistics.median(steps):.3f}" for steps in b) + " s"),
        ("ratio of each pair", " ".join(f"{ratio:.4f}" for ratio in ratios)),
        ("mean ratio", f"{mean:.4f}   (95 % interval {low:.4f} to {high:.4f}, t, {len(ratios)} pairs)"),
    ]


def _recovery_rows(measured: Measured) -> list[tuple[str, str]]:
    found = recoveries(measured.history, written=measured.written, launched=measured.launched)
    causes = [f"{e.cause}/{e.phase}" for e in measured.history if isinstance(e, Diagnosed)]
    verdicts = [type(e.verdict).__name__ for e in measured.history if isinstance(e, Finished)]
    return [
        ("failures", ", ".join(causes) or "none"),
        ("the run's end", ", ".join(verdicts) or "none"),
        ("OOM line -> seen by the driver", spread([row.seen_s for row in found])),
        ("OOM line -> gang stopped", spread([row.stopped_s for row in found])),
        ("gang stopped -> memory drained", spread([row.drained_s for row in found])),
        ("  of that, the drain gate alone", spread([row.gate_s for row in found])),
        ("memory drained -> decision recorded", spread([row.decided_s for row in found])),
        ("  of that, choosing the remedy alone", spread([row.policy_s for row in found])),
        ("OOM line -> next attempt's program runs", spread([row.relaunched_s for row in found])),
        ("not in it: the job's own start to its first step or OOM", spread([row.job_s for row in found])),
    ]


if __name__ == "__main__":
    sys.exit(main())
