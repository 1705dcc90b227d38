"""`fix`: from the log of a dead job to a change of the user's own script, job or command."""

from __future__ import annotations

import json
import shlex
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autotune.orchestrator.cli import main
from autotune.orchestrator.init.draft import Draft, draft_of

ACTOR = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
SCORING = "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
BAR = "Training Progress:   2%|2         | 50/2110 [4:02:11<166:10:22, 290.41s/it]\n"
STEP = "step:{0} - training/global_step:{0} - perf/time_per_step:100.5 - timing_s/step:100.5\n"
LOG = """\
(WorkerDict pid=47)   File "/opt/verl/verl/workers/actor/dp_actor.py", line 520, in update_policy
(WorkerDict pid=47)     loss.backward()
(WorkerDict pid=47)   File "/opt/torch/_tensor.py", line 648, in backward
(WorkerDict pid=47) torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.61 GiB. GPU 0 has a \
total capacity of 79.25 GiB of which 7.92 GiB is free. Including non-PyTorch memory, this process has \
71.32 GiB memory in use. Of the allocated memory 66.20 GiB is allocated by PyTorch, and 1.41 GiB is \
reserved by PyTorch but unallocated.
"""
COMMAND = f"""\
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/data/train.parquet \\
    data.train_batch_size=256 data.max_prompt_length=2048 data.max_response_length=16384 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.model.use_remove_padding=True \\
    actor_rollout_ref.model.enable_gradient_checkpointing=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=True \\
    {ACTOR}=VALUE actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 trainer.n_gpus_per_node=8"""
LITERAL = COMMAND.replace("VALUE", "36864")
CALCULATED = f"TOKENS=$((2048 * 18))\n{COMMAND.replace('VALUE', '$TOKENS')}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "dead.log").write_text(LOG)
    return tmp_path


def fixed(*words: str) -> dict[str, Any]:
    result = called("--json", *words)
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def called(*words: str) -> Result:
    return CliRunner().invoke(main, ["fix", *words])


def draft(*words: str, folder: Path) -> Draft:
    return draft_of(words, cwd=str(folder), environment={}, now=0.0)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (f"set -x\n{LITERAL} 2>&1 | tee out.txt\n", f"{ACTOR}=18432 "),
        (f'TOKENS=36864\n{COMMAND.replace("VALUE", "$TOKENS")} "$@"\n', "TOKENS=18432"),
        (f"TOKENS=${{TOKENS:-36864}}\n{COMMAND.replace('VALUE', '${TOKENS}')}\n", "TOKENS=${TOKENS:-18432}"),
        (f"TOKENS=$((2048 * 18))\n{COMMAND.replace('VALUE', '$TOKENS')} > out.txt\n", f"{ACTOR}=18432 "),
        (
            f"TOKENS=$((2048 * 18))\n{COMMAND.replace('VALUE', '$TOKENS')} 2>&1 | \\\n tee o.txt\n",
            f"{ACTOR}=18432 ",
        ),
        (f"source vars.sh\n{COMMAND.replace('VALUE', '$TOKENS')}\n", f"{ACTOR}=18432 "),
        ("#SBATCH --nodes=1\nsrun bash inner.sh\n", f"{ACTOR}=18432 "),
    ],
    ids=["literal", "variable", "default", "calculated", "piped", "sourced", "wrapper"],
)
def test_an_edited_script_gives_exactly_the_new_command(script: str, line: str, folder: Path) -> None:
    file = folder / "run.sh"
    file.write_text(f"#!/bin/bash\n{script}")
    file.chmod(0o755)
    (folder / "vars.sh").write_text("TOKENS=36864\n")
    (folder / "inner.sh").write_text(f'{LITERAL} "$@"\n')
    before = draft("run.sh", folder=folder)
    answer = fixed("dead.log", "run.sh")
    assert file.read_text() == f"#!/bin/bash\n{script}" and not answer["is_written"]
    assert answer["changes"]["tokens_per_microbatch"] == [36864, 18432]
    assert any(row.startswith("+") and line.strip() in row for row in answer["diff"].splitlines())
    assert fixed("dead.log", "run.sh", "-w")["is_written"]
    after = draft("run.sh", folder=folder)
    assert (after.command, after.env, after.workdir) == (before.command, before.env, before.workdir)
    changed = {name: str(value) for name, value in answer["settings"].items()}
    whole = {name.lstrip("+"): str(value) for name, value in after.settings.items()}
    kept = {name.lstrip("+"): str(value) for name, value in before.settings.items()}
    assert whole == kept | {name.lstrip("+"): value for name, value in changed.items()}
    assert subprocess.run(["bash", "-n", "run.sh"], check=False).returncode == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o755
    shell = "sbatch" if "SBATCH" in script else "bash"
    assert answer["without_autotune"] == f"{shell} run.sh"


