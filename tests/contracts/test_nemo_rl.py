"""What autotune writes for NeMo-RL, read by Hydra as NeMo-RL's code calls it, on its own configuration."""

import json
from pathlib import Path

import pytest
import yaml

from autotune.launchers.frameworks.dialects.hydra import bare
from autotune.launchers.frameworks.nemo_rl.adapter import NemoRL
from autotune.launchers.frameworks.nemo_rl.config import Config
from autotune.launchers.frameworks.tabular.declared import facts
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.rehearsing import Part
from tests.launchers.frameworks.nemo_rl_jobs import CLUSTER, JOBS, job

from .changes import legal
from .environments import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
READER = (Path(__file__).parent / "nemo_rl_reader.py").read_text()
FRAMEWORK = NemoRL()
FACTS = facts("autotune.launchers.frameworks.nemo_rl", "0.7.0")


def tree():
    """Return the facts as the YAML that they were read from."""
    root = {}
    for key in FACTS.types:
        *sections, name = key.split(".")
        node = root
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = FACTS.defaults.get(key)
    return root


@pytest.fixture
def ask(tmp_path):
    def asked(cases):
        path = tmp_path / "question.json"
        path.write_text(json.dumps({"cases": cases, "tree": tree()}))
        # verl's environment has Hydra 1.3, as NeMo-RL.
        return json.loads(run("verl", READER, str(path), timeout_s=300).splitlines()[-1])

    return asked


def overrides(of, knobs):
    return list(FRAMEWORK.command(of, knobs, run="7c1e", attempt=1, resume=True).argv[3:])


@pytest.mark.parametrize("kind", JOBS)
def test_every_override_of_every_change_is_taken_and_arrives(ask, kind, checked):
    of, cases, wanted = JOBS[kind], [], []
    profile = FRAMEWORK.profile(of, CLUSTER)
    moves = list(legal(profile))
    for knobs in [Knobs(), *(knobs for _, _, knobs in moves)]:
        settings = {bare(key): value for key, value in FRAMEWORK.settings(of, knobs).items()}
        if settings not in wanted:
            wanted.append(settings)
            cases.append({"overrides": overrides(of, knobs), "names": list(settings)})
    assert len(wanted) > 5
    for settings, answer in zip(wanted, ask(cases), strict=True):
        assert answer.get("values") == settings, answer
    checked(profile, [(knob, value) for knob, value, _ in moves], "OmegaConf and NeMo-RL 0.7.0's own schema")


@pytest.mark.parametrize("kind", JOBS)
def test_references_come_to_what_omegaconf_makes_of_them(ask, kind):
    names = [key for key, value in FACTS.defaults.items() if isinstance(value, str) and "${" in value]
    (answer,) = ask([{"overrides": overrides(JOBS[kind], Knobs()), "names": names}])
    config = Config(JOBS[kind])
    assert {name: config.get(name) for name in names} == answer["values"]


def test_presets_the_example_and_trials_are_taken(ask):
    example = yaml.safe_load((ROOT / "configs" / "nemo-rl-math.yaml").read_text())["settings"]
    of = [job(dict(start)) for start in (*FRAMEWORK.presets.values(), example)]
    of += [FRAMEWORK.trial(each, folder="/runs/1", steps=5, longest=False) for each in JOBS.values()]
    of += [
        FRAMEWORK.rehearsal(each, folder="/r/1", part=part, longest=True)
        for each in JOBS.values()
        for part in Part
    ]
    names = ["checkpointing.checkpoint_dir", "grpo.max_num_steps"]
    answers = ask([{"overrides": overrides(each, Knobs()), "names": names} for each in of])
    assert all("error" not in answer for answer in answers), answers


@pytest.mark.parametrize(
    "setting", ["policy.train_microbatch_size", "policy.generation.gpu_memory_utilization"]
)
def test_what_the_check_calls_unknown_is_refused(ask, setting):
    assert FRAMEWORK.check(job({setting: 4}))
    refused, added = ask([{"overrides": [f"{plus}{setting}=4"], "names": []} for plus in ("", "++")])
    assert "Could not override" in refused["error"] and "error" not in added
    assert FRAMEWORK.check(job({f"++{setting}": 4})) == ()
