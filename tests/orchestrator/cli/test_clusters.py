"""Which cluster a run goes on with."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.launchers.runners.cluster.runner import RayRunner
from autotune.orchestrator.cli.shared import connect
from autotune.orchestrator.config.cards import find_card
from autotune.orchestrator.report import evidence
from autotune.policies.values.events import Edited, Ended, Started
from autotune.policies.values.history import accepted_of
from autotune.policies.values.job import Cluster, ClusterSpec, Job
from autotune.policies.values.run.view import RunView
from tests.orchestrator.cli.fork_server import Forked
from tests.orchestrator.cli.terminal import run
from tests.orchestrator.cli.test_troubles import the_run, until
from tests.orchestrator.scripted import JOB

FIRST, SECOND = "forever@10.0.0.1:6379+80", "forever@10.0.0.2:6379+141"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def answering() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def opened(stated: str | None, before: str | None, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Return the address that is opened for a job with `address: stated`, whose run was at `before`."""
    asked: list[str | None] = []
    monkeypatch.setattr(RayRunner, "open", lambda address, **_: asked.append(address))
    job = Job(name="x", framework="builtin", cluster=ClusterSpec(address=stated))
    known = Cluster(address=before or "", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=1)
    connect.open_runner(job, before=None if before is None else known)
    return asked[0]


@pytest.mark.parametrize("stated", [None, "auto"])
def test_a_run_goes_on_with_its_own_cluster_while_that_answers(
    stated: str | None, answering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert opened(stated, answering, monkeypatch) == answering
    assert opened(stated, "127.0.0.1:1", monkeypatch) == "auto"
    assert opened("10.0.0.3:6379", answering, monkeypatch) == "10.0.0.3:6379"
    assert opened(stated, None, monkeypatch) == stated


def test_a_run_of_our_own_ray_goes_on_with_one_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert opened(None, "local", monkeypatch) == "local"


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ("local", "starting Ray on this machine ..."),
        (None, "looking for a Ray cluster ..."),
        ("auto", "looking for a Ray cluster ..."),
        ("10.0.0.1:6379", "connecting to the Ray cluster at 10.0.0.1:6379 ..."),
    ],
)
def test_what_is_waited_for_is_shown_before_ray_is_asked(
    stated: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output: list[str] = []
    before: list[str] = []
    monkeypatch.setattr(RayRunner, "open", lambda **_: before.extend(output))
    job = Job(name="x", framework="builtin", cluster=ClusterSpec(address=stated))
    connect.open_runner(job, say=output.append)
    assert before == [words]


def left_running(home: Path) -> None:
    def kill(child: Forked) -> None:
        until(home, "progressed")
        child.kill()

    assert run("launch", "job.yaml", cwd=home, play=FIRST, meanwhile=kill).code == -signal.SIGKILL


def test_another_cluster_is_told_measured_and_kept(home: Path) -> None:
    left_running(home)
    assert accepted_of(the_run(home).history()).job.cluster.gpu_memory_bytes == 80 << 30
    result = run("resume", cwd=home, play="tight_memory@10.0.0.2:6379+141")
    assert result.code == 0, result.err
    assert (
        "the run was on the Ray cluster at 10.0.0.1:6379; it continues on the one at 10.0.0.2:6379: "
        "1 × GPU (141.00 GiB)"
    ) in result.err
    history = the_run(home).history()
    now = accepted_of(history)
    assert (now.cluster.address, now.job.cluster.gpu_memory_bytes) == ("10.0.0.2:6379", 141 << 30)
    (moved,) = (e for e in history if isinstance(e, Edited))
    assert (moved.knobs, moved.forgets, moved.file) == (False, False, "")
    assert next(e.attempt for e in history if isinstance(e, Ended)) == 1
    assert not [
        fact
        for fact in evidence._turned(RunView(history), accepted_of(history).profile)
        if fact.name == "edited by the user"
    ]
    (reported,) = json.loads(run("status", now.run, "--json", cwd=home).out)["edits"]
    assert reported == 'cluster.address "10.0.0.1:6379" → "10.0.0.2:6379"'


def test_the_memory_of_gpus_that_cannot_be_measured_is_as_stated(home: Path) -> None:
    (home / "job.yaml").write_text(JOB + "cluster: {gpus_per_node: 1, gpu: MI300X}\n")
    assert run("launch", "job.yaml", cwd=home, play="tight_memory@10.0.0.1:6379+0").code == 0
    cluster = accepted_of(the_run(home).history()).cluster
    assert (cluster.gpus_per_node, cluster.gpu_memory_bytes) == (1, find_card("MI300X").memory_bytes)


def test_the_same_cluster_is_not_told(home: Path) -> None:
    left_running(home)
    result = run("resume", cwd=home, play="tight_memory@10.0.0.1:6379+80")
    assert result.code == 0 and "Ray cluster at" not in result.err
    assert not any(isinstance(e, Edited) for e in the_run(home).history())


def test_a_run_whose_cluster_is_not_reached_is_not_stopped(home: Path) -> None:
    left_running(home)
    before = the_run(home).history()
    result = run("stop", cwd=home, play="unreachable")
    assert result.code == 3 and "is stopped" not in result.err
    assert (
        "cannot reach Ray at gpu-01:6379" in result.err
        and f"then run `autotune stop {before[0].run}`" in result.err
    )
    assert the_run(home).history() == before
    assert run("stop", cwd=home, play=FIRST).code == 0
    assert "was already stopped" in run("stop", cwd=home, play="unreachable").err


def test_nothing_is_stopped_from_another_cluster(home: Path) -> None:
    left_running(home)
    before = the_run(home).history()
    result = run("stop", cwd=home, play=SECOND)
    assert result.code == 3 and "is stopped" not in result.err
    assert "10.0.0.1:6379, could not be reached; its processes may still be running" in result.err
    assert the_run(home).history() == before
    assert run("stop", cwd=home, play=FIRST).code == 0
    assert len([e for e in the_run(home).history() if isinstance(e, Started)]) == 1
    assert run("stop", cwd=home, play=SECOND).code == 0  # nothing is left that could run
