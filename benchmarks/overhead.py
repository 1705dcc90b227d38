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
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.orchestrator.cli.shared.launch_options import LaunchOptions
from autotune.orchestrator.cli.shared.start import first_command, prepare
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.run import journal
from autotune.orchestrator.run.directory import RunRequest
from autotune.policies.values.events import History, Progressed
from autotune.policies.values.observation import StepDone
from benchmarks.figures import Reading, rates
from benchmarks.place import Head, Lookout, Meter, ray_head
from benchmarks.report import WARM_UP_STEPS, Measured, Run, report

# The recorded rollouts serve both models: 16 prompts, 8 samples each, 32 tokens: 4,096 tokens a step.
DATA: dict[str, Any] = {"prompts": 16, "samples": 8, "prompt_tokens": 8, "response_tokens": 24}
SMALL = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 512, "vocab": 2048}
LARGE = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "intermediate": 1024, "vocab": 2048}
# As written the larger model needs 88 MiB to score, 486 to train and 88 for the optimizer step.
BUDGET = "80MiB"
RECORDED_STEPS = 2
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
    floor = idle(head)
    settings = replay | {"model_shape": SMALL, "steps": steps, "save_every": 0}
    supervised, alone = [], []
    for pair in range(1, pairs + 1):
        _say(f"pair {pair} of {pairs}")
        supervised.append(_supervised(head, _job(head, folder / f"{pair}-a", settings)))
        alone.append(_alone(head, _job(head, folder / f"{pair}-b", settings)))
    _say(f"a job that does not fit into {BUDGET}")
    tight = replay | {"model_shape": LARGE, "steps": OOM_STEPS, "save_every": 1, "trainer_budget": BUDGET}
    lookout = Lookout(head.logs)
    with launched(head, _job(head, folder / "oom", tight)) as child, Meter(head, driver=child.pid) as meter:
        lookout.watch(child, longest_s=LONGEST_RUN_S)
    history = _history(folder / "oom")
    return Measured(floor, supervised, alone, history, lookout.written, sorted(meter.shims.values()))


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
def launched(head: Head, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield `autotune launch` on a terminal; what it shows there is kept in a file."""
    ours, terminal = pty.openpty()
    argv = [
        sys.executable,
        "-m",
        "autotune.orchestrator.cli",
        "--runs-dir",
        str(folder / "runs"),
        "launch",
        "job.yaml",
        *("--policy", "ladder"),  # the estimate would avoid the failures that are to be timed
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
    with launched(head, folder) as child, Meter(head, driver=child.pid) as meter:
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
    request = RunRequest()
    job = prepare(LaunchOptions(job_file=folder / "job.yaml", request=request)).job
    command = first_command(job, request)
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
    output = []
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
                output.append(text)
                marker = Builtin().marker(text)
                if isinstance(marker, StepDone) and marker.seconds is not None:
                    stamps.append(time.time())
                    steps.append(marker.seconds)
            child.wait(LONGEST_RUN_S)
    finally:
        _end(child)
    if child.returncode:
        raise RuntimeError(f"the job exited with {child.returncode}:\n{''.join(output)}")
    warm = min(WARM_UP_STEPS, len(steps) - 1)
    return _run(meter.readings, steps=steps[warm:], since=stamps[warm], until=stamps[-1], begun=begun)


def _run(readings: Sequence[Reading], *, steps: list[float], since: float, until: float, begun: float) -> Run:
    return Run(
        steps=steps,
        steady=rates(readings, since=since, until=until),
        whole=rates(readings, since=0.0, until=math.inf),
        seconds=time.time() - begun,
    )


def idle(head: Head) -> dict[str, float]:
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


def journals(folder: Path) -> str:
    """Return what the journals of the runs in a folder hold so far."""
    return "".join(path.read_text() for path in folder.glob("runs/*/events.jsonl"))


def _history(folder: Path) -> History:
    (path,) = (folder / "runs").glob("*/events.jsonl")
    return journal.read(path)


def _say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
