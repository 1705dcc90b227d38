"""verl's own code as the judge of every override that can reach it."""

from __future__ import annotations

import json
import re
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks.verl import keys as verl_keys
from autotune.orchestrator.config.installed import with_version
from autotune.policies.remedies.ladder import candidates
from autotune.policies.remedies.legality import objections
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Setting
from autotune.policies.values.observation import StepDone
from autotune.policies.values.rehearsing import Part
from tests.contracts.environments import environment, run
from tests.contracts.wheels import wheel
from tests.launchers.frameworks.verl_jobs import (
    ACTOR,
    JOBS,
    ROLLOUT,
    VERL,
    job,
    moves,
    profile,
    with_settings,
    written_jobs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

# Composes each list as verl's entry point does, validates it and builds what its workers build of it.
_COMPOSE = """
import copy, gc, json, sys, warnings
warnings.simplefilter("ignore")
import yaml
from hydra import compose, initialize_config_module
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
load, texts = yaml.load, {}
def load_once(stream, Loader):  # the same files for every list
    text = stream if isinstance(stream, str) else stream.read()
    if text not in texts:
        texts[text] = load(text, Loader)
    return copy.deepcopy(texts[text])
yaml.load = load_once
gc.freeze()  # what is imported lives to the end
for words in json.load(open(sys.argv[1])):
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", overrides=words)
        validate_config(config, need_reference_policy(config), need_critic(config))
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        print("TAKEN")
    except BaseException as error:
        print("REFUSED", json.dumps(f"{type(error).__name__}: {error}"[:400]))
"""
_TINY = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
_VALUES = """
import json, sys
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=[f"model_engine={sys.argv[1]}"])
def leaves(node, at=""):
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{at}{key}.")
        elif key != "_target_":
            yield f"{at}{key}", value
print(json.dumps(dict(leaves(OmegaConf.to_container(config, resolve=False)))))
"""


def verdicts(lists: list[tuple[str, ...]], folder: Path) -> list[str]:
    """Return what verl says of each list of overrides: TAKEN, or REFUSED and why."""
    (folder / "config.json").write_text(json.dumps(_TINY))
    (folder / "generation_config.json").write_text("{}")
    # To build a critic verl reads its model, which this machine has not.
    stand_in = (f"critic.model.path={folder}", "++critic.model.load_tokenizer=False")
    file = folder / "overrides.json"
    file.write_text(json.dumps([(*words, *stand_in) for words in lists]))
    output = run("verl", _COMPOSE, str(file), timeout_s=1700).splitlines()
    items = [line for line in output if line.startswith(("TAKEN", "REFUSED"))]
    assert len(items) == len(lists)
    return items


def overrides(of: Job, settings: dict[str, Any], *, resume: bool = False) -> tuple[str, ...]:
    """Return the overrides of an attempt of a job with changed settings."""
    changed = with_settings(of, settings)
    command = VERL.command(changed, profile(changed).knobs, run="7c1e", attempt=1 + resume, resume=resume)
    return command.argv[3:]


def changes_of(of: Job) -> list[dict[str, Setting]]:
    """Return every change that any remedy can make of a job, and every value of every grid."""
    own = profile(of)
    items = [{knob: value} for knob, value, _ in moves(of)]
    for cause, phase, component in product(Cause, Phase, Component):
        diagnosis = Diagnosis(cause=cause, phase=phase, component=component)
        items += [r.changes for r in candidates(own, own.knobs, diagnosis, started=False) if r.changes]
    return [change for index, change in enumerate(items) if change not in items[:index]]


def folded(of: Job) -> list[dict[str, Setting]]:
    """Return the changes joined where they are legal together: each takes verl a second to judge."""
    own, groups = profile(of), list[dict[str, Setting]]()
    for change in changes_of(of):
        for group in groups:
            together = replace(own.knobs, **group, **{k: v for k, v in change.items() if k not in group})
            if group.keys().isdisjoint(change) and not objections(own, own.knobs, together, started=False):
                group |= change
                break
        else:
            groups.append(dict(change))
    return groups


ALL = {**JOBS, **written_jobs()}


def lists_of(of: Job) -> list[tuple[dict[str, Setting] | str, tuple[str, ...]]]:
    """Return a job's lists of overrides: every change, and the ways in which it is started without one."""
    own = profile(of)
    items: list[tuple[dict[str, Setting] | str, tuple[str, ...]]] = [
        (group, overrides(of, VERL.settings(of, replace(own.knobs, **group)))) for group in folded(of)
    ]
    short = VERL.trial(of, folder="/scratch/trial", steps=5, longest=True)
    parts = {part: VERL.rehearsal(of, folder="/scratch/1", part=part, longest=True) for part in Part}
    return [
        *items,
        *((part.value, overrides(each, {}, resume=part is Part.RELOAD)) for part, each in parts.items()),
        ("as written", overrides(of, {})),
        ("resumed", overrides(of, {}, resume=True)),
        ("trial", overrides(short, {})),
    ]


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[dict[str, Setting] | str, str]]]:
    """Return what verl says of every list of every job; one process judges them all."""
    rows = [(name, what, words) for name, of in ALL.items() for what, words in lists_of(of)]
    message = verdicts([words for _, _, words in rows], tmp_path_factory.mktemp("verl"))
    result: dict[str, list[tuple[dict[str, Setting] | str, str]]] = {name: [] for name in ALL}
    for (name, what, _), line in zip(rows, message, strict=True):
        result[name].append((what, line))
    return result


