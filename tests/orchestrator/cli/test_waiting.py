"""A run that waits for the nodes of a cluster that grows, as its terminal and `status` show it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from autotune.policies.values.events import Edited, Finished, Infrastructure, Started
from tests.orchestrator.cli.fork_server import Forked
from tests.orchestrator.cli.terminal import Seen, run
from tests.orchestrator.cli.test_troubles import the_run
from tests.orchestrator.scripted import JOB

PLAY = "tight_memory@10.0.0.1:6379"
GROWS = {"GROWS": "1"}
WAITS = "waiting for 2 nodes with 8 GPUs each: 1 of 2 there; 1 × gpu starting"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(f"{JOB}cluster: {{nodes: 1, wait_for_nodes: 2m}}\n")
    return tmp_path


def status(home: Path) -> dict[str, object]:
    (output,) = json.loads(run("status", "--json", cwd=home).out)
    assert isinstance(output, dict)
    return output


def awaiting(home: Path) -> None:
    """Wait until the run has written what it waits for."""
    end = time.monotonic() + 20
    while not list((home / "runs").glob("*/waiting.json")):
        assert time.monotonic() < end, "the run does not wait"
        time.sleep(0.02)


def launch_waits(home: Path, then: str) -> tuple[Seen, dict[str, object]]:
    """Launch while a node is missing; `then` a node comes, or a signal. Returns what `status` showed."""
    (home / "nodes").write_text("1")
    output: dict[str, object] = {}

    def meanwhile(child: Forked) -> None:
        awaiting(home)
        output.update(status(home))
        if then == "node":
            (home / "nodes").write_text("2")
        else:
            os.kill(child.pid, signal.Signals[then])

    return run("launch", "job.yaml", cwd=home, play=PLAY, env=GROWS, meanwhile=meanwhile), output


def test_a_launch_waits_for_a_node_and_status_shows_it(home: Path) -> None:
    result, output = launch_waits(home, "node")
    assert result.code == 0, result.err
    assert f"{WAITS} (" in result.err and "of at most 2m 00s)" in result.err
    assert "2 nodes with 8 GPUs each ready after" in result.err
    assert output["status"] == "WAITING 1/2 nodes"
    waiting = output["waiting"]
    assert isinstance(waiting, dict)
    assert (waiting["nodes"], waiting["wanted"], waiting["gpus"], waiting["limit_s"]) == (1, 2, 8, 120.0)
    after = status(home)
    assert (after["status"], after["waiting"]) == ("COMPLETED", None)


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_wait_ends_when_asked_and_goes_on_with_resume(name: str, code: int, home: Path) -> None:
    result, _ = launch_waits(home, name)
    assert result.code == code, result.err
    assert f"stopped by {name} before anything was started" in result.err
    assert not the_run(home).history() and status(home)["waiting"] is None
    (home / "nodes").write_text("2")
    assert run("resume", cwd=home, play=PLAY, env=GROWS).code == 0


def test_a_run_that_waits_is_stopped_from_elsewhere(home: Path) -> None:
    (home / "nodes").write_text("1")
    stops: list[Seen] = []

    def meanwhile(_: Forked) -> None:
        awaiting(home)
        stops.append(run("stop", cwd=home, play=PLAY, env=GROWS))

    result = run("launch", "job.yaml", cwd=home, play=PLAY, env=GROWS, meanwhile=meanwhile)
    assert (result.code, stops[0].code) == (143, 0), (result.err, stops[0].err)
    assert status(home)["running"] is False


def test_nodes_that_do_not_come_end_the_launch_and_status_says_which(home: Path) -> None:
    (home / "job.yaml").write_text(f"{JOB}cluster: {{nodes: 1, wait_for_nodes: 5s}}\n")
    (home / "nodes").write_text("1")
    result = run("launch", "job.yaml", cwd=home, play=PLAY, env=GROWS)
    assert result.code == 3
    assert "2 nodes with 8 GPUs each were not ready within 5.0s: 1 of 2 there; 1 × gpu starting" in result.err
    run_id = the_run(home).id
    assert f"`autotune resume {run_id}` waits again" in result.err
    output = run("status", run_id, cwd=home).out
    assert "waited 5.0s for 2 nodes with 8 GPUs each: 1 came; 1 × gpu starting" in output
    (home / "nodes").write_text("2")
    assert run("resume", cwd=home, play=PLAY, env=GROWS).code == 0


def test_an_edited_job_waits_for_its_nodes_before_it_is_taken(home: Path) -> None:
    result = run("launch", "job.yaml", cwd=home, play="never_fits@10.0.0.1:6379")
    assert result.code == 1, result.err
    edited = JOB.replace("tokens_per_microbatch: 4096", "tokens_per_microbatch: 2048")
    (home / "edited.yaml").write_text(f"{edited}cluster: {{nodes: 1, wait_for_nodes: 5s}}\n")
    (home / "nodes").write_text("1")
    result = run("resume", "--job", "edited.yaml", cwd=home, play=PLAY, env=GROWS)
    assert result.code == 3 and "were not ready within 5.0s" in result.err, result.err
    assert not any(isinstance(e, Edited) for e in the_run(home).history())
    (home / "nodes").write_text("2")
    assert run("resume", "--job", "edited.yaml", cwd=home, play=PLAY, env=GROWS).code == 0


def test_a_relaunch_waits_for_a_node_that_left(home: Path) -> None:
    """The first attempt runs out of memory; meanwhile a node leaves, and it does not come back in time."""
    (home / "job.yaml").write_text(f"{JOB}cluster: {{nodes: 1, wait_for_nodes: 5s}}\n")

    def leave(child: Forked) -> None:
        end = time.monotonic() + 20
        while not list((home / "runs").glob("*/attempts/0001")):
            assert time.monotonic() < end
            time.sleep(0.01)
        (home / "nodes").write_text("1")

    result = run("launch", "job.yaml", cwd=home, play=PLAY, env=GROWS, meanwhile=leave)
    assert result.code == 3, result.err
    history = the_run(home).history()
    assert [e.attempt for e in history if isinstance(e, Started)] == [1]
    last = history[-1]
    assert isinstance(last, Finished) and isinstance(last.verdict, Infrastructure)
    assert "1 of 2 there" in last.verdict.reason
    (home / "nodes").write_text("2")
    result = run("resume", cwd=home, play=PLAY, env=GROWS)
    assert result.code == 0, result.err
    assert [e.attempt for e in the_run(home).history() if isinstance(e, Started)] == [1, 2]
