"""Launch scripts: what `init` reads in them is what bash gives to stubs on its PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from autotune.launchers.frameworks import find
from autotune.orchestrator.cli import main
from autotune.orchestrator.config.loader import load
from autotune.orchestrator.init.bash.reader import Reading, read_script
from autotune.orchestrator.init.entry_points import unwrapped
from autotune.policies.values.job import Cluster

_SCRIPTS = Path(__file__).parent / "scripts"
_NOW = 1_795_000_000
_PROGRAMS = ("python3", "torchrun", "ray", "pkill", "nvidia-smi")
_TOOLS = ("bash", "basename", "cat", "dirname", "grep", "realpath", "seq", "tr", "wc", "nohup", "mkdir")
_STUB = """#!{bash}
record=$({mktemp} {out}/XXXXXXXX)
printf '%s\\0' "${{0##*/}}" "$@" > "$record"
case "${{0##*/}} ${{1:-}}" in "python3 -c"|nvidia-smi*) exit 1 ;; esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the scripts, in which the user stands."""
    folder = tmp_path / "checkout"
    shutil.copytree(_SCRIPTS, folder)
    (folder / "logs").mkdir()
    return folder


def recorded(script: Path, *arguments: str, folder: Path, scratch: Path, **variables: str) -> list[list[str]]:
    """Return the command lines that bash gives to the stubs, in the order of their start."""
    out, path = scratch / "out", scratch / "path"
    out.mkdir()
    path.mkdir()
    names = {name: shutil.which(name) for name in (*_TOOLS, "mktemp", "date")}
    for name in _TOOLS:
        (path / name).symlink_to(str(names[name]))
    for name in _PROGRAMS:
        (path / name).write_text(_STUB.format(bash=names["bash"], mktemp=names["mktemp"], out=out))
    (path / "date").write_text(f'#!{names["bash"]}\nexec {names["date"]} -d @{_NOW} "$@"\n')
    (path / "tee").write_text(f"#!{names['bash']}\nexec {names['cat']} > /dev/null\n")
    for file in path.iterdir():
        if not file.is_symlink():
            file.chmod(0o755)
    environment = {"PATH": str(path), "HOME": "/home/somebody", **variables}
    whole = f"cd '{folder}' && bash '{script}' " + " ".join(f"'{a}'" for a in arguments) + "; wait"
    subprocess.run([str(names["bash"]), "-c", whole], env=environment, capture_output=True, timeout=60)
    for _ in range(600):  # a script may leave its program in the background
        records = sorted(out.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        if any(
            record.read_bytes().startswith((b"python3\0-m", b"ray\0job", b"torchrun")) for record in records
        ):
            break
        subprocess.run(["sleep", "0.05"], check=True)
    return [record.read_bytes().decode().split("\0")[:-1] for record in records]


def read(script: Path, *arguments: str, folder: Path, **variables: str) -> Reading:
    environment = {"PATH": "/nowhere", "HOME": "/home/somebody", **variables}
    return read_script(
        script, script.read_text(), arguments, cwd=str(folder), environment=environment, now=_NOW
    )


@pytest.mark.parametrize(
    ("name", "arguments", "variables"),
    [
        ("submitted.sh", (), {}),
        ("submitted.sh", ("--seed", "7"), {"GPUS": "8", "NO_EVAL": "1"}),
        ("overrides.sh", (), {}),
        ("overrides.sh", ("--tp", "4", "trainer.total_epochs=3"), {"OFFLOAD": "yes", "MODEL": "/m/Qwen3-8B"}),
        ("wrapped.sh", ("--more", "a b"), {"CARDS": "0,1"}),
    ],
)
def test_reads_what_bash_starts(
    name: str, arguments: tuple[str, ...], variables: dict[str, str], checkout: Path, tmp_path: Path
) -> None:
    script = checkout / name
    theirs = recorded(script, *arguments, folder=checkout, scratch=tmp_path, **variables)
    reading = read(script, *arguments, folder=checkout, **variables)
    ours = [list(i.argv) for i in reading.invocations]
    ours = [argv[1:] if argv[0] == "nohup" else argv for argv in ours]
    training = next(a for a in theirs if a[:2] in (["ray", "job"], ["python3", "-m"]) or a[0] == "torchrun")
    same = [argv for argv in ours if argv[:4] == training[:4]]
    unknown = re.compile("\ue000[^\ue001]*\ue001")  # of the links that nvidia-smi would count
    patterns = [[".*".join(map(re.escape, unknown.split(word))) for word in argv] for argv in same]
    assert [len(argv) for argv in same] == [len(training)]
    assert all(map(re.fullmatch, patterns[0], training))


def test_programs_are_never_started(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(os, "system", refuse)
    for name in ("submitted.sh", "overrides.sh", "wrapped.sh"):
        assert read(checkout / name, folder=checkout).invocations
    assert not (checkout / "run.log").exists()


def test_what_was_not_understood_has_its_place(checkout: Path) -> None:
    reading = read(checkout / "overrides.sh", folder=checkout)
    assert [(Path(n.file).name, n.line) for n in reading.notes] == [("overrides.sh", 4)]
    assert "torch_npu" in reading.notes[0].message


def init(folder: Path, *words: str, env: dict[str, str] | None = None) -> Result:
    kept = Path.cwd()
    os.chdir(folder)
    try:
        environment = {"HOME": "/home/somebody", "SOURCE_DATE_EPOCH": str(_NOW)} | (env or {})
        return CliRunner().invoke(main, ["init", *words], env=environment)
    finally:
        os.chdir(kept)


_SEPARATE = "trainer.use_v1=true trainer.v1.trainer_mode=separate_async actor_rollout_ref.rollout.nnodes=1"


@pytest.mark.parametrize(
    ("settings", "cluster"),
    [
        (
            "trainer.n_gpus_per_node=2 rollout.n_gpus_per_node=6 rollout.nnodes=1",
            "nodes: 1, gpus_per_node: 8",
        ),
        ("trainer.nnodes=2 rollout.nnodes=2", "nodes: 4, gpus_per_node: 8"),
        ("trainer.nnodes=1 rollout.nnodes=1 rollout.n_gpus_per_node=4", "nodes: 2, gpus_per_node: 8"),
        (
            f"{_SEPARATE} trainer.n_gpus_per_node=4 actor_rollout_ref.rollout.n_gpus_per_node=4",
            "nodes: 1, gpus_per_node: 8",
        ),
    ],
)
def test_engines_with_their_own_gpus_count_in_the_cluster(
    settings: str, cluster: str, checkout: Path
) -> None:
    program = ["--", "python3", "-m", "verl.experimental.fully_async_policy.fully_async_main"]
    init(checkout, *program, "actor_rollout_ref.rollout.name=vllm", *settings.split())
    assert cluster in (checkout / "job.yaml").read_text()


def test_a_folder_is_no_script(checkout: Path) -> None:
    result = init(checkout, "models")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: `models` is a folder\nhint: name the launch script")


@pytest.mark.parametrize(
    ("line", "framework"),
    [
        ("megatron rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct", "command"),
        ("python -m skyrl.train.main_sft model.path=Qwen/Qwen2.5-7B-Instruct", "command"),
        ("uv run examples/nemo_gym/run_grpo_nemo_gym.py --config c.yaml", "nemo-rl"),
        ("python3 -m verl.trainer.main config=c.yaml worker.rollout.n=5", "command"),  # EasyR1
        (
            "python3 patch.py --target /x/verl/trainer/main_ppo.py && uv run run_grpo.py --config c",
            "nemo-rl",
        ),  # a helper
    ],
)
def test_further_programs_of_frameworks_are_known(line: str, framework: str, checkout: Path) -> None:
    (checkout / "run.sh").write_text(f"{line} 2>&1 | tee run.log\n")
    init(checkout, "run.sh")
    text = (checkout / "job.yaml").read_text()
    assert f"\nframework: {framework}\n" in text
    assert "No framework was recognised" not in text


def test_a_prediction_asks_for_the_cards_only_where_they_would_help(checkout: Path) -> None:
    verl = ["--", "python3", "-m", "verl.trainer.main_ppo", "trainer.n_gpus_per_node=8"]
    command = [*verl, "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct"]
    unnamed = init(checkout, "-o", "other.yaml", *command)
    assert "hint: add --gpus 8xH100 for the memory of a GPU" in unnamed.stderr
    assert "next: autotune plan other.yaml --gpus 8xH100   or   autotune launch" in unnamed.stderr
    named = init(checkout, "--gpus", "8xH100", *command)
    assert "predicted peak" in named.stderr and "hint: add --gpus" not in named.stderr
    assert "next: autotune plan job.yaml   or   autotune launch job.yaml" in named.stderr
    unknown = init(checkout, "-o", "unknown.yaml", "--", "accelerate", "launch", "train.py")
    assert "no memory estimate: the model's shape is unknown" in unknown.stderr
    assert "--gpus" not in unknown.stderr


def launched(folder: Path, file: str) -> str:
    result = CliRunner().invoke(main, ["launch", "-n", str(folder / file)])
    assert result.exit_code == 0, result.stderr
    return result.stdout.replace(" \\\n  ", "\n")


def test_a_script_of_overrides_becomes_a_job(checkout: Path) -> None:
    result = init(checkout, "overrides.sh", "--gpus", "8xH100")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "job.yaml\n"
    assert "job.yaml: verl, 23 settings kept" in result.stderr
    assert "overrides.sh:4: assumed to fail" in result.stderr
    assert "predicted peak per GPU" in result.stderr
    text = (checkout / "job.yaml").read_text()
    assert "gpu: H100-80GB" in text
    assert "HYDRA_FULL_ERROR: '1'" in text
    argv = launched(checkout, "job.yaml")
    for word in (
        "data.train_files=[/data/gsm8k/train.parquet,/data/math/train.parquet]",
        "actor_rollout_ref.actor.optim.lr=1e-06",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=10240",
        "trainer.experiment_name=qwen2.5-7b-instruct-grpo-" + time.strftime("%Y%m%d", time.localtime(_NOW)),
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True",
    ):
        assert word in argv


def test_a_submission_becomes_a_job(checkout: Path) -> None:
    (checkout / "train.py").touch()
    result = init(checkout, "submitted.sh", "--gpus", "H100", "-o", "my.yaml")
    assert "my.yaml: slime" in result.stderr
    text = (checkout / "my.yaml").read_text()
    assert "NCCL_NVLS_ENABLE:" not in text and "variable NCCL_NVLS_ENABLE follows only from" in text
    assert "submitted.sh:8: HAS_LINKS is '0' or '1', as" in text
    assert "kl-loss-coef: '0.00'" in text
    assert "sglang-cuda-graph-bs: [1, 2, 4, 8, 12, 16]" in text
    assert "gpus_per_node: 4" in text
    assert f"workdir: {checkout}" in text


def test_a_command_of_skyrl_becomes_a_job(checkout: Path) -> None:
    command = ["uv", "run", "--isolated", "-m", "skyrl.train.entrypoints.main_base"]
    settings = ["trainer.placement.policy_num_gpus_per_node=4", "generator.inference_engine.num_engines=4"]
    result = init(checkout, "--gpus", "4xH100", "--", *command, *settings, "trainer.resume_mode=null")
    assert "job.yaml: skyrl, 3 settings kept" in result.stderr
    text = (checkout / "job.yaml").read_text()
    assert "gpus_per_node: 4" in text and "trainer.resume_mode: null" in text
    assert "uv\nrun\n--isolated\n-m\nskyrl.train.entrypoints.main_base\n" in launched(checkout, "job.yaml")


_OPENRLHF = (
    "--actor.num_gpus_per_node 4 --vllm.num_engines 2 --vllm.tensor_parallel_size 2 "
    "--train.agent_func_path a.py --actor.adam.betas 0.9 0.95"
)
_MEGATRON = "--rollout-batch-size 32 --actor-num-gpus-per-node 4 --num-rollout 30 --colocate"


@pytest.mark.parametrize(
    ("line", "framework", "nodes", "gpus"),
    [
        (f"-m openrlhf.cli.train_ppo_ray {_OPENRLHF} --train.colocate_all", "openrlhf", 1, 4),
        (f"-m openrlhf.cli.train_ppo_ray {_OPENRLHF} --ref.num_gpus_per_node 1", "openrlhf", 2, 8),
        (f"-m openrlhf.cli.train_ppo_ray {_OPENRLHF} --algo.kl.init_coef 0", "openrlhf", 1, 8),
        (f"/root/miles/train.py {_MEGATRON}", "miles", 1, 4),
        (f"train.py {_MEGATRON} --use-miles-router", "miles", 1, 4),
        (f"train.py {_MEGATRON}", "slime", 1, 4),
    ],
)
def test_flags_of_a_framework_become_its_settings(
    line: str, framework: str, nodes: int, gpus: int, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(f"python3 {line}\n")
    result = init(tmp_path, "run.sh")
    assert f"job.yaml: {framework}," in result.stderr, result.stderr
    job = load(tmp_path / "job.yaml")
    assert (job.framework, job.cluster.nodes, job.cluster.gpus_per_node) == (framework, nodes, gpus)
    if framework == "openrlhf":
        assert job.settings["actor.adam.betas"] == [0.9, 0.95]


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("train.py --vllm-enforce-eager", "vime"),
        ("vime/train.py", "vime"),
        ("/root/vime/train.py", "vime"),
        ("train_async.py --train-backend fsdp", "slime's fsdp trainer"),
    ],
)
def test_slime_with_another_engine_or_trainer_is_no_job_of_slime(
    program: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(f"python3 {program} {_MEGATRON}\n")
    result = init(tmp_path, "run.sh")
    assert f"{name}: no adapter yet" in result.stderr, result.stderr
    assert load(tmp_path / "job.yaml").framework == "command"


def test_a_checkout_of_vime_is_told_by_its_package(tmp_path: Path) -> None:
    (tmp_path / "vime").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / "run.sh").write_text(f"python3 train.py {_MEGATRON}\n")
    assert "vime: no adapter yet" in init(tmp_path, "run.sh").stderr


def test_an_existing_file_stays(checkout: Path) -> None:
    (checkout / "job.yaml").write_text("mine")
    result = init(checkout, "overrides.sh")
    assert result.exit_code == 2
    assert "already exists" in result.stderr
    assert (checkout / "job.yaml").read_text() == "mine"
    assert init(checkout, "--force", "overrides.sh").exit_code == 0


def test_a_command_behind_two_dashes(tmp_path: Path) -> None:
    words = ("python3", "-m", "verl.trainer.main_ppo", "actor_rollout_ref.rollout.n=4", "--config-name=mine")
    result = init(tmp_path, "-o", "-", "--", *words)
    assert "framework: verl" in result.stdout
    assert "--config-name=mine" in result.stdout


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ("policy: {model_name: Qwen/Qwen3-4B}\nloss_fn: {}\nsft: {max_num_steps: 32}\n", "NeMo-RL"),
        ("actor_train: {}\nactor_infer: {}\npretrain: Qwen/Qwen3-4B\n", "ROLL"),
    ],
)
def test_frameworks_without_an_adapter_are_named(document: str, named: str, tmp_path: Path) -> None:
    (tmp_path / "their.yaml").write_text(document)
    result = init(tmp_path, "their.yaml")
    assert result.exit_code == 0, result.stderr
    assert named in result.stderr
    assert "framework: command" in (tmp_path / "job.yaml").read_text()


@pytest.mark.parametrize(
    ("sections", "pipeline"),
    [
        ("actor_infer: {}\nrewards: {}\n", "rlvr"),
        ("actor_infer: {}\ntrain_env_manager: {}\n", "agentic"),
        ("chosen_key: chosen\n", "dpo"),
    ],
)
def test_a_file_of_roll_is_started_by_the_program_of_its_sections(
    sections: str, pipeline: str, tmp_path: Path
) -> None:
    folder = tmp_path / "examples" / "tictactoe"
    folder.mkdir(parents=True)
    placed = "actor_train: {device_mapping: 'list(range(0, 8))'}\nreference: {device_mapping: '[8,9]'}\n"
    text = f"pretrain: Qwen/Qwen3-4B\nnum_gpus_per_node: 8\n{placed}{sections}"
    (folder / "mine.yaml").write_text(text)
    command = f"python examples/start_{pipeline}_pipeline.py --config_path tictactoe --config_name mine"
    (folder / "run.sh").write_text(f"{command}\n")
    assert init(tmp_path, "examples/tictactoe/mine.yaml").exit_code == 0
    of_file = load(tmp_path / "job.yaml")
    assert of_file.command == tuple(command.split()) and of_file.workdir == str(tmp_path)
    assert init(tmp_path, "--force", "examples/tictactoe/run.sh").exit_code == 0
    for each in (of_file, load(tmp_path / "job.yaml")):
        assert (each.cluster.nodes, each.cluster.gpus_per_node) == (2, 8)


def test_a_program_of_ones_own_with_a_file_of_nemo_rl_is_driven_and_its_defaults_are_an_assumption(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.yaml").write_text("policy: {model_name: Qwen/Qwen3-4B}\ngrpo: {max_num_steps: 3}\n")
    run = "uv run ./examples/run_grpo_chess.py --config mine.yaml"
    (tmp_path / "run.sh").write_text(f"for i in 1 2; do\n  COMMAND='{run}' sbatch --nodes=2 ray.sub\ndone\n")
    result = init(tmp_path, "run.sh")
    assert result.stderr.count("sbatch --nodes=2") == 1  # said once of a loop
    job = load(tmp_path / "job.yaml")
    assert (job.framework, job.config) == ("nemo-rl", "mine.yaml")
    profile = find(job.framework).profile(
        job,
        Cluster(address="", nodes=2, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40),
    )
    facts = profile.facts
    assert [fact.name for fact in facts if fact.is_assumed] == ["release", "program"]


def test_nemo_rl_is_driven_from_its_file_and_from_its_command(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "run_grpo.py").write_text("")
    (tmp_path / "base.yaml").write_text(
        "cluster: {gpus_per_node: 8, num_nodes: 2}\npolicy: {dtensor_cfg: {enabled: true}}\n"
    )
    (tmp_path / "grpo.yaml").write_text(
        "defaults: base.yaml\npolicy: {precision: bfloat16}\ngrpo: {seed: 1}\n"
    )
    assert init(tmp_path, "grpo.yaml").exit_code == 0
    job = load(tmp_path / "job.yaml")
    assert (job.framework, job.command) == ("nemo-rl", ("uv", "run", "examples/run_grpo.py"))
    assert job.document["policy"] == {
        "dtensor_cfg": {"enabled": True},
        "precision": "bfloat16",
    } and job.workdir == str(tmp_path)
    (tmp_path / "job.yaml").unlink()
    words = (
        "uv",
        "run",
        "python",
        "examples/run_grpo.py",
        "--config",
        "grpo.yaml",
        "grpo.seed=2",
        "++grpo.x=3",
    )
    assert init(tmp_path, "--", *words).exit_code == 0
    job = load(tmp_path / "job.yaml")
    assert (job.command, job.config) == (words[:4], "grpo.yaml")
    assert job.settings == {"grpo.seed": 2, "++grpo.x": 3}


def test_a_recipe_of_nemo_rl_is_read_with_the_files_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "policy: {dtensor_cfg: {enabled: true}}\ngrpo: {seed: 1}\ncluster: {num_nodes: 1}\n"
    )
    (tmp_path / "middle.yaml").write_text("defaults: base.yaml\ncluster: {gpus_per_node: 4}\n")
    (tmp_path / "recipe.yaml").write_text("defaults: middle.yaml\npolicy: {model_name: Qwen/Qwen3-4B}\n")
    assert init(tmp_path, "recipe.yaml").exit_code == 0
    job = load(tmp_path / "job.yaml")
    assert (job.framework, job.cluster.nodes, job.cluster.gpus_per_node) == ("nemo-rl", 1, 4)


def test_a_recipe_without_the_file_that_it_extends_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("defaults: ../base.yaml\npolicy: {model_name: Qwen/Qwen3-4B}\n")
    result = init(tmp_path, "recipe.yaml")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "error: recipe.yaml extends ../base.yaml: no such file",
        f"hint: looked for {tmp_path.parent / 'base.yaml'}",
    ]


@pytest.mark.parametrize("trainer", ["sft", "dpo", "rm", "ppo", "distillation"])
def test_nemo_rl_s_other_trainers_start_their_own_script(trainer: str, tmp_path: Path) -> None:
    (tmp_path / "their.yaml").write_text(f"policy: {{model_name: Qwen/Qwen3-4B}}\n{trainer}: {{seed: 1}}\n")
    assert init(tmp_path, "their.yaml").exit_code == 0
    assert f"examples/run_{trainer}.py" in load(tmp_path / "job.yaml").command


def test_trl_is_driven_from_its_file_and_from_its_command(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(
        "model_name_or_path: Qwen/Qwen3-4B\nnum_generations: 8\nuse_vllm: true\n"
    )
    result = init(tmp_path, "grpo.yaml")
    assert result.exit_code == 0
    assert "each process with a whole copy of the model: `config_file` names accelerate's" in result.stderr
    job = load(tmp_path / "job.yaml")
    assert (job.framework, job.command, job.document["num_generations"]) == ("trl", (), 8)
    (tmp_path / "job.yaml").unlink()
    words = ("trl", "grpo", "--config", "grpo.yaml", "--per_device_train_batch_size", "16", "--bf16")
    assert init(tmp_path, "--", *words).exit_code == 0
    job = load(tmp_path / "job.yaml")
    assert job.settings == {"per_device_train_batch_size": 16, "bf16": True}
    assert job.document["use_vllm"] is True


def test_ms_swift_is_driven_from_its_file_and_from_its_command(tmp_path: Path) -> None:
    text = "rlhf_type: grpo\nmodel: Qwen/Qwen3-4B\nper_device_train_batch_size: 8\nENV: {NPROC_PER_NODE: 4}\n"
    (tmp_path / "grpo.yaml").write_text(text)
    assert init(tmp_path, "grpo.yaml").exit_code == 0
    job = load(tmp_path / "job.yaml")
    assert (job.framework, job.command, job.document["model"]) == ("ms-swift", (), "Qwen/Qwen3-4B")
    (tmp_path / "job.yaml").unlink()
    flags = ("--rlhf_type", "grpo", "--reward_funcs", "accuracy", "format", "--max_steps", "5")
    assert init(tmp_path, "--", "NPROC_PER_NODE=8", "swift", "rlhf", "grpo.yaml", *flags).exit_code == 0
    job = load(tmp_path / "job.yaml")
    assert (job.framework, job.command, job.document["model"]) == ("ms-swift", (), "Qwen/Qwen3-4B")
    assert job.settings["reward_funcs"] == ["accuracy", "format"] and job.env == {"NPROC_PER_NODE": "8"}


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("trl", ("grpo", "--model_name_or_path", "Qwen/Qwen3-4B")),
        ("swift", ("rlhf", "--rlhf_type", "grpo", "--per_device_train_batch_size", "8")),
    ],
)
@pytest.mark.parametrize("folder", ["/opt/rl/bin/", "env/bin/", ""])
def test_a_program_of_an_environment_runs_in_its_interpreter(
    program: str, words: tuple[str, ...], folder: str, tmp_path: Path
) -> None:
    assert init(tmp_path, "--", f"{folder}{program}", *words).exit_code == 0
    job = load(tmp_path / "job.yaml")
    assert (job.command, job.python) == ((), f"{folder}python3" if folder else None)


def test_another_trainer_of_ms_swift_is_run_and_not_driven(tmp_path: Path) -> None:
    assert init(tmp_path, "--", "swift", "rlhf", "--rlhf_type", "dpo", "--model", "m").exit_code == 0
    job = load(tmp_path / "job.yaml")
    assert (job.framework, job.command[:2]) == ("command", ("swift", "rlhf"))


def test_secrets_stay_out_of_the_environment(tmp_path: Path) -> None:
    token = "hf_" + "a1B2" * 8
    (tmp_path / "run.sh").write_text(
        f"export HF_TOKEN={token}\npython3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4\n"
    )
    result = init(tmp_path, "run.sh")
    assert "run.sh:1: a secret is left out: `export HF_TOKEN=...` where autotune runs" in result.stderr
    text = (tmp_path / "job.yaml").read_text()
    assert "  HF_TOKEN: {env: HF_TOKEN}\n" in text and token not in text + result.stderr


def test_a_script_without_a_training(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text('[ -n "$BASE_FOLDER_OF_MINE" ] || exit 1\npython3 train_grpo.py --a 1\n')
    result = init(tmp_path, "run.sh")
    assert result.exit_code == 1
    assert "run.sh:1: the script ends here: `exit 1`" in result.stderr


def test_a_training_inside_bash_c_is_found_behind_what_prepares_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        'srun -w node bash -c \\\n"export OWN=1; cd /opt; pip install ray \\\n&& /root/bin/ray job submit -- '
        'python3 -m openrlhf.cli.train_ppo_ray --train.batch_size 128 2>&1 | tee log"\n'
    )
    result = init(tmp_path, "run.sh")
    assert "openrlhf, 1 setting kept" in result.stderr
    assert "OWN: '1'" in (tmp_path / "job.yaml").read_text()
    assert "workdir: /opt" in (tmp_path / "job.yaml").read_text()


@pytest.mark.parametrize("text", ["python3 a.py | tee log", "python3 a.py 'b", "(python3 a.py)"])
def test_a_text_for_bash_with_other_operators_stays_one_command(text: str) -> None:
    assert unwrapped(("bash", "-c", text)).argv == ("bash", "-c", text)


def test_a_script_that_ends_for_want_of_a_variable_names_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        'if [ -z "${BASE_FOLDER_OF_MINE}" ]; then\n  echo "BASE_FOLDER_OF_MINE is not set."\n  exit 1\nfi\n'
        "python3 train_grpo.py --a 1\n"
    )
    result = init(tmp_path, "run.sh")
    assert result.exit_code == 1
    assert 'run.sh:3: the script ends here: `exit 1`, after it prints "BASE_FOLDER_OF_MINE is not set."' in (
        result.stderr
    )
    assert (
        "hint: pass the variables and arguments that the script expects: NAME=value autotune init run.sh"
        in (result.stderr)
    )
    assert init(tmp_path, "run.sh", env={"BASE_FOLDER_OF_MINE": "/models"}).exit_code == 0


def test_a_message_far_from_the_end_of_a_script_does_not_explain_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text('echo "begins"\n\n\n\nexit 1\npython3 train_grpo.py --a 1\n')
    result = init(tmp_path, "run.sh")
    assert "run.sh:5: the script ends here: `exit 1`\n" in result.stderr


_OLDER = "actor_rollout_ref.actor.megatron.grad_offload"  # verl 0.9.1 does not have it, 0.9.0 does
_MEGATRON_OF_VERL = ("python3", "-m", "verl.trainer.main_ppo", "model_engine=megatron", f"{_OLDER}=true")


def test_the_release_that_the_settings_were_checked_against_is_named(tmp_path: Path) -> None:
    words = (
        *_MEGATRON_OF_VERL,
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
    )
    result = init(tmp_path, "--", *words)
    assert result.exit_code == 0, result.stderr
    checked = "verl 0.9.1, the newest known: the job's own version was not found; set framework_version"
    assert f"settings checked against {checked}\n" in result.stderr
    assert f"# Settings checked against {checked}.\nframework: verl\n" in (tmp_path / "job.yaml").read_text()
    assert f"verl 0.9.1 does not accept {_OLDER}, but verl 0.9.0 does" in result.stderr
    output = msgspec.json.decode(init(tmp_path, "--json", "--force", "--", *words).stdout)
    assert output["checked_against"] == checked and _OLDER in output["warnings"][0]


def test_the_release_of_a_checkout_is_named_even_of_a_job_with_errors(tmp_path: Path) -> None:
    version = tmp_path / "verl" / "version" / "version"
    version.parent.mkdir(parents=True)
    version.write_text("0.9.1\n")
    result = init(tmp_path, "--", *_MEGATRON_OF_VERL)
    assert result.exit_code == 1
    assert "hint: verl 0.9.0 accepts it; it was removed" in result.stderr
    assert f"# Settings checked against verl 0.9.1 ({version})." in (tmp_path / "job.yaml").read_text()


def test_a_framework_without_releases_names_none(tmp_path: Path) -> None:
    result = init(tmp_path, "--", "python3", "train.py", *_MEGATRON.split())
    assert "job.yaml: slime" in result.stderr and "checked against" not in result.stderr
    assert "checked against" not in (tmp_path / "job.yaml").read_text()


def test_a_missing_backslash_is_named_with_its_place(tmp_path: Path) -> None:
    lines = (
        "ARGS=(--num-rollout 3)",
        "python3 train.py \\",
        "   --colocate --hf-checkpoint m",
        "   ${ARGS[@]}",
    )
    (tmp_path / "run.sh").write_text("\n".join(lines) + "\n")
    result = init(tmp_path, "run.sh")
    message = "  run.sh:4: `--num-rollout` begins a command: is a `\\` missing above?\n"
    assert message in result.stderr


def test_a_note_stands_once_however_often_its_reason_occurs(tmp_path: Path) -> None:
    command = "python3 -m verl.trainer.main_ppo data.train_files=$BASE/train data.val_files=$BASE/test"
    (tmp_path / "run.sh").write_text(f"export OUT=$BASE/out\n{command}\n")
    result = init(tmp_path, "run.sh")
    assert result.stderr.count("$BASE is not set in the script or your environment: assumed empty") == 1
    assert "run.sh:1: $BASE is not set" in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("run.sh", b"\xea\x00", "cannot read `run.sh`: not UTF-8 text (line 1, column 1)"),
        ("run.sh", b" \n", "`run.sh` is empty"),
        ("run.sh", None, "`run.sh` is a folder"),
        ("job.yaml", None, "`job.yaml` is a folder"),
        ("a.yaml", b"", "`a.yaml` is empty"),
        ("a.yaml", b"- a\n", "`a.yaml` is no mapping of settings"),
        ("a.yaml", b"a: b\n\tc: d\n", "error[job]: a tab indents this line\n --> a.yaml:2:1"),
        ("a.yaml", b"[" * 50_000, "nested more than 32 levels deep"),
        ("a.yaml", b"a: &a [*a]", "this value contains itself"),
        ("a.yaml", b"a: " + b"x" * 300_000, "larger than 256 KiB"),
        ("a.yaml", b"!!python/object/apply:os.system ['exit 1']", "is not read here"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_error(
    name: str, content: bytes | None, reason: str, tmp_path: Path
) -> None:
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(content)
    result = init(tmp_path, name, "-o", "made.yaml")
    assert result.exit_code == 2, result.output
    assert reason in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "made.yaml").exists()


@pytest.mark.parametrize("words", [("nowhere.sh",), ("nowhere",), ("nowhere.yaml",), ("--",), ()])
def test_a_source_that_is_not_there_is_a_usage_error(words: tuple[str, ...], tmp_path: Path) -> None:
    result = init(tmp_path, *words)
    assert result.exit_code == 2 and not (tmp_path / "job.yaml").exists()


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf"])
def test_line_ends_and_byte_order_marks_of_windows_are_no_part_of_a_script(
    prefix: bytes, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_bytes(
        prefix + b"python3 train.py \\\r\n  --colocate --rollout-batch-size 8 \\\r\n  --num-rollout 3\r\n"
    )
    init(tmp_path, "run.sh")
    job = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert (job["framework"], job["command"]) == ("slime", ["python3", "train.py"])
    assert job["settings"] == {"colocate": True, "rollout-batch-size": 8, "num-rollout": 3}


@pytest.mark.parametrize("test", ["source {name}", "bash {name}"])
def test_a_path_that_the_system_refuses_to_look_up_is_not_there(test: str, tmp_path: Path) -> None:
    """A name that is too long is refused to every user, as a folder of another user is."""
    script = tmp_path / "run.sh"
    line = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8"
    script.write_text(f"{test.format(name='./' + 'x' * 300)}\n{line}\n")
    result = CliRunner().invoke(main, ["init", str(script), "-o", str(tmp_path / "job.yaml")])
    assert isinstance(result.exception, SystemExit | None)
    assert "actor_rollout_ref.rollout.n: 8" in (tmp_path / "job.yaml").read_text()


def test_a_name_that_the_system_refuses_to_look_up_is_one_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["init", "x" * 300, "-o", str(tmp_path / "job.yaml")])
    assert result.exit_code == 2 and "no such file or program" in result.stderr
