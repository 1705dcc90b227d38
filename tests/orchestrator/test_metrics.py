"""A run as Prometheus metrics: what each row of the journal makes of them, and on a real Ray cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from autotune.orchestrator import metrics
from autotune.orchestrator.metrics import Metrics
from autotune.orchestrator.run import directory
from autotune.orchestrator.run_states import METRIC_STATES
from autotune.policies.values.events import (
    Accepted,
    Decided,
    Ended,
    Finished,
    GaveUp,
    GoalReached,
    Interrupted,
    Progressed,
    Started,
)
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Crashed, Peak
from autotune.policies.values.profile import Profile
from autotune.policies.values.rehearsing import Part
from tests.orchestrator.cli.terminal import ROOT, run
from tests.orchestrator.scripted import JOB

PEAKS = {"backward": Peak(used_bytes=60, capacity_bytes=80), "rollout": Peak(used_bytes=8, capacity_bytes=0)}


def accepted(address: str) -> Accepted:
    cluster = Cluster(
        address=address, nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=1 << 30
    )
    profile = Profile(framework="builtin", knobs=Knobs(), supported={})
    return Accepted(run="7c1e", job=Job(name="j", framework="builtin"), profile=profile, cluster=cluster)


class Exported:
    """Stands for a cluster: the last value of every series."""

    def __init__(self, *, common: dict[str, str]) -> None:
        self.common = common
        self.values: dict[str, float] = {}

    def export(self, name: str, value: float, *, description: str, **tags: str) -> None:
        assert description.endswith(".")
        self.values[" ".join((name, *tags.values()))] = value


@pytest.fixture
def run_metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    monkeypatch.setattr(metrics, "ClusterMetrics", Exported)
    return Metrics()


def values(run_metrics: Metrics) -> dict[str, float]:
    cluster: Any = run_metrics._cluster
    assert isinstance(cluster, Exported)
    return cluster.values


def state(run_metrics: Metrics) -> list[str]:
    name = "autotune_state "
    return [key.removeprefix(name) for key, on in values(run_metrics).items() if key.startswith(name) and on]


def test_the_figures_follow_the_journal(run_metrics: Metrics) -> None:
    start = Started(attempt=1, knobs=Knobs())
    steps = (
        (accepted("10.0.0.1:6379"), "starting"),
        (start, "starting"),
        (Progressed(attempt=1, step=1, peaks=PEAKS), "running"),
        (Ended(attempt=1, outcome=Crashed(exit_code=1)), "recovering"),
        (Decided(attempt=1, reason="x"), "recovering"),
        (replace(start, attempt=2), "recovering"),
        (Progressed(attempt=2, step=2), "running"),
        (GoalReached(attempt=2, step=2, marginal=False, headroom=0.25), "stable"),
        (Progressed(attempt=2, step=3), "stable"),
        (replace(start, attempt=3, trial=0), "searching"),
        (Ended(attempt=3, outcome=Crashed(exit_code=1)), "searching"),
        (Finished(verdict=GaveUp(reason="x")), "gave_up"),
        (Decided(reason="resumed by the user"), "recovering"),
        (Finished(verdict=Interrupted(by="user")), "stopped"),
    )
    for event, expected in steps:
        run_metrics.take(event)
        run_metrics.settle()
        assert state(run_metrics) == [expected], event
    result = values(run_metrics)
    assert (result["autotune_attempts"], result["autotune_relaunches"], result["autotune_step"]) == (3, 1, 3)
    assert result["autotune_headroom_ratio backward"] == 0.25
    assert "autotune_headroom_ratio rollout" not in result, "its capacity is not known"
    assert len([name for name in result if name.startswith("autotune_state")]) == len(METRIC_STATES)


def test_a_rehearsal_is_before_the_training(run_metrics: Metrics) -> None:
    run_metrics.take(accepted("10.0.0.1:6379"))
    for number in (1, 2):
        run_metrics.take(Started(attempt=number, knobs=Knobs(), rehearsal=Part.WORST))
        run_metrics.take(Progressed(attempt=number, step=1, peaks=PEAKS))
        run_metrics.settle()
        run_metrics.take(Ended(attempt=number, outcome=Crashed(exit_code=1)))
        run_metrics.take(Decided(attempt=number, reason="x"))
        assert state(run_metrics) == ["starting"]
    assert "autotune_step" not in values(run_metrics)
    run_metrics.take(Started(attempt=3, knobs=Knobs()))
    result = values(run_metrics)
    assert (result["autotune_attempts"], result["autotune_relaunches"]) == (3, 0)
    run_metrics.take(Progressed(attempt=3, step=1))
    run_metrics.settle()
    assert state(run_metrics) == ["running"]


def test_steps_are_exported_together(run_metrics: Metrics) -> None:
    for event in (accepted("10.0.0.1:6379"), Started(attempt=1, knobs=Knobs())):
        run_metrics.take(event)
    for number in (1, 2, 3):
        run_metrics.take(Progressed(attempt=1, step=number))
        assert "autotune_step" not in values(run_metrics)
    run_metrics.settle()
    assert values(run_metrics)["autotune_step"] == 3
    values(run_metrics).clear()
    run_metrics.settle()
    assert not values(run_metrics)
    run_metrics.take(Progressed(attempt=1, step=4))
    run_metrics.take(Ended(attempt=1, outcome=Crashed(exit_code=1)))
    assert values(run_metrics)["autotune_step"] == 4


def test_the_page_names_every_figure_and_state(run_metrics: Metrics) -> None:
    for event in (accepted("10.0.0.1:6379"), Progressed(attempt=1, step=1, peaks=PEAKS)):
        run_metrics.take(event)
    run_metrics.settle()
    page = (ROOT / "docs" / "operations.md").read_text()
    named = set(re.findall(r"`ray_(autotune_\w+)`", page))
    assert named == {name.split()[0] for name in values(run_metrics)}
    (states,) = re.findall(r"tag `state`: ([a-z_, ]+) \|", page)
    assert states.split(", ") == list(METRIC_STATES)


def test_our_own_ray_gets_no_metrics_and_a_history_is_only_noted(run_metrics: Metrics) -> None:
    run_metrics.take(accepted("local"))
    assert run_metrics._cluster is None
    run_metrics.note(accepted("10.0.0.1:6379"))
    run_metrics.note(Started(attempt=1, knobs=Knobs()))
    assert values(run_metrics) == {}
    run_metrics.take(Started(attempt=2, knobs=Knobs()))
    assert values(run_metrics)["autotune_attempts"] == 2


def test_without_a_cluster_nothing_is_exported_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    result = run("launch", "job.yaml", cwd=tmp_path, play="elsewhere")
    assert result.code == 0 and "metrics" not in result.err
    assert directory.runs(tmp_path / "runs")[0].history()[0].cluster.address == "10.0.0.1:6379"  # type: ignore[union-attr]


_REAL = """
import json, sys, time, urllib.request
import ray
from tests.orchestrator.test_metrics import PEAKS, accepted
from autotune.orchestrator.metrics import Metrics
from autotune.policies.values.events import Progressed, Started
from autotune.policies.values.knobs import Knobs

