"""Any file by its content, wrappers and scripts nested in any order, and what Slurm is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from autotune.orchestrator.cli import main
from autotune.orchestrator.init import slurm
from autotune.orchestrator.init.documents import Kind, kind_of
from autotune.orchestrator.init.hardware import Hardware

INNER = """#!/bin/bash
python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm data.train_batch_size=${1:-8} \\
  actor_rollout_ref.actor.use_dynamic_bsz=true
"""
SUBMIT = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gres=gpu:h100:8 --mem=900G
#SBATCH --time=1:00:00
{call}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*words: str, **variables: str) -> Result:
    return CliRunner().invoke(main, ["init", *words], env=variables)


def job(folder: Path) -> dict[str, object]:
    made: dict[str, object] = yaml.safe_load((folder / "job.yaml").read_text())
    return made


@pytest.mark.parametrize(
    "name", ["submit.slurm", "submit.sbatch", "submit.job", "submit.txt", "submit", "a.py"]
)
@pytest.mark.parametrize("executable", [False, True])
def test_a_script_is_one_by_its_first_line(name: str, executable: bool, folder: Path) -> None:
    (folder / name).write_text(SUBMIT.format(call=INNER))
    (folder / name).chmod(0o755 if executable else 0o644)
    for words in ((name,), (f"./{name}", "32"), ("bash", name), (str(folder / name),)):
        result = init(*words, "--force")
        assert result.exit_code == 0, result.stderr
        made = job(folder)
        assert made["framework"] == "verl"
        assert made["settings"]["data.train_batch_size"] == (32 if len(words) == 2 and "32" in words else 8)  # type: ignore[index]


@pytest.mark.parametrize(
    "call",
    [
        "bash run_grpo.sh 64",
        "./run_grpo.sh 64",
        "srun bash run_grpo.sh 64",
        "srun --nodes 2 -w host1 ./run_grpo.sh 64",
        "srun --exclusive ./run_grpo.sh 64",
        "srun bash -x run_grpo.sh 64",
        "nohup srun env A=1 timeout 5h bash run_grpo.sh 64 &> log &",
        'srun bash -c "cd . && bash run_grpo.sh 64 | tee log"',
        "sbatch --parsable run_grpo.sh 64",
        "ray job submit --working-dir . -- bash run_grpo.sh 64",
        "sbatch --parsable --wrap \"srun bash -c 'export N=64; bash run_grpo.sh \\$N'\"",
        "srun bash /where/it/was/moved/from/scripts/run_grpo.sh 64",
    ],
)
def test_wrappers_and_scripts_nest_in_any_order(call: str, folder: Path) -> None:
    (folder / "scripts").mkdir()
    for place in (folder, folder / "scripts"):
        (place / "run_grpo.sh").write_text("#!/usr/bin/env bash\nexec ./inner.slurm $1\n")
    (folder / "inner.slurm").write_text(INNER)
    (folder / "submit.slurm").write_text(SUBMIT.format(call=call))
    result = init("submit.slurm")
    assert result.exit_code == 0, result.stderr
    made = job(folder)
    assert made["framework"] == "verl"
    assert made["settings"]["data.train_batch_size"] == 64  # type: ignore[index]
    assert made["cluster"] == {"nodes": 1, "gpus_per_node": 8, "gpu": "H100-80GB", "host_memory": "900GiB"}


_CALL = "python3 -m verl.trainer.main_ppo data.train_batch_size=${BATCH}"
_SKYPILOT = f"""
resources: {{accelerators: 'H100:4'}}
num_nodes: 2
envs: {{BATCH: 64}}
run: |
  {_CALL} \\
    trainer.nnodes=$SKYPILOT_NUM_NODES trainer.n_gpus_per_node=$SKYPILOT_NUM_GPUS_PER_NODE
"""
_DSTACK = f"""
type: task
nodes: 2
env: [BATCH=64, HF_TOKEN]
commands:
- pip install verl
- {_CALL} trainer.nnodes=$DSTACK_NODES_NUM
resources: {{gpu: '80GB:8'}}
"""
_RAY_JOB = f"""
kind: RayJob
spec:
  runtimeEnvYAML: |
    env_vars: {{BATCH: 64}}
  entrypoint: >-
    {_CALL}
    trainer.nnodes=2
