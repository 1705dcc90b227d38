"""Passes that really run out of memory are made anew in smaller micro-batches, with the same result."""

import gc
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

from autotune.launchers.builtin.config.settings import ModelShape, parse_settings
from autotune.launchers.builtin.data.model import write_model
from autotune.launchers.builtin.data.task import Sample
from autotune.launchers.builtin.process.device import ALLOCATOR_ENVIRONMENT
from autotune.launchers.builtin.process.records import CureRecord, FailureRecord, PhaseFailure
from autotune.launchers.builtin.trainer.rank import Report, TrainerRank

pytestmark = pytest.mark.timeout(500)

SHAPE = ModelShape(hidden=256, layers=2, heads=8, kv_heads=4, intermediate=1024, vocab=2048)
ALL = ["tokens_per_microbatch", "microbatch_size", "logprob_tokens"]
BASE: dict[str, Any] = {
    "in_place": ALL,
    "prompts": 16,
    "samples": 4,
    "prompt_tokens": 8,
    "response_tokens": 24,
    "steps": 1,
    "recompute": "full",
    "optimizer_offload": True,
    "logprob_tokens": 256,
    "lr": 1e-5,
}
SMALL = {"tokens_per_microbatch": 256, "prompts": 8}
LEAST = {"tokens_per_microbatch": 32, "logprob_tokens": 32, "prompts": 4}
SCORES = {"samples": 8, "tokens_per_microbatch": 128, "logprob_tokens": 8192}
BY_COUNT = {"dynamic_batching": False, "microbatch_size": 64}
AMPLE = "4GiB"
PAIRS = ["one of two", "both", "scores", "between two models"]
CURED = [*PAIRS, "alone", "by count"]


class Outcome(msgspec.Struct):
    """What one rank says of its steps."""

    cures: list[CureRecord] = []
    losses: list[float] = []
    gradients: list[dict[str, list[float]]] = []  # of each step, a part
    peaks: dict[str, int] = {}  # bytes, by phase
    error: FailureRecord | None = None

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


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


def run(
    model: str, knobs: dict[str, Any], meeting: str | None, rank: int, ranks: int, *, faulty: bool = False
) -> Outcome:
    document = {"model": model, "save_every": 0, "ranks": ranks, **BASE, **knobs}
    trainer = TrainerRank(parse_settings(document), rank)
    trainer.start(model, meeting, None)
    if faulty:
        fail_once(trainer)
    outcome = Outcome()

    def until_cured(call: Callable[[int], Report], step: int) -> Report:
        while (done := noted(call(step))).cure is not None:
            outcome.cures.append(done.cure)
        return done

    def noted(done: Report) -> Report:
        for phase, reading in done.readings.items():
            outcome.peaks[phase] = max(outcome.peaks.get(phase, 0), reading.peak_bytes)
        return done

    try:
        for step in range(1, document["steps"] + 1):
            trainer.take(samples(step, document["prompts"] * document["samples"]))
            until_cured(trainer.log_prob, step)
            outcome.losses.append(until_cured(trainer.train, step).values["loss"])
            outcome.gradients.append(gradients(trainer))
            noted(trainer.optimize(step))
    except PhaseFailure as failure:
        if ranks > 1:
            os._exit(1)  # the other rank waits for this one
        outcome.error = failure.record
    trainer._device.lift()
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return outcome


def fail_once(trainer: TrainerRank) -> None:
    """Let the first pass fail behind its last collective, as if the allocator had refused."""

    def fail(*_: Any) -> None:
        handle.remove()
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes.")

    handle = trainer._policy.register_forward_hook(fail)


def gradients(trainer: TrainerRank) -> dict[str, list[float]]:
    trainer._device.lift()
    results = {}
    for name, weight in trainer.parameters.items():
        whole: Any = weight.grad
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        results[name] = whole.reshape(-1)[:1000].tolist()
    trainer._device.enforce()
    return results


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, shape=SHAPE, seed=0)
    return str(folder)


@pytest.fixture(scope="module")
def jobs(model: str) -> dict[str, list[Outcome]]:
    """Return what both ranks say of every job."""
    meetings = []
    for _ in range(32):  # more than there are runs of two ranks
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


PHASES = {"scores": {"log_prob"}, "between two models": {"log_prob"}}
FAILING = {"one of two": {0}, "scores": {1}, "between two models": {1}}