@pytest.mark.parametrize("name", ALL)
def test_every_change_composes_and_validates(name, judged, checked) -> None:
    own = profile(ALL[name])
    changed = {knob for what, _ in judged[name] if isinstance(what, dict) for knob in what}
    assert changed >= own.supported.keys() - {"dynamic_batching"}
    assert {f"{what}: {line}" for what, line in judged[name] if line != "TAKEN"} == set()
    changes = [change for what, _ in judged[name] if isinstance(what, dict) for change in what.items()]
    checked(own, changes, "the composition and the validation of verl 0.9.1")


@pytest.mark.parametrize("engine", ["dp", "megatron"])
def test_the_facts_hold_what_verl_composes(engine: str) -> None:
    assert json.loads(run("verl", _VALUES, engine)) == verl_keys.keys_of("0.9.1", engine).configured


def test_fields_that_only_dataclasses_know_have_their_defaults() -> None:
    program = """
from verl.workers.config import FSDPCriticConfig, RolloutConfig
import dataclasses
of = lambda kind, name: next(f.default for f in dataclasses.fields(kind) if f.name == name)
print(of(FSDPCriticConfig, "ppo_infer_max_token_len_per_gpu"), of(RolloutConfig, "enable_sleep_mode"))
"""
    known = verl_keys.keys_of("0.9.1", "dp").defaults
    keys = ("critic.ppo_infer_max_token_len_per_gpu", "actor_rollout_ref.rollout.enable_sleep_mode")
    assert run("verl", program).split()[-2:] == [str(known[key]) for key in keys]


def test_what_verl_prints_of_its_configuration_is_read_back() -> None:
    program = """
import sys
from pprint import pprint
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
with initialize_config_module("verl.trainer.config", version_base=None):
    pprint(OmegaConf.to_container(compose("ppo_trainer", overrides=sys.argv[1:]), resolve=True))
"""
    for name in ("fsdp2-reference", "critic", "megatron"):
        of = JOBS[name]
        text = run("verl", program, *VERL.words(of.settings))
        tagged = "".join(f"\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m {line}\n" for line in text.splitlines())
        for output in (text, tagged):
            settings = VERL.printed(output)
            shown_job = Job(name="j", framework="verl", settings=settings)
            assert profile(shown_job).knobs == profile(of).knobs
        torn = "\n".join(tagged.splitlines()[:200])
        assert VERL.printed(torn)[f"{'actor_rollout_ref.actor'}.use_dynamic_bsz"] is True


def test_the_lines_that_the_markers_read_are_verls() -> None:
    package = next((environment("verl").parents[1] / "lib").glob("python*/site-packages/verl"))
    trainer = (package / "trainer/ppo/v1/trainer_base.py").read_text()
    for text in (
        "Resuming from {global_step_folder}, setting global step to {self.global_steps}",
        "Saving checkpoint to {local_global_step_folder}",
        "Training from scratch",
        "create worker group ",
        "actor and ref model engine initialized",
        "checkpoint engine manager initialized",
        "all initialize finished, ready to fit",
        "Final validation metrics: ",
        'desc="Training Progress"',
    ):
        assert text in trainer, text
    saver = (package / "utils/checkpoint/fsdp_checkpoint_manager.py").read_text()
    assert "Saved extra_state to " in saver
    buffer = (package / "trainer/ppo/v1/replay_buffer.py").read_text()
    assert 'os.getenv("VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS", "60")' in buffer
    program = """
import numpy as np
from verl.utils.logger.aggregate_logger import concat_dict_to_str
print(concat_dict_to_str({"training/global_step": 7, "perf/time_per_step": np.float64(3.5),
    "perf/total_num_tokens": np.int64(7000), "actor/perf/max_memory_allocated_gb": 41.5}, step=7))
"""
    marker = VERL.marker(run("verl", program).splitlines()[-1])
    assert isinstance(marker, StepDone)
    assert (marker.step, marker.seconds, marker.tokens_per_second) == (7, 3.5, 2000.0)
    assert marker.metrics["actor/perf/max_memory_allocated_gb"] == 41.5


