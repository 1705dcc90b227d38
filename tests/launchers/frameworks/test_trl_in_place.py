"""A step of TRL's trainer that is made anew in pieces: the losses, gradients and metrics it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks import find
from autotune.launchers.frameworks.hugging_face.in_place import InPlace
from autotune.policies.diagnosis.job_records import cure_of
from autotune.policies.values.job import Cluster, Job, Recovery
from autotune.policies.values.knobs import Knobs

torch = pytest.importorskip("torch")

ALONE = Cluster(address="", nodes=1, gpus_per_node=1, gpu_memory_bytes=0, host_memory_bytes=0)


class Watch:
    """The part of the entry that the pieces need; a failure is one of memory where it says so."""

    program = "trl"
    phase = "forward"

    def record(self, error: BaseException) -> dict[str, Any] | None:
        shared = {"cause": "gpu-oom", "device": "cpu-budget", "phase": "backward", "step": 1}
        return {"schema": 1, **shared, "message": str(error)} if "memory" in str(error) else None

    def lift(self) -> None: ...

    def limit(self) -> None: ...


class Trainer:
    """A mean over samples divided by the passes of a step, as the trainer's own; only so many rows fit."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.ones_(self.model.weight)
        self.model.eval()  # as it is loaded
        self.optimizer = torch.optim.SGD(self.model.parameters())
        self.args = SimpleNamespace(steps_per_generation=2)
        self.current_gradient_accumulation_steps = 2
        self._metrics: dict[str, dict[str, list[float]]] = {"train": {"reward": [0.5]}}

    def _prepare_inputs(self, inputs: Any) -> Any:
        assert self.model.training
        return inputs

    def training_step(self, model: Any, inputs: Any) -> Any:
        batch = self._prepare_inputs(inputs)
        loss = model(batch["x"]).pow(2).mean() / self.current_gradient_accumulation_steps
        self._metrics["train"].setdefault("entropy", []).append(1.0)
        loss.backward()
        if len(batch["x"]) > self.fits:  # it fails when gradients are there already
            raise RuntimeError("out of memory")
        return loss.detach()


def step(trainer: Trainer, passes: list[Any]) -> tuple[list[Any], InPlace]:
    in_place = InPlace(trainer, Watch())
    in_place.begin()
    return [in_place.step(Trainer.training_step, trainer.model, each) for each in passes], in_place


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "records"
    monkeypatch.setenv("AUTOTUNE_RECORDS", str(path))
    return path


def passes() -> list[Any]:
    torch.manual_seed(0)
    return [{"x": torch.randn(8, 3), "count": torch.tensor(16), "none": None} for _ in range(2)]


def test_loss_and_gradient_are_those_of_the_whole_pass(records: Path) -> None:
    whole, cured = Trainer(fits=8), Trainer(fits=3)
    (expected, _), (losses, in_place) = step(whole, passes()), step(cured, passes())
    assert torch.allclose(torch.stack(losses), torch.stack(expected), atol=1e-6)
    assert torch.allclose(cured.model.weight.grad, whole.model.weight.grad, atol=1e-6)
    assert (cured.current_gradient_accumulation_steps, cured.args.steps_per_generation) == (2, 2)
    cures = [cure_of(line) for line in records.read_text().splitlines()]
    assert [(cure.before, cure.after) for cure in cures if cure] == [(8, 4), (4, 2)]
    # What generation logged stays, what abandoned passes logged does not.
    assert cured._metrics["train"] == {"reward": [0.5], "entropy": [1.0] * 8}
    in_place.begin()
    in_place.step(Trainer.training_step, cured.model, passes()[0])
    assert len(records.read_text().splitlines()) == 2  # the setting is kept


def test_a_failure_in_a_later_pass_begins_the_step_anew(records: Path) -> None:
    whole, cured = Trainer(fits=8), Trainer(fits=8)
    in_place, expected = InPlace(cured, Watch()), step(whole, passes())[0]
    in_place.begin()
    first, second = passes()
    losses = [in_place.step(Trainer.training_step, cured.model, first)]
    cured.fits = 4
    losses.append(in_place.step(Trainer.training_step, cured.model, second))
    assert torch.allclose(torch.stack(losses), torch.stack(expected), atol=1e-6)
    assert torch.allclose(cured.model.weight.grad, whole.model.weight.grad, atol=1e-6)
    assert json.loads(records.read_text().partition("cured ")[2])["after"] == 4


@pytest.mark.parametrize(
    "batch", [{"x": torch.ones(1, 3)}, {"x": torch.ones(8, 3), "pixel_values": torch.ones(8)}]
)
def test_what_cannot_be_split_fails_as_before(records: Path, batch: Any) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        step(Trainer(fits=0), [batch])
    assert not records.exists()


def test_another_failure_is_not_cured(records: Path) -> None:
    trainer = Trainer(fits=8)
    with pytest.raises(RuntimeError, match="shapes"):
        step(trainer, [{"x": torch.ones(8, 2)}])
    assert not records.exists()


def test_scoring_is_made_in_pieces(records: Path) -> None:
    in_place, sizes = InPlace(Trainer(fits=8), Watch()), []

    def score(rows: int, *, batch_size: int) -> int:
        sizes.append(batch_size)
        if batch_size > 2:
            raise RuntimeError("out of memory")
        return rows

    scored = in_place.scores(score)
    with torch.no_grad():
        assert (scored(16, batch_size=8), scored(16, batch_size=8)) == (16, 16)
    assert sizes == [8, 4, 2, 2]


@pytest.mark.parametrize(
    ("settings", "recovery", "is_cured"),
    [
        ({}, Recovery(), True),
        ({}, Recovery(in_place=False), False),
        ({}, Recovery(deny=("microbatch_size",)), False),
        ({"loss_type": "bnpo"}, Recovery(), False),
        ({"num_processes": 2}, Recovery(), False),
    ],
)
def test_only_an_exact_and_permitted_change_in_one_process_is_made(
    settings: dict[str, Any], recovery: Recovery, *, is_cured: bool
) -> None:
    trl = find("trl")
    job = Job(name="j", framework="trl", settings=settings, recovery=recovery)
    profile = trl.profile(job, ALONE)
    command = trl.command(job, profile.knobs, run="r", attempt=1, resume=False)
    assert ("AUTOTUNE_IN_PLACE" in command.env) is is_cured
    assert "in_place.py" in {file.name for file in command.files}
    trial = trl.trial(job, folder="/t", steps=2, longest=False)
    assert "AUTOTUNE_IN_PLACE" not in trl.command(trial, Knobs(), run="r", attempt=1, resume=False).env
    assert replace(trial.recovery, in_place=recovery.in_place) == recovery
