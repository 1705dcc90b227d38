"""Settings that the newest known release refuses and an older one accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.launchers import frameworks
from autotune.orchestrator.config.installed import accepted_before
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.errors import JobErrors
from autotune.orchestrator.planner import settings_of
from autotune.policies.values.job import Job

_REMOVED = "actor_rollout_ref.actor.megatron.grad_offload"  # in verl 0.9.1
_SETTINGS = {
    "model_engine": "megatron",
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    _REMOVED: True,
}


def job(version: str | None = None, **more: Any) -> Job:
    return Job(name="j", framework="verl", framework_version=version, settings={**_SETTINGS, **more})


def text(folder: Path, *lines: str) -> str:
    (folder / "model").mkdir(exist_ok=True)
    settings = {**_SETTINGS, "actor_rollout_ref.model.path": str(folder / "model")}
    return "\n".join(
        [
            "name: j",
            "framework: verl",
            f"workdir: {folder}",
            "cluster: {nodes: 1, gpus_per_node: 8}",
            *lines,
            "settings:",
            *(f"  {key}: {value}" for key, value in settings.items()),
        ]
    )


def test_the_newest_release_that_accepts_a_setting_is_located() -> None:
    result = {("settings", _REMOVED): "0.9.0"}
    assert accepted_before(job("0.9.1"), frameworks.find("verl")) == result
    assert accepted_before(job(), frameworks.find("verl")) == result  # checked against the newest release
    assert accepted_before(job("0.9.0"), frameworks.find("verl")) == {}


def test_a_setting_that_no_release_accepts_has_none() -> None:
    unknown = {"actor_rollout_ref.actor.megatron.grad_ofload": True}
    result = accepted_before(job("0.9.1", **unknown), frameworks.find("verl"))
    assert set(result) == {("settings", _REMOVED)}


def test_a_framework_with_one_release_has_no_older_one() -> None:
    assert accepted_before(Job(name="j", framework="slime"), frameworks.find("slime")) == {}


def test_without_a_version_the_job_is_read_as_the_newest_release_with_a_note(tmp_path: Path) -> None:
    older = parse(text(tmp_path, "python: /nowhere/python"))
    (note,) = older.notes
    assert note == (
        f"verl 0.9.1 does not accept {_REMOVED}, but verl 0.9.0 does:"
        " set `framework_version: 0.9.0` if you run it"
    )
    assert settings_of(older, frameworks.find("verl")).startswith("verl 0.9.1, the newest known")
    assert parse(text(tmp_path, "framework_version: 0.9.0", "python: /nowhere/python")).notes == ()


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.6.1", "0.5.9.post1, the nearest known to 0.6.1"),
        ("0.8.11", "0.8.11, names only"),
        ("0.11.2", "0.11.2 (framework_version)"),
    ],
)
def test_the_release_whose_names_are_used_is_named(version: str, release: str) -> None:
    own = Job(name="j", framework="openrlhf", framework_version=version)
    assert settings_of(own, frameworks.find("openrlhf")) == f"openrlhf {release}"


def test_with_a_version_the_hint_names_the_older_release(tmp_path: Path) -> None:
    with pytest.raises(JobErrors) as caught:
        parse(text(tmp_path, "framework_version: 0.9.1"))
    hints = [each.hint for each in caught.value.complaints if "grad_offload" in each.message]
    assert hints and hints[0].startswith("verl 0.9.0 accepts it; it was removed")
