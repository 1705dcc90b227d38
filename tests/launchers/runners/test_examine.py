"""The nodes of a real cluster as `autotune doctor` sees them; one of them falls silent."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.doctor.check import Check, Examined, Status
from autotune.orchestrator.doctor.examine import examine_all
from tests.launchers.runners.attempts import wait_for

pytestmark = pytest.mark.timeout(180)

GIB = 1 << 30
JOB = """\
name: checked
framework: command
command: [python, train.py]
workdir: {workdir}
cluster: {{address: "{address}", nodes: 1, gpus_per_node: 2, gpu_memory: 79GiB}}
"""


@pytest.fixture(scope="module")
def cards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cards")


@pytest.fixture(scope="module")
def nodes(ray_home: Path, cards: Path) -> Iterator[tuple[Any, Any]]:
    """A head without cards, and a node that offers two of its three."""
    from ray._private.worker import shutdown
    from ray.cluster_utils import Cluster

    path = [str(Path(__file__).with_name("scripted")), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(path), "SCRIPTED_CARDS": str(cards)}
    cluster = Cluster()
    store = 100 << 20
    cluster.add_node(num_cpus=4, object_store_memory=store, include_dashboard=False)
    second = cluster.add_node(num_cpus=4, num_gpus=2, object_store_memory=store, env_vars=environment)
    yield cluster, second
    shutdown()
    cluster.shutdown()


def examined(nodes: tuple[Any, Any], folder: Path, *, node_s: float) -> Examined:
    text = JOB.format(workdir=folder, address=nodes[0].address)
    return examine_all(parse(text), runs_dir=folder / "runs", node_s=node_s)


def named(result: Examined, name: str) -> list[Check]:
    return [check for check in result.checks if check.name == name]


def test_every_node_is_examined(nodes: tuple[Any, Any], cards: Path, tmp_path: Path) -> None:
    (cards / "1").write_text(str(2 * GIB))
    result = examined(nodes, tmp_path, node_s=120.0)
    assert result.nodes == 2 and result.address == nodes[0].address
    assert [c.status for c in named(result, "python") + named(result, "ray")] == [Status.OK] * 4
    head, second = named(result, "gpus")
    assert head.what == "no GPUs" and head.node != second.node
    assert second.what == "3 × NVIDIA H100, 80.00 GiB each; Ray offers 2 of them"
    (held,) = named(result, "held-memory")
    assert held.node == second.node
    assert held.what == "GPU 1 already holds 2.00 GiB (no visible process holds it)"
    connected, stated, fits = named(result, "cluster")
    assert connected.what.endswith("answers, 2 nodes")
    assert stated.status is Status.WARNING and "NVML says 80.00 GiB" in stated.what
    assert fits.status is Status.OK
    assert result.code == (1 if result.count(Status.FAILED) else 0)


def test_a_node_that_does_not_answer_is_a_failed_check(nodes: tuple[Any, Any], tmp_path: Path) -> None:
    raylet = nodes[1].all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGSTOP)
    try:
        wait_for(lambda: Path(f"/proc/{raylet}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        result = examined(nodes, tmp_path, node_s=4.0)
    finally:
        os.kill(raylet, signal.SIGCONT)
    silent = named(result, "node")
    assert {check.status for check in silent} == {Status.FAILED}
    assert {check.what for check in silent} == {"did not answer within 4 s"}
    assert any(nodes[1].node_id.startswith(check.node[-7:-1]) for check in silent)
    assert result.code == 1
