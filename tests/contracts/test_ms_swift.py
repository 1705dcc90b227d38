"""What autotune knows of ms-swift against its wheel, which is read and not run."""

from __future__ import annotations

import ast
import zipfile
from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks import find
from autotune.launchers.frameworks.core.types import misfit
from autotune.launchers.frameworks.hugging_face import entry
from autotune.launchers.frameworks.hugging_face.settings import shown_settings
from autotune.launchers.frameworks.ms_swift.adapter import _MODULE
from autotune.launchers.frameworks.ms_swift.config import LAUNCH_VARIABLES, RELEASES
from autotune.launchers.frameworks.ms_swift.rows import LOSSES
from autotune.launchers.frameworks.tabular.declared import facts as known_facts
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.rehearsing import Part
from tests.contracts.wheels import wheel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SWIFT = find("ms-swift")
CLUSTER = Cluster(
    address="local", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)
JOBS: list[dict[str, Any]] = [
    {"gradient_accumulation_steps": 2},
    {"steps_per_generation": 4},
    {"use_vllm": True, "vllm_mode": "colocate", "max_length": 512},
    {"deepspeed": "zero3_offload", "tuner_type": "full"},
    {"fsdp": "fsdp2"},
]


@pytest.fixture(scope="module", params=RELEASES)
def text(request: pytest.FixtureRequest) -> dict[str, str]:
    with zipfile.ZipFile(wheel("ms_swift", request.param)) as archive:
        wanted = ("swift/rlhf_trainers/", "swift/arguments/", "swift/cli/", "swift/config/")
        names = [name for name in archive.namelist() if name.startswith(wanted) and "." in name]
        return {name: archive.read(name).decode() for name in names}


def methods(source: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}


def test_the_module_and_its_launch_variables_are_there(text: dict[str, str]) -> None:
    assert f"{_MODULE.replace('.', '/')}.py" in text
    main = text["swift/cli/main.py"]
    assert all(f"'{name}'" in main for name in LAUNCH_VARIABLES)
    assert all(f"swift/config/{name}.json" in text for name in ("zero2_offload", "zero3_offload", "fsdp2"))


def test_the_entry_finds_what_it_watches(text: dict[str, str]) -> None:
    trainers = methods(text["swift/rlhf_trainers/grpo_trainer.py"])
    trainers |= methods(text["swift/rlhf_trainers/rollout_mixin.py"])
    wanted = {"_generate_completions", "_move_model_to_vllm", "compute_loss", entry._SCORES}
    assert wanted <= trainers and wanted - {entry._SCORES} <= entry._PHASES.keys()


def test_every_loss_is_one_of_the_trainer(text: dict[str, str]) -> None:
    trainer = text["swift/rlhf_trainers/grpo_trainer.py"]
    assert all(f"'{loss}'" in trainer for loss in LOSSES)


@pytest.mark.parametrize("release", RELEASES)
def test_every_setting_that_can_be_written_is_known_and_fits(release: str) -> None:
    facts = known_facts("autotune.launchers.frameworks.ms_swift", release)
    assert facts.types.keys() >= shown_settings("autotune.launchers.frameworks.ms_swift")
    for settings in JOBS:
        own = {"rlhf_type": "grpo", "per_device_train_batch_size": 8, **settings}
        job = Job(name="j", framework="ms-swift", framework_version=release, settings=own)
        profile = SWIFT.profile(job, CLUSTER)
        moves = [
            replace(profile.knobs, **{knob: value})
            for knob, support in profile.supported.items()
            for value in support.grid.values
        ]
        made = [SWIFT.settings(job, knobs) for knobs in moves]
        made += [SWIFT.trial(job, folder="/t", steps=2, longest=True).settings]
        made += [SWIFT.rehearsal(job, folder="/r", part=part, longest=True).settings for part in Part]
        made += [dict(start) for start in SWIFT.presets.values()]
        for changed in made:
            for name, value in changed.items():
                if name.islower():  # the others are variables
                    assert name in facts.types and not misfit(facts.types[name], value), (name, value)
