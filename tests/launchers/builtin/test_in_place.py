"""Passes that really run out of memory are made anew in smaller micro-batches, with the same result."""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from autotune.launchers.builtin.config.settings import parse_settings
from autotune.launchers.builtin.config.shape import ModelShape
from autotune.launchers.builtin.data.model import write_model
from autotune.launchers.builtin.data.samples import Sample
from autotune.launchers.builtin.process.device import ALLOCATOR_ENVIRONMENT
from autotune.launchers.builtin.process.records import CureRecord, FailureRecord, PhaseFailure
from autotune.launchers.builtin.trainer.rank import Report, TrainerRank

SHAPE = ModelShape(hidden=256, layers=4, heads=8, kv_heads=4, intermediate=1024, vocab=2048)
ALL = ["tokens_per_microbatch", "microbatch_size", "logprob_tokens"]


BASE: dict[str, Any] = {
    "prompts": 16,
    "samples": 4,
    "prompt_tokens": 8,
    "response_tokens": 24,
    "steps": 2,
    "recompute": "full",
    "optimizer_offload": True,
    "lr": 1e-5,
}
# Needs of each of two ranks, in MiB: log_prob 37, backward 67.
PAIRS: dict[str, dict[str, Any]] = {
    "one of two": {"in_place": ALL, "trainer_budget": ["62MiB", None]},
    "both": {"in_place": ALL, "trainer_budget": "62MiB"},
    "scores": {
        "in_place": ALL,
        "trainer_budget": [None, "49MiB"],
        "samples": 8,
        "steps": 1,
        "tokens_per_microbatch": 256,
        "logprob_tokens": 8192,
    },
}
ALONE: dict[str, dict[str, Any]] = {
    "alone": {"in_place": ALL, "trainer_budget": "85MiB"},
    "by count": {
        "in_place": ALL,
        "trainer_budget": "85MiB",
        "dynamic_batching": False,
        "microbatch_size": 32,
        "logprob_tokens": 256,
    },
    "too small": {"in_place": ALL, "trainer_budget": "52MiB"},
    "not permitted": {"in_place": ["logprob_tokens"], "trainer_budget": "80MiB"},
}


class Outcome(msgspec.Struct):
    """What one rank says of two steps."""

    cures: list[CureRecord] = []
    losses: list[float] = []
    gradients: list[dict[str, list[float]]] = []  # of each step, a part
    error: FailureRecord | None = None


def samples(step: int, count: int) -> list[Sample]:
    source = random.Random(step)
    result = []
    for _ in range(count):
        length = source.randrange(16, 25)
        result.append(
            Sample(
                prompt=[source.randrange(2048) for _ in range(8)],
                response=[source.randrange(2048) for _ in range(length)],
                logprobs=[-7.0] * length,
                reward=0.5,
                advantage=source.gauss(0, 1),
            )
        )
    return result


def run(model: str, knobs: dict[str, Any], meeting: str | None, rank: int, ranks: int) -> Outcome:
    document = {"model": model, "save_every": 0, "ranks": ranks, **BASE, **knobs}
    trainer = TrainerRank(parse_settings(document), rank)
    trainer.start(model, meeting, None)
    outcome = Outcome()

    def until_cured(call: Callable[[int], Report], step: int) -> Report:
        while (done := call(step)).cure is not None:
            outcome.cures.append(done.cure)
        return done

    try:
        for step in range(1, document["steps"] + 1):
            trainer.take(samples(step, document["prompts"] * document["samples"]))
            until_cured(trainer.log_prob, step)
            outcome.losses.append(until_cured(trainer.train, step).values["loss"])
            outcome.gradients.append(gradients(trainer))
            trainer.optimize(step)
    except PhaseFailure as failure:
        if ranks > 1:
            os._exit(1)  # the other rank waits for this one
        outcome.error = failure.record
    trainer._device.lift()
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return outcome


