"""`fix` and `plan --log` of what a Slurm user has: a script that starts another, and its log."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from autotune.orchestrator.cli import main
from tests.orchestrator.cli.test_fix import ACTOR, LITERAL, draft, fixed
from tests.orchestrator.cli.test_fix import folder as folder


def test_a_value_in_a_script_that_a_slurm_script_starts_is_changed_there(folder: Path) -> None:
    header = "#!/bin/bash\n#SBATCH --gres=gpu:h100:8\ncd $SLURM_SUBMIT_DIR\n"
    (folder / "submit.slurm").write_text(f"{header}srun bash run.sh base\n")
    (folder / "run.sh").write_text(f"NAME=$1\n{LITERAL} trainer.experiment_name=$NAME\n")
    answer = fixed("dead.log", "submit.slurm", "-w")
    assert answer["file"] == "run.sh" and answer["without_autotune"] == "sbatch submit.slurm"
    assert answer["with_autotune"] == (
        "autotune init submit.slurm\n"
        "(grep -E '^#(!|SBATCH)' submit.slurm; echo autotune launch job.yaml) | sbatch"
    )
    after = draft("submit.slurm", folder=folder)
    assert str(after.settings[ACTOR]) == "18432" and after.settings["trainer.experiment_name"] == "base"


def test_a_job_of_several_nodes_is_launched_by_the_script_that_starts_ray_on_each(folder: Path) -> None:
    header = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:h100:8\n"
    two = LITERAL.replace("trainer.n_gpus_per_node=8", "trainer.n_gpus_per_node=8 trainer.nnodes=2")
    (folder / "submit.slurm").write_text(f"{header}srun {two}\n")
    launch = fixed("dead.log", "submit.slurm")["with_autotune"].splitlines()[1]
    words = launch.split()
    assert words[:2] == ["sbatch", "--nodes=2"] and "JOB=$PWD/job.yaml,RUNS=$PWD/runs" in words[2]
    assert Path(words[3]).name == "slurm.sbatch" and Path(words[3]).is_file()


def test_a_log_corrects_the_plan_of_a_changed_job_as_it_does_that_of_a_fix(folder: Path) -> None:
    (folder / "run.sh").write_text(LITERAL)
    CliRunner().invoke(main, ["init", "run.sh", "--gpus", "8xH100"])
    words = ("--log", "dead.log", "--set", "tokens_per_microbatch=18432", "--json")
    plan = json.loads(CliRunner().invoke(main, ["plan", "job.yaml", *words]).stdout)
    planned = next(row for row in plan["phases"] if row["phase"] == "train")
    (peak,) = (row for row in fixed("dead.log", "job.yaml")["peaks"] if row["phase"] == "train")
    assert planned["total_bytes"] == peak["after_bytes"]
    assert planned["verdict"] == "fits"
