"""Two trainer ranks broadcast their weights to a real SGLang engine, through gloo instead of NCCL."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from autotune.launchers.builtin.actors import end, gather, start_trainers
from autotune.launchers.builtin.config.settings import ModelShape, parse_settings
from autotune.launchers.builtin.data.model import write_model
from autotune.launchers.builtin.engines.base import Completion, EngineOptions
from autotune.launchers.builtin.engines.rollout import RolloutActor, start_rollout_actor
from autotune.launchers.builtin.weight_sync import Broadcast

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU platform yields to a GPU"),
]

SHAPE = ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocab=256)
PROMPTS = [[7, 11, 13], [200, 3, 99, 42], [5, 5]]


@pytest.fixture
def cluster() -> Iterator[None]:
    # A socket's path is limited to 107 characters; pytest's folders are too deep.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        yield
        ray.shutdown()


def greedy(actor) -> list[Completion]:
    return ray.get(
        actor.generate.remote(
            PROMPTS, seeds=[0] * len(PROMPTS), max_new_tokens=12, temperature=0.0, ignore_eos=True, step=1
        )
    )


def update_after_each_answer(actor: RolloutActor, folder: Path) -> None:
    for step in range(4, 34):
        actor.generate([[5, 5]], seeds=[0], max_new_tokens=4, temperature=0.0, ignore_eos=True, step=step)
        actor.update_from_disk(str(folder), step=step)


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.tokens for completion in completions]


@pytest.mark.timeout(600)
def test_a_broadcast_gives_the_same_engine_as_the_weights_on_disk(cluster, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for seed, folder in enumerate((old, new)):
        write_model(folder, shape=SHAPE, seed=seed)
    document = {"model": str(new), "save_every": 0, "ranks": 2, "sync_buffer": 40_000, "param_offload": True}
    trainers = start_trainers(parse_settings(document), on_gpu=False)
    options = EngineOptions(model_path=str(old), concurrency=8, max_model_len=64)
    engines = {"rollout-0": start_rollout_actor("sglang", options)}
    engine = engines["rollout-0"]
    meeting = ray.get(trainers["trainer-0"].address.remote())
    starts = {label: rank.start.remote(str(new), meeting, None) for label, rank in trainers.items()}
    gather(starts | {"rollout-0": engine.ready.remote()})
    before = greedy(engine)

    transfer = Broadcast(trainers, engines=engines, backend="gloo")
    transfer.join(0)
    assert len(ray.get(trainers["trainer-0"].contents.remote(1))) > 3
    for step in (1, 2):
        ray.get(engine.begin_update.remote(step=step))
        transfer.sync(step)
        ray.get(engine.end_update.remote(step=step))
        gather({label: rank.rest.remote(step) for label, rank in trainers.items()})
    broadcast = greedy(engine)
    assert tokens(broadcast) != tokens(before)

    ray.get(engine.update_from_disk.remote(str(old), step=3))
    assert greedy(engine) == before
    ray.get(engine.update_from_disk.remote(str(new), step=3))
    assert greedy(engine) == broadcast

    # Inside the actor, where nothing delays the update: the scheduler's batch still holds finished requests.
    ray.get(engine.__ray_call__.remote(update_after_each_answer, new))
    end(trainers, engines=engines, patience_s=5)