def gradients(trainer: TrainerRank) -> dict[str, list[float]]:
    trainer._device.lift()
    found = {}
    for name, weight in trainer.parameters.items():
        whole: Any = weight.grad
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        found[name] = whole.reshape(-1)[:1000].tolist()
    trainer._device.enforce()
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, shape=SHAPE, seed=0)
    return str(folder)


@pytest.fixture(scope="module")
def jobs(model: str) -> dict[str, list[Outcome]]:
    """Return what both ranks say of every job."""
    meetings = []
    for _ in range(2 * len(PAIRS)):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            meetings.append(f"127.0.0.1:{listener.getsockname()[1]}")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, model, str(rank), *meetings],
            env=os.environ | ALLOCATOR_ENVIRONMENT | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    ranks = [msgspec.json.decode(output, type=dict[str, Outcome]) for output in outputs]
    return {job: [outcomes[job] for outcomes in ranks if job in outcomes] for job in ranks[0]}


@pytest.mark.parametrize("job", PAIRS)
def test_two_ranks_go_on_together(jobs: dict[str, list[Outcome]], job: str) -> None:
    first, second = jobs[job]
    assert first.cures == second.cures
    assert {cure.phase for cure in first.cures} == {"log_prob" if job == "scores" else "backward"}
    assert {cure.cause for cure in first.cures} == {"gpu-oom"}
    assert {cure.rank for cure in first.cures} == {1 if job == "scores" else 0}
    sizes: dict[str, int] = {}
    for cure in first.cures:
        assert cure.after < cure.before == sizes.get(cure.knob, cure.before)
        sizes[cure.knob] = cure.after


@pytest.mark.parametrize("job", [*PAIRS, "alone", "by count"])
def test_training_is_that_of_smaller_micro_batches(jobs: dict[str, list[Outcome]], job: str) -> None:
    for cured, begun in zip(jobs[job], jobs[f"{job}, at once"], strict=True):
        assert cured.cures
        assert not begun.cures
        assert cured.losses == pytest.approx(begun.losses, abs=1e-6)
        for ours, theirs in zip(cured.gradients, begun.gradients, strict=True):
            for name, gradient in ours.items():
                assert any(gradient)
                assert gradient == pytest.approx(theirs[name], abs=1e-6, rel=1e-4), name


def test_sequences_are_counted_where_they_are_not_packed(jobs: dict[str, list[Outcome]]) -> None:
    cures = jobs["by count"][0].cures
    assert {cure.knob for cure in cures} == {"microbatch_size"}
    assert (cures[0].before, cures[0].after) == (32, 16)


@pytest.mark.parametrize("job", ["too small", "not permitted"])
def test_what_cannot_be_cut_fails_as_before(jobs: dict[str, list[Outcome]], job: str) -> None:
    (outcome,) = jobs[job]
    assert outcome.error is not None
    assert (outcome.error.cause, outcome.error.phase, outcome.error.step) == ("gpu-oom", "backward", 1)
    assert outcome.error.requested_bytes
    assert {cure.knob for cure in outcome.cures} <= ({"tokens_per_microbatch", "logprob_tokens"})
    assert bool(outcome.cures) == (job == "too small")


def everything(model: str, rank: int, meetings: list[str]) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}

    def compared(job: str, knobs: dict[str, Any], ranks: int) -> None:
        meeting = meetings.pop() if ranks > 1 else None
        found[job] = run(model, knobs, meeting, rank, ranks)
        if found[job].error is None:
            free = knobs | {"trainer_budget": None} | {cure.knob: cure.after for cure in found[job].cures}
            meeting = meetings.pop() if ranks > 1 else None
            found[f"{job}, at once"] = run(model, free, meeting, rank, ranks)

    for job, knobs in PAIRS.items():
        compared(job, knobs, 2)
    for job, knobs in ALONE.items() if rank == 0 else ():
        compared(job, knobs, 1)
    return found


if __name__ == "__main__":
    folder, own = sys.argv[1], int(sys.argv[2])
    sys.stdout.buffer.write(msgspec.json.encode(everything(folder, own, sys.argv[3:])))