ray.init(num_cpus=1, include_dashboard=False, _metrics_export_port=int(sys.argv[1]), logging_level="ERROR")
try:
    metrics = Metrics()
    for event in (accepted("10.0.0.1:6379"), Started(attempt=1, knobs=Knobs()),
                  Progressed(attempt=1, step=7, peaks=PEAKS)):
        metrics.take(event)
    metrics.settle()
    until, lines, url = time.monotonic() + 90, [], f"http://127.0.0.1:{sys.argv[1]}/metrics"
    while time.monotonic() < until and not lines:
        time.sleep(0.5)
        try:
            text = urllib.request.urlopen(url, timeout=5).read().decode()
        except OSError:
            continue
        lines = [line for line in text.splitlines() if line.startswith("ray_autotune_")]
    print(json.dumps(lines))
finally:
    ray.shutdown()
"""


@pytest.mark.e2e
def test_a_real_cluster_exports_them(tmp_path: Path, unused_port: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _REAL, str(unused_port)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        cwd=ROOT,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
    )
    lines = json.loads(done.stdout.splitlines()[-1])

    def value(*parts: str) -> float:
        (line,) = (each for each in lines if all(part in each for part in parts))
        return float(line.rpartition(" ")[2])

    assert value("ray_autotune_attempts{", 'run="7c1e"', 'job="j"', 'framework="builtin"') == 1
    assert value("ray_autotune_step{") == 7
    assert value("ray_autotune_headroom_ratio{", 'phase="backward"') == 0.25
    assert value("ray_autotune_state{", 'state="running"') == 1
    assert value("ray_autotune_state{", 'state="failed"') == 0


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
