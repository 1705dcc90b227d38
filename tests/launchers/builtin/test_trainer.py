"""EXACT knobs: the same update for the same samples; a checkpoint continues as if nothing had happened."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from autotune.launchers.builtin.data.task import Sample
from autotune.launchers.builtin.process.records import PhaseFailure
from autotune.launchers.builtin.storage import checkpoint
from autotune.launchers.builtin.trainer.rank import TrainerRank
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import scan
from autotune.policies.values.failure import Cause, Phase

Start = Callable[..., TrainerRank]
COMMON = {"kl_coef": 0.01, "lr": 1e-3}


def step(rank: TrainerRank, number: int, samples: list[Sample]) -> dict[str, float]:
    rank.take(samples)
    rank.log_prob(number)
    trained = rank.train(number)
    optimized = rank.optimize(number)
    rank.rest(number)
    return trained.values | optimized.values


def gradients(rank: TrainerRank, samples: list[Sample]) -> dict[str, torch.Tensor]:
    rank.take(samples)
    rank.log_prob(1)
    rank.train(1)
    return {
        name: parameter.grad.clone()
        for name, parameter in rank._weights.items()
        if parameter.grad is not None
    }


def weights(rank: TrainerRank) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in rank._weights.items()}


@pytest.mark.parametrize(
    "knobs",
    [
        {"tokens_per_microbatch": 30},
        {"dynamic_batching": False, "microbatch_size": 5},
        {"dynamic_batching": False, "microbatch_size": 1},
        {"recompute": "full"},
        {"activation_offload": True},
        {"activation_offload": True, "recompute": "full"},
        {"optimizer_offload": True},
        {"param_offload": True},
        {"logprob_tokens": 20},
        {"logprob_chunk": 7},
        {"loss_recompute": True, "logprob_chunk": 7},
        {
            "tokens_per_microbatch": 30,
            "recompute": "full",
            "activation_offload": True,
            "optimizer_offload": True,
            "param_offload": True,
            "logprob_chunk": 5,
            "loss_recompute": True,
        },
    ],
    ids=str,
)
def test_an_exact_knob_gives_the_same_update(
    trainer: Start, ragged_samples: list[Sample], knobs: dict[str, Any]
) -> None:
    plain, other = trainer(**COMMON), trainer(**COMMON, **knobs)
    expected, result = gradients(plain, ragged_samples), gradients(other, ragged_samples)
    assert expected.keys() == result.keys()
    for name, gradient in expected.items():
        # Key biases have no gradient in exact arithmetic: softmax ignores a shift of all scores.
        if name.endswith("k_proj.bias"):
            continue
        error = (gradient - result[name]).norm() / gradient.norm()
        assert error < 1e-5, name
    plain.optimize(1), other.optimize(1)
    plain.rest(1), other.rest(1)
    first, second = step(plain, 2, ragged_samples), step(other, 2, ragged_samples)
    assert second == pytest.approx(first, rel=1e-4, abs=1e-6)


def test_optimizer_state_in_host_memory_is_bitwise_equal(
    trainer: Start, ragged_samples: list[Sample]
) -> None:
    plain, mapped = trainer(**COMMON), trainer(**COMMON, optimizer_offload=True, param_offload=True)
    for number in (1, 2, 3):
        step(plain, number, ragged_samples)
        step(mapped, number, ragged_samples)
    expected, result = weights(plain), weights(mapped)
    assert all(torch.equal(expected[name], result[name]) for name in expected)
    assert mapped._host.mapped_bytes > 0


def test_a_restored_rank_continues_bitwise(
    trainer: Start, ragged_samples: list[Sample], tmp_path: Path
) -> None:
    straight = trainer(**COMMON)
    step(straight, 1, ragged_samples)
    partial = checkpoint.begin(tmp_path, step=1)
    straight.save(str(partial), 1)
    saved = checkpoint.commit(partial, step=1, position=32, ranks=1, keep=2)
    resumed = trainer(resume_from=saved, **COMMON, optimizer_offload=True)
    assert step(straight, 2, ragged_samples) == step(resumed, 2, ragged_samples)
    expected, result = weights(straight), weights(resumed)
    assert all(torch.equal(expected[name], result[name]) for name in expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_the_step(
    trainer: Start, ragged_samples: list[Sample], value: float
) -> None:
    rank = trainer(**COMMON)
    step(rank, 1, ragged_samples)
    before = weights(rank)
    gradients(rank, ragged_samples)
    name = "model.layers.1.mlp.up_proj.weight"
    broken = rank._weights[name].grad
    assert broken is not None
    broken.view(-1)[7] = value
    with pytest.raises(PhaseFailure) as caught:
        rank.optimize(2)
    record = caught.value.record
    assert (record.cause, record.phase, record.step, record.rank) == ("code", "optimizer", 2, 0)
    assert f"step 2: the gradient of {name} on rank 0 is not finite" in record.message
    after = weights(rank)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_diagnosis_leaves_a_bad_gradient_to_a_human(trainer: Start, ragged_samples: list[Sample]) -> None:
    rank = trainer(**COMMON)
    bad = [msgspec.structs.replace(sample, advantage=math.nan) for sample in ragged_samples]
    with pytest.raises(PhaseFailure) as caught:
        step(rank, 3, bad)
    diagnosis = diagnose(scan([f"{caught.value}\n".encode()]))
    assert (diagnosis.cause, diagnosis.phase, diagnosis.step) == (Cause.CODE, Phase.OPTIMIZER, 3)


@pytest.mark.parametrize("limit", [1, 5000, 1 << 30])
def test_buckets_carry_every_weight_and_respect_their_size(trainer: Start, limit: int) -> None:
    import pickle

    rank = trainer(sync_buffer=limit)
    largest = max(weight.numel() * 4 for weight in rank._weights.values())
    arrived: dict[str, torch.Tensor] = {}
    for index in range(rank.bucket_count(1)):
        tensors = pickle.loads(pickle.dumps(rank.bucket(index, 1), protocol=5))
        assert sum(tensor.numel() * 4 for _, tensor in tensors) <= max(limit, largest)
        arrived |= dict(tensors)
    expected = weights(rank)
    assert arrived.keys() == expected.keys()
    assert all(torch.equal(expected[name], arrived[name]) for name in expected)


def test_weights_on_disk_load_in_transformers(trainer: Start, tiny_model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    rank = trainer()
    rank.write_weights(str(tmp_path), 1)
    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(rank).items())
