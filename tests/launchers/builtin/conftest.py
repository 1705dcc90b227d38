import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.launchers.builtin.config.settings import ModelShape, parse_settings
from autotune.launchers.builtin.data.model import write_model
from autotune.launchers.builtin.data.task import Sample
from autotune.launchers.builtin.trainer.rank import TrainerRank

SHAPE = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=64, vocab=64)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Compute with one thread: beside other tests the threads of a team wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, shape=SHAPE, seed=1)
    return folder


@pytest.fixture(scope="session")
def ragged_samples() -> list[Sample]:
    source = random.Random(0)
    samples = []
    for _ in range(12):
        length = source.randrange(1, 10)
        samples.append(
            Sample(
                prompt=[source.randrange(2, 64) for _ in range(source.randrange(2, 6))],
                response=[source.randrange(2, 64) for _ in range(length)],
                logprobs=[-4.0] * length,
                reward=0.5,
                advantage=source.gauss(0, 1),
            )
        )
    return samples


@pytest.fixture
def trainer(tiny_model: Path) -> Callable[..., TrainerRank]:
    def start(resume_from: Path | None = None, **settings: Any) -> TrainerRank:
        document = {"model": str(tiny_model), "save_every": 0, "response_tokens": 9, **settings}
        rank = TrainerRank(parse_settings(document), 0)
        rank.start(str(tiny_model), None, None if resume_from is None else str(resume_from))
        return rank

    return start
