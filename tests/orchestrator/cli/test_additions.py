"""What autotune changes in the user's command has a reason, and no checkpoint of the user's is deleted."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from autotune.launchers import frameworks
from autotune.orchestrator.additions import additions
from autotune.orchestrator.cli import main
from autotune.orchestrator.config.loader import load_unfinished
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))


def jobs() -> list[Job]:
    """Return the example jobs, and each with the settings of its framework's guides."""
    own = [load_unfinished(file)[0] for file in FILES]
    presets = [
        msgspec.structs.replace(job, settings={**job.settings, **preset})
        for job in own
        for preset in frameworks.find(job.framework).presets.values()
    ]
    return own + presets


@pytest.mark.parametrize("resume", [False, True])
def test_every_setting_that_differs_from_the_job_has_a_reason(resume: bool) -> None:
    for each in jobs():
        job = msgspec.structs.replace(each, resume=resume, python="/usr/bin/python")
        framework = frameworks.find(job.framework)
        command = framework.command(job, Knobs(), run="R", attempt=1, resume=resume)
        changes = additions(framework, job, Knobs(), command, why="")
        assert [change.name for change in changes if not change.reason] == [], job.name


def test_a_first_launch_says_why_it_turns_a_knob() -> None:
    (job, _), framework = load_unfinished(CONFIGS / "verl-grpo-qwen2.5-7b.yaml"), frameworks.find("verl")
    knobs = Knobs(memory_fraction=0.5)
    command = framework.command(job, knobs, run="R", attempt=1, resume=False)
    (change, *rest) = additions(framework, job, knobs, command, why="it is predicted to fit")
    assert (change.name, change.before, change.after) == (
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "0.6",
        "0.5",
    )
    assert change.reason == "it is predicted to fit" and rest


def test_no_checkpoint_of_the_user_s_folder_is_deleted() -> None:
    for each in jobs():
        job = msgspec.structs.replace(each, resume=True)
        command = frameworks.find(job.framework).command(job, Knobs(), run="R", attempt=1, resume=True)
        before = " ".join(map(str, (*job.settings, *job.command)))
        for word in ("ckpt_to_keep", "save_total_limit", "keep_top_k", "ckpt.max_num"):
            assert word in before or word not in " ".join(command.argv), job.name


def test_the_script_of_launch_n_begins_with_the_changes_and_runs(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        f"name: own\nframework: command\nworkdir: {tmp_path}\nenv: {{GREETING: hello}}\n"
        "command: [bash, -c, 'echo $GREETING {steps}']\nsettings: {steps: 3}\n"
    )
    result = CliRunner().invoke(main, ["launch", "-n", str(file)])
    assert result.exit_code == 0, result.output
    assert subprocess.run(["bash", "-c", result.stdout], capture_output=True, text=True).stdout == "hello 3\n"
    text = CliRunner().invoke(main, ["launch", "-n", str(CONFIGS / "trl-grpo.yaml")]).stdout
    head, body = text.split("set -euo pipefail\n")
    assert (
        "# ~ --output_dir /checkpoints/grpo → /checkpoints/grpo/dry-run\n#     checkpoints of this run"
        in head
    )
    assert len(text.splitlines()) < 100  # files that autotune brings are copied by their paths
    copies = [line.split()[1] for line in body.splitlines() if line.startswith("cp ")]
    assert len(copies) == 3 and all(Path(copy).is_file() for copy in copies)


def test_a_checkpoint_that_is_passed_over_is_named(tmp_path: Path) -> None:
    text = (CONFIGS / "verl-grpo-qwen2.5-7b.yaml").read_text()
    for step in (9, 40):
        (tmp_path / "saved" / f"global_step_{step}").mkdir(parents=True)
    file = tmp_path / "job.yaml"
    file.write_text(
        text.replace("settings:\n", f"settings:\n  trainer.default_local_dir: {tmp_path}/saved\n")
    )
    warning = f"{tmp_path}/saved has global_step_40, and a launch begins at step 0: `resume: true` continues"
    assert warning in CliRunner().invoke(main, ["launch", "-n", str(file)]).stderr
    plan = json.loads(CliRunner().invoke(main, ["plan", str(file), "--json"]).stdout)
    assert warning in plan["warnings"][0]
    assert "trainer.resume_mode" in [change["name"] for change in plan["additions"]]
    file.write_text(f"{file.read_text()}\nresume: true\n")
    assert "begins at step 0" not in CliRunner().invoke(main, ["launch", "-n", str(file)]).stderr


def test_no_secret_is_shown_with_a_change(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    text = (CONFIGS / "verl-grpo-qwen2.5-7b.yaml").read_text()
    secret = "trainer.default_local_dir: {env: FOLDER_KEY}"
    file.write_text(text.replace("settings:\n", f"settings:\n  {secret}\n"))
    for words in (["launch", "-n", str(file)], ["plan", str(file)]):
        result = CliRunner().invoke(main, words, env={"FOLDER_KEY": "/very/hidden/place-of-mine"})
        assert result.exit_code == 0 and "hidden" not in result.output
