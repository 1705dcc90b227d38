"""A log of a job that was started again tells how its last start ended, with the figures of that start."""

from __future__ import annotations

import json

import pytest

from autotune.orchestrator.explain.incident import read_of
from autotune.orchestrator.explain.json_output import document
from autotune.policies.values.failure import Cause, Phase
from tests.orchestrator.explain.test_parts import CUDA, of, page_of

_FIRST = (
    "step:7 - actor/loss:0.2 - timing_s/step:50",
    '  File "verl/workers/actor/dp_actor.py", line 470, in update_policy',
    "    loss.backward()",
    CUDA,
)
_HOST = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."
_RAY = "2025-11-02 11:00:00,000\tINFO worker.py:1800 -- Started a local Ray instance."
_LAUNCHED = (
    "+ python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.gpu_memory_utilization={} "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 data.train_batch_size=64"
)


@pytest.mark.parametrize(
    "start",
    [
        _RAY,
        _LAUNCHED.format(0.5),
        "++ torchrun --nproc-per-node 8 train.py",
        "[default] Rendezvous complete for workers. Result:\n  restart_count=1\n  master_addr=n1",
        "W1102 1 torch/distributed/run.py:793] Setting OMP_NUM_THREADS environment variable for each process",
        "The following values were not passed to `accelerate launch` and had defaults used instead:",
        "[2025-11-02 11:00:00,000] [INFO] [launch.py:146:main] WORLD INFO DICT: {'localhost': [0, 1]}",
        "Running entrypoint for job raysubmit_9: python3 train.py",
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-11-02T11:00:00 DUE TO JOB REQUEUE ***",
    ],
)
def test_the_end_of_the_last_start_is_told_and_the_earlier_one_named(start: str) -> None:
    explanation = of(*_FIRST, start, "a line", _HOST)
    diagnosis, page = explanation.diagnosis, page_of(explanation)
    assert (diagnosis.cause, diagnosis.phase, diagnosis.step) == (Cause.HOST_OOM, Phase.NONE, None)
    assert not explanation.followers and "first of" not in page
    assert "info: an earlier start of the job failed too: gpu-oom in phase `backward` (log:4)\n" in page
    earlier = json.loads(document([read_of(explanation, [])]))["earlier"]
    assert earlier == {"cause": "gpu-oom", "phase": "backward", "line": 4}


@pytest.mark.parametrize(
    "line",
    [
        f"(TaskRunner pid=9) {_RAY}",
        "  restart_count=0",
        "+ python3 -c 'import torch'",
        "retry with offload",
    ],
)
def test_what_starts_no_job_begins_no_other_story(line: str) -> None:
    explanation = of(*_FIRST, line, _HOST)
    assert explanation.diagnosis.cause is Cause.GPU_OOM and explanation.earlier is None


def test_a_start_before_any_failure_is_the_first() -> None:
    explanation = of(_LAUNCHED.format(0.5), _RAY, *_FIRST)
    assert explanation.evidence.start == 0 and "start of the job" not in page_of(explanation)


def test_a_start_without_a_failure_leaves_the_one_before() -> None:
    explanation = of(*_FIRST, _RAY, "step:1 - actor/loss:0.2 - timing_s/step:50")
    assert (explanation.diagnosis.cause, explanation.diagnosis.step) == (Cause.GPU_OOM, 7)
    assert "info: the job was started again (log:5); no rule finds a failure after that\n" in page_of(
        explanation
    )


def test_a_start_that_ends_well_leaves_no_failure() -> None:
    explanation = of(*_FIRST, _RAY, "{'train_runtime': 119.8, 'train_loss': 1.23, 'epoch': 1.0}")
    assert explanation.diagnosis.cause is Cause.UNKNOWN


def test_each_start_has_its_own_settings_and_steps() -> None:
    first, second = _LAUNCHED.format(0.5), _LAUNCHED.format(0.6)
    for start, fraction in ((first, 0.5), (second, 0.6)):
        profile = of(first, *_FIRST, start, *_FIRST[1:]).context.known.profile
        assert profile is not None and profile.knobs.memory_fraction == fraction
    assert of(first, *_FIRST, second, "step:2 - actor/loss:0.2", CUDA).diagnosis.step == 2


def test_of_three_starts_the_last_is_told() -> None:
    explanation = of(*_FIRST, _RAY, _HOST, _RAY, CUDA)
    assert (explanation.diagnosis.cause, explanation.evidence.start) == (Cause.GPU_OOM, 7)
    assert explanation.earlier is not None and explanation.earlier.cause is Cause.HOST_OOM
