"""A real cluster whose nodes an autoscaler starts and ends: from zero, between attempts, after the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_driver import RAY, Head, until
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
IDLE_S = 8  # after which the autoscaler ends a node; the pause before a relaunch is longer
TRAIN = """
import os, time
for step in range(1, 4):
    print(f"step: {step}/3 loss=0.5", flush=True)
    time.sleep(0.5)
"""
# The first attempt trains until its other node is gone.
WAITS = TRAIN + "\nif os.environ['AUTOTUNE_ATTEMPT'].endswith('/1'):\n    time.sleep(600)\n"


def job(port: int, folder: Path, *, nodes: int = 2, more: str = "") -> str:
    return f"""\
name: grows
framework: command
command: ["{sys.executable}", "{folder}/train.py"]
cluster: {{address: "127.0.0.1:{port}", nodes: {nodes}, gpus_per_node: 1{more}}}
goal: {{steps: 2}}
"""


def config(port: int) -> dict[str, object]:
    """Return the configuration of a cluster that starts up to two nodes with a GPU, and ends idle ones."""
    worker = {"CPU": 2, "GPU": 1, "object_store_memory": 80 << 20}
    lists = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "growing",
        "max_workers": 2,
        "idle_timeout_minutes": IDLE_S / 60,
        "upscaling_speed": 1.0,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": f"127.0.0.1:{port}",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "foreground_node_launch": True,
        },
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "rsync_exclude": [],
        "rsync_filter": [],
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "gpu": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": 2},
        },
        **{f"{name}_commands": [] for name in lists},
    }


class Growing(Head):
    """A head without GPUs, and its autoscaler, whose nodes are processes with one scripted card each."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        super().__init__(folder, self.port, free_port())
        (folder / "config.json").write_text(json.dumps(config(self.port)))
        (folder / "cards").mkdir()
        paths = (str(ROOT / "tests/faults/scripted"), str(ROOT), os.environ.get("PYTHONPATH", ""))
        self.env |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "SCRIPTED_CARDS": str(folder / "cards"),
            "RAY_TMPDIR": str(folder),
            "RAY_AUTH_MODE": "disabled",
            "RAY_FAKE_CLUSTER": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "10",
        }
        options = {
            "port": self.port,
            "temp-dir": folder / "ray",
            "autoscaling-config": folder / "config.json",
            "num-cpus": 0,
            "object-store-memory": 80 << 20,
            "ray-client-server-port": free_port(),
            "include-dashboard": "false",
        }
        start = [RAY, "start", "--head", "--node-ip-address=127.0.0.1", "--disable-usage-stats"]
        start += [f"--{name}={value}" for name, value in options.items()]
        subprocess.run(start, env=self.env, cwd=folder, check=True, stdout=subprocess.DEVNULL)

    def raylets(self) -> dict[int, str]:
        """Return the processes of the nodes that the autoscaler started, with their command lines."""
        result = {}
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or ())
            if "/raylet " in line and f":{self.port} " in line and "--head" not in line:
                result[process.pid] = line
        return result

    def close(self) -> None:
        """End every process of the cluster."""
        for hard in (False, True):
            for process in psutil.process_iter(["cmdline"]):
                line = " ".join(process.info["cmdline"] or ())
                if process.pid != os.getpid() and (str(self.folder) in line or f":{self.port}" in line):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        (process.kill if hard else process.terminate)()
            time.sleep(2.0)


@pytest.fixture
def growing() -> Iterator[Growing]:
    folder = Path(tempfile.mkdtemp(prefix="atg-", dir="/tmp"))
    head = Growing(folder)
    try:
        yield head
    finally:
        head.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_nodes_are_started_kept_between_attempts_replaced_and_given_back(growing: Growing) -> None:
    head_alone = len(growing.raylets())
    (growing.folder / "train.py").write_text(WAITS)
    (growing.folder / "job.yaml").write_text(job(growing.port, growing.folder))
    with (growing.folder / "err.txt").open("wb") as err:
        driver = subprocess.Popen(
            [sys.executable, "-m", "autotune.orchestrator.cli", "launch", "job.yaml"],
            cwd=growing.folder,
            env=growing.env,
            stderr=err,
            stdout=subprocess.DEVNULL,
        )
    until(lambda: 3 in growing.steps(), "the first attempt makes no steps on nodes that were started")
    accepted = growing.events()[0]["cluster"]
    assert isinstance(accepted, dict)
    assert (accepted["nodes"], accepted["gpus_per_node"]) == (2, 1)
    assert accepted["gpu_memory_bytes"] == 80 << 30  # measured once they were there
    assert not head_alone and len(growing.raylets()) == 2
    survivor, taken = sorted(growing.raylets())
    os.kill(taken, signal.SIGKILL)  # the machine of a spot instance is taken away

    def starts() -> int:
        return sum(event["type"] == "started" for event in growing.events())

    until(lambda: starts() == 2, "no second attempt")
    # The pause before it is longer than the time after which the autoscaler ends an idle node.
    assert survivor in growing.raylets(), "the node that was left ended between the attempts"
    assert driver.wait(180) == 0, (growing.folder / "err.txt").read_text()
    events = growing.events()
    assert [e["attempt"] for e in events if e["type"] == "started"] == [1, 2]
    (lost,) = (e for e in events if e["type"] == "ended" and e["attempt"] == 1)
    assert "left the cluster" in str(lost["outcome"]), lost
    output = (growing.folder / "err.txt").read_text()
    assert "waiting for 2 nodes with 1 GPU each: 1 of 2 there" in output
    until(lambda: len(growing.raylets()) == head_alone, "nodes stay although nothing needs them", 90)


def test_nodes_that_cannot_come_end_the_launch_and_are_not_requested_any_more(growing: Growing) -> None:
    head_alone = len(growing.raylets())
    (growing.folder / "train.py").write_text(TRAIN)
    (growing.folder / "job.yaml").write_text(
        job(growing.port, growing.folder, nodes=3, more=", wait_for_nodes: 15s")
    )
    done = growing.autotune("launch", "job.yaml")
    assert done.returncode == 3, done.stderr
    assert "3 nodes with 1 GPU each were not ready within 15s" in done.stderr
    until(lambda: len(growing.raylets()) == head_alone, "a request is left", 90)
