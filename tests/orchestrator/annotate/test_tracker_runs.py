"""Which run of a tracker is the job's: settings and variables say; its output fills what they leave open."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.launchers.base import OWN_SOURCE, Tracked
from autotune.orchestrator.annotate.tracker_runs import places
from autotune.policies.values.job import Tracker

ID = "0c84bc5312894624897a7dd67d12df5b"
PRINTED = {
    Tracker.WANDB: (
        """\
(TaskRunner pid=77) \x1b[34m\x1b[1mwandb\x1b[0m: 🚀 View run at \x1b[34mhttps://wandb.ai/my-team/a%20project/runs/grpo-7c1e\x1b[0m
wandb: 🚀 View run another at: https://wandb.ai/my-team/other/runs/zzz
""",
        {"entity": "my-team", "project": "a project", "id": "grpo-7c1e"},
    ),
    Tracker.SWANLAB: (
        "swanlab: 🚀 View run grpo at https://swanlab.cn/@me/night/runs/autotune7c1e000000000\n",
        {"workspace": "me", "project": "night", "id": "autotune7c1e000000000"},
    ),
    Tracker.MLFLOW: (f"🏃 View run grpo at: http://10.0.0.1:5000/#/experiments/3/runs/{ID}\n", {"id": ID}),
    Tracker.TRACKIO: (
        """\
* Trackio project initialized: night
* Trackio metrics logged to: /data/trackio
* Resumed existing run: calm-river-1
""",
        {"project": "night", "store": "/data/trackio", "name": "calm-river-1"},
    ),
}


def read(tmp_path: Path, log: str, *tracked: Tracked, **variables: str) -> dict[Tracker, dict[str, str]]:
    (tmp_path / "run.log").write_text(log)
    return places(tmp_path / "run.log", tracked, variables, folder="/job")[0]


@pytest.mark.parametrize("tracker", PRINTED)
def test_a_run_as_its_tracker_prints_it(tracker: Tracker, tmp_path: Path) -> None:
    text, expected = PRINTED[tracker]
    assert read(tmp_path, f"begun\n{text}step 1\n") == {tracker: expected}


def test_the_id_of_an_mlflow_run_in_a_line_of_the_job(tmp_path: Path) -> None:
    line = f"MLflow primary init complete: experiment=night, run=a, run_id={ID}\n"
    assert read(tmp_path, line) == {Tracker.MLFLOW: {"id": ID}}
    assert read(tmp_path, f"mlflow is off; request run id {ID}0\n") == {}


def test_the_settings_go_before_the_variables_and_these_before_the_log(tmp_path: Path) -> None:
    lines = "Saving log to of/the.log.\n"
    printed = Tracked(tracker=Tracker.TENSORBOARD, lines=("Saving log to {folder}.",))
    settings = Tracked(tracker=Tracker.TENSORBOARD, place={"folder": "of/settings"}, lines=printed.lines)
    variables = {"TENSORBOARD_DIR": "/of/variables"}
    tensorboard = Tracker.TENSORBOARD
    assert read(tmp_path, lines, settings, **variables) == {tensorboard: {"folder": "/job/of/settings"}}
    assert read(tmp_path, lines, printed, **variables) == {tensorboard: {"folder": "/of/variables"}}
    assert read(tmp_path, lines, printed) == {tensorboard: {"folder": "/job/of/the.log"}}


OWN = {"WANDB_ENTITY": "my-team", "WANDB_PROJECT": "grpo"}
VIEW = "wandb: 🚀 View run at https://wandb.ai/{}\n"


@pytest.mark.parametrize(
    ("variables", "runs", "own"),
    [
        (
            OWN | {"WANDB_RUN_ID": "own1"},
            ("other-team/their/runs/abc123", "my-team/grpo/runs/abc123"),
            "own1",
        ),
        (OWN, ("other-team/grpo/runs/abc123", "my-team/their/runs/abc123", "my-team/grpo/runs/own2"), "own2"),
        (OWN, ("my-team/grpo/runs/own1", "my-team/grpo/runs/abc123"), "own1"),
        (OWN, ("other-team/grpo/runs/abc123",), None),
        ({"WANDB_PROJECT": "grpo"}, ("other-team/their/runs/abc", "my-team/grpo/runs/own3"), "own3"),
    ],
)
def test_the_output_of_a_job_names_no_other_run_than_its_own(
    variables: dict[str, str], runs: tuple[str, ...], own: str | None, tmp_path: Path
) -> None:
    result = read(tmp_path, "".join(map(VIEW.format, runs)), **variables)
    place = {"entity": "my-team", "project": "grpo", "id": own}
    assert result == ({} if own is None else {Tracker.WANDB: place})


def test_the_settings_decide_the_project_of_a_run(tmp_path: Path) -> None:
    settings = Tracked(tracker=Tracker.WANDB, place={"project": "grpo"})
    log = VIEW.format("other-team/their/runs/abc") + VIEW.format("my-team/grpo/runs/own")
    assert read(tmp_path, log, settings)[Tracker.WANDB]["id"] == "own"


def test_an_mlflow_run_of_the_output_is_not_taken_where_the_experiment_is_stated(tmp_path: Path) -> None:
    settings = Tracked(tracker=Tracker.MLFLOW, place={"experiment": "night", "name": "grpo"})
    assert read(tmp_path, PRINTED[Tracker.MLFLOW][0], settings) == {Tracker.MLFLOW: dict(settings.place)}


def test_a_name_below_another_project_is_not_taken(tmp_path: Path) -> None:
    settings = Tracked(tracker=Tracker.TRACKIO, place={"project": "night"})
    log = (
        "* Trackio project initialized: theirs\n* Created new run: theirs-1\n"
        "* Trackio project initialized: night\n* Created new run: own-1\n"
    )
    assert read(tmp_path, log, settings) == {Tracker.TRACKIO: {"project": "night", "name": "own-1"}}


def test_a_tracker_that_is_on_without_a_run_is_distinguished(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("")
    unknown = Tracked(tracker=Tracker.TRACKIO, place={"space": "me/space"})
    lines = Tracked(tracker=Tracker.TENSORBOARD, lines=("Saving log to {folder}.",))
    result = places(tmp_path / "run.log", (unknown, lines), {"WANDB_PROJECT": "night"}, folder="/job")
    assert result == ({}, (Tracker.TRACKIO,))


@pytest.mark.parametrize(
    "line",
    [
        "wandb: 🚀 View run at https://wandb.ai/a/b/runs/",
        "wandb: View run at https://" + "/" * 100_000,
        "wandb: View run at " + "https://a/b/c/runs" * 9000,
        "🏃 View run x at: http://h/#/experiments/3/runs/../../etc/passwd",
        "mlflow run_id: ; rm -rf /",
        f"[@{OWN_SOURCE}] wandb: 🚀 View run at https://wandb.ai/a/b/runs/c",
    ],
)
def test_a_line_that_is_no_run(line: str, tmp_path: Path) -> None:
    assert read(tmp_path, f"{line}\n") == {}
