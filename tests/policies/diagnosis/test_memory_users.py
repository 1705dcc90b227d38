"""Who held a node's memory, as Ray, the kernel, systemd-oomd and Kubernetes print it."""

from __future__ import annotations

import pytest

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.memory_users import largest
from autotune.policies.diagnosis.scan import scan
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause, Component, Phase

GIB = 1 << 30
RAY = (
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    "Memory on the node (IP: 10.0.0.1, ID: ab) where the task (actor ID: cd, name=xWorkerDict_0:5:WorkerDict"
    ".__init__, pid=31, memory used=2.00GB) was running was 240.00GB / 251.50GB (0.954), which exceeds the "
    "memory usage threshold of 0.95. Top 10 memory users:\n"
)
OOMD = (
    "Killed /user.slice/docker-ab.scope due to memory used (64424509440) / total (67108864000) and swap used "
    "(0) / total (0) being more than 90.00%"
)
EVICTED = "Threshold quantity: 100Mi, available: 41Mi. Container main was using 120Gi, request is 0."
KERNEL = """\
[856340.1] python3 invoked oom-killer: gfp_mask=0x1100cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0
[856340.2] Tasks state (memory values in pages):
[856340.2] [  pid  ]   uid  tgid total_vm      rss{columns} pgtables_bytes swapents oom_score_adj name
[856340.2] [    717]     0   717     5633      431{zeros}        81920      384             0 sshd
[856340.2] [ 410126]  1000 410126 19976250  5242880{zeros}  102400  256  0 pt_data_worker
[856340.2] [ 410127]  1000 410127 19976250  5242880{zeros}  102400  256  0 pt_data_worker
[856340.2] [ 410120]  1000 410120 19976250  1310720{zeros}  102400  256  0 python3
[856341.7] Out of memory: Killed process 410126 (pt_data_worker) total-vm:79905000kB, anon-rss:20971520kB, \
file-rss:0kB, shmem-rss:0kB, UID:0
"""


def explained(text: str) -> Diagnosis:
    diagnosis = diagnose(scan([text.encode()]))
    assert diagnosis.cause is Cause.HOST_OOM
    return diagnosis


SMALL = "2.00\tray::WorkerDict.actor_rollout_update_actor"


@pytest.mark.parametrize("prefix", ["", "(raylet) ", "(TaskRunner pid=7) "])
@pytest.mark.parametrize(
    ("users", "component", "phase", "held", "count"),
    [
        (["229.50\tray::TaskRunner.run", SMALL], "driver", "none", 229.5, 1),
        (["60.50\tray::WorkerDict.actor_compute_log_prob"] * 3 + [SMALL], "trainer", "log_prob", 181.5, 3),
        (["80.00\tVLLM::EngineCore_DP0", "80.00\tVLLM::EngineCore_DP1", SMALL], "rollout", "none", 160, 2),
        (["90.00\tpt_data_worker", "90.00\tpt_data_worker"], "data", "data", 180, 2),
    ],
)
@pytest.mark.parametrize("between", ["\n", ", "])
def test_the_largest_group_of_rays_table_names_component_and_phase(
    prefix: str, users: list[str], component: str, phase: str, held: float, count: int, between: str
) -> None:
    table = between.join(["PID\tMEM(GB)\tCOMMAND", *(f"{100 + at}\t{row}" for at, row in enumerate(users))])
    explanation = explained("\n".join(prefix + line for line in (RAY + table).split("\n")))
    group = largest(explanation.facts)
    assert group is not None
    assert (group.held_bytes, group.count) == (held * GIB, count)
    assert (explanation.component.value, explanation.phase.value) == (component, phase)


@pytest.mark.parametrize(("columns", "zeros"), [("", ""), (" rss_anon rss_file rss_shmem", " 1 2 0")])
def test_the_kernels_table_is_read_in_both_forms(columns: str, zeros: str) -> None:
    explanation = explained(KERNEL.format(columns=columns, zeros=zeros))
    group = largest(explanation.facts)
    assert group is not None and (group.command, group.count) == ("pt_data_worker", 2)
    assert group.held_bytes == 40 * GIB and group.alike
    assert explanation.component is Component.DATA


@pytest.mark.parametrize(
    ("line", "command", "held"),
    [
        (f"systemd-oomd[700]: {OOMD}", "/user.slice/docker-ab.scope", 60),
        (f"The node was low on resource: memory. {EVICTED}", "container main", 120),
    ],
)
def test_a_sentence_that_names_who_was_killed_is_read(line: str, command: str, held: int) -> None:
    (holder,) = explained(line).facts.holders
    assert (holder.pid, holder.command, holder.held_bytes) == (None, command, held * GIB)


def test_who_was_killed_is_no_holder_where_it_used_little() -> None:
    explanation = explained(RAY)
    assert [one.held_bytes for one in explanation.facts.holders] == [2 * GIB]
    assert largest(explanation.facts) is None
    assert explanation.phase is Phase.NONE


SLURM = (
    "slurmstepd: error: Detected 1 oom_kill event in StepId=44.0. Some of the tasks have been OOM Killed.\n"
)
SACCT = """\
JobID           JobName      State     MaxRSS     ReqMem
------------ ---------- ---------- ---------- ----------
44            verl_grpo OUT_OF_ME+                  512G
44.batch          batch OUT_OF_ME+   2125368K
44.0             python OUT_OF_ME+ 509812340K
"""
PIPED = """\
JobID|State|MaxRSS|ReqMem|
44|OUT_OF_MEMORY||512G|
44.batch|OUT_OF_MEMORY|2.02M||
44.0|OUT_OF_MEMORY|486.2G||
"""
SEFF = (
    "State: OUT_OF_MEMORY (exit code 0)\nMemory Utilized: 510.90 GB\nMemory Efficiency: 99.79% of 512.00 GB\n"
)


@pytest.mark.parametrize(
    ("text", "command", "held"),
    [
        (SLURM + SACCT, "step 44.0", 509812340 * 1024 / GIB),
        (SLURM + PIPED, "step 44.0", 486.2),
        (SEFF, "the Slurm job", 510.9),
    ],
)
def test_the_largest_step_of_a_slurm_job_is_named(text: str, command: str, held: float) -> None:
    group = largest(explained(text).facts)
    assert group is not None and group.command == command
    assert group.held_bytes / GIB == pytest.approx(held, abs=0.01)


def test_a_table_of_slurm_that_is_cut_names_nothing() -> None:
    for rows in (1, 2):
        assert largest(explained(SLURM + "".join(SACCT.splitlines(keepends=True)[:rows])).facts) is None
    assert largest(explained(SLURM + SACCT.replace("-", "")).facts) is None
