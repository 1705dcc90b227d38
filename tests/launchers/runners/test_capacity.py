"""Nodes that a real cluster does not have yet: requested, counted, kept, and not requested after the end."""

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

from autotune.launchers.runners.cluster import internals
from autotune.launchers.runners.cluster.runner import RayRunner
from tests.launchers.runners.attempts import wait_for

pytestmark = pytest.mark.timeout(120)
# What a head with an autoscaler and one without write about themselves (Ray 2.60), the sizes left out.
HEAD = "f" * 51 + "00000"
GROWING = {"active_nodes": {"ray.head.default": 1}, "pending_nodes": [], "pending_launches": {}}
FIXED = {"active_nodes": {f"node_{HEAD}": 1}, "pending_nodes": [], "pending_launches": {}}
REFUSED = {
    "node_availabilities": {
        "gpu": {
            "node_type": "gpu",
            "is_available": False,
            "unavailable_node_information": {
                "category": "QuotaExceeded",
                "description": "no quota\n for H100",
            },
        }
    }
}


@pytest.mark.parametrize(
    ("report", "grows", "note"),
    [
        (GROWING, True, ""),
        (FIXED, False, ""),
        ({}, False, ""),
        ({**GROWING, "pending_launches": {"gpu": 2}}, True, "2 × gpu starting"),
        ({**GROWING, "pending_nodes": [["10.0.0.7", "gpu", "waiting-for-ssh"]]}, True, "1 × gpu starting"),
        (
            {**GROWING, "node_availability_summary": REFUSED},
            True,
            "gpu could not be started: no quota for H100",
        ),
    ],
)
def test_what_an_autoscaler_reports(report: dict[str, object], grows: bool, note: str) -> None:
    assert internals.growth_of_first({"autoscaler_report": report}) == (grows, note)


def test_what_the_second_autoscaler_reports() -> None:
    from ray.autoscaler.v2.schema import ClusterStatus, LaunchRequest, NodeInfo

    def head(instance: str) -> NodeInfo:
        return NodeInfo(
            instance_type_name="", ray_node_type_name="", instance_id=instance, ip_address="10.0.0.1"
        )

    def launch(state: str, **more: object) -> LaunchRequest:
        status = LaunchRequest.Status(state)
        return LaunchRequest("p5", "gpu", 2, status, request_ts_s=1, **more)  # type: ignore[arg-type]

    assert internals.growth_of_second(ClusterStatus(idle_nodes=[head("")])) == (False, "")
    assert internals.growth_of_second(ClusterStatus(active_nodes=[head("i-1")])) == (True, "")
    asked = ClusterStatus(idle_nodes=[head("i-1")], pending_launches=[launch("PENDING")])
    assert internals.growth_of_second(asked) == (True, "2 × gpu starting")
    refused = ClusterStatus(idle_nodes=[head("i-1")], failed_launches=[launch("FAILED", details="no quota")])
    assert internals.growth_of_second(refused) == (True, "gpu could not be started: no quota")


def test_a_cluster_without_an_autoscaler_says_so(runner: RayRunner) -> None:
    wait_for(lambda: internals.growth().grows is not None, seconds=30)
    assert internals.growth() == (False, "")
    assert runner.capacity(gpus=1, joining=False) is None


@pytest.fixture(scope="module")
def runner(ray_address: str) -> Iterator[RayRunner]:
    runner = RayRunner.open(ray_address, nodes=2)
    yield runner
    runner.close()


def pending() -> list[str]:
    return [row.name for row in internals.group_rows() if not row.removed]


def test_nodes_that_may_join_are_requested_and_counted(runner: RayRunner) -> None:
    """One of the two nodes has GPUs."""
    capacity = runner.capacity(gpus=1, joining=True)
    assert capacity is not None
    assert (capacity.ready, capacity.nodes, capacity.wanted) == (False, 1, 2)
    assert pending() == ["autotune: nodes"]
    runner.capacity(gpus=1, joining=True)
    assert pending() == ["autotune: nodes"], "one request, however often it is looked at"
    runner.withdraw()
    wait_for(lambda: not pending(), seconds=10)


def test_nodes_that_are_there_are_kept_and_their_resources_are_free(runner: RayRunner) -> None:
    import ray

    result = []
    wait_for(lambda: result.append(runner.capacity(gpus=0, joining=True)) or result[-1].ready, seconds=30)
    wait_for(lambda: not pending(), seconds=10)
    wait_for(lambda: ray.available_resources()["CPU"] == ray.cluster_resources()["CPU"], seconds=10)
    assert len(runner._request._keepers) == 2


def test_a_killed_driver_leaves_no_request(ray_address: str, runner: RayRunner) -> None:
    source = f"""
        from autotune.launchers.runners.cluster.runner import RayRunner
        import json, time
        runner = RayRunner.open({ray_address!r}, nodes=3)
        capacity = runner.capacity(gpus=1, joining=True)
        print(json.dumps(capacity.nodes), flush=True)
        time.sleep(600)
    """
    driver = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE)
    assert driver.stdout is not None
    assert json.loads(driver.stdout.readline()) == 1
    assert pending() == ["autotune: nodes"]
    driver.kill()
    driver.wait()
    wait_for(lambda: not pending(), seconds=30)
