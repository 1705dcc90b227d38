"""Nodes that freeze, leave and join, and the cluster's head."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from tests.faults.bench import Bench, Unmet, frozen
from tests.faults.cluster import has_process_tables
from tests.faults.program import SAVE_EVERY
from tests.faults.scenario import Scenario

_SINCE_CHECKPOINT = SAVE_EVERY - 1
_MOMENT_S = 2.0  # the fault comes within so long after the first steps


def _trains(bench: Bench, random: Random) -> None:
    """Wait until the job trains, and for a moment that the seed chooses."""
    bench.training(3)
    time.sleep(random.uniform(0.0, _MOMENT_S))


def _supervisor_frozen(seconds: float) -> Callable[[Bench, Random], int]:
    def play(bench: Bench, random: Random) -> int:
        nodes, driver = bench.launched(1)
        _trains(bench, random)
        supervisor = nodes.actors(1)
        if not supervisor:
            raise Unmet("the harness finds no supervisor")
        bench.fault()
        with frozen(supervisor):
            time.sleep(max(seconds * bench.scale, 3.0))
        bench.training(3)
        code = bench.finish(driver)
        bench.notice(r"supervisor|not answer|silent|lost")
        return code

    return play


def _sampler_frozen(bench: Bench, random: Random) -> int:
    nodes, driver = bench.launched(2)
    _trains(bench, random)
    bench.fault()
    with frozen(nodes.actors(2)):
        bench.training(10)  # while the other node is silent
        time.sleep(max(70.0 * bench.scale, 3.0))
        bench.training(10)
    bench.training(3)
    code = bench.finish(driver)
    bench.notice(r"not answer|silent|node|sampler")
    return code


def _sampler_frozen_oom(bench: Bench, random: Random) -> int:
    nodes, driver = bench.launched(2)
    _trains(bench, random)
    bench.training(SAVE_EVERY)
    with frozen(nodes.actors(2)):
        bench.order("oom")
        bench.fault()
        bench.until(lambda: len(bench.starts()) == 2, "no relaunch beside a frozen node", within_s=120)
        bench.training(3)
    bench.notice(r"oom|memory")
    return bench.finish(driver)


def _worker_node_lost(bench: Bench, random: Random) -> int:
    nodes, driver = bench.launched(4, words=("--ranks", "2"))
    _trains(bench, random)
    bench.fault()
    nodes.lose(random.choice((2, 3)))
    bench.until(lambda: len(bench.starts()) == 2, "no relaunch", within_s=CONCLUSION_S)
    bench.training(3)
    bench.notice(r"lost|died|left|node")
    return bench.finish(driver)


def _unused_node_lost(bench: Bench, random: Random) -> int:
    if not has_process_tables():
        raise Unmet("the harness may not make this fault here: a node needs a process table of its own")
    nodes, driver = bench.launched(3)
    _trains(bench, random)
    bench.fault()
    nodes.lose(random.choice((2, 3)))
    bench.until(lambda: "left the cluster; the attempt had nothing there" in driver.story, "nothing says so")
    bench.training(20)
    code = bench.finish(driver)
    bench.notice(r"left the cluster")
    return code


def _unused_node_frozen(bench: Bench, random: Random) -> int:
    nodes, driver = bench.launched(2)
    _trains(bench, random)
    bench.fault()
    nodes.freeze(2)
    bench.training(10)
    time.sleep(45.0)  # Ray itself gives a node up after about half a minute
    nodes.thaw(2)
    bench.training(10)
    code = bench.finish(driver)
    bench.notice(r"left the cluster|lost|node|silent|not answer")
    return code


def _node_joins(bench: Bench, random: Random) -> int:
    nodes, driver = bench.launched(1)
    _trains(bench, random)
    bench.fault()
    number = nodes.add()
    bench.order("rank")
    log = bench.run / "attempts" / "0001" / "run.log"
    marker = f"a rank is on node {number}".encode()
    bench.until(
        lambda: marker in log.read_bytes(),
        f"nothing of node {number}, which joined, is in the log",
        within_s=45,
    )
    bench.until(lambda: len(nodes.actors(number)) == 1, "the new node has no sampler", within_s=30)
    code = bench.finish(driver)
    bench.notice(r"node|joined")
    return code


def _gcs_restarted(bench: Bench, random: Random) -> int:
    nodes, driver = bench.launched(2, durable=True)
    _trains(bench, random)
    bench.fault()
    nodes.restart_gcs(down_s=random.uniform(1.0, 10.0))
    bench.training(20)
    time.sleep(10.0)
    bench.training(3)
    code = bench.finish(driver)
    bench.notice(r"head|cluster|not answer|lost")
    return code


def _head_lost(bench: Bench, random: Random) -> int:
    nodes, driver = bench.launched(2)
    _trains(bench, random)
    bench.fault()
    nodes.lose(1)
    driver.ended(180)
    bench.notice(r"head|cluster|not answer")
    if bench.noticed_s is None:
        raise Unmet(f"nothing says that the head is gone: {driver.last_words}")
    nodes.close()
    bench.nodes(2, port=nodes.port)
    second = bench.resume()
    bench.training(3)
    return bench.finish(second)


CONCLUSION_S = 150.0
_RANKS = "its ranks ran there"
SCENARIOS = (
    *(
        Scenario(
            name=f"supervisor-frozen-{seconds}",
            fault=f"the supervisor does not answer for {seconds} s; the job trains on",
            play=_supervisor_frozen(seconds),
            how="SIGSTOP to its actor",
            ci=seconds == 90,
        )
        for seconds in (30, 90, 300)
    ),
    Scenario(
        name="sampler-frozen",
        fault="the sampler of a node without a rank does not answer for 70 s",
        play=_sampler_frozen,
        how="SIGSTOP to its actor",
    ),
    Scenario(
        name="sampler-frozen-oom",
        fault="the same, and the job runs out of memory meanwhile",
        play=_sampler_frozen_oom,
        attempts=2,
        repeated=_SINCE_CHECKPOINT,
        why="an out-of-memory failure needs another configuration",
        how="SIGSTOP to its actor",
    ),
    Scenario(
        name="worker-node-lost",
        fault="a node with a rank of the job loses its power",
        play=_worker_node_lost,
        attempts=2,
        repeated=_SINCE_CHECKPOINT,
        why=_RANKS,
        how="SIGKILL to everything on it",
    ),
    Scenario(
        name="unused-node-lost",
        fault="a node that the job does not use loses its power",
        play=_unused_node_lost,
        how="SIGKILL to everything on it",
    ),
    Scenario(
        name="unused-node-frozen",
        fault="a node that the job does not use hangs for 45 s and comes back",
        play=_unused_node_frozen,
        how="SIGSTOP to everything on it",
    ),
    Scenario(
        name="node-joins",
        fault="a node joins and the job puts a rank on it",
        play=_node_joins,
        ci=True,
    ),
    Scenario(
        name="gcs-restarted",
        fault="the head's GCS, which keeps its state on disk, is down for up to 10 s",
        play=_gcs_restarted,
        how="SIGKILL, then started again",
    ),
    Scenario(
        name="head-lost",
        fault="the head loses its power; a new cluster, then `resume`",
        play=_head_lost,
        attempts=2,
        repeated=_SINCE_CHECKPOINT,
        why="the job's own processes ran there",
        how="SIGKILL to everything on it",
    ),
)
