"""The rank of a Ray worker that prints only its pid where it fails."""

from __future__ import annotations

import pytest

from autotune.orchestrator.explain.text_output import render_explanation
from tests.orchestrator.explain.test_explanation import OOM, of

FAILED = "(WorkerDict pid=731, ip=10.1.0.5) torch.OutOfMemoryError: " + OOM.partition("OutOfMemoryError: ")[2]


def log(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines) + FAILED


@pytest.mark.parametrize(
    "line",
    [
        "(WorkerDict pid=731, ip=10.1.0.5) rank 11: wrapped the actor, device cuda:3",
        "(WorkerDict pid=731, ip=10.1.0.5) [rank11]: starts",
        "\x1b[36m(WorkerDict pid=731, ip=10.1.0.5)\x1b[0m init global_rank=11 world_size=16",
        "(WorkerDict pid=731, ip=10.1.0.5) name=abWorkerDict_0:11",
    ],
)
def test_the_rank_that_a_worker_prints_elsewhere_is_that_of_its_failure(line: str) -> None:
    other = "(WorkerDict pid=731, ip=10.1.0.4) rank 3: the same pid on another node"
    result = of(log(other, line))
    assert result.diagnosis.rank == 11
    assert "rank 11, pid 731 on 10.1.0.5" in render_explanation(result)


@pytest.mark.parametrize(
    "lines",
    [
        ("(WorkerDict pid=730, ip=10.1.0.5) rank 11: another process",),
        ("(WorkerDict pid=731, ip=10.1.0.5) rank 11: a", "(WorkerDict pid=731, ip=10.1.0.5) rank 12: b"),
        ("(WorkerDict pid=731, ip=10.1.0.5) local_rank=3", "(WorkerDict pid=731, ip=10.1.0.5) from rank 0"),
        ("(WorkerDict pid=730, ip=10.1.0.5) rank 11", "(WorkerDict pid=731, ip=10.1.0.5) rank 11"),
    ],
)
def test_no_rank_is_named_where_the_log_does_not_show_it(lines: tuple[str, ...]) -> None:
    result = of(log(*lines))
    assert result.diagnosis.rank is None
    assert "pid 731 on 10.1.0.5, rank not in the log" in render_explanation(result)
