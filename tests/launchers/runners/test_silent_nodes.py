"""Nodes of a real cluster that freeze, come and go while an attempt runs."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.launchers.base import Unreachable
from autotune.launchers.runners.cluster.actor import NodeActor
from autotune.launchers.runners.cluster.handle import RayHandle
from autotune.launchers.runners.cluster.runner import RayRunner
from autotune.launchers.runners.cluster.timeouts import Waits
from tests.launchers.runners.attempts import Program, Reading, carriers, wait_for

pytestmark = pytest.mark.timeout(120)

WAITS = Waits(notice=1.0, survey=(0.5, 0.5), replace=1.0, end=5.0, answer=3.0, knock=0.5)
TALK = """
    import time
    number = 0
    while True:
        number += 1
        print("line", number, "ready", flush=True)
        time.sleep(0.1)
"""
# A rank on the node with the resource that the environment names, as soon as there is one.
RANK = """
    import os, ray, time
    ray.init(log_to_driver=False)

    @ray.remote(num_cpus=0, resources={os.environ["PLACE"]: 0.1})
    class Rank:
        def hang(self):
            time.sleep(600)

    rank = Rank.remote()
    print("ready", flush=True)
    ray.get(rank.hang.remote())
"""

FAILS = RANK.replace(
    "ray.get(rank.hang.remote())",
    """while not os.path.exists(os.environ["NOW"]):
        time.sleep(0.1)
    os._exit(3)""",
)


@pytest.fixture(scope="module")
def cluster(ray_home: Path) -> Iterator[Any]:
    from ray._private.worker import shutdown
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    store = 100 << 20
    cluster.add_node(num_cpus=8, object_store_memory=store, include_dashboard=False)
    cluster.add_node(num_cpus=8, resources={"second": 1}, object_store_memory=store)
    yield cluster
    shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def runner(cluster: Any) -> Iterator[RayRunner]:
    from autotune.launchers.runners.cluster.connection import connect

    runner = RayRunner(connect(str(cluster.address)), waits=WAITS)
    yield runner
    runner.close()


class Following(Reading):
    """A reading that keeps the notes too."""

    def __init__(self, handle: RayHandle) -> None:
        super().__init__(handle)
        self.notes: list[str] = []

    def poll(self) -> Any:
        observed = super().poll()
        self.notes += observed.notes
        return observed

    def noted(self, text: str) -> None:
        wait_for(lambda: (self.poll(), any(text in note for note in self.notes))[1])


def pid_of(handle: RayHandle, node: str) -> int:
    import ray

    return int(ray.get(handle._readers[node].actor.__ray_call__.remote(lambda _: os.getpid())))


def other_node(handle: RayHandle) -> str:
    (node,) = (node for node in handle._readers if node != handle._head)
    return node


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def lines(reading: Reading) -> int:
    return reading.logs[""].count("\n")


def test_a_frozen_sampler_silences_nobody_else_and_is_reported(runner, program: Program, run):
    handle = runner.start(program(TALK), run=run, attempt=1, python=None)
    reading = Following(handle)
    reading.until("ready")
    with frozen(pid_of(handle, other_node(handle))):
        reading.noted("has not answered for")
        before = lines(reading)
        wait_for(lambda: (reading.poll(), lines(reading) >= before + 20)[1])
        assert reading.poll().silent_s == 0.0
        assert not reading.lost
    reading.noted("answers again after")
    assert [note.split(" has ")[0].split(" answers ")[0] for note in reading.notes] == [
        f"node {handle._readers[handle._head].name}"
    ] * 2
    handle.stop(grace_s=1)
    assert handle.drain(timeout_s=10).clear
    handle.release()


def test_an_attempt_outlives_the_silence_of_its_supervisor(runner, program: Program, run):
    handle = runner.start(program(TALK), run=run, attempt=1, python=None)
    reading = Following(handle)
    reading.until("ready")
    with frozen(pid_of(handle, handle._head)):
        reading.noted("training goes on, waiting up to 900 s")
        assert reading.poll().silent_s >= 1.0
        assert not reading.lost
    reading.noted("answers again after")
    before = lines(reading)
    wait_for(lambda: (reading.poll(), lines(reading) >= before + 5)[1])
    numbers = [int(line.split()[1]) for line in reading.logs[""].splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))  # nothing twice, nothing missing
    handle.stop(grace_s=1)
    assert reading.to_end().signal == signal.SIGTERM
    handle.release()


def test_stop_ends_the_processes_of_a_node_whose_actor_is_frozen(runner, program: Program, run):
    handle = runner.start(program(RANK, env={"PLACE": "second"}), run=run, attempt=1, python=None)
    reading = Following(handle)
    reading.until("ready")
    wait_for(lambda: len(carriers(f"{run}/1")) >= 3)  # shim, program, rank
    wait_for(lambda: (reading.poll(), handle._readers[other_node(handle)].used)[1])
    with frozen(pid_of(handle, other_node(handle))):
        assert handle.stop(grace_s=1) < 60
        wait_for(lambda: not carriers(f"{run}/1"), seconds=5)
        drained = handle.drain(timeout_s=0.5)
        assert not drained.clear
        assert not drained.held
        assert "no answer from" in drained.unknown
    assert handle.drain(timeout_s=30).clear
    handle.release()
    wait_for(lambda: not any(run in name for name in handle._posts.names()))


def test_the_memory_of_a_silent_node_without_a_rank_is_not_awaited(runner, program: Program, run):
    handle = runner.start(program(TALK), run=run, attempt=1, python=None)
    reading = Following(handle)
    reading.until("ready")
    node = other_node(handle)
    with frozen(pid_of(handle, node)):
        handle._readers[node].used = False  # as on a machine of its own: these nodes share their processes
        handle.stop(grace_s=1)
        assert handle.drain(timeout_s=600).clear
    handle.release()


def test_a_supervisor_that_never_answers_again_is_lost(runner, program: Program, run):
    handle = runner.start(program(TALK), run=run, attempt=1, python=None)
    handle._waits = Waits(supervisor=2.0)
    reading = Following(handle)
    reading.until("ready")
    with frozen(pid_of(handle, handle._head)):
        wait_for(lambda: reading.poll().lost)
        assert "has not answered for" in reading.lost
        handle.stop(grace_s=1)
        assert not carriers(f"{run}/1")
        handle.release()
    wait_for(lambda: not handle._posts.names())


def test_nodes_join_and_leave(cluster, runner, program: Program, run):
    handle = runner.start(program(RANK, env={"PLACE": "late"}), run=run, attempt=1, python=None)
    reading = Following(handle)
    reading.until("ready")
    unused = cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
    reading.noted("joined the cluster")
    cluster.remove_node(unused)
    reading.noted("the attempt had nothing there")
    assert not reading.lost

    reading.notes.clear()
    before = set(handle._readers)
    used = cluster.add_node(num_cpus=1, resources={"late": 1}, object_store_memory=100 << 20)
    reading.noted("joined the cluster")
    (joined,) = set(handle._readers) - before
    wait_for(lambda: (reading.poll(), handle._readers[joined].used)[1])
    cluster.remove_node(used)
    wait_for(lambda: reading.poll().lost)
    assert "left the cluster" in reading.lost
    handle.stop(grace_s=1)
    assert not carriers(f"{run}/1")
    handle.release()


def test_a_failure_that_follows_from_a_lost_node_is_a_loss(cluster, runner, program: Program, run):
    """Its power fails: Ray calls the rank unavailable, and its tables count the node for half a minute."""
    doomed = cluster.add_node(num_cpus=1, resources={"doomed": 1}, object_store_memory=100 << 20)
    handle = runner.start(program(RANK, env={"PLACE": "doomed"}), run=run, attempt=1, python=None)
    reading = Following(handle)
    reading.until("ready")
    wait_for(lambda: (reading.poll(), handle._readers[doomed.node_id].used)[1])
    raylet = psutil.Process(doomed.all_processes["raylet"][0].process.pid)
    for victim in (raylet, *raylet.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
    wait_for(lambda: (observed := reading.poll()).lost or observed.exit)
    assert "Ray's own process there" in reading.lost or "left the cluster" in reading.lost
    handle.stop(grace_s=1)
    assert not carriers(f"{run}/1")
    handle.release()
    cluster.remove_node(doomed)


def test_a_failure_beside_a_silent_sampler_is_the_frameworks_own(runner, program: Program, run, tmp_path):
    now = tmp_path / "now"
    handle = runner.start(
        program(FAILS, env={"PLACE": "second", "NOW": str(now)}), run=run, attempt=1, python=None
    )
    reading = Following(handle)
    reading.until("ready")
    node = other_node(handle)
    wait_for(lambda: (reading.poll(), handle._readers[node].used)[1])
    with frozen(pid_of(handle, node)):
        now.touch()
        assert reading.to_end().code == 3
    handle.stop(grace_s=1)
    handle.release()


def test_a_sampler_that_died_is_replaced(runner, program: Program, run):
    handle = runner.start(program(TALK), run=run, attempt=1, python=None)
    reading = Following(handle)
    reading.until("ready")
    node = other_node(handle)
    first = pid_of(handle, node)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: (reading.poll(), handle._readers[node].deaths)[1])
    wait_for(lambda: (reading.poll(), not handle._readers[node].deaths)[1])
    assert pid_of(handle, node) != first
    assert not reading.lost
    handle.stop(grace_s=1)
    handle.release()


def test_an_actor_that_nobody_reads_expires(runner, run):
    import ray

    detached = ray.remote(NodeActor).options(num_cpus=0, lifetime="detached", name=run)
    actor = detached.remote(run=run, attempt=1, name="a", expires_s=8.0)
    ray.get(actor.begun.remote())

    def gone() -> bool:
        try:
            ray.get(actor.node_id.remote())  # which is no reading
        except ray.exceptions.RayActorError:
            return True
        return False

    wait_for(gone)


def test_an_attempt_is_followed_while_the_heads_tables_are_frozen(cluster, runner, program: Program, run):
    handle = runner.start(program(TALK), run=run, attempt=1, python=None)
    reading = Following(handle)
    reading.until("ready")
    with frozen(cluster.head_node.all_processes["gcs_server"][0].process.pid):
        reading.noted("although it takes connections")
        before = lines(reading)
        wait_for(lambda: (reading.poll(), lines(reading) >= before + 5)[1])
        assert not reading.lost
    reading.noted("the Ray cluster's head answers again")
    handle.stop(grace_s=1)
    handle.release()


def test_an_attempt_is_reached_again_when_the_head_is_back(runner, program: Program, run):
    handle = runner.start(program(TALK), run=run, attempt=1, python=None)
    reading = Following(handle)
    reading.until("ready")
    runner._link.leave("the head was away for too long")
    with pytest.raises(Unreachable, match="the Ray cluster's head does not answer"):
        handle.stop(grace_s=1)
    before = lines(reading)
    wait_for(lambda: (reading.poll(), lines(reading) >= before + 5)[1])
    numbers = [int(line.split()[1]) for line in reading.logs[""].splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))
    handle.stop(grace_s=1)
    assert reading.to_end().signal == signal.SIGTERM
    handle.release()


def test_a_slow_supervisor_is_attached_to_or_left_alone(runner, program: Program, run):
    handle = runner.start(program(TALK), run=run, attempt=1, python=None)
    Reading(handle).until("ready")
    impatient = RayRunner(runner._connection, waits=Waits(attach=0.5))
    with frozen(pid_of(handle, handle._head)):
        with pytest.raises(Unreachable, match="does not answer") as caught:
            impatient.attach(run=run, attempt=1)
        assert "its training may go on" in str(caught.value)
        assert not any(run in text for text in impatient.sweep(run=run))
    attached = impatient.attach(run=run, attempt=1)
    assert attached is not None
    reading = Reading(attached)
    reading.until("line 1 ready")
    handle.stop(grace_s=1)
    handle.release()
