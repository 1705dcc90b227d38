"""Where the trackers of each framework keep a run: the rows of their tables on jobs that use them."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.launchers import frameworks
from autotune.launchers.base import Tracked
from autotune.policies.values.job import Job, Tracker

SAVING = ("Saving tensorboard log to {folder}.",)


def of(framework: str, settings: dict[str, Any], **more: Any) -> dict[Tracker, Tracked]:
    job = Job(name="x", framework=framework, settings=settings, workdir="/job", **more)
    return {each.tracker: each for each in frameworks.find(framework).tracked(job, run="7c1e")}


def test_verl() -> None:
    names = {"trainer.project_name": "p", "trainer.experiment_name": "e"}
    result = of("verl", {**names, "trainer.logger": ["console", "mlflow", "tensorboard"]})
    place = {"default_uri": "sqlite:////tmp/mlruns.db", "experiment": "p", "name": "e"}
    assert result[Tracker.MLFLOW].place == place and result[Tracker.TENSORBOARD].lines == SAVING
    wandb = of("verl", {**names, "trainer.logger": "['console','wandb']"})
    assert {tracker: each.place for tracker, each in wandb.items()} == {Tracker.WANDB: {"project": "p"}}


def test_skyrl_and_its_default_names() -> None:
    assert of("skyrl", {"trainer.logger": "mlflow"})[Tracker.MLFLOW].place == {
        "experiment": "skyrl",
        "name": "test_run",
    }
    assert of("skyrl", {})[Tracker.WANDB].place == {"project": "skyrl"}


def test_nemo_rl() -> None:
    result = of("nemo-rl", {"logger.mlflow_enabled": True, "logger.mlflow.experiment_name": "night"})
    place = result[Tracker.MLFLOW].place
    assert place["experiment"] == "night" and place["uri"] == "http://localhost:5000"
    assert of("nemo-rl", {}) == {}


def test_areal() -> None:
    on = {"stats_logger.tensorboard.path": "/tb", "stats_logger.trackio.mode": "online"}
    result = of("areal", {**on, "stats_logger.trackio.space_id": "me/space"})
    assert {tracker: each.place for tracker, each in result.items()} == {
        Tracker.TENSORBOARD: {"folder": "/tb"},
        Tracker.TRACKIO: {"space": "me/space"},
    }
    assert of("areal", {"stats_logger.trackio.mode": "disabled"}) == {}


def test_openrlhf_names_its_folder_by_the_time() -> None:
    result = of("openrlhf", {"logger.tensorboard_dir": "/tb/wandb"})
    assert result[Tracker.TENSORBOARD].place == {"folder": "/tb/wandb/*"}
    assert of("openrlhf", {}) == {}


@pytest.mark.parametrize(
    ("report_to", "trackers"),
    [
        ("all", {Tracker.TENSORBOARD, Tracker.MLFLOW, Tracker.TRACKIO}),
        (["tensorboard", "wandb"], {Tracker.TENSORBOARD}),
        ("none", set()),
    ],
)
def test_trl(report_to: Any, trackers: set[Tracker]) -> None:
    job = Job(
        name="x",
        framework="trl",
        settings={"report_to": report_to, "output_dir": "out", "run_name": "r"},
        workdir="/job",
    )
    result = frameworks.find("trl").tracked(job, run="7c1e")
    assert {each.tracker for each in result} == trackers
    folders = [each.place.get("folder") for each in result if each.tracker is Tracker.TENSORBOARD]
    assert folders in ([], ["/job/out/7c1e/runs/*", None])


@pytest.mark.parametrize("framework", ["slime", "relax", "miles"])
def test_frameworks_on_megatron(framework: str) -> None:
    result = of(framework, {"use-mlflow": True, "mlflow-tracking-uri": "http://m", "mlflow-run-id": "1"})
    assert result[Tracker.TENSORBOARD].lines == SAVING
    assert result[Tracker.MLFLOW].place == {"uri": "http://m", "id": "1"}
    assert Tracker.MLFLOW not in of(framework, {})


def test_every_template_of_a_line_names_one_thing() -> None:
    for name in ("verl", "areal", "slime", "openrlhf", "skyrl", "nemo-rl", "trl", "ms-swift"):
        rows = frameworks.find(name).table.trackers
        assert rows and all(line.count("{") == line.count("}") == 1 for row in rows for line in row.lines)
