"""The driver on a real Ray head: killed and resumed, submitted, detached, stopped from elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
JOB = """\
name: small
framework: builtin
settings:
  engine: light
  model_shape: {hidden: 32, layers: 1, heads: 2, kv_heads: 1, intermediate: 64, vocab: 128}
  steps: 100000
  prompts: 2
  samples: 2
  prompt_tokens: 7
  response_tokens: 4
  save_every: 1
goal: {steps: 3}
"""
RAY = str(Path(sys.executable).with_name("ray"))


class Head:
    """A Ray head of our own and a folder to call `autotune` in."""

    def __init__(self, folder: Path, port: int, dashboard: int) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{port}"
        self.url = f"http://127.0.0.1:{dashboard}"
        self.env = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1"}

    def autotune(self, *arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "autotune.orchestrator.cli", *arguments],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "autotune.orchestrator.cli", *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def events(self, runs: str = "runs") -> list[dict[str, object]]:
        journals = list((self.folder / runs).glob("*/events.jsonl"))
        return [json.loads(line) for line in journals[0].read_text().splitlines()] if journals else []

    def steps(self, runs: str = "runs") -> list[object]:
        return [event["step"] for event in self.events(runs) if event["type"] == "progressed"]


def until(condition: Callable[[], object], what: str, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


@pytest.fixture(scope="module")
def ray_head() -> Iterator[tuple[int, int]]:
    with started_head() as ports:
        yield ports


@contextmanager
def started_head(*options: str, env: Mapping[str, str] | None = None) -> Iterator[tuple[int, int]]:
    """Start a Ray head; yields its port and its dashboard's."""
    folder = Path(tempfile.mkdtemp(prefix="at-", dir="/tmp"))  # sockets below it have a longest path
    for _ in range(3):  # a port may be taken between its choice and its use: the head then ends
        port, dashboard, client = free_port(), free_port(), free_port()
        command = [RAY, "start", "--head", "--block", "--port", str(port), "--dashboard-port", str(dashboard)]
        command += ["--temp-dir", str(folder), "--num-cpus", "16", "--include-dashboard", "true"]
        # Another Ray on this machine may hold the usual ports.
        command += ["--dashboard-agent-listen-port", str(free_port())]
        command += ["--ray-client-server-port", str(client), *options]
        child = subprocess.Popen(
            command,
            env={**os.environ, "HOME": str(folder), **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until(partial(_has_started_or_ended, child, dashboard, client), "the head did not start", 300)
        if child.poll() is None:
            break
    assert child.poll() is None, "three heads ended while they started"
    try:
        yield port, dashboard
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def _has_started_or_ended(child: subprocess.Popen[bytes], *ports: int) -> bool:
    """Return whether all of a head answers, or all has ended: Ray waits 30 s for its parts."""
    return child.poll() is not None or all(map(answers, ports))


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def head(ray_head: tuple[int, int], tmp_path: Path) -> Head:
    made = Head(tmp_path, *ray_head)
    (tmp_path / "job.yaml").write_text(JOB + f"cluster: {{address: '{made.address}'}}\n")
    return made


def marked(run: str) -> list[int]:
    """The processes that still carry the run's mark."""
    result = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"AUTOTUNE_ATTEMPT={run}/".encode() in (process / "environ").read_bytes():
                result.append(int(process.name))
        except OSError:
            continue
    return result


def test_a_killed_driver_resumes_the_attempt_that_still_runs(head: Head) -> None:
    driver = head.start("launch", "job.yaml")
    until(lambda: len(head.steps()) > 5, "no steps")
    driver.kill()
    driver.wait()
    before = head.steps()
    run = next((head.folder / "runs").iterdir()).name
    assert marked(run), "the attempt died with its driver"
    second = head.start("resume")
    until(lambda: len(head.steps()) > len(before) + 5, "no steps after the resume")
    second.send_signal(signal.SIGINT)
    assert second.wait(timeout=120) == 130
    steps = head.steps()
    assert steps == list(range(1, len(steps) + 1)), "a step was repeated or is missing"
    assert [event["type"] for event in head.events()].count("started") == 1
    until(lambda: not marked(run), "processes are left", 20)


def test_a_run_is_stopped_whose_driver_dies_as_it_is_asked(head: Head) -> None:
    driver = head.start("launch", "job.yaml")
    until(lambda: len(head.steps()) > 1, "no steps")
    run = next((head.folder / "runs").iterdir())
    driver.send_signal(signal.SIGSTOP)
    stopping = head.start("stop", run.name)
    until((run / "stop").exists, "no request")
    driver.kill()
    driver.wait()
    assert stopping.wait(timeout=120) == 0
    assert not marked(run.name), "processes are left"
    assert head.events()[-1]["type"] == "finished"


def test_a_run_is_stopped_on_its_own_cluster_whatever_the_terminal_names(head: Head) -> None:
    (head.folder / "job.yaml").write_text(JOB)
    head.env["RAY_ADDRESS"] = head.address
    driver = head.start("launch", "job.yaml")
    until(lambda: len(head.steps()) > 1, "no steps")
    driver.kill()
    driver.wait()
    run = next((head.folder / "runs").iterdir()).name
    head.env["RAY_ADDRESS"] = "127.0.0.1:1"
    stopped = head.autotune("stop", run)
    assert stopped.returncode == 0 and "is stopped" in stopped.stderr, stopped.stderr
    until(lambda: not marked(run), "processes are left", 20)
    assert "edited" not in [event["type"] for event in head.events()]


def test_submitted_as_a_ray_job(head: Head) -> None:
    runs = str(head.folder / "shared")
    refused = head.autotune("launch", "job.yaml", "--submit", head.url)
    assert refused.returncode == 2 and "absolute" in refused.stderr
    submitted = head.autotune("launch", "job.yaml", "--submit", head.url, "--runs-dir", runs)
    assert submitted.returncode == 0 and submitted.stdout.startswith("autotune-small-"), submitted.stderr
    until(lambda: len(head.steps("shared")) > 3, "no steps")
    assert head.autotune("stop", "--runs-dir", runs).returncode == 0
    verdict = head.events("shared")[-1]["verdict"]
    assert isinstance(verdict, dict) and verdict["verdict"] == "interrupted"


def test_detached_on_a_cluster_it_is_a_job_of_that_cluster(head: Head) -> None:
    runs = str(head.folder / "shared")
    detached = head.autotune("launch", "job.yaml", "--detach", "--runs-dir", runs)
    assert detached.returncode == 0 and detached.stdout.startswith("autotune-small-"), detached.stderr
    until(lambda: len(head.steps("shared")) > 1, "no steps")
    assert head.autotune("stop", "--runs-dir", runs).returncode == 0


def test_plain_ray_job_submit(head: Head) -> None:
    program = [sys.executable, "-m", "autotune.orchestrator.cli"]
    words = ["--address", head.url, "--working-dir", str(head.folder), "--", *program]
    refused = subprocess.run(
        [RAY, "job", "submit", *words, "launch", "job.yaml"], env=head.env, capture_output=True, text=True
    )
    assert refused.returncode != 0 and "must be absolute" in refused.stdout + refused.stderr
    runs = str(head.folder / "shared")
    words = ["--no-wait", *words]
    subprocess.run(
        [RAY, "job", "submit", *words, "launch", "job.yaml", "--runs-dir", runs],
        env=head.env,
        check=True,
        capture_output=True,
    )
    until(lambda: len(head.steps("shared")) > 1, "no steps")
    assert head.autotune("stop", "--runs-dir", runs).returncode == 0


def test_detached_on_this_machine_it_is_a_daemon(tmp_path: Path) -> None:
    here = Head(tmp_path, 0, 0)
    (tmp_path / "job.yaml").write_text(JOB + "cluster: {address: local}\n")
    detached = here.autotune("launch", "job.yaml", "--detach")
    assert detached.returncode == 0, detached.stderr
    run = detached.stdout.strip()
    until(lambda: len(here.steps()) > 1, "no steps")
    stopped = here.autotune("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    until(lambda: not marked(run), "processes are left", 20)
    assert "stopped by `autotune stop`" in (tmp_path / "runs" / run / "driver.log").read_text()


def test_an_unreachable_cluster_is_reported(tmp_path: Path) -> None:
    here = Head(tmp_path, 0, 0)
    (tmp_path / "job.yaml").write_text(JOB + "cluster: {address: '127.0.0.1:9'}\n")
    done = here.autotune("launch", "job.yaml")
    assert done.returncode == 3 and "Traceback" not in done.stderr and "hint: " in done.stderr
    done = here.autotune(
        "launch", "job.yaml", "--submit", "http://127.0.0.1:9", "--runs-dir", str(tmp_path / "r")
    )
    assert done.returncode == 3 and "Traceback" not in done.stderr
