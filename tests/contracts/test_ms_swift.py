"""What autotune knows of ms-swift against its wheel's source and its own parser of arguments."""

from __future__ import annotations

import ast
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

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
from tests.contracts.changes import legal
from tests.contracts.conftest import Checked
from tests.contracts.environments import environment, run
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
    {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4},
]
# Needed packages that are not installed: DeepSpeed, which builds its kernels for a card, and liger-kernel.
_UNPARSED_KNOBS = ("fused_kernels",)
_PARSE = """
import contextlib, io, json, sys
from swift.arguments import RLHFArguments
from swift.utils import parse_args

for words in json.load(open(sys.argv[1])):
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            arguments, rest = parse_args(RLHFArguments, words)
        own = arguments.training_args
        passes = (own.per_device_train_batch_size, own.gradient_accumulation_steps)
        print("TAKEN", json.dumps([*passes, own.generation_batch_size, rest]))
    except BaseException as error:
        print("REFUSED", json.dumps(f"{type(error).__name__}: {error}"[:400]))
"""


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
        made = [SWIFT.settings(job, knobs) for _, _, knobs in legal(profile)]
        made += [SWIFT.trial(job, folder="/t", steps=2, longest=True).settings]
        made += [SWIFT.rehearsal(job, folder="/r", part=part, longest=True).settings for part in Part]
        made += [dict(start) for start in SWIFT.presets.values()]
        for changed in made:
            for name, value in changed.items():
                if name.islower():  # the others are variables
                    assert name in facts.types and not misfit(facts.types[name], value), (name, value)


def test_every_change_is_taken_by_the_parser_and_keeps_the_batch(tmp_path: Path, checked: Checked) -> None:
    material = Path(__file__).parents[1] / "real" / "material.py"
    subprocess.run([str(environment("ms-swift")), str(material), str(tmp_path)], check=True, timeout=300)
    fixed = {"model": str(tmp_path / "model"), "model_type": "qwen2", "template": "qwen2_5", "dataset": "d"}
    fixed |= {"check_model": False, "torch_dtype": "float32", "bf16": False, "use_cpu": True}
    lists, batches, rows = [], [], []
    for settings in JOBS:
        if "deepspeed" in settings:
            continue
        own = {"rlhf_type": "grpo", "per_device_train_batch_size": 8, **fixed, **settings}
        job = Job(name="j", framework="ms-swift", settings=own)
        profile = SWIFT.profile(job, CLUSTER)
        moves = [move for move in legal(profile, steps=1) if move[0] not in _UNPARSED_KNOBS]
        rows.append((profile, [(knob, value) for knob, value, _ in moves]))
        forms = [(job, profile.knobs), *((job, knobs) for _, _, knobs in moves)]
        forms += [(SWIFT.trial(job, folder="/t", steps=2, longest=True), profile.knobs)]
        forms += [
            (SWIFT.rehearsal(job, folder="/r", part=part, longest=True), profile.knobs) for part in Part
        ]
        for wanted, knobs in forms:
            argv = SWIFT.command(wanted, knobs, run="r", attempt=1, resume=False).argv
            lists.append(argv[argv.index(_MODULE) + 1 :])
            layout = profile.layout
            batches.append((layout.mini_batch or layout.sequences, layout.sequences))
    file = tmp_path / "words.json"
    file.write_text(json.dumps(lists))
    printed = run("ms-swift", _PARSE, str(file), timeout_s=600).splitlines()
    verdicts = [line for line in printed if line.startswith(("TAKEN", "REFUSED"))]
    assert len(verdicts) == len(lists)
    for words, verdict, batch in zip(lists, verdicts, batches, strict=True):
        answer, _, rest = verdict.partition(" ")
        assert answer == "TAKEN", (words, rest)
        micro, accumulation, generation, unread = json.loads(rest)
        assert (micro * accumulation, generation, unread) == (*batch, []), words
    for profile, taken in rows:
        checked(profile, taken, "the parser of ms-swift 4.6.0")
