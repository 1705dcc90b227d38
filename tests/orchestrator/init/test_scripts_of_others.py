"""What scripts of other projects hold: each case is a form that many of them have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from autotune.orchestrator.cli import main
from autotune.orchestrator.config.loader import load
from autotune.orchestrator.config.public_models import find_like
from autotune.orchestrator.init.bash.reader import Reading, read_script
from autotune.orchestrator.init.entry_points import unwrapped

_VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_dynamic_bsz=true"
    " actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct"
)
_MEGATRON = "--hf-checkpoint m --rollout-batch-size 32 --actor-num-gpus-per-node 4 --colocate --num-rollout 9"


def read(folder: Path, text: str, **variables: str) -> Reading:
    script = folder / "run.sh"
    script.write_text(text)
    return read_script(script, text, cwd=str(folder), environment=variables, now=0)


def words_of(folder: Path, text: str) -> tuple[str, ...]:
    return read(folder, text).invocations[-1].argv


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a=1 b=2 c=3\npython3 x=$a-$b-c\n", "x=1-2-c"),
        ("host=h port=80\nurl=http://$host:$port/run\npython3 x=$url\n", "x=http://h:80/run"),
        ("a=1\npython3 x=dir/$a$a/end\n", "x=dir/11/end"),
        ("d=/data\nfiles=[$d/a,\\\n$d/b,\\\n$d/c]\npython3 x=$files\n", "x=[/data/a,/data/b,/data/c]"),
        ("x='{a:{},'\\\n'b:{}}'\npython3 x=$x\n", "x={a:{},b:{}}"),
        ("x='$a-$b-c'\npython3 x=$x\n", "x=$a-$b-c"),
        ("cat <<'EOF' > f\n$a-$b\\\nc\nEOF\npython3 x=\"$(cat f)\"\n", "x=$a-$b\\\nc"),
        ("# it's $a-$b here\\\na=1 b=2\npython3 x=$a,$b,c\n", "x=1,2,c"),
    ],
)
def test_words_that_the_grammar_cannot_read_are_read_as_bash_does(
    text: str, word: str, tmp_path: Path
) -> None:
    assert words_of(tmp_path, text) == ("python3", word)


def test_a_note_behind_a_joined_line_keeps_its_line(tmp_path: Path) -> None:
    reading = read(tmp_path, "x=a\\\nb\\\nc\necho ok\npython3 x=$MISSING\n")
    assert [note.line for note in reading.notes] == [5]


@pytest.mark.parametrize(
    "check",
    [
        "if [ ! -d /cluster/data ]; then\n  echo no data\n  exit 1\nfi",
        "[[ -f /cluster/data ]] || { echo no data; exit 1; }",
        "if [[ ! -f /cluster/data && -n '1' ]]; then exit 2; fi",
    ],
)
def test_a_path_of_the_cluster_need_not_be_here(check: str, tmp_path: Path) -> None:
    reading = read(tmp_path, f"{check}\n{_VERL}\n")
    assert [each.argv[0] for each in reading.invocations] == ["python3"]
    assert reading.notes[0].message == "assumed to exist where the job runs: `/cluster/data`"


def test_a_script_that_ends_for_another_reason_still_ends(tmp_path: Path) -> None:
    assert not read(tmp_path, f"if [ -z '' ]; then exit 1; fi\n{_VERL}\n").invocations
    assert not read(
        tmp_path, f"if [ ! -d /no ]; then echo; fi\nif [ 1 = 1 ]; then exit 1; fi\n{_VERL}\n"
    ).invocations


def test_a_loop_that_waits_for_a_server_ends(tmp_path: Path) -> None:
    wait = "n=0\nwhile [ $n -lt 3 ]; do\n  if curl http://h; then\n    break\n  fi\n  n=$((n + 1))\ndone"
    reading = read(tmp_path, f"{wait}\nif [ $n -eq 3 ]; then\n  exit 1\nfi\n{_VERL}\n")
    assert reading.invocations[-1].argv[0] == "python3"
    assert "assumed true, what the loop waits for: `curl http://h`" in [n.message for n in reading.notes]


def test_options_of_env_take_their_values() -> None:
    program = unwrapped(("env", "-u", "ROCR_VISIBLE_DEVICES", "A=1", *_VERL.split()))
    assert program.argv == tuple(_VERL.split()) and program.env == {"A": "1"}


def miles(folder: Path) -> Path:
    checkout = folder / "checkout"
    for each in ("miles/utils/external_utils", "scripts/models", "examples/lora"):
        (checkout / each).mkdir(parents=True)
    (checkout / "train.py").touch()
    (checkout / "miles/utils/external_utils/model_args_utils.py").touch()
    (checkout / "scripts/models/small.py").write_text(
        "import os\nfrom model_args_utils import moe_layer_freq\nLAYERS = 3\nWIDTH = 8 * 64\n\n"
        "def model_args(base: str | None = None) -> str:\n"
        "    base = base if base is not None else os.environ.get('BASE') or '10000'\n"
        "    return (\n        '--swiglu '\n        f'--num-layers {LAYERS} --hidden-size {WIDTH} '\n"
        "        f'--moe-layer-freq {moe_layer_freq(nlayers=LAYERS, first_k_dense_replace=1)} '\n"
        "        f'--rotary-base {base} '\n    )\n"
    )
    (checkout / "scripts/models/long.py").write_text(
        "from model_args_utils import load_sibling_model_args\n\n"
        "def model_args() -> str:\n    return load_sibling_model_args(__file__, 'small', base=5000000)\n"
    )
    (checkout / "scripts/models/computed.py").write_text(
        "import subprocess\n\ndef model_args() -> str:\n    return subprocess.check_output('env')\n"
    )
    return checkout


def script_of(checkout: Path, model: str) -> str:
    lines = (
        'HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"',
        f'LINE="$(python3 "$HERE/../../miles/utils/external_utils/model_args_utils.py" "{model}")" || exit 1',
        'read -ra MODEL_ARGS <<< "${LINE}"',
        f"python3 train.py {_MEGATRON} ${{MODEL_ARGS[@]}}",
    )
    (checkout / "examples/lora/run.sh").write_text("\n".join(lines) + "\n")
    return str(checkout / "examples/lora/run.sh")


@pytest.mark.parametrize(("model", "base"), [("small", 10000), ("long", 5000000)])
def test_a_model_s_flags_of_miles_are_read(
    model: str, base: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = script_of(miles(tmp_path), model)
    result = CliRunner().invoke(main, ["init", script])
    assert "job.yaml: miles," in result.stderr, result.stderr
    settings = load(tmp_path / "job.yaml").settings
    assert (settings["num-layers"], settings["hidden-size"], settings["swiglu"]) == (3, 512, True)
    assert (settings["moe-layer-freq"], settings["rotary-base"]) == ("[0,1,1]", base)


def test_a_model_s_flags_that_need_python_stay_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = script_of(miles(tmp_path), "computed")
    result = CliRunner().invoke(main, ["init", script])
    assert result.exit_code == 1
    assert "known only where a shell runs it" in result.stderr


def test_the_folder_of_a_module_is_where_its_package_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "fork" / "verl" / "trainer"
    package.mkdir(parents=True)
    (package / "main_ppo.py").touch()
    script = tmp_path / "fork" / "examples" / "run.sh"
    script.parent.mkdir()
    script.write_text(f"{_VERL}\n")
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(main, ["init", str(script)]).exit_code == 0
    assert f"workdir: {tmp_path / 'fork'}\n" in (tmp_path / "job.yaml").read_text()


def test_a_script_with_the_flags_of_trl_is_driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = "--model_name_or_path Qwen/Qwen3-4B --output_dir out --learning_rate 1e-6 --num_generations 8"
    (tmp_path / "run.sh").write_text(
        f"accelerate launch --num_processes 4 --config_file zero3.yaml src/grpo.py {flags}\n"
    )
    assert CliRunner().invoke(main, ["init", "run.sh"]).exit_code == 0
    job = load(tmp_path / "job.yaml")
    assert (job.framework, job.command) == ("trl", ("accelerate", "launch", "src/grpo.py"))
    assert job.settings["num_processes"] == 4 and job.settings["config_file"] == "zero3.yaml"
    result = CliRunner().invoke(main, ["launch", "-n", "job.yaml"])
    assert result.exit_code == 0, result.stderr
    words = result.stdout.replace("\\\n", "").split()
    at = words.index("src/grpo.py")
    assert words[words.index("--config_file") + 1] == "zero3.yaml"
    assert "--model_name_or_path" in words[at:]
    (tmp_path / "run.sh").write_text(f"python src/grpo.py {flags}\n")
    assert CliRunner().invoke(main, ["init", "run.sh", "--force"]).exit_code == 0
    job = load(tmp_path / "job.yaml")
    assert (job.framework, job.cluster.gpus_per_node) == ("trl", 1)
    (tmp_path / "src").mkdir()
    own = "parser = argparse.ArgumentParser()\n"
    for call, parser, framework in (
        (f"accelerate launch src/grpo.py {flags}", "parser = TrlParser(GRPOConfig)\n", "trl"),
        (f"accelerate launch src/grpo.py {flags}", own, "command"),
        (f"python3 /cluster/src/grpo.py {flags}", own, "command"),
        ("python3 mine_grpo.py --output-dir o --learning-rate 1 --num-generations 8", own, "command"),
        ("accelerate launch src/grpo.py --model m --lr 1", "", "command"),
    ):
        (tmp_path / "src" / "grpo.py").write_text(parser)
        (tmp_path / "run.sh").write_text(f"{call}\n")
        assert CliRunner().invoke(main, ["init", "run.sh", "--force"]).exit_code == 0
        assert load(tmp_path / "job.yaml").framework == framework, call


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("/data/multiturn-sft-qwen-2.5-32b-instruct/global_step_372", "Qwen/Qwen2.5-32B-Instruct"),
        ("me/Qwen2.5-7B-Instruct-GRPO", "Qwen/Qwen2.5-7B-Instruct"),
        ("/data/Qwen3-30B-A3B-sft", "Qwen/Qwen3-30B-A3B"),
        ("/data/DeepSeek-R1-Distill-Qwen-7B-x", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
        ("/models/zai-org/GLM-4.5-Air-Base", "zai-org/GLM-4.5-Air"),
        ("/data/Qwen2.5-7B/my-13b", ""),
        ("/data/Qwen3-8B-Eagle3", ""),
        ("/data/Qwen2.5-7B-Instruct-AWQ", ""),
        ("/data/InternVL-Qwen2.5-7B", ""),
        ("/data/Qwen3-235B-A22B-4layer", ""),
        ("/data/Qwen3-30B-thing", ""),
        ("/YOUR_MODEL_PATH", ""),
    ],
)
def test_a_copy_has_the_shape_of_the_model_in_its_name(name: str, like: str) -> None:
    result = find_like(name)
    assert (result[0] if result else "") == like


def test_an_assumed_shape_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(f"{_VERL}-mine\n")
    result = CliRunner().invoke(main, ["init", "run.sh", "--gpus", "8xH100"])
    assert "predicted peak per GPU" in result.stderr
    message = "the shape of the model `Qwen/Qwen2.5-7B-Instruct-mine` is assumed to be that of"
    assert f"{message} Qwen/Qwen2.5-7B-Instruct" in " ".join(result.stderr.split())


def test_a_text_of_several_lines_for_bash_is_read_as_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        f"export B=2\nsource .venv/bin/activate\nray status\n{_VERL} trainer.nnodes=$N \\\n  data.seed=\\$B"
    )
    (tmp_path / "run.sh").write_text(f'N=2\nexport A=1\nsrun --overlap bash -c "{text}"\n')
    result = CliRunner().invoke(main, ["init", "run.sh"])
    assert result.exit_code == 0, result.stderr
    job = load(tmp_path / "job.yaml")
    assert (job.framework, job.settings["trainer.nnodes"], job.settings["data.seed"]) == ("verl", 2, 2)
    assert job.env == {"A": "1", "B": "2"}


def test_a_secret_flag_without_its_value_hides_no_other_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"python3 train.py {_MEGATRON} --wandb-key ${{WANDB_KEY}} --wandb-group g\n"
    (tmp_path / "run.sh").write_text(text)
    assert CliRunner().invoke(main, ["init", "run.sh"]).exit_code == 0
    result = CliRunner().invoke(main, ["launch", "-n", "--json", "job.yaml"]).stdout
    assert '"--wandb-key","--wandb-group","g"' in result


_OPENRLHF = (
    "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --actor_num_gpus_per_node 4 --vllm_num_engines 4"
)


@pytest.mark.parametrize(
    ("command", "moved", "words"),
    [
        (
            f"python3 train.py {_MEGATRON} --prm-workers 2 --env-tags a b --trace",
            ["prm-workers", "env-tags", "trace"],
            ["python3", "train.py", "--prm-workers", "2", "--env-tags", "a", "b", "--trace"],
        ),
        (
            f"{_OPENRLHF} --env_file env.yaml",
            ["env_file"],
            ["python3", "-m", "openrlhf.cli.train_ppo_ray", "--env_file", "env.yaml"],
        ),
        (f"python3 train.py {_MEGATRON} --sglang-mem-fraction-statik 0.7", [], ["python3", "train.py"]),
        (f"python3 train.py {_MEGATRON} --prm-url $PRM_URL", [], ["python3", "train.py"]),
    ],
    ids=["slime", "openrlhf", "misspelt", "without a value"],
)
def test_flags_of_a_fork_go_to_its_command(
    command: str, moved: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(f"{command}\n")
    made = CliRunner().invoke(main, ["init", "run.sh"])
    job = yaml.safe_load(Path("job.yaml").read_text())
    assert job["command"] == words
    assert not {*moved} & {*job["settings"]}
    assert f"so kept in `command`: {', '.join(f'--{name}' for name in moved)}" in made.stderr or not moved
    if moved:
        assert made.exit_code == 0, made.stderr
        assert "passes on and does not read" not in made.stderr


@pytest.mark.parametrize("is_there", [True, False])
def test_a_flag_that_the_jobs_own_code_has_is_not_taken_for_a_misspelt_one(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "openrlhf"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "version.txt").write_text("0.9.10\n")
    (package / "train.py").write_text(
        'parser.add_argument("--micro_train_batch_sizes")\n' if is_there else ""
    )
    Path("run.sh").write_text(f"{_OPENRLHF} --micro_train_batch_sizes 4\n")
    made = CliRunner().invoke(main, ["init", "run.sh"])
    assert ("unknown flag --micro_train_batch_sizes" in made.stderr) is not is_there, made.stderr
    assert (made.exit_code == 0) is is_there, made.stderr


@pytest.mark.parametrize(
    ("server", "training"),
    [
        ("trl vllm-serve --model m", "accelerate launch grpo.py --use_vllm true --num_generations 8"),
        ("swift rollout --model m", "swift rlhf --rlhf_type grpo --use_vllm true --num_generations 8"),
        ("", "accelerate launch grpo.py --use_vllm true --num_generations 8"),
        ("vllm serve m", "accelerate launch grpo.py --use_vllm true --num_generations 8"),
    ],
)
def test_the_server_of_a_training_is_a_part_of_the_job(server: str, training: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"{server} &\n{training} --output_dir out\n" if server else f"{training}\n")
    job = tmp_path / "job.yaml"
    arguments = ["init", str(script), "--gpus", "8xH100", "-o", str(job)]
    CliRunner().invoke(main, arguments, catch_exceptions=False)
    own = server.split() if server.startswith(("trl", "swift")) else None
    assert yaml.safe_load(job.read_text()).get("server") == own


@pytest.mark.parametrize(
    "text",
    [
        'if [ "$NODE_RANK" = "0" ]; then\n{train}\nfi\n',
        "RANK=$1\nif [[ $RANK == 0 ]]; then\n{train}\nfi\n",
        '[ "${{SLURM_NODEID}}" != 0 ] && exit 0\n{train}\n',
    ],
)
def test_what_the_first_node_starts_is_read_where_nothing_numbers_the_nodes(
    text: str, tmp_path: Path
) -> None:
    reading = read(tmp_path, text.format(train=_VERL))
    assert reading.invocations[-1].argv[:3] == ("python3", "-m", "verl.trainer.main_ppo")
    assert [note.message.partition(":")[0].partition(" ")[2] for note in reading.notes] == ["is empty"]


def test_an_empty_rank_is_no_other_node_and_no_missing_name(tmp_path: Path) -> None:
    for test in ('[ "$RANK" = "1" ]', '[ "$RANK" = "head" ]', '[ "$GROUP" = "0" ]'):
        assert read(tmp_path, f"if {test}; then\n{_VERL}\nfi\n").invocations == ()


def test_a_default_behind_a_test_for_an_empty_variable_is_the_value(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f'if [ -z "$MODEL" ]; then\n  MODEL=Qwen/Qwen3-4B\nfi\n{_VERL} actor_rollout_ref.model.path=$MODEL'
    )
    result = CliRunner().invoke(main, ["init", str(script), "-o", str(tmp_path / "job.yaml")])
    assert result.exit_code == 0
    settings = yaml.safe_load((tmp_path / "job.yaml").read_text())["settings"]
    assert settings["actor_rollout_ref.model.path"] == "Qwen/Qwen3-4B"


def test_what_prepares_data_or_serves_is_no_training(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "python scripts/prepare_grpo_data.py --out a\n"
        "python -m openrlhf.cli.serve_rm --reward_pretrain m &\n"
        "python scripts/train_mine.py --data a\n"
        "python eval_grpo.py --data a\n"
    )
    CliRunner().invoke(main, ["init", str(script), "-o", str(tmp_path / "job.yaml")])
    command = yaml.safe_load((tmp_path / "job.yaml").read_text())["command"]
    assert command == ["python", "scripts/train_mine.py", "--data", "a"]


def test_the_gpus_that_a_script_counts_are_those_of_the_call_or_of_slurm(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    counted = f"n=$(nvidia-smi -L 2>/dev/null | wc -l)\n{_VERL} trainer.n_gpus_per_node=$n\n"
    for header, words, expected in (
        ("", ["--gpus", "4xH100"], 4),
        ("#!/bin/bash\n#SBATCH --gres=gpu:2\n", [], 2),
        ("", [], "$(nvidia-smi -L 2>/dev/null | wc -l)"),
    ):
        script.write_text(header + counted)
        CliRunner().invoke(main, ["init", str(script), "-o", str(tmp_path / "job.yaml"), "--force", *words])
        settings = yaml.safe_load((tmp_path / "job.yaml").read_text())["settings"]
        assert settings["trainer.n_gpus_per_node"] == expected