@pytest.mark.parametrize("lines", [[], [BAR], [STEP.format(n) for n in range(41, 51)]], ids=len)
def test_phases_that_completed_steps_are_left_as_they_are(folder: Path, lines: list[str]) -> None:
    (folder / "dead.log").write_text("".join(lines) + LOG)
    (folder / "run.sh").write_text(LITERAL.replace("memory_utilization=0.6", "memory_utilization=0.9"))
    answer = fixed("dead.log", "run.sh")
    over = {peak["phase"] for peak in answer["peaks"] if peak["before_bytes"] > 79.25 * 2**30}
    assert over == {"train"} if lines else over > {"train"}
    assert set(answer["changes"]) == {"tokens_per_microbatch"}


def test_what_died_the_change_its_peaks_and_the_next_commands_are_printed(folder: Path) -> None:
    (folder / "run.sh").write_text(LITERAL)
    lines = called("dead.log", "run.sh").stdout.splitlines()
    assert lines[0].startswith("error[gpu-oom]: backward ran out of GPU memory: needed 9.61 GiB, 7.92 GiB")
    assert lines[1].startswith("  dead.log:4")
    assert lines[3].startswith("change: tokens_per_microbatch 36864 → 18432 (exact")
    assert "--- run.sh" in lines and "+++ run.sh" in lines
    (peak,) = (line for line in lines if line.startswith("predicted peak of train: "))
    assert " of 79.2 GiB (" in peak
    at = lines.index("write the change")
    assert lines[at + 1 :] == [
        "  autotune fix dead.log run.sh -w",
        "start it with autotune",
        "  autotune init run.sh",
        "  autotune launch job.yaml",
        "or without",
        "  bash run.sh",
    ]


def test_the_change_is_the_one_that_launch_makes(folder: Path) -> None:
    from autotune.launchers import frameworks
    from autotune.orchestrator.cluster_fit import with_gpu_memory
    from autotune.orchestrator.config.loader import expected_cluster, load_unfinished
    from autotune.orchestrator.explain.reader import read
    from autotune.orchestrator.planner import first_attempt
    from autotune.policies.diagnosis.diagnose import diagnose
    from autotune.policies.recovery.next_remedy import next_remedy
    from autotune.policies.values.history import Attempt, fold

    (folder / "run.sh").write_text(LITERAL)
    assert CliRunner().invoke(main, ["init", "run.sh", "--gpus", "8xH100"]).exit_code == 0
    answer = fixed("dead.log", "job.yaml")
    job, _ = load_unfinished("job.yaml")
    cluster = expected_cluster(job)
    accepted, _ = first_attempt(with_gpu_memory(job, cluster), frameworks.find("verl"), cluster)
    failed = Attempt(number=1, knobs=accepted.profile.knobs, diagnosis=diagnose(read("dead.log").evidence))
    history = fold((accepted,))
    remedy = next_remedy(type(history)(accepted=accepted, attempts=(failed,)))
    assert remedy is not None
    assert answer["remedy"] == remedy.name
    assert {knob: after for knob, (_, after) in answer["changes"].items()} == remedy.changes


