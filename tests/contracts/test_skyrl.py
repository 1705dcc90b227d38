"""What autotune writes for SkyRL, read by SkyRL's own configuration."""

import json
from pathlib import Path

import pytest
import yaml

from autotune.launchers.frameworks.skyrl.adapter import SkyRL
from autotune.launchers.frameworks.tabular.declared import facts
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.rehearsing import Part
from tests.launchers.frameworks.skyrl_jobs import CLUSTER, JOBS, job

from .changes import legal
from .environments import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
READER = (Path(__file__).parent / "skyrl_reader.py").read_text()
FRAMEWORK = SkyRL()
FACTS = facts("autotune.launchers.frameworks.skyrl", "0.4.0")


@pytest.fixture
def ask(tmp_path):
    def asked(cases):
        path = tmp_path / "question.json"
        path.write_text(json.dumps({"cases": cases}))
        return json.loads(run("skyrl", READER, str(path), timeout_s=300).splitlines()[-1])

    return asked


def overrides(of, knobs):
    return list(FRAMEWORK.command(of, knobs, run="7c1e", attempt=1, resume=True).argv[3:])


def test_the_defaults_are_skyrl_s_own(ask):
    # Sections that are built on demand, and settings that follow from others, have no default to compare.
    built = ("delta_weight_sync.", "mixed_precision.", "eval_sampling_params.")
    plain = [key for key, kind in FACTS.types.items() if kind != "any"]
    plain = [key for key in plain if not any(section in key for section in built)]
    (answer,) = ask([{"overrides": [], "names": plain}])
    theirs, given = answer["values"], ("trainer.ckpt_path", "trainer.export_path")
    filled = {"trainer.ref.model.path", "trainer.algorithm.temperature", "generator.max_input_length"}
    filled |= {"data.dataloader.num_workers", *given}  # what __post_init__ and the home folder say
    wrong = {key: (FACTS.defaults.get(key), value) for key, value in theirs.items() if key not in filled}
    assert {key: pair for key, pair in wrong.items() if pair[0] != pair[1]} == {}


@pytest.mark.parametrize("kind", JOBS)
def test_every_override_of_every_change_is_taken_and_arrives(ask, kind, checked):
    of, cases, wanted = JOBS[kind], [], []
    profile = FRAMEWORK.profile(of, CLUSTER)
    moves = list(legal(profile))
    for knobs in [Knobs(), *(knobs for _, _, knobs in moves)]:
        settings = FRAMEWORK.settings(of, knobs)
        if settings not in wanted:
            wanted.append(settings)
            cases.append({"overrides": overrides(of, knobs), "names": list(settings)})
    assert len(wanted) > 5
    for settings, answer in zip(wanted, ask(cases), strict=True):
        assert answer.get("values") == settings, answer
    checked(profile, [(knob, value) for knob, value, _ in moves], "SkyRL 0.4.0's own configuration")


def test_presets_the_example_and_trials_are_taken(ask):
    example = yaml.safe_load((ROOT / "configs" / "skyrl-gsm8k.yaml").read_text())["settings"]
    starts = [*FRAMEWORK.presets.values(), example]
    of = [job(dict(start)) for start in starts]
    of += [FRAMEWORK.trial(each, folder="/runs/1", steps=5, longest=True) for each in JOBS.values()]
    of += [
        FRAMEWORK.rehearsal(each, folder="/r/1", part=part, longest=True)
        for each in JOBS.values()
        for part in Part
    ]
    names = ["trainer.ckpt_path", "trainer.resume_mode"]
    answers = ask([{"overrides": overrides(each, Knobs()), "names": names} for each in of])
    assert all("error" not in answer for answer in answers), answers


@pytest.mark.parametrize("setting", ["trainer.max_token_per_microbatch", "generator.gpu_memory_utilization"])
def test_what_the_check_calls_unknown_is_unknown_to_skyrl(ask, setting):
    assert FRAMEWORK.check(job({setting: 4}))
    (answer,) = ask([{"overrides": [f"{setting}=4"], "names": []}])
    assert "Invalid fields" in answer["error"]
