"""The rehearsal of each framework: what it meets, what it saves and loads, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.orchestrator.config.loader import load_unfinished
from autotune.orchestrator.driver import rehearsal
from autotune.policies.values.command import Command
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.rehearsing import STEPS, LateEvent, Part
from tests.lookalikes import jobs

# What makes a job of the look-alikes validate, and how its rehearsal then says so.
VALIDATING: dict[str, tuple[dict[str, Any], str]] = {
    "verl": ({"trainer.test_freq": 20}, "trainer.test_freq=2"),
    "areal": ({"evaluator.freq_epochs": 1}, "++evaluator.freq_steps=2"),
    "slime": ({"eval-interval": 20, "eval-num-gpus": 2}, "--eval-interval 2"),
    "relax": ({"eval-interval": 20}, "--eval-interval 2"),
    "miles": ({"eval-interval": 20, "eval-sglang-mem-fraction-static": 0.5}, "--eval-interval 2"),
    "openrlhf": ({"eval.dataset": "mine", "eval.steps": 20}, "--eval.steps 2"),
    "skyrl": ({"trainer.eval_interval": 20, "data.val_data": ["v.parquet"]}, "trainer.eval_interval=2"),
    "nemo-rl": ({"grpo.val_period": 20}, "grpo.val_period=2"),
    "ms-swift": ({"split_dataset_ratio": 0.01}, "--eval_steps 2"),
}
WITHOUT: dict[str, dict[str, Any]] = {"nemo-rl": {"grpo.val_period": 0}}  # whose own file validates
SAVES = {
    "verl": "trainer.save_freq=2",
    "areal": "++recover.freq_steps=2",
    "slime": "--save-interval 2",
    "relax": "--save-interval 2",
    "miles": "--save-interval 2",
    "openrlhf": "--ckpt.save_steps 2",
    "skyrl": "trainer.ckpt_interval=2",
    "nemo-rl": "checkpointing.save_period=2",
    "ms-swift": "--save_steps 2",
}
# How the second start says that it goes on, and the first that it does not.
RELOADS = {
    "verl": ("trainer.resume_mode=auto", "trainer.resume_mode=disable"),
    "areal": ("++recover.mode=", "++recover.mode="),
    "slime": ("--load /r/7/1/checkpoints", "--save /r/7/1/checkpoints"),
    "relax": ("--load /r/7/1/checkpoints", "--save /r/7/1/checkpoints"),
    "miles": ("--load /r/7/1/checkpoints", "--save /r/7/1/checkpoints"),
    "openrlhf": ("--ckpt.load_enable", "--ckpt.path /r/7/1/checkpoints"),
    "skyrl": ("trainer.resume_mode=latest", "trainer.resume_mode=none"),
    "nemo-rl": ("checkpointing.checkpoint_dir=/r/7/1", "checkpointing.checkpoint_dir=/r/7/1"),
    "ms-swift": (" own swift.cli.rlhf", " start swift.cli.rlhf"),
}
# What reports a training to others, and the words of a command that do so.
REPORTING: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "verl": ({"trainer.logger": ["console", "wandb"]}, ("wandb",)),
    "areal": (
        {"stats_logger.wandb.mode": "online", "stats_logger.swanlab.mode": "cloud"},
        ("online", "cloud"),
    ),
    "slime": ({"use-wandb": True}, ("--use-wandb",)),
    "relax": (
        {"use-wandb": True, "use-clearml": True, "notify-urls": "json://me"},
        ("--use-wandb", "--use-clearml", "--notify-urls"),
    ),
    "miles": ({"use-wandb": True, "use-mlflow": True}, ("--use-wandb", "--use-mlflow")),
    "openrlhf": ({"logger.wandb.key": "mine"}, ("logger.wandb.key",)),
    "skyrl": ({"trainer.logger": "wandb"}, ("wandb",)),
    "nemo-rl": (
        {"logger.wandb_enabled": True, "logger.mlflow_enabled": True},
        ("wandb_enabled=true", "mlflow_enabled=true"),
    ),
    "ms-swift": ({"report_to": ["wandb", "swanlab"]}, ("wandb", "swanlab")),
}
NOT_MET = {
    "verl": "trainer.save_freq",
    "nemo-rl": "checkpointing.save_period",
    "skyrl": "trainer.ckpt_interval",
    "openrlhf": "ckpt.path",
    "ms-swift": "save_strategy",
}
NEVER = {"openrlhf": None, "ms-swift": "no"}  # of each other framework -1


def job(name: str, folder: Path, settings: dict[str, Any] | None = None) -> Job:
    file = jobs.written(name, folder, address="local", settings=settings or {}, workdir=str(folder))
    return load_unfinished(file)[0]


def rendered(name: str, of: Job, part: Part, *, longest: bool = True) -> Command:
    framework = FRAMEWORKS[name]
    short = framework.rehearsal(of, folder="/r/7/1", part=part, longest=longest)
    return framework.command(short, Knobs(), run="7", attempt=1, resume=part is Part.RELOAD)


def words(name: str, of: Job, part: Part, *, longest: bool = True) -> str:
    return " ".join(rendered(name, of, part, longest=longest).argv)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_event_that_is_not_met_has_a_reason(name: str, tmp_path: Path) -> None:
    if name in jobs.FRAMEWORKS:
        of = job(name, tmp_path)
    else:
        of = Job(name="j", framework=name, workdir="/w", settings={})
    met = FRAMEWORKS[name].meets(of)
    assert [each.event for each in met] == list(LateEvent)
    assert all(each.reason for each in met if not each.met)
    assert {each.event for each in met if each.met} >= {LateEvent.OPTIMIZER, LateEvent.WAKE_UP}


@pytest.mark.parametrize("name", SAVES)
def test_a_rehearsal_saves_into_its_own_folder_and_goes_on_from_there(name: str, tmp_path: Path) -> None:
    of = job(name, tmp_path)
    met = {each.event for each in FRAMEWORKS[name].meets(of) if each.met}
    assert {LateEvent.SAVE, LateEvent.RELOAD} <= met
    worst, reload = words(name, of, Part.WORST), words(name, of, Part.RELOAD)
    assert SAVES[name] in worst and SAVES[name] in reload
    on, off = RELOADS[name]
    assert on in reload and off in worst and "/r/7/1" in worst
    assert str(tmp_path / "checkpoints") not in worst + reload
    assert str(tmp_path / "areal") not in worst + reload


@pytest.mark.parametrize("name", VALIDATING)
def test_it_validates_with_the_save_where_the_job_does(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    settings, message = VALIDATING[name]
    of, plain = job(name, tmp_path / "a", settings), job(name, tmp_path / "b", WITHOUT.get(name))
    assert LateEvent.VALIDATION in {each.event for each in FRAMEWORKS[name].meets(of) if each.met}
    assert message in words(name, of, Part.WORST)
    assert LateEvent.VALIDATION not in {each.event for each in FRAMEWORKS[name].meets(plain) if each.met}
    assert message not in words(name, plain, Part.WORST)
    for setting, value in settings.items():  # such as the engines that validate
        if setting in ("eval-num-gpus", "eval-sglang-mem-fraction-static", "eval.dataset"):
            assert f"--{setting} {value}" in words(name, of, Part.WORST)


@pytest.mark.parametrize("name", REPORTING)
def test_it_reports_to_nobody(name: str, tmp_path: Path) -> None:
    settings, message = REPORTING[name]
    of = job(name, tmp_path, settings)
    training = " ".join(FRAMEWORKS[name].command(of, Knobs(), run="7", attempt=1, resume=False).argv).lower()
    assert all(word in training for word in message), training
    for part in Part:
        assert not [word for word in message if word in words(name, of, part).lower()]


@pytest.mark.parametrize("name", NOT_MET)
def test_a_job_that_never_saves_is_not_made_to(name: str, tmp_path: Path) -> None:
    of = job(name, tmp_path, {NOT_MET[name]: NEVER.get(name, -1)})
    met = {each.event for each in FRAMEWORKS[name].meets(of) if each.met}
    assert not met & {LateEvent.SAVE, LateEvent.RELOAD}
    assert SAVES[name] not in words(name, of, Part.WORST)


def test_answers_are_forced_only_where_the_framework_can(tmp_path: Path) -> None:
    of = job("verl", tmp_path)
    assert "ignore_eos=True" in words("verl", of, Part.WORST)
    assert "ignore_eos" not in words("verl", of, Part.WORST, longest=False)
    other = replace(of, settings={**of.settings, "actor_rollout_ref.rollout.name": "sglang"})
    length = FRAMEWORKS["verl"].meets(other)[0]
    assert (length.event, length.met) == (LateEvent.LENGTH, False) and "vLLM alone" in length.reason


def test_trl_saves_after_whole_generations() -> None:
    of = Job(
        name="j",
        framework="trl",
        workdir="/w",
        settings={"num_iterations": 2, "eval_strategy": "steps", "output_dir": "/mine"},
    )
    trl = FRAMEWORKS["trl"]
    short = trl.rehearsal(of, folder="/r", part=Part.WORST, longest=True)
    span = short.settings["save_steps"] // 2
    assert span >= 2
    assert (short.settings["max_steps"], short.settings["eval_steps"]) == (3 * span, 2 * span)
    assert short.settings["save_strategy"] == short.settings["eval_strategy"] == "steps"
    assert short.settings["output_dir"] == "/r/checkpoints"
    never = replace(of, settings={"save_strategy": "no"})
    assert LateEvent.RELOAD not in {each.event for each in trl.meets(never) if each.met}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_no_step_of_a_rehearsal_reaches_the_goal(name: str, tmp_path: Path) -> None:
    settings = {"num_iterations": 4} if name == "trl" else {}  # of which each generation takes four steps
    of = job(name, tmp_path) if name in jobs.FRAMEWORKS else Job(name="j", framework=name, settings=settings)
    for part in Part:
        short = rehearsal.short(FRAMEWORKS[name], of, folder="/r", part=part, longest=True)
        last = FRAMEWORKS[name].last_step(short) or STEPS[part]
        assert last >= STEPS[part] and short.goal.steps > last


def test_a_command_without_a_folder_of_its_own_is_not_rehearsed(tmp_path: Path) -> None:
    of = job("command", tmp_path)
    for engine, wakes in (("none", False), ("vllm", True)):
        met = FRAMEWORKS["command"].meets(replace(of, settings={**of.settings, "engine": engine}))
        assert {each.event: each.met for each in met}[LateEvent.WAKE_UP] is wakes
    fixed = replace(of, command=tuple(word for word in of.command if "{folder}" not in word))
    assert not FRAMEWORKS["command"].meets(fixed)
