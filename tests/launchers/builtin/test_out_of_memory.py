"""Real allocation failures under a real limit, each in its own process, leave the right record."""

import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.launchers.builtin.config.settings import ModelShape, parse_settings
from autotune.launchers.builtin.data.model import write_model
from autotune.launchers.builtin.data.task import Sample
from autotune.launchers.builtin.process.device import ALLOCATOR_ENVIRONMENT
from autotune.launchers.builtin.process.records import (
    PREFIX,
    FailureRecord,
    PhaseFailure,
    deliver,
    describe,
    report,
)

SHAPE = ModelShape(hidden=256, layers=4, heads=8, kv_heads=4, intermediate=1024, vocab=2048)
SMALL_BATCHES = {"tokens_per_microbatch": 512, "recompute": "full"}


def one_step(model: str, knobs: dict[str, Any], file_limit_bytes: int | None) -> None:
    """Run a step of 4,096 tokens in this process; its failure is left on stderr."""
    import resource

    from autotune.launchers.builtin.trainer.rank import TrainerRank

    source = random.Random(0)

    def sample() -> Sample:
        tokens = [source.randrange(2048) for _ in range(32)]
        return Sample(
            prompt=tokens[:8],
            response=tokens[8:],
            logprobs=[-7.0] * 24,
            reward=0.5,
            advantage=source.gauss(0, 1),
        )

    if file_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit_bytes, file_limit_bytes))
    rank = TrainerRank(parse_settings({"model": model, "save_every": 0, **knobs}), 0)
    rank.start(model, None, None)
    rank.take([sample() for _ in range(128)])
    rank.log_prob(1)
    rank.train(1)
    rank.optimize(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, shape=SHAPE, seed=0)
    return str(folder)


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServerContext]:
    """Return what forks processes of one that has imported the trainer, with the allocator's environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autotune.launchers.builtin.trainer.rank"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ALLOCATOR_ENVIRONMENT | {"OMP_NUM_THREADS": "1"}).items():
            patch.setenv(name, value)
        yield context


def in_process(log: Path, *arguments: Any) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        one_step(*arguments)
    except PhaseFailure:
        sys.exit(1)


@pytest.fixture
def failure(processes: ForkServerContext, model: str, tmp_path: Path) -> Callable[..., FailureRecord | None]:
    def run(knobs: dict[str, Any], *, file_limit_bytes: int | None = None) -> FailureRecord | None:
        log = tmp_path / "stderr.log"
        process = processes.Process(target=in_process, args=(log, model, knobs, file_limit_bytes))
        process.start()
        process.join(120)
        text = log.read_text()
        lines = [line.removeprefix(PREFIX) for line in text.splitlines() if line.startswith(PREFIX)]
        records = [msgspec.json.decode(line, type=FailureRecord) for line in lines]
        assert process.exitcode == bool(records), text
        return records[0] if records else None

    return run


# Needs, in MiB, of the first step as written: log_prob 88, forward 486, backward 510, optimizer 88.
@pytest.mark.parametrize(
    ("phase", "budget", "knobs"),
    [
        ("log_prob", 60, {}),
        ("forward", 120, {"logprob_tokens": 1024}),
        ("backward", 140, {"logprob_tokens": 1024, "recompute": "full"}),
        ("optimizer", 76, SMALL_BATCHES),
        (None, 76, SMALL_BATCHES | {"optimizer_offload": True}),
    ],
)
def test_a_small_budget_fails_in_its_phase(
    failure: Callable[..., FailureRecord | None], phase: str | None, budget: int, knobs: dict[str, Any]
) -> None:
    record = failure(knobs | {"trainer_budget": f"{budget}MiB"})
    if phase is None:
        assert record is None
        return
    assert record is not None
    assert (record.phase, record.cause, record.device) == (phase, "gpu-oom", "cpu-budget")
    assert (record.step, record.component, record.budget_bytes) == (1, "trainer", budget << 20)
    assert record.requested_bytes
    assert record.used_bytes
    assert record.used_bytes <= (budget + 1) << 20 < record.used_bytes + record.requested_bytes + (2 << 20)


def test_exhausted_host_memory_is_another_cause(
    failure: Callable[..., FailureRecord | None], tmp_path: Path
) -> None:
    (folder := tmp_path / "host").mkdir()
    record = failure(
        SMALL_BATCHES | {"optimizer_offload": True, "host_dir": str(folder)}, file_limit_bytes=1 << 20
    )
    assert record is not None
    assert (record.phase, record.cause, record.device) == ("optimizer", "host-oom", None)
    assert record.requested_bytes == 2 << 20
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "budget", "cause"),
    [
        (MemoryError(), 5, "gpu-oom"),
        (MemoryError(), None, "host-oom"),
        (ValueError("no"), 5, "code"),
        (OSError(28, "No space left on device"), 5, "disk"),
        (ValueError("Loaded weights leave no GPU memory for the KV cache"), 5, "pool-too-small"),
    ],
)
def test_causes(error: Exception, budget: int | None, cause: str) -> None:
    record = describe(
        error,
        phase="init",
        component="rollout",
        rank=1,
        step=0,
        on_gpu=False,
        used_bytes=1,
        budget_bytes=budget,
    )
    assert record.cause == cause
    assert msgspec.json.decode(record.line().removeprefix(PREFIX), type=FailureRecord) == record


def test_a_record_goes_to_the_attempts_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = MemoryError("no")
    record = describe(
        error,
        phase="backward",
        component="trainer",
        rank=1,
        step=3,
        on_gpu=False,
        used_bytes=1,
        budget_bytes=5,
    )
    file = tmp_path / "records.log"
    monkeypatch.delenv("AUTOTUNE_RECORDS", raising=False)
    deliver(record)  # by hand: nobody reads records
    monkeypatch.setenv("AUTOTUNE_RECORDS", str(tmp_path / "elsewhere" / "records.log"))
    deliver(record)  # on another node
    monkeypatch.setenv("AUTOTUNE_RECORDS", str(file))
    report(record, error)
    deliver(record)
    assert file.read_text() == f"{record.line()}\n" * 2
