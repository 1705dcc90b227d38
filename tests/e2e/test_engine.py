"""A real SGLang engine in a Ray actor, under a device budget that the kernel enforces."""

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import ray
import torch

from autotune.launchers.builtin.config.settings import ModelShape
from autotune.launchers.builtin.data.model import write_model
from autotune.launchers.builtin.engines.base import EngineOptions
from autotune.launchers.builtin.engines.rollout import RolloutActor, start_rollout_actor
from autotune.launchers.builtin.process.records import PREFIX, FailureRecord, PhaseFailure

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform yields to a GPU"),
]

MIB = 1 << 20
SHAPE = ModelShape(hidden=256, layers=4, heads=8, kv_heads=4, intermediate=1024, vocab=2048)
START_S = 400


@pytest.fixture(scope="module")
def logs() -> Iterator[Path]:
    temporary = tempfile.mkdtemp(prefix="at-e2e-", dir="/tmp")
    context = ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=temporary,
    )
    yield Path(context.address_info["session_dir"]) / "logs"
    ray.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = (tmp_path_factory.mktemp("a") / "m", tmp_path_factory.mktemp("b") / "m")
    for seed, folder in enumerate(folders):
        write_model(folder, shape=SHAPE, seed=seed)
    return folders


@pytest.fixture
def options(models: tuple[Path, Path]) -> EngineOptions:
    return EngineOptions(
        model_path=str(models[0]),
        budget_bytes=320 * MIB,
        memory_fraction=0.5,
        concurrency=128,
        max_model_len=512,
    )


def prompts(count: int, length: int) -> list[list[int]]:
    source = random.Random(count * length)
    return [[source.randrange(SHAPE.vocab) for _ in range(length)] for _ in range(count)]


def generate(actor, asked: list[list[int]], *, seeds: list[int], tokens: int, step: int = 1):
    return ray.get(
        actor.generate.remote(
            asked, seeds=seeds, max_new_tokens=tokens, temperature=1.0, ignore_eos=True, step=step
        ),
        timeout=START_S,
    )


def update_after_each_answer(actor: RolloutActor, folder: Path) -> None:
    for step in range(3, 23):
        actor.generate([[5, 5]], seeds=[0], max_new_tokens=4, temperature=0.0, ignore_eos=True, step=step)
        actor.update_from_disk(str(folder), step=step)


def records(logs: Path) -> list[FailureRecord]:
    result = {}
    for path in sorted(logs.glob("worker-*.err"), key=lambda path: path.stat().st_mtime):
        # Ray repeats a record in the traceback of an actor that could not be built.
        texts = [line.partition(PREFIX)[2] for line in path.read_text().splitlines() if PREFIX in line]
        result |= {(path, text): msgspec.json.decode(text, type=FailureRecord) for text in texts}
    return list(result.values())


def eventually(condition: Callable[[], bool], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def family(actor) -> list[psutil.Process]:
    worker = psutil.Process(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))
    return [worker, *worker.children(recursive=True)]


def schedulers() -> list[psutil.Process]:
    """Return the processes that multiprocessing started for this test's engines."""
    result = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "multiprocessing.spawn" in " ".join(process.cmdline()):
                result.append(process)
    return result


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end between the two questions
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def gone(processes: list[psutil.Process]) -> bool:
    return not any(map(alive, processes))


