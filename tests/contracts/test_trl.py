"""TRL's own configuration as the judge of every setting that can reach it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.launchers.frameworks import find
from autotune.launchers.frameworks.hugging_face import entry
from autotune.launchers.frameworks.hugging_face.settings import shown_settings
from autotune.launchers.frameworks.tabular.declared import facts as known_facts
from autotune.launchers.frameworks.trl.config import RELEASES
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.rehearsing import Part
from tests.contracts.changes import legal
from tests.contracts.conftest import Checked
from tests.contracts.environments import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

TRL = find("trl")
FACTS = known_facts("autotune.launchers.frameworks.trl", RELEASES[-1])
SHOWN = shown_settings("autotune.launchers.frameworks.trl")
CLUSTER = Cluster(
    address="local", nodes=1, gpus_per_node=1, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)
_FACTS = """
import dataclasses, json, types, typing, warnings
warnings.simplefilter("ignore")
from accelerate.commands.launch import launch_command_parser
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig
from trl.scripts.grpo import GRPOScriptArguments
import trl
from pathlib import Path
from transformers import Trainer
from trl import GRPOTrainer

def kind(hint):
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    plain = [part for part in parts if part is not type(None)]
    if len(plain) == 1 and plain[0] in (int, float, bool):
        return plain[0].__name__ + ("?" if len(plain) < len(parts) else "")
    return "text"

kinds, values = {}, {}
for each in (GRPOConfig, ModelConfig, DatasetMixtureConfig, GRPOScriptArguments):
    hints = typing.get_type_hints(each)
    for field in dataclasses.fields(each):
        kinds.setdefault(kind(hints[field.name]), []).append(field.name)
        if field.default is not dataclasses.MISSING:
            values.setdefault(field.name, getattr(field.default, "value", field.default))
flags = [a for a in launch_command_parser()._actions if a.option_strings]
launch = {name[2:].replace("-", "_"): a for a in flags for name in a.option_strings if name.startswith("--")}
folder = Path(trl.__file__).parent / "accelerate_configs"
plain = (int, float, str, type(None))
print(json.dumps({
    "kinds": kinds,
    "values": {name: value for name, value in values.items() if isinstance(value, plain)},
    "launch": {name: getattr(a.type, "__name__", "") for name, a in launch.items()},
    "switches": sorted(name for name, a in launch.items() if a.nargs == 0),
    "configurations": sorted(file.stem for file in folder.glob("*.yaml")),
    "methods": [name for name in dir(GRPOTrainer)],
}))
"""
_PARSE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from accelerate.commands.launch import launch_command_parser
from trl.scripts.grpo import make_parser
for launch, words in json.load(open(sys.argv[1])):
    try:
        launch_command_parser().parse_args([*launch, "script.py"])
        _, config, _, _ = make_parser().parse_args_and_config(words, fail_with_unknown_args=False)
        passes = (config.per_device_train_batch_size, config.gradient_accumulation_steps)
        print("TAKEN", json.dumps([*passes, config.generation_batch_size]))
    except BaseException as error:
        print("REFUSED", json.dumps(f"{type(error).__name__}: {error}"[:400]))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run("trl", _FACTS, timeout_s=300).splitlines()[-1])
    return result


def test_the_lists_of_names_are_those_of_the_packages(facts: dict[str, Any]) -> None:
    ours: dict[str, set[str]] = {}
    for name, kind in FACTS.types.items():
        plain = kind.startswith("launch") or kind.rstrip("?") in ("int", "float", "bool")
        ours.setdefault(kind if plain else "text", set()).add(name)
    switches, launch = ours.pop("launch switch"), ours.pop("launch")
    numbers = {kind: ours.pop(f"launch {kind}") for kind in ("int", "float")}
    assert ours == {kind: set(names) for kind, names in facts["kinds"].items()}
    own = set().union(*ours.values())
    theirs = set(facts["launch"]) - own - {"help", "env"}
    assert switches.union(launch, *numbers.values()) == theirs | {"accelerate_config"}
    assert numbers == {kind: {name for name in theirs if facts["launch"][name] == kind} for kind in numbers}
    assert switches == set(facts["switches"]) & theirs


def test_the_defaults_are_those_of_the_packages(facts: dict[str, Any]) -> None:
    given = {name: value for name, value in facts["values"].items() if value is not None}
    assert {name: value for name, value in FACTS.defaults.items() if name in given} == given
    assert FACTS.defaults.keys() == given.keys() and FACTS.types.keys() >= SHOWN


def test_the_entry_finds_what_it_watches(facts: dict[str, Any]) -> None:
    assert {"_generate", "compute_loss", "_save_checkpoint", entry._SCORES} <= set(facts["methods"])
    assert {"zero1", "zero2", "zero3", "fsdp1", "fsdp2", "multi_gpu"} <= set(facts["configurations"])


def test_every_change_is_taken_and_keeps_the_batch(tmp_path: Path, checked: Checked) -> None:
    begun: list[dict[str, Any]] = [
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 16, "steps_per_generation": 4},
        {"per_device_train_batch_size": 16, "generation_batch_size": 64},
        {"use_vllm": True, "vllm_gpu_memory_utilization": 0.4},
        {"dataloader_num_workers": 2, "dataloader_prefetch_factor": 4},
        {"accelerate_config": "zero3", "num_processes": 1},
        {"accelerate_config": "fsdp2", "num_processes": 1},
        {"reward_funcs": ["reward.a", "reward.b"], "generation_kwargs": {"min_new_tokens": 4}},
    ]
    lists, batches, rows = [], [], []
    for own in begun:
        job = Job(name="j", framework="trl", settings={"use_cpu": True, "bf16": False, **own})
        profile = TRL.profile(job, CLUSTER)
        moves = list(legal(profile))
        rows.append((profile, [(knob, value) for knob, value, _ in moves]))
        forms = [(job, profile.knobs), *((job, knobs) for _, _, knobs in moves)]
        forms += [(TRL.trial(job, folder="/t", steps=2, longest=True), profile.knobs)]
        forms += [(TRL.rehearsal(job, folder="/r", part=part, longest=True), profile.knobs) for part in Part]
        for wanted, knobs in forms:
            argv = TRL.command(wanted, knobs, run="r", attempt=1, resume=False).argv
            at, launched = argv.index("trl.scripts.grpo"), argv.index("launch")
            launch = list(argv[launched + 1 : at - 3])
            if "--accelerate_config" in launch:  # the entry finds its file
                place = launch.index("--accelerate_config")
                del launch[place : place + 2]
            lists.append((launch, argv[at + 1 :]))
            layout = profile.layout
            batches.append((layout.mini_batch or layout.sequences, layout.sequences))
    file = tmp_path / "words.json"
    file.write_text(json.dumps(lists))
    verdicts = run("trl", _PARSE, str(file), timeout_s=300).splitlines()
    assert len(verdicts) == len(lists)
    for words, verdict, batch in zip(lists, verdicts, batches, strict=True):
        message, _, rest = verdict.partition(" ")
        assert message == "TAKEN", (words, rest)
        micro, accumulation, generation = json.loads(rest)
        assert (micro * accumulation, generation) == batch, words
    for profile, taken in rows:
        checked(profile, taken, "the parsers of TRL 1.16.0 and accelerate 1.15.0")