@pytest.mark.parametrize("job", PAIRS)
def test_two_ranks_go_on_together(jobs: dict[str, list[Outcome]], job: str) -> None:
    first, second = jobs[job]
    assert first.cures == second.cures
    assert {cure.phase for cure in first.cures} <= PHASES.get(job, {"forward", "backward"})
    assert {cure.cause for cure in first.cures} == {"gpu-oom"}
    assert {cure.rank for cure in first.cures} <= ({0, 1} if job == "both" else FAILING[job])
    sizes: dict[str, int] = {}
    for cure in first.cures:
        assert cure.after < cure.before == sizes.get(cure.knob, cure.before)
        sizes[cure.knob] = cure.after


@pytest.mark.parametrize("job", CURED)
def test_training_is_that_of_smaller_micro_batches(jobs: dict[str, list[Outcome]], job: str) -> None:
    for cured, begun in zip(jobs[job], jobs[f"{job}, at once"], strict=True):
        assert cured.cures
        assert not begun.cures
        assert cured.losses == pytest.approx(begun.losses, abs=1e-6)
        assert cured.losses
        for ours, theirs in zip(cured.gradients, begun.gradients, strict=True):
            for name, gradient in ours.items():
                mine, other = torch.tensor(gradient), torch.tensor(theirs[name])
                assert mine.any()
                assert (mine - other).abs().max() <= 1e-3 * other.abs().max(), name


def test_sequences_are_counted_where_they_are_not_packed(jobs: dict[str, list[Outcome]]) -> None:
    cures = jobs["by count"][0].cures
    assert {cure.knob for cure in cures} == {"microbatch_size"}
    assert (cures[0].before, cures[0].after) == (64, 32)


@pytest.mark.parametrize("job", ["too small", "not permitted"])
def test_what_cannot_be_cut_fails_as_before(jobs: dict[str, list[Outcome]], job: str) -> None:
    (outcome,) = jobs[job]
    assert outcome.error is not None
    assert (outcome.error.cause, outcome.error.step) == ("gpu-oom", 1)
    assert outcome.error.phase in ("forward", "backward")
    assert outcome.error.requested_bytes
    cut = {cure.knob for cure in outcome.cures}
    assert ("tokens_per_microbatch" in cut) == (job == "too small")


def everything(model: str, rank: int, meetings: list[str]) -> dict[str, Outcome]:
    """Run all jobs; their budgets lie halfway between the needs of large and small micro-batches here."""
    results: dict[str, Outcome] = {}

    def one(ranks: int, knobs: dict[str, Any], *, faulty: bool = False) -> Outcome:
        gc.collect()
        return run(model, knobs, meetings.pop() if ranks > 1 else None, rank, ranks, faulty=faulty)

    def job(name: str, ranks: int, budgets: Any, knobs: dict[str, Any], *, faulty: bool = False) -> None:
        knobs = knobs | {"trainer_budget": budgets}
        results[name] = one(ranks, knobs, faulty=faulty)
        if results[name].error is None:
            free = knobs | {"trainer_budget": None} | {cure.knob: cure.after for cure in results[name].cures}
            results[f"{name}, at once"] = one(ranks, free)

    one(2, {})  # what the libraries keep from their first use on belongs to no job
    small = one(2, SMALL).peak
    budget = (one(2, {}).peak + small) // 2
    scoring = (one(2, SCORES).peak + small) // 2
    job("one of two", 2, [budget, None], {})
    job("both", 2, budget, {})
    job("scores", 2, [None, scoring], SCORES)
    job("between two models", 2, AMPLE, {"kl_coef": 0.1, "logprob_tokens": 8192}, faulty=rank == 1)
    if rank > 0:
        return results

    one(1, {})
    least = one(1, LEAST)
    budget = (one(1, {}).peak + one(1, SMALL).peak) // 2
    job("alone", 1, budget, {"steps": 2})
    job("by count", 1, budget, BY_COUNT)
    job("too small", 1, (least.peaks["log_prob"] + least.peaks["backward"]) // 2, {})
    job("not permitted", 1, budget, {"in_place": ["logprob_tokens"]})
    return results


if __name__ == "__main__":
    folder, own = sys.argv[1], int(sys.argv[2])
    sys.stdout.buffer.write(msgspec.json.encode(everything(folder, own, sys.argv[3:])))