def recomputed_logprobs(model: Path, prompt: list[int], response: list[int]) -> torch.Tensor:
    from autotune.launchers.builtin.process.torchvision_ops import declare

    declare()
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = network(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def gap(model: Path, prompt: list[int], completion) -> float:
    expected = recomputed_logprobs(model, prompt, completion.tokens)
    return float((expected - torch.tensor(completion.logprobs)).abs().max())


@pytest.mark.timeout(1000)
def test_samples_repeat_and_weights_arrive(logs, models, options) -> None:
    from safetensors.torch import load_file

    asked, seeds = prompts(32, 9), list(range(1000, 1032))
    actor = start_rollout_actor("sglang", options)
    first = generate(actor, asked, seeds=seeds, tokens=12)
    assert [len(completion.tokens) for completion in first] == [12] * 32
    assert gap(models[0], asked[0], first[0]) < 1e-4
    memory = ray.get(actor.memory.remote())
    assert 0 < memory.peak_bytes <= memory.budget_bytes == 320 * MIB
    # Half the budget holds 19 MiB of weights, what loading them left, and, at 4 KiB a token, the pool.
    assert 120 * MIB < memory.pool_tokens * 4096 < 141 * MIB

    # The same seed samples the same tokens whatever else is in the batch.
    few = generate(actor, asked[3:8], seeds=seeds[3:8], tokens=12)
    assert [completion.tokens for completion in few] == [completion.tokens for completion in first[3:8]]
    other = generate(actor, asked, seeds=[seed + 1 for seed in seeds], tokens=12)
    assert [completion.tokens for completion in other] != [completion.tokens for completion in first]

    tensors = list(load_file(models[1] / "model.safetensors").items())
    ray.get(actor.begin_update.remote(step=1))
    for start in range(0, len(tensors), 8):
        ray.get(actor.update.remote(tensors[start : start + 8], step=1))
    ray.get(actor.end_update.remote(step=1))
    updated = generate(actor, asked, seeds=seeds, tokens=12)
    assert gap(models[1], asked[0], updated[0]) < 1e-4 < gap(models[0], asked[0], updated[0])

    # What a colocated job asks of its engine. Here nothing pauses memory.
    tensors = list(load_file(models[0] / "model.safetensors").items())
    ray.get(actor.sleep.remote(step=2))
    ray.get(actor.wake.remote("weights", step=2))
    ray.get(actor.begin_update.remote(step=2))
    for start in range(0, len(tensors), 8):
        ray.get(actor.update.remote(tensors[start : start + 8], step=2))
    ray.get(actor.end_update.remote(step=2))
    ray.get(actor.wake.remote("kv_cache", step=2))
    awake = generate(actor, asked, seeds=seeds, tokens=12)
    assert [completion.tokens for completion in awake] == [completion.tokens for completion in first]

    ray.get(actor.update_from_disk.remote(str(models[1]), step=2))
    assert gap(models[1], asked[0], generate(actor, asked, seeds=seeds, tokens=12)[0]) < 1e-4
    ray.get(actor.update_from_disk.remote(str(models[0]), step=1))
    back = generate(actor, asked, seeds=seeds, tokens=12)
    assert [completion.tokens for completion in back] == [completion.tokens for completion in first]

    # Inside the actor, where nothing delays the update: the scheduler's batch still holds finished requests.
    ray.get(actor.__ray_call__.remote(update_after_each_answer, models[0]))

    processes = family(actor)
    ray.get(actor.shutdown.remote())
    assert eventually(lambda: gone(processes[1:]), within_s=15)
    ray.kill(actor)

    # ... and the same after a restart, with another pool and another limit on what runs at once.
    changed = msgspec.structs.replace(options, concurrency=8, memory_fraction=0.3)
    again = start_rollout_actor("sglang", changed)
    repeated = generate(again, asked, seeds=seeds, tokens=12)
    assert [completion.tokens for completion in repeated] == [completion.tokens for completion in first]
    processes = family(again)
    assert any("sglang" in process.name() for process in processes)
    os.kill(processes[0].pid, signal.SIGKILL)
    assert eventually(lambda: gone(processes), within_s=30)
    assert records(logs) == []


@pytest.mark.timeout(500)
def test_a_caller_killed_during_the_start_leaves_nothing(logs, options) -> None:
    actor = start_rollout_actor("sglang", options)
    assert eventually(lambda: bool(schedulers()), within_s=180)
    (scheduler,) = schedulers()
    processes = [scheduler, *scheduler.parent().children(recursive=True)]
    scheduler.parent().kill()
    assert eventually(lambda: gone(processes), within_s=30)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(actor.ready.remote(), timeout=START_S)


@pytest.mark.timeout(500)
def test_a_pool_that_holds_no_request_fails_in_rollout_init(logs, options) -> None:
    before = len(records(logs))
    actor = start_rollout_actor("sglang", msgspec.structs.replace(options, memory_fraction=0.03))
    with pytest.raises(ray.exceptions.ActorDiedError) as caught:
        ray.get(actor.ready.remote(), timeout=START_S)
    assert PhaseFailure.__name__ in str(caught.value)
    (record,) = records(logs)[before:]
    assert (record.cause, record.phase, record.component, record.device) == (
        "pool-too-small",
        "rollout_init",
        "rollout",
        "cpu-budget",
    )
    assert record.budget_bytes == 320 * MIB


@pytest.mark.timeout(900)
def test_a_batch_beyond_the_budget_fails_in_rollout_and_fewer_requests_at_once_cure_it(logs, options) -> None:
    before = len(records(logs))
    tight = msgspec.structs.replace(options, memory_fraction=0.9)
    asked, seeds = prompts(128, 16), list(range(128))
    actor = start_rollout_actor("sglang", tight)
    ray.get(actor.ready.remote(), timeout=START_S)
    processes = family(actor)
    with pytest.raises(ray.exceptions.ActorDiedError):
        generate(actor, asked, seeds=seeds, tokens=48, step=7)
    (record,) = records(logs)[before:]
    assert (record.cause, record.phase, record.step) == ("gpu-oom", "rollout", 7)
    assert record.requested_bytes is not None
    assert record.used_bytes is not None
    assert record.used_bytes + record.requested_bytes >= 320 * MIB
    assert eventually(lambda: gone(processes), within_s=30)

    cured = start_rollout_actor("sglang", msgspec.structs.replace(tight, concurrency=16))
    generate(cured, asked, seeds=seeds, tokens=48, step=7)
    memory = ray.get(cured.memory.remote())
    assert memory.peak_bytes < 320 * MIB
    ray.kill(cured)
    assert len(records(logs)) == before + 1
