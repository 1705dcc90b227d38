"""What slime's, Relax's and miles's logs have in common: a resumed run, the first remedy of every failure."""

import pytest

from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.observation import Resumed, Saved, StepDone

from .megatron_jobs import EVERY, FAILING, MILES, RELAX, SLIME, job
from .megatron_replay import cure, read

EACH = pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)


@EACH
def test_a_resumed_run_counts_on(framework) -> None:
    markers = read(framework, "resumed").markers
    assert markers[0] == Resumed(step=20)
    assert [m.step for m in markers if isinstance(m, StepDone)] == [21]
    assert [m for m in markers if isinstance(m, Saved)] == [Saved(step=21)]


# Exact remedies come before those that change the numbers, as an optimizer on the host does.
SAME = [
    (Phase.INIT, Component.TRAINER, "tensor_parallel", "--tensor-model-parallel-size 4"),
    (Phase.ROLLOUT_INIT, Component.ROLLOUT, "reduce_mem_fraction", "--sglang-mem-fraction-static 0.7"),
    (Phase.ROLLOUT, Component.ROLLOUT, "reduce_mem_fraction", "--sglang-mem-fraction-static 0.7"),
    (Phase.FORWARD, Component.TRAINER, "reduce_tokens_per_mb", "--max-tokens-per-gpu 8192"),
    (Phase.BACKWARD, Component.TRAINER, "reduce_tokens_per_mb", "--max-tokens-per-gpu 8192"),
    (Phase.OPTIMIZER, Component.TRAINER, "tensor_parallel", "--tensor-model-parallel-size 4"),
    (
        Phase.WEIGHT_SYNC,
        Component.TRAINER,
        "reduce_sync_buffer",
        "--update-weight-buffer-size 268435456",
    ),
]
OWN = [
    (RELAX, Phase.LOG_PROB, Component.REF, "reduce_tokens_per_mb", "--max-tokens-per-gpu 8192"),
    (SLIME, Phase.LOG_PROB, Component.TRAINER, "reduce_tokens_per_mb", "--max-tokens-per-gpu 8192"),
    (
        RELAX,
        Phase.COMM,
        Component.TRAINER,
        "reduce_sync_buffer",
        "--update-weight-buffer-size 268435456",
    ),
    (MILES, Phase.LOG_PROB, Component.TRAINER, "reduce_tokens_per_mb", "--max-tokens-per-gpu 8192"),
    (MILES, Phase.COMM, Component.TRAINER, "reduce_sync_buffer", "--update-weight-buffer-size 268435456"),
    (SLIME, Phase.COMM, Component.TRAINER, "reduce_sync_buffer", "--update-weight-buffer-size 268435456"),
]


@pytest.mark.parametrize(
    ("framework", "phase", "component", "remedy", "words"),
    [
        pytest.param(*case, id=f"{case[0].name}-{case[1].value}")
        for case in (*((framework, *same) for framework in EVERY for same in SAME), *OWN)
    ],
)
def test_a_failure_of_device_memory_gets_its_first_remedy(framework, phase, component, remedy, words) -> None:
    proposal = cure(framework, job(framework, FAILING[framework.name]), phase.value)
    assert (proposal.diagnosis.cause, proposal.diagnosis.phase) == (Cause.GPU_OOM, phase)
    assert proposal.diagnosis.component is component
    assert (proposal.remedy, proposal.words[0]) == (remedy, words)


@EACH
def test_a_refused_pool_grows(framework) -> None:
    proposal = cure(framework, job(framework, FAILING[framework.name]), "pool_too_small")
    assert proposal.diagnosis.cause is Cause.POOL_TOO_SMALL
    assert proposal.words == (
        "--sglang-mem-fraction-static 0.85",
        "--rollout-num-gpus-per-engine 2",
        "--sglang-max-running-requests 32",  # of twice the engines' size, as many in sum
    )
