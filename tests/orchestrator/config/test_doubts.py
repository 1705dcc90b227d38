"""A rule of another release than the job's is a warning: it refuses no job, and its hint breaks none."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.launchers import frameworks
from autotune.orchestrator.config.loader import assumed, parse_elsewhere
from autotune.orchestrator.doctor.check import Status
from autotune.orchestrator.doctor.job import settings_checks
from autotune.orchestrator.errors import JobErrors
from autotune.policies.values.job import Job

_VERL = """
name: j
framework: verl
workdir: {folder}
cluster: {{address: auto}}
python: {folder}/bin/python
{version}
settings:
  algorithm.adv_estimator: grpo
  actor_rollout_ref.rollout.name: vllm
  actor_rollout_ref.actor.ppo_micro_batch_size: 64
"""


def verl(folder: Path, version: str = "") -> Job:
    stated = f"framework_version: '{version}'" if version else ""
    return parse_elsewhere(_VERL.format(folder=folder, version=stated))[0]


def about(job: Job, name: str) -> list[str]:
    return [note for note in job.notes if name in note and "would refuse" in note]


def test_the_rules_of_the_jobs_own_release_refuse_it(tmp_path: Path) -> None:
    with pytest.raises(JobErrors, match="divide it"):
        verl(tmp_path, "0.9.1")


def test_the_rules_do_not_refuse_what_a_config_file_of_the_job_may_set(tmp_path: Path) -> None:
    stated = "framework_version: 0.9.1\ncommand: [python3, -m, verl.trainer.main_ppo, --config-name=mine]"
    text = _VERL.replace("{version}", stated).format(folder=tmp_path)
    notes = about(parse_elsewhere(text)[0], "ppo_micro_batch_size")
    assert notes and all(note.endswith("a configuration file of its own") for note in notes)


def test_the_rules_of_an_unknown_release_are_a_warning(tmp_path: Path) -> None:
    (note, *_) = about(verl(tmp_path), "ppo_micro_batch_size")
    assert note.endswith("the job's own release is not known") and "divide it" not in note


def test_a_misspelt_setting_of_an_unknown_release_names_the_one_that_is_meant(tmp_path: Path) -> None:
    text = _VERL.format(folder=tmp_path, version="").replace("ppo_micro_batch_size", "ppo_micro_btch_size")
    (note,) = about(parse_elsewhere(text)[0], "ppo_micro_btch_size")
    assert "(did you mean " in note and "ppo_micro_batch_size" in note


def test_the_hint_of_another_release_is_left_out(tmp_path: Path) -> None:
    notes = about(verl(tmp_path, "0.7.2"), "ppo_micro_batch_size")
    assert notes and not any("divide it" in note for note in notes)
    assert all(note.endswith("the job's own release is 0.7.2") for note in notes)


def test_what_an_older_release_takes_is_no_doubt(tmp_path: Path) -> None:
    for version in ("0.1", "0.2.0.post2", "0.6.1"):
        assert about(verl(tmp_path, version), "ppo_micro_batch_size") == []


def test_what_the_jobs_own_code_does_not_have_is_no_mistake_of_the_job(tmp_path: Path) -> None:
    package = tmp_path / "verl"
    (package / "version").mkdir(parents=True)
    (package / "version" / "version").write_text("0.1.0\n")
    (package / "trainer.py").write_text("size = config.actor_rollout_ref.actor.ppo_micro_batch_size\n")
    assert about(verl(tmp_path), "ppo_micro_batch_size_per_gpu") == []


def test_a_text_for_a_number_is_refused_whatever_the_release(tmp_path: Path) -> None:
    with pytest.raises(JobErrors, match="train_batch_size"):
        parse_elsewhere(_VERL.format(folder=tmp_path, version="") + "  data.train_batch_size: many\n")


def slime(folder: Path, flag: str) -> Job:
    text = f"name: j\nframework: slime\nworkdir: {folder}\ncluster: {{address: auto}}\nsettings:\n  {flag}\n"
    return parse_elsewhere(text)[0]


@pytest.mark.parametrize("flag", ["megatron-to-hf-mode: bridge", "prm-num-gpus-per-engine: 2"])
def test_a_flag_that_the_jobs_own_slime_has_is_passed_on_without_a_word(tmp_path: Path, flag: str) -> None:
    name = flag.partition(":")[0]
    framework = frameworks.find("slime")

    def words(job: Job) -> list[str]:
        every = (*job.notes, *framework.profile(job, assumed(job)).warnings)
        return [each for each in every if name in each]

    assert words(slime(tmp_path, flag))
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("")
    (tmp_path / "slime" / "arguments.py").write_text(f'parser.add_argument("--{name}")\n')
    own = slime(tmp_path, flag)
    assert words(own) == []
    command = framework.command(
        own, framework.profile(own, assumed(own)).knobs, run="r", attempt=1, resume=False
    )
    assert f"--{name}" in command.argv


def test_no_check_mark_of_doctor_comes_from_an_assumption(tmp_path: Path) -> None:
    framework = frameworks.find("verl")
    text = _VERL.replace("ppo_micro_batch_size: 64", "use_dynamic_bsz: true")

    def marked(version: str) -> set[str]:
        job, _ = parse_elsewhere(text.format(folder=tmp_path, version=version))
        checks = settings_checks(job, framework, framework.profile(job, assumed(job)))
        return {check.name for check in checks if check.status is Status.OK}

    assert {"settings", "resume"} <= marked("framework_version: 0.9.1")
    assert not {"settings", "resume"} & marked("")
    assert not {"settings", "resume"} & marked("framework_version: 0.2.0.dev")