def test_a_job_file_is_edited_as_it_stands(folder: Path) -> None:
    (folder / "run.sh").write_text(LITERAL)
    assert CliRunner().invoke(main, ["init", "run.sh", "--gpus", "8xH100"]).exit_code == 0
    before = (folder / "job.yaml").read_text()
    answer = fixed("dead.log", "job.yaml")
    assert answer["with_autotune"] == "autotune launch job.yaml --set tokens_per_microbatch=18432"
    assert (folder / "job.yaml").read_text() == before
    assert fixed("dead.log", "job.yaml", "-w")["with_autotune"] == "autotune launch job.yaml"
    plan = CliRunner().invoke(main, ["launch", "-n", "job.yaml"])
    assert f"{ACTOR}=18432" in plan.stdout and f"{SCORING}=36864" in plan.stdout


def test_a_command_becomes_another_command(folder: Path) -> None:
    words = shlex.split(LITERAL.replace("\\\n", " "))
    answer = fixed("dead.log", "--", *words)
    assert answer["file"] == "" and not answer["is_written"]
    changed = shlex.split(answer["without_autotune"])
    assert f"{ACTOR}=18432" in changed and set(words) - set(changed) == {f"{ACTOR}=36864"}
    assert answer["with_autotune"].endswith("autotune launch job.yaml")


def test_a_log_corrects_a_plan(folder: Path) -> None:
    (folder / "run.sh").write_text(LITERAL)
    assert CliRunner().invoke(main, ["init", "run.sh", "--gpus", "8xH100"]).exit_code == 0
    peaks = []
    for words in ((), ("--log", "dead.log")):
        plan = json.loads(CliRunner().invoke(main, ["plan", "job.yaml", *words, "--json"]).stdout)
        peaks.append(next(row for row in plan["phases"] if row["phase"] == "train"))
        assert plan["log"] == (words[1] if words else "")
    assert peaks[0]["verdict"] == "fits" and peaks[1]["verdict"] == "overflows"


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["no.log", "run.sh"], 2, "no such log: no.log"),
        (["dead.log", "no.sh"], 2, "no such file or program: no.sh"),
        (["dead.log"], 2, "pass the script, the job file, or `--` and the command that wrote the log"),
        ([".", "run.sh"], 2, "`.` is a folder, and no run of autotune"),
        (["run.sh", "run.sh"], 2, "the log is given twice; pass the script"),
        (["healthy.log", "run.sh"], 1, "no memory ran out, so nothing is changed"),
    ],
)
def test_what_cannot_be_fixed(words: list[str], code: int, problem: str, folder: Path) -> None:
    (folder / "run.sh").write_text(LITERAL)
    (folder / "healthy.log").write_text(LOG.splitlines()[0])
    result = called(*words)
    assert result.exit_code == code and problem in result.output
    assert (folder / "run.sh").read_text() == LITERAL


HOST_LOG = """\
Training Progress:  10%|#         | 116/1155 [7:54:43<67:30:48, 233.93s/it]
ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.1, ID: ab12) where the task (task ID: cd34, name=WorkerDict.update_actor, \
pid=2285, memory used=10.13GB) was running was 891.06GB / 937.50GB (0.950459), which exceeds the memory \
usage threshold of 0.95. Ray killed this worker (ID: ef56) because it was the most recently scheduled task.
"""


@pytest.mark.parametrize("log", [LOG, HOST_LOG, LOG.replace("update_policy", "compute_log_prob")])
def test_plan_and_fix_answer_a_log_with_the_same_change(log: str, folder: Path) -> None:
    (folder / "dead.log").write_text(log)
    (folder / "run.sh").write_text(LITERAL)
    CliRunner().invoke(main, ["init", "run.sh"])
    answer = fixed("dead.log", "job.yaml", "--gpus", "8xH100")
    planned = CliRunner().invoke(
        main, ["plan", "job.yaml", "--gpus", "8xH100", "--log", "dead.log", "--json"]
    )
    first = json.loads(planned.stdout)["ladder"][0]
    for name in ("cause", "phase", "remedy", "changes", "effect", "slows", "reason", "at_least"):
        assert first[name] == answer[name], name


