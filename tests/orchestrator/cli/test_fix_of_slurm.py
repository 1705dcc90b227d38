"""`fix` and `plan --log` of what a Slurm user has: a script that starts another, and its log."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from autotune.orchestrator.cli import main
from tests.orchestrator.cli.test_fix import ACTOR, LITERAL, called, draft, fixed
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


def test_a_change_that_only_shortens_steps_is_named(folder: Path) -> None:
    command = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=256 "
        "data.max_prompt_length=1024 data.max_response_length=4096 data.train_files=/d/a.parquet "
        "actor_rollout_ref.model.path=Qwen/Qwen3-4B actor_rollout_ref.actor.ppo_mini_batch_size=64 "
        f"actor_rollout_ref.actor.use_dynamic_bsz=True {ACTOR}=20480 "
        "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 "
        "trainer.n_gpus_per_node=4 trainer.nnodes=1 trainer.save_freq=10 trainer.total_training_steps=120"
    )
    step = "(TaskRunner pid=41) step:{0} - perf/time_per_step:61.1 - training/global_step:{0}\n"
    (folder / "big.log").write_text(
        f"+ {command}\n"
        + "".join(map(step.format, range(1, 8)))
        + '(WorkerDict pid=77)   File "/opt/verl/workers/fsdp_workers.py", line 700, in compute_log_prob\n'
        "(WorkerDict pid=77)     log_probs = logprobs_from_logits(logits=logits, labels=rolled)\n"
        "(WorkerDict pid=77) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 11.59 GiB. GPU 0 "
        "has a total capacity of 47.41 GiB of which 3.32 GiB is free. Including non-PyTorch memory, this "
        "process has 44.09 GiB memory in use. Of the allocated memory 40.30 GiB is allocated by PyTorch, and "
        "0.90 GiB is reserved by PyTorch but unallocated.\n"
    )
    (folder / "run.sh").write_text(f"{command}\n")
    answer = fixed("big.log", "run.sh")
    assert len(answer["changes"]) > 1 and answer["for_speed"] == ["rollout_tensor_parallel"]
    text = CliRunner().invoke(main, ["fix", "big.log", "run.sh"]).output
    assert "rollout_tensor_parallel only shortens steps: without it the job fits as well" in text
    assert not answer["differs"] and "warning" not in text
    called("big.log", "run.sh", "-w")
    again = called("big.log", "run.sh")
    assert "warning: run.sh is not as the log shows it: " in again.output
    assert fixed("big.log", "run.sh")["differs"].keys() == answer["changes"].keys()


def test_a_log_corrects_the_plan_of_a_changed_job_as_it_does_that_of_a_fix(folder: Path) -> None:
    (folder / "run.sh").write_text(LITERAL)
    CliRunner().invoke(main, ["init", "run.sh", "--gpus", "8xH100"])
    words = ("--log", "dead.log", "--set", "tokens_per_microbatch=18432", "--json")
    plan = json.loads(CliRunner().invoke(main, ["plan", "job.yaml", *words]).stdout)
    planned = next(row for row in plan["phases"] if row["phase"] == "train")
    (peak,) = (row for row in fixed("dead.log", "job.yaml")["peaks"] if row["phase"] == "train")
    assert planned["total_bytes"] == peak["after_bytes"]
    assert planned["verdict"] == "fits"
