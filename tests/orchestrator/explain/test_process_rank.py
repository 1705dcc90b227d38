"""What an explanation shows of a worker: its rank, if its log names it, and sizes with their units."""

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


def test_sizes_of_advice_have_units() -> None:
    log = (
        "+ python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct "
        "data.train_batch_size=128 data.max_prompt_length=512 data.max_response_length=4096 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.name=sglang "
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.85 "
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 trainer.n_gpus_per_node=4 trainer.nnodes=1 "
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 data.train_files=/data/a.parquet "
        "data.val_files=/data/b.parquet actor_rollout_ref.rollout.tensor_model_parallel_size=1\n"
        '(WorkerDict pid=55)   File "verl/workers/fsdp_sglang.py", line 130, in __enter__\n'
        '(WorkerDict pid=55)     self.inference_engine.resume_memory_occupation(tags=["kv_cache"])\n'
        "(WorkerDict pid=55) torch.OutOfMemoryError: " + OOM.partition("OutOfMemoryError: ")[2]
    )
    page = render_explanation(of(log))
    assert "lower `sync_buffer` 2 GiB → 1 GiB" in page, page