def test_flags_of_trl_are_edited_where_they_stand(folder: Path) -> None:
    program = "accelerate launch --num_processes 8 grpo.py --model_name_or_path Qwen/Qwen3-4B --output_dir o"
    flags = "--use_vllm --vllm_mode colocate --max_completion_length 16000 --num_generations 8"
    own = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    (folder / "run.sh").write_text(f"{own}{program} {flags} --per_device_train_batch_size 1\n")
    answer = fixed("dead.log", "run.sh", "-w")
    script = (folder / "run.sh").read_text()
    assert answer["is_written"] and all(f" {word}" in script for word in answer["words"])


FRAGMENTED = LOG.replace("66.20 GiB is", "50.20 GiB is").replace("1.41 GiB is", "17.41 GiB is")
OF_TRL = (
    "accelerate launch --num_processes 8 grpo.py --model_name_or_path Qwen/Qwen3-4B --output_dir o --use_vllm"
)


@pytest.mark.parametrize(
    ("above", "line"),
    [
        ("#SBATCH --nodes=1\n", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        (
            'export PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512"\n',
            'export PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:512,expandable_segments:True"',
        ),
    ],
)
def test_a_variable_is_set_where_the_script_exports_it(above: str, line: str, folder: Path) -> None:
    (folder / "dead.log").write_text(FRAGMENTED)
    (folder / "run.sh").write_text(f"#!/bin/bash\n{above}{OF_TRL}\n")
    assert fixed("dead.log", "run.sh", "-w")["is_written"]
    variable, command = (folder / "run.sh").read_text().splitlines()[-2:]
    assert variable == line and command.startswith(OF_TRL)


def test_a_variable_is_set_before_a_command(folder: Path) -> None:
    (folder / "dead.log").write_text(FRAGMENTED)
    answer = fixed("dead.log", "--", *OF_TRL.split())
    whole = f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True {OF_TRL}"
    assert answer["without_autotune"].startswith(whole) and f"init -- {whole}" in answer["with_autotune"]


def test_a_value_that_can_go_no_lower_says_why(folder: Path) -> None:
    (folder / "run.sh").write_text(LITERAL)
    (why,) = fixed("dead.log", "run.sh")["at_least"]
    assert why.startswith("18432 is the least: ") and why.endswith("= 18432")
    assert why in called("dead.log", "run.sh").output


def test_a_log_of_another_job_is_not_answered_with_peaks(folder: Path) -> None:
    (folder / "run.sh").write_text(LITERAL.replace("Qwen3-8B", "Qwen2.5-0.5B-Instruct"))
    (folder / "dead.log").write_text(
        LOG.replace("update_policy", "save_checkpoint").replace("backward", "save")
    )
    answer = fixed("dead.log", "run.sh")
    assert answer["phase"] == "checkpoint" and not answer["peaks"]
    assert "is the log one of it?" in answer["note"] or "does not count" in answer["note"]


def test_a_host_whose_estimate_stays_the_same_is_given_no_peaks(folder: Path) -> None:
    (folder / "dead.log").write_text(HOST_LOG)
    (folder / "run.sh").write_text(LITERAL)
    answer = fixed("dead.log", "run.sh", "--gpus", "8xH100")
    assert answer["cause"] == "host-oom"
    assert all(each["phase"] == "host memory" for each in answer["peaks"]) or answer["note"]


def test_a_link_to_a_script_on_another_file_system_is_followed(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        script = Path(elsewhere) / "run.sh"
        script.write_text(LITERAL)
        (folder / "run.sh").symlink_to(script)
        assert called("dead.log", "run.sh", "-w").exit_code == 0
        assert (folder / "run.sh").is_symlink()
        assert f"{ACTOR}=18432" in script.read_text()
        assert list(Path(elsewhere).iterdir()) == [script]
