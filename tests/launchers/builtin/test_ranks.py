"""Two trainer ranks under FSDP2 and gloo, each a process of its own, without Ray."""

import contextlib
import math
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from autotune.launchers.builtin.config.settings import ModelShape, parse_settings
from autotune.launchers.builtin.data.model import write_model
from autotune.launchers.builtin.data.task import Sample
from autotune.launchers.builtin.process.host_memory import HostMemory
from autotune.launchers.builtin.process.records import PhaseFailure
from autotune.launchers.builtin.trainer.rank import TrainerRank

# Weights and activations of every size: what is offloaded can be told apart by its bytes.
SHAPE = ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=160, vocab=256)
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "offloaded": {"activation_offload": True},
    "bad gradient": {},
    "half": {"dtype": "bfloat16", "activation_offload": True},
}


class Outcome(msgspec.Struct):
    """What one rank says of one job."""

    gradients: dict[str, list[float]] = {}
    offloaded: list[int] = []  # bytes of each block
    types: set[str] = set()  # of weights, gradients and moments
    error: str = ""


def samples() -> list[Sample]:
    source = random.Random(0)
    return [
        Sample(
            prompt=[source.randrange(256) for _ in range(8)],
            response=[source.randrange(256) for _ in range(24)],
            logprobs=[-5.5] * 24,
            reward=0.5,
            advantage=source.gauss(0, 1),
        )
        for _ in range(16)
    ]


def run(job: str, folder: Path, meeting: str | None, rank: int, ranks: int) -> Outcome:
    document = {"model": str(folder), "save_every": 0, "ranks": ranks, **JOBS[job]}
    trainer = TrainerRank(parse_settings(document), rank)
    trainer.start(str(folder), meeting, None)
    outcome = Outcome()
    with taken_blocks(outcome.offloaded):
        trainer.take(samples())
        trainer.log_prob(1)
        trainer.train(1)
    for name, weight in trainer._weights.items():
        gradient: Any = weight.grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        outcome.types |= {f"{tensor.dtype}" for tensor in (weight, gradient)}
        outcome.gradients[name] = whole.reshape(-1).tolist()
    if job == "bad gradient":
        if rank == ranks - 1:
            broken: Any = trainer._weights["model.layers.0.mlp.down_proj.weight"].grad
            (broken.to_local() if ranks > 1 else broken)[0, 0] = math.inf
        try:
            trainer.optimize(1)
        except PhaseFailure as failure:
            outcome.error = failure.record.message
    else:
        trainer.optimize(1)
        outcome.types |= {f"{part.dtype}" for pair in trainer._adam.moments.values() for part in pair}
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return outcome


@contextlib.contextmanager
def taken_blocks(sizes: list[int]) -> Iterator[None]:
    take = HostMemory.take

    def counted(self: HostMemory, size_bytes: int) -> torch.Tensor:
        sizes.append(size_bytes)
        return take(self, size_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostMemory, "take", counted)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, shape=SHAPE, seed=1)
    return folder


@pytest.fixture(scope="module")
def pair(model: Path) -> dict[str, list[Outcome]]:
    """Return what both ranks say of every job."""
    meetings = []
    for _ in JOBS:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            meetings.append(f"127.0.0.1:{listener.getsockname()[1]}")
    processes = [
        subprocess.Popen([sys.executable, __file__, str(model), str(rank), *meetings], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=150)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    ranks = [msgspec.json.decode(output, type=dict[str, Outcome]) for output in outputs]
    return {job: [outcomes[job] for outcomes in ranks] for job in JOBS}


def test_only_activations_are_offloaded(pair: dict[str, list[Outcome]], model: Path) -> None:
    alone = run("offloaded", model, None, 0, 1).offloaded
    assert alone
    # Each rank has half of the samples: half of the bytes of each saved activation, and nothing else.
    for outcome in pair["offloaded"]:
        assert [2 * size for size in outcome.offloaded] == alone
    assert not pair["plain"][0].offloaded


def test_offloaded_activations_give_the_same_gradients(pair: dict[str, list[Outcome]]) -> None:
    for plain, offloaded in zip(pair["plain"], pair["offloaded"], strict=True):
        assert offloaded.gradients == plain.gradients


def test_two_ranks_give_the_gradients_of_one(pair: dict[str, list[Outcome]], model: Path) -> None:
    alone = run("plain", model, None, 0, 1).gradients
    for name, gradient in pair["plain"][0].gradients.items():
        assert gradient == pytest.approx(alone[name], rel=1e-3, abs=1e-6)


def test_all_ranks_refuse_a_bad_gradient_and_its_own_names_it(pair: dict[str, list[Outcome]]) -> None:
    first, second = (outcome.error for outcome in pair["bad gradient"])
    assert "step 1: a gradient of another rank is not finite" in first
    assert "model.layers.0.mlp.down_proj.weight on rank 1 is not finite" in second


def test_passes_in_bf16_keep_everything_else_in_fp32(pair: dict[str, list[Outcome]], model: Path) -> None:
    alone = run("half", model, None, 0, 1)
    exact = run("offloaded", model, None, 0, 1)
    assert alone.types == pair["half"][0].types == {"torch.float32"}
    # What is saved of the layers is half as wide; the scores stay as they are.
    assert sum(exact.offloaded) / 2 < sum(alone.offloaded) < sum(exact.offloaded) * 0.7
    for name, gradient in exact.gradients.items():
        if name.endswith("k_proj.bias"):  # has no gradient in exact arithmetic
            continue
        wanted = torch.tensor(gradient)
        for result in (alone, pair["half"][0]):
            error = (torch.tensor(result.gradients[name]) - wanted).norm() / wanted.norm()
            assert 0 < error < 0.05, name


if __name__ == "__main__":
    path, own = Path(sys.argv[1]), int(sys.argv[2])
    result = {job: run(job, path, meeting, own, 2) for job, meeting in zip(JOBS, sys.argv[3:], strict=True)}
    sys.stdout.buffer.write(msgspec.json.encode(result))