"""
_KUBERNETES = f"""
kind: Service
---
kind: PyTorchJob
spec:
  containers:
  - env: [{{name: BATCH, value: '64'}}]
    resources: {{limits: {{nvidia.com/gpu: 8}}}}
    command: [bash, -c]
    args:
    - |
      {_CALL.replace("{BATCH}", "(BATCH)")}
"""


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        (_SKYPILOT, {"nodes": 2, "gpus_per_node": 4, "gpu": "H100-80GB"}),
        (_DSTACK, {"nodes": 2, "gpus_per_node": 8}),
        (_RAY_JOB, {"nodes": 2, "gpus_per_node": 8}),
        (_KUBERNETES, {"nodes": 1, "gpus_per_node": 8}),
    ],
)
def test_a_task_file_is_read_as_the_script_in_it(text: str, cluster: dict[str, object], folder: Path) -> None:
    (folder / "task.yaml").write_text(text)
    result = init("task.yaml")
    assert result.exit_code == 0, result.stderr
    made = job(folder)
    assert (made["framework"], made["env"]) == ("verl", {"BATCH": "64"})
    assert made["settings"]["data.train_batch_size"] == 64  # type: ignore[index]
    assert made["cluster"] == cluster
    assert "values from your environment" not in result.stderr


@pytest.mark.parametrize(
    "script",
    [
        f"BATCH=64\nkubectl apply -f - <<EOF{_KUBERNETES.replace('$(BATCH)', '$BATCH')}EOF\n",
        f"cat > made.yaml <<'EOF'{_KUBERNETES}EOF\nkubectl -n rl create --filename=made.yaml\n",
        "kubectl apply -f pods.yaml\n",
    ],
    ids=["input", "written", "on disk"],
)
def test_a_manifest_that_a_script_applies_is_read_as_the_script_in_it(script: str, folder: Path) -> None:
    (folder / "pods.yaml").write_text(_KUBERNETES)
    (folder / "run.sh").write_text(script)
    result = init("run.sh")
    assert result.exit_code == 0, result.stderr
    made = job(folder)
    assert made["settings"]["data.train_batch_size"] == 64  # type: ignore[index]
    assert made["cluster"] == {"nodes": 1, "gpus_per_node": 8}


def test_of_several_programs_in_a_container_the_training_becomes_the_job(folder: Path) -> None:
    texts = ("cd /w/verl && pip install -e .", "ray start --head", "cd /w && bash run_grpo.sh", "ls runs")
    (folder / "run.sh").write_text("".join(f"docker exec c bash -c '{text}'\n" for text in texts))
    assert init("run.sh").exit_code == 0
    assert job(folder)["command"][-1] == texts[2]  # type: ignore[index]


def test_a_script_that_starts_itself_is_left_out(folder: Path) -> None:
    (folder / "run.sh").write_text(f"#!/bin/bash\n./run.sh again\n{INNER}")
    result = init("run.sh")
    assert result.exit_code == 0 and "starts itself" in result.stderr


@pytest.mark.parametrize("call", ["srun bash gone.sh base", "srun ./gone.sh base", "srun -N 2 gone.sh base"])
def test_a_file_that_is_not_followed_is_named_with_the_command_for_it(call: str, folder: Path) -> None:
    (folder / "submit.slurm").write_text(SUBMIT.format(call=call))
    result = init("submit.slurm")
    assert result.exit_code == 1
    name = "./gone.sh" if "./" in call else "gone.sh"
    assert f"not followed, because it is not here: {name}" in result.stderr
    assert f"autotune init {name} base" in result.stderr


@pytest.mark.parametrize("text", ["import torch\ntorch.ones(1)\n", "#!/usr/bin/env python3\nx = 1\n"])
def test_a_program_of_python_gets_the_command_that_runs_it(text: str, folder: Path) -> None:
    (folder / "train.py").write_text(text)
    result = init("train.py", "--lr", "1")
    assert result.exit_code == 2
    assert "`train.py` is a Python program" in result.stderr
    assert "autotune init -- python train.py --lr 1" in result.stderr


def test_no_such_file_is_said_of_a_file_that_is_not_there(folder: Path) -> None:
    for words in (("gone.slurm",), ("gone.sbatch", "base"), ("gone",)):
        result = init(*words)
        assert result.exit_code == 2 and f"no such file or program: {words[0]}" in result.stderr
    (folder / "there.txt").write_text("echo nothing\n")
    assert "no such file" not in init("there.txt").stderr


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("#!/usr/bin/env -S bash -e\nx\n", Kind.SHELL),
        ("#!/opt/perl\n", Kind.PROGRAM),
        ("\x7fELF....", Kind.PROGRAM),
        ("# words\nexport A=1\npython3 x.py\n", Kind.SHELL),
        ("echo foo: bar\n", Kind.SHELL),
        ("# settings\nmodel: x\nsteps: 4\n", Kind.DOCUMENT),
        ("---\na: 1\n", Kind.DOCUMENT),
        ('"""Trains."""\nimport os\n', Kind.PYTHON),
    ],
)
def test_what_a_file_holds_is_told_by_its_content(text: str, kind: Kind, tmp_path: Path) -> None:
    file = tmp_path / "file.conf"
    file.write_text(text)
    assert kind_of(file) is kind


@pytest.mark.parametrize(
    ("header", "asked"),
    [
        ("#SBATCH -N 2 -G 16\n", Hardware(nodes=2, gpus_per_node=8)),
        (
            "#SBATCH -N2\n#SBATCH --gpus-per-node=a100:4\n",
            Hardware(nodes=2, gpus_per_node=4, gpu="A100-80GB"),
        ),
        ("#SBATCH --gres=gpu:8,nvme:1 --mem 512000\n", Hardware(gpus_per_node=8, host_memory="512000MiB")),
        ("#SBATCH --nodes=2-4 --mem=0\n", Hardware(nodes=2)),
        ("## SBATCH -N 2\n", Hardware()),
    ],
)
def test_what_slurm_is_asked_for(header: str, asked: Hardware) -> None:
    assert slurm.of_header(header) == asked


def test_an_empty_secret_of_this_machine_is_left_out(folder: Path) -> None:
    (folder / "run.sh").write_text(
        "export WANDB_API_KEY=${WANDB_API_KEY:-}\nexport HF_TOKEN=none\nexport MODE=${MODE:-}\n" + INNER
    )
    result = init("run.sh")
    assert result.exit_code == 0, result.stderr
    assert "WANDB_API_KEY looks like a secret" in result.stderr
    assert job(folder)["env"] == {"MODE": ""}


def test_what_of_this_machine_is_in_the_job_is_said(folder: Path) -> None:
    (folder / "run.sh").write_text(
        "export PATH=/opt/cuda/bin:$PATH\nexport CACHE=$HOME/cache\necho $USER\n" + INNER
    )
    result = init("run.sh", HOME="/home/somebody", USER="nobody-of-note")
    assert "run.sh:1: values from your environment: HOME, PATH" in result.stderr


def test_a_value_of_this_machine_is_told_where_its_script_reads_it(folder: Path) -> None:
    (folder / "inner.sh").write_text(f"{INNER.strip()} trainer.project_name=$PROJECT\n")
    (folder / "run.sh").write_text(
        f"#!/bin/bash\nexport OUT=$DATA_ROOT/out\nexport HF_TOKEN=hf_{'a1B2' * 8}\nbash inner.sh\n"
    )
    result = init("run.sh", DATA_ROOT="/mnt/data", PROJECT="mine")
    assert "run.sh:2: values from your environment: DATA_ROOT\n" in result.stderr
    assert "inner.sh:2: values from your environment: PROJECT\n" in result.stderr
    assert "run.sh:3: a secret is left out: `export HF_TOKEN=...`" in result.stderr


@pytest.mark.parametrize(("interpreter", "named"), [("/opt/verl/bin/python3.12", True), ("python3", False)])
def test_the_environment_that_a_command_names_is_that_of_the_workers(
    interpreter: str, named: bool, folder: Path
) -> None:
    (folder / "run.sh").write_text(INNER.replace("python3", interpreter))
    assert init("run.sh").exit_code == 0
    assert job(folder).get("python") == (interpreter if named else None)


@pytest.mark.parametrize(
    ("options", "checkpoints", "is_lost"),
    [
        ("-v /data:/data", "/ckpts", True),
        ("-v /data:/data -v /nfs/ckpts:/ckpts", "/ckpts/run", False),
        ("--mount type=volume,source=ckpts,target=/ckpts", "/ckpts", False),
        ("-v $PWD:/work -w /work", "checkpoints", False),
        ("-v /data:/data -w /work", "checkpoints", True),
        ("srun", "/ckpts/run", False),
        ("srun", "/lost", True),
    ],
)
def test_checkpoints_that_are_gone_with_their_container_are_named(
    options: str, checkpoints: str, is_lost: bool, folder: Path
) -> None:
    around = f"srun {_PYXIS}" if options == "srun" else f"docker run --gpus all {options} verl:latest"
    (folder / "run.sh").write_text(
        f"{around} python3 -m verl.trainer.main_ppo"
        " actor_rollout_ref.rollout.name=vllm actor_rollout_ref.actor.use_dynamic_bsz=true"
        f" actor_rollout_ref.model.path=Qwen/Qwen2.5-7B trainer.default_local_dir={checkpoints}\n"
    )
    result = init("run.sh", "--gpus", "8xH100")
    assert result.exit_code == 0, result.stderr
    assert ("mounts nothing at the checkpoint folder" in result.stderr) is is_lost


_PYXIS = "--container-image /images/verl.sqsh --container-mounts=/data:/data,/ckpts:/ckpts:rw"


@pytest.mark.parametrize(
    ("before", "program", "command", "note"),
    [
        ("", "python3", "srun", ""),
        ("", "ray job submit -- python3", "python3", "start autotune in the same container"),
        (f"srun {_PYXIS} ray start --head --block &", "python3", "python3", "that of the Ray cluster"),
        (f"srun {_PYXIS} bash -c 'ray start --head' &", "python3", "python3", "that of the Ray cluster"),
        ("srun ray start --head --block &", "python3", "srun", ""),
    ],
)
def test_a_training_stays_in_its_container_of_slurm_unless_ray_runs_there(
    before: str, program: str, command: str, note: str, folder: Path
) -> None:
    training = INNER.replace("python3", f"srun --nodes=1 {_PYXIS} {program}", 1)
    (folder / "run.sbatch").write_text(f"#!/bin/bash\n{before}\n{training}")
    result = init("run.sbatch")
    job = yaml.safe_load((folder / "job.yaml").read_text())
    assert job["framework"] == "verl"
    assert job.get("command", ["python3"])[0] == command
    assert note in result.stderr and ("start autotune in" in result.stderr) == bool(note)


def test_a_script_in_a_container_of_slurm_is_read_and_the_container_named(folder: Path) -> None:
    (folder / "inner.sh").write_text(INNER)
    (folder / "run.sbatch").write_text(f"#!/bin/bash\nsrun {_PYXIS} bash inner.sh\n")
    result = init("run.sbatch")
    assert yaml.safe_load((folder / "job.yaml").read_text())["framework"] == "verl"
    assert "start autotune in the same container" in result.stderr


def test_the_variables_of_slurm_have_the_size_that_the_header_asks_for(folder: Path) -> None:
    header = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:4\n"
    training = "trainer.nnodes=$SLURM_NNODES trainer.n_gpus_per_node=${SLURM_GPUS_ON_NODE:-8}"
    line = next(each for each in INNER.splitlines() if "main_ppo" in each)
    (folder / "run.sbatch").write_text(f"{header}{line.rstrip(' ' + chr(92))} {training}\n")
    init("run.sbatch")
    settings = job(folder)["settings"]
    assert isinstance(settings, dict)
    assert (settings["trainer.nnodes"], settings["trainer.n_gpus_per_node"]) == (2, 4)


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("export LIMIT=9\npython3 leak.py --n 3\n", ["python3", "leak.py", "--n", "3"]),
        ("pip install x\npython -m pip list\nuv run leak.py\n", ["uv", "run", "leak.py"]),
        ("for s in 1 2; do python3 leak.py --seed $s; done\n", ["bash", "run.sh"]),
        ("python3 prepare.py\npython3 -m mine.main\n", ["bash", "run.sh"]),
    ],
)
def test_a_script_of_no_known_framework_is_run_by_its_one_program_or_whole(
    script: str, command: list[str], folder: Path
) -> None:
    (folder / "run.sh").write_text(script)
    result = init("run.sh")
    assert result.exit_code == 0, result.stderr
    made = job(folder)
    assert (made["framework"], made["command"]) == ("command", command)


@pytest.mark.parametrize("script", ["python -m pip install x\n", "mkdir a\ndocker run x\n"])
def test_a_script_without_a_program_of_python_is_no_job(script: str, folder: Path) -> None:
    (folder / "run.sh").write_text(script)
    result = init("run.sh")
    assert result.exit_code == 1 and "no training found in `run.sh`" in result.stderr
    assert "hint: give the command that trains: autotune init -- COMMAND" in result.stderr