@pytest.mark.parametrize("name", ["cuda_graph_max_bs", "chunked_prefill_size", "max_running_requests"])
def test_the_pinned_sglang_takes_its_arguments(name: str) -> None:
    package = next((environment("sglang-0.5.12").parents[1] / "lib").glob("python*/site-packages/sglang"))
    arguments = (package / "srt/server_args.py").read_text()
    assert re.search(rf"^    {name}: Optional\[int\] = None", arguments, re.MULTILINE)


def test_a_changed_number_of_data_loader_workers_breaks_a_resume() -> None:
    program = """
from torchdata.stateful_dataloader import StatefulDataLoader
def loader(workers):
    return StatefulDataLoader(list(range(16)), batch_size=2, num_workers=workers)
before = loader(2)
next(iter(before))
state = before.state_dict()
for workers in (2, 1, 0):
    after = loader(workers)
    after.load_state_dict(state)
    try:
        next(iter(after)); print(workers, "continues")
    except AssertionError:
        print(workers, "refused")
"""
    assert run("verl", program).split("\n")[:3] == ["2 continues", "1 refused", "0 refused"]


def test_values_that_need_quotes_arrive_as_they_are() -> None:
    program = """
import json, sys
from hydra import compose, initialize_config_module
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=sys.argv[1:])
data, trainer = config.data, config.trainer
print(json.dumps([data.train_files, trainer.experiment_name, data.val_files, trainer.project_name]))
"""
    names = ["~/it's here, (new)/a=b.parquet", '10 % of {all}: \\ "x"', "/a/b-c.d@e", r"it\'s, ends with \\"]
    keys = ("data.train_files", "trainer.experiment_name", "data.val_files", "trainer.project_name")
    of = job(**dict(zip(keys, names, strict=True)))
    assert json.loads(run("verl", program, *VERL.words(of.settings)).splitlines()[-1]) == names


_TAKEN = """
import json, sys
from hydra import compose, initialize_config_dir
package, words = sys.argv[1], json.loads(sys.argv[2])
with initialize_config_dir(f"{package}/trainer/config", version_base=None):
    config = compose("ppo_trainer", overrides=words)
source = open(f"{package}/utils/tracking.py").read()
scope = {"__name__": "tracking"}
exec(compile(source, "tracking.py", "exec"), scope)
print(json.dumps(sorted(set(config.trainer.logger) - set(scope["Tracking"].supported_backend))))
print(config.trainer.resume_mode, config.trainer.default_local_dir)
"""


@pytest.mark.parametrize("version", ["0.2.0.post2", "0.4.1", "0.6.1"])
@pytest.mark.parametrize("place", ["", "luffy/verl"])
def test_a_checkout_of_an_older_release_takes_the_command_of_an_attempt(
    tmp_path: Path, version: str, place: str
) -> None:
    with zipfile.ZipFile(wheel("verl", version)) as archive:
        archive.extractall(tmp_path / place)
    settings = {
        "algorithm.adv_estimator": "grpo",
        f"{ROLLOUT}.name": "vllm",
        f"{ACTOR}.use_dynamic_bsz": True,
        "trainer.logger": ["console", "wandb"],
    }
    python = str(tmp_path / "bin" / "python")
    written = Job(name="j", framework="verl", workdir=str(tmp_path), python=python, settings=settings)
    of = with_version(written, VERL)
    assert of.framework_version == version
    for attempt in (1, 2):
        own = profile(of).knobs
        command = VERL.command(of, own, run="7c1e", attempt=attempt, resume=attempt > 1)
        words = [word.replace("{python}", python) for word in command.argv[3:]]
        package = str(tmp_path / place / "verl")
        unsupported, resumed = run("verl", _TAKEN, package, json.dumps(words)).splitlines()[-2:]
        assert unsupported == "[]"
        assert resumed.startswith("auto" if attempt > 1 else "disable") and resumed.endswith("7c1e")
