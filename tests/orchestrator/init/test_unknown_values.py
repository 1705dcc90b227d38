"""A value is what bash gives, or it is marked as one that somebody has to write."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from autotune.orchestrator.cli import main
from autotune.orchestrator.config.loader import parse, unfilled
from autotune.orchestrator.config.overrides import with_edits
from autotune.orchestrator.config.yaml_edit import Edit
from autotune.orchestrator.errors import JobErrors
from autotune.orchestrator.init.bash.reader import Reading, read_script
from autotune.orchestrator.init.bash.state import to_edit
from autotune.orchestrator.init.formulas import formula_of, source_of
from autotune.orchestrator.placeholders import warnings

_VERL = (
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.use_dynamic_bsz=true"
    " actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct"
)


def read(folder: Path, text: str) -> Reading:
    script = folder / "run.sh"
    script.write_text(text)
    return read_script(script, text, cwd=str(folder), environment={}, now=0)


def last_words(folder: Path, text: str) -> list[str]:
    return [to_edit(word) for word in read(folder, text).invocations[-1].argv[1:]]


def init(folder: Path, text: str, *words: str, name: str = "run.sh") -> tuple[Result, dict[str, object]]:
    (folder / name).write_text(text)
    result = CliRunner().invoke(main, ["init", str(folder / name), "-o", str(folder / "job.yaml"), *words])
    return result, yaml.safe_load((folder / "job.yaml").read_text())


@pytest.mark.parametrize(
    "text",
    [
        "f() { if (($1>2)); then echo a; else echo b; fi; }\nx=$(f 3)$(f 1)",
        "f() { case $1 in a) echo A;; *) echo other;; esac; }\nx=$(f a)$(f b)",
        "x=$(for n in 1 2 3; do echo -n $n,; done)",
        "x=$(for ((i = 0; i < 3; i++)); do echo -n $i; done)",
        "f() { until [ ${n:-0} -ge 3 ]; do n=$(( ${n:-0} + 1 )); echo -n $n; done; }\nx=$(f)",
        "f() { [ $1 = y ] && echo yes || echo no; }\nx=$(f y)$(f z)",
        "f() { local v=$1; { echo -n $v; echo -n end; }; }\nx=$(f a)",
        "f() { for n in 5 10 20; do if [ $n -ge 10 ]; then echo $n; return; fi; done; }\nx=$(f)",
        "x=$(while read -r w; do printf '%s-' $w; done <<< $'a\\nb')",
        "x=$(echo 'a b' | while read p q; do echo $q$p; done)",
        "while IFS=, read -r p q; do x=$x$q; done < <(printf '1,2\\n3,4\\n')",
        "mapfile -t H < <(printf 'h1\\nh2\\n')\nx=${H[1]}${#H[@]}",
        "x=$(echo a/b-c | sed -e 's/.*\\///' -e 's/-c$//')",
        "x=$(echo a,b,c | cut -d, -f2-)$(printf 'a\\nb\\n' | tail -n 1)$(echo ' a  b ' | xargs)",
        "x=`expr 16 \\* 8`$(echo 55 | awk '{ printf \"%.2f\", $1 / 100 }')",
    ],
)
def test_a_text_that_a_script_prints_is_the_one_that_bash_prints(text: str, tmp_path: Path) -> None:
    ours = last_words(tmp_path, f'{text}\nrecord "$x"\n')
    bash = ["bash", "-c", f'record() {{ printf \'%s\' "$@"; }}\n{text}\nrecord "$x"']
    assert ours == [subprocess.run(bash, capture_output=True, text=True, check=True).stdout]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('A=1 B=1\nif [ "$(probe)" = x ]; then A=2; fi\nrecord $A $B', ["$(A)", "1"]),
        ('if [ "$(probe)" = x ]; then A=2; else A=2; fi\nrecord $A', ["2"]),
        ('case "$(probe)" in a*) A=1 ;; b) A=2 ;; *) A=3 ;; esac\nrecord $A', ["$(A)"]),
        ('case "$(probe)" in a) A=1 B=1 ;; *) A=1 B=2 ;; esac\nrecord $A$B', ["1$(B)"]),
        ('A=1\n[ "$(probe)" = x ] && A=2\nrecord $A', ["$(A)"]),
        ('[ "$(probe)" = x ] && A=2 || A=3\nrecord $A', ["$(A)"]),
        ('A=1\n[ "$(probe)" = x ] || A=2\nrecord $A', ["$(A)"]),
        ("A=4\nif probe; then A=8; fi\nrecord $((A * 2))", ["$((A * 2))"]),
        ('X=(--a 1)\nif probe; then X+=(--b 2); fi\nrecord "${X[@]}"', ["--a", "1", "$(X[@])"]),
        ('X=(--a 1)\nif probe; then X=(--a 2); fi\nrecord "${X[@]}"', ["--a", "$(X)"]),
        ("A=1\nif probe; then unused=1; fi\nrecord $A", ["1"]),
        ("A=1 B=1\nwhile read -r x; do A=2; done < f\nrecord $A $B", ["$(A)", "1"]),
        ("A=1\nfor ((i = 0; i < $(probe); i++)); do A=2; done\nrecord $A", ["$(A)"]),
        (
            "while ((SECONDS < 9)); do if probe; then A=1; break; fi; done\n[ $A = 1 ] || exit\nrecord b",
            ["b"],
        ),
        ("{ probe && record a; } > log", ["a"]),
    ],
)
def test_branches_that_nobody_can_choose_leave_unknown_what_they_set_differently(
    text: str, words: list[str], tmp_path: Path
) -> None:
    assert last_words(tmp_path, text + "\n") == words


def test_what_an_unknown_value_depends_on_has_its_line_and_its_choices(tmp_path: Path) -> None:
    script = f'A=2 B=1\nif [ "$(probe)" = x ]; then A=8; B=2; fi\n{_VERL} data.train_batch_size=$A\n'
    result, job = init(tmp_path, script)
    assert result.exit_code == 1
    assert job["settings"]["data.train_batch_size"] == "$(A)"  # type: ignore[index]
    assert (
        "run.sh:2: A is '2' or '8', as `[ \"$(probe)\" = x ]` turns out where the job runs" in result.stderr
    )
    assert "B is" not in result.stderr
    launched = CliRunner().invoke(main, ["launch", "-n", str(tmp_path / "job.yaml")])
    line = next(
        n for n, each in enumerate((tmp_path / "job.yaml").read_text().splitlines(), 1) if "$(A)" in each
    )
    assert launched.exit_code == 2 and f"job.yaml:{line}:" in launched.stderr + launched.stdout
    assert f"# Edit before a launch: line {line}." in (tmp_path / "job.yaml").read_text()


def test_a_condition_that_decides_no_setting_is_no_error(tmp_path: Path) -> None:
    script = f"if curl -s http://h; then NOTIFY=1; fi\n{_VERL} data.train_batch_size=64\n"
    assert init(tmp_path, script)[0].exit_code == 0


def test_a_setting_of_an_empty_variable_needs_an_edit_and_one_that_may_be_empty_does_not(
    tmp_path: Path,
) -> None:
    script = f"{_VERL} trainer.experiment_name=$EXPERIMENT trainer.project_name=${{PROJECT:-}} data.x=''\n"
    result, job = init(tmp_path, script)
    settings = job["settings"]
    assert isinstance(settings, dict) and result.exit_code == 1
    assert (settings["trainer.experiment_name"], settings["trainer.project_name"]) == ("$(EXPERIMENT)", "")
    assert "run.sh:1: `trainer.experiment_name` needs a value: $EXPERIMENT has none" in result.stderr


def test_a_hole_in_a_value_is_a_place_to_be_filled_in(tmp_path: Path) -> None:
    script = f'{_VERL} data.url="http://${{HOST}}:$PORT/reward" data.x=a$HOME_OF_DATA data.y=$A:b\n'
    result, job = init(tmp_path, f"A=1\n{script}")
    settings = job["settings"]
    assert isinstance(settings, dict) and result.exit_code == 1
    assert settings["data.url"] == "http://$(HOST):$(PORT)/reward"
    assert (settings["data.x"], settings["data.y"]) == ("a$(HOME_OF_DATA)", "1:b")


_SLIME = "--hf-checkpoint m --rollout-batch-size 32 --actor-num-gpus-per-node 4 --colocate --num-rollout 9"


def test_an_array_of_a_file_that_is_not_here_needs_an_edit(tmp_path: Path) -> None:
    script = f'source models/big.sh\npython3 train.py {_SLIME} "${{MODEL_ARGS[@]}}" --lr 1e-6\n'
    result, job = init(tmp_path, script)
    settings = job["settings"]
    assert isinstance(settings, dict) and result.exit_code == 1
    assert job["command"] == ["python3", "train.py", "$(MODEL_ARGS[@])"]
    assert settings["num-rollout"] == 9 and settings["lr"] == "1e-6"


def test_a_file_above_the_script_is_found(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/big.sh").write_text("MODEL_ARGS=(--num-layers 3)\n")
    folder = tmp_path / "scripts/run"
    folder.mkdir(parents=True)
    words = read(folder, 'source models/big.sh\nrecord "${MODEL_ARGS[@]}"\n').invocations[-1].argv
    assert words == ("record", "--num-layers", "3")


@pytest.mark.parametrize("file", ["~/.bashrc", "/opt/conda/bin/activate", "venv/bin/activate"])
def test_a_file_of_a_machine_sets_no_array(file: str, tmp_path: Path) -> None:
    assert last_words(tmp_path, f'source {file}\nrecord a "${{MORE[@]}}"\n') == ["a"]


def test_places_to_be_filled_in_have_their_lines_and_lose_no_setting(tmp_path: Path) -> None:
    script = (
        "M=/path/to/your/model\nswift rlhf --rlhf_type grpo --model $M \\\n"
        "  --dataset <YOUR_DATA> --val_dataset <VAL DATA> \\\n"
        "  --num_generations 8 --report_to none \\\n"
    )
    result, job = init(tmp_path, script)
    settings = job["settings"]
    assert isinstance(settings, dict)
    assert result.exit_code == 1 and settings["num_generations"] == 8 and settings["report_to"] == "none"
    assert "run.sh:3: `<YOUR_DATA>` is a placeholder" in result.stderr
    assert "run.sh:1: `/path/to/your/model` is a placeholder" in result.stderr
    assert "syntax error" not in result.stderr


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("$(nvidia-smi -L | wc -l)", "known only where a shell runs it"),
        ("`hostname`", "known only where a shell runs it"),
        ("/runs/`date +%F`/x", "known only where a shell runs it"),
        ("Use the `search` tool first", ""),
        ("<DATA_PATH>", "placeholder"),
        ("http://<node1_ip>:<PORT>/v1", "placeholder"),
        ("<script> of a report", ""),
        ("/path/to/data", "placeholder"),
        ("path/to/data", "placeholder"),
        ("your_model", "placeholder"),
        ("/YOUR_MODELPATH", "placeholder"),
        ("/your/save/path", "placeholder"),
        ("--config-path=your-code-dir/config", "placeholder"),
        ("['Your Test Dataset']", "placeholder"),
        ("xxx", "placeholder"),
        ("TO_BE_FILLED/Qwen2.5-7B", "placeholder"),
        ("/data/refilled/x", ""),
        ("${oc.env:HOME}/x", ""),
        ("</search>", ""),
        ("<|im_end|>", ""),
        ("<image>", ""),
        ("/data/yourself/x", ""),
        ("solve $x$", ""),
        ("exxxon", ""),
        ("/mypath/to", ""),
        (None, ""),
        (3, ""),
    ],
)
def test_a_value_that_nobody_filled_in_is_an_error_of_the_job_at_its_line(value: object, reason: str) -> None:
    job = {"name": "a", "framework": "command", "command": ["x"], "settings": {"k": value}}
    text = yaml.safe_dump(job, sort_keys=False)
    result = unfilled(text)
    assert [reason in each.message for each in result] == [True] * bool(reason)
    if reason:
        with pytest.raises(JobErrors) as error:
            parse(text)
        assert [each.line for each in error.value.complaints if reason in each.message][-1:] == [
            len(text.splitlines())
        ]


@pytest.mark.parametrize(
    "line",
    [
        "  - <answer file>  # autotune: literal",
        "  - '$(x) is an expression'  # any reason; # autotune: literal",
        "  - 'Your Test Dataset'  #autotune:literal",
        "  - |  # autotune: literal\n    Write <file name>\n    and stop.",
    ],
)
def test_a_value_that_is_meant_is_marked_at_its_line(line: str, tmp_path: Path) -> None:
    head = f"name: a\nframework: command\nworkdir: {tmp_path}\ncommand:\n  - x\n"
    plain = line.split("#", 1)[0] + line.rpartition("literal")[2]
    assert [each.line for each in unfilled(f"{head}{plain}\n")] == [6]
    assert "`# autotune: literal`" in unfilled(f"{head}{plain}\n")[0].hint
    text = f"{head}{line}\n  - <DATA_PATH>\n"
    assert [each.message.split("`")[1] for each in unfilled(text)] == ["command.2"]
    job = parse(f"{head}{line}\n")
    assert warnings(job) == () and warnings(with_edits(job, [Edit(("recovery", "relaunches"), 3, "x")])) == ()


def test_a_mark_within_a_value_or_at_another_line_marks_nothing() -> None:
    head = "name: a\nframework: verl\nsettings:\n"
    assert unfilled(f"{head}  k: '<DATA_PATH> # autotune: literal'\n")
    assert unfilled(f"{head}  # autotune: literal\n  k: <DATA_PATH>\n")
    assert unfilled(f"{head}  k: <DATA_PATH>  # not autotune: literally\n")


@pytest.mark.parametrize(
    ("name", "value", "is_open"),
    [
        ("DATA_DIR", "/path/to/data", True),
        ("DATA_DIR", "TO_BE_FILLED", True),
        ("OPENAI_API_KEY", "your-key", False),
        ("LABEL", "xxx", False),
    ],
)
def test_a_variable_may_have_a_dummy_for_a_key(name: str, value: str, is_open: bool) -> None:
    job = {"name": "a", "framework": "command", "command": ["x"], "env": {name: value}}
    assert bool(unfilled(yaml.safe_dump(job))) == is_open


def test_the_text_of_a_shell_may_call_programs_and_a_path_of_this_machine_is_no_placeholder(
    tmp_path: Path,
) -> None:
    (tmp_path / "path/to/data").mkdir(parents=True)
    job = {"name": "a", "framework": "command", "command": ["bash", "-c", "x $(date)"]}
    assert not unfilled(yaml.safe_dump({**job, "settings": {"k": str(tmp_path / "path/to/data")}}))
    assert unfilled(yaml.safe_dump({**job, "command": ["x", "$(date)"]}))


@pytest.mark.parametrize(
    ("script", "source", "formula"),
    [
        ("x k=$(( (P + R) * 2 ))", "$(( (P + R) * 2 ))", "$(( (P + R) * 2 ))"),
        ("N=$((A * 2))\nx k=$N \\", "$N", "$((A * 2))"),
        ('N="${A}-${B}"\nx --k "$N"', '"$N"', "${A}-${B}"),
        ("N=4\nx k=$N", "$N", ""),
        ("N=$((A))\nN=$((B))\nx k=$N", "$N", ""),
        ("# x k=$((A))\nx k=3", "3", ""),
        ("x other.k=1", "", ""),
    ],
)
def test_the_formula_behind_a_setting_is_found(script: str, source: str, formula: str) -> None:
    assert source_of("k", script) == source
    assert formula_of(source, script) == formula


def test_a_job_file_has_blocks_and_formulas(tmp_path: Path) -> None:
    script = (
        f"P=512 R=1024\nN=$(( (P + R) * 2 ))\n{_VERL} trainer.project_name=p"
        " data.train_files=/path/to/a.parquet"
        " actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$N\n"
    )
    init(tmp_path, script)
    lines = [line.strip() for line in (tmp_path / "job.yaml").read_text().splitlines()]
    blocks = [lines.index(f"# {title}") for title in ("needs an edit", "decides memory", "the rest")]
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    assert blocks[0] < lines.index("data.train_files: /path/to/a.parquet  # edit") < blocks[1]
    assert blocks[1] < lines.index(f"{key}: 3072  # was: $(( (P + R) * 2 ))") < blocks[2]
    assert blocks[2] < lines.index("trainer.project_name: p")


def test_a_value_that_follows_an_option_stays_with_it(tmp_path: Path) -> None:
    line = "python3 -m own.train -S trainer.n=1 -S actor_rollout_ref.rollout.n=8 --set a.b=2"
    result, job = init(tmp_path, line + "\n")
    assert (result.exit_code, job["framework"]) == (0, "command")
    assert job["command"] == line.split()


def test_a_value_that_follows_an_option_of_a_known_program_stays_with_it_too(tmp_path: Path) -> None:
    job = init(tmp_path, f"{_VERL} --own algorithm.x=1 data.train_batch_size=64\n")[1]
    assert job["command"][3:] == ["--own", "algorithm.x=1"]  # type: ignore[index]
    assert "algorithm.x" not in job["settings"]  # type: ignore[operator]


def test_switches_of_hydra_take_no_setting_away(tmp_path: Path) -> None:
    job = init(tmp_path, f"{_VERL} --multirun data.train_batch_size=64\n")[1]
    assert job["settings"]["data.train_batch_size"] == 64  # type: ignore[index]


def test_uv_in_front_of_a_submission_is_a_wrapper(tmp_path: Path) -> None:
    job = init(
        tmp_path, f"uv run --frozen ray job submit --address=http://h -- {_VERL} data.train_batch_size=8\n"
    )[1]
    assert job["command"] == ["python3", "-m", "verl.trainer.main_ppo"]


@pytest.mark.parametrize("is_here", [False, True])
def test_a_program_that_a_batch_script_takes_from_a_variable_is_followed(
    is_here: bool, tmp_path: Path
) -> None:
    if is_here:
        (tmp_path / "ray.sub").write_text('#!/bin/bash\nsrun ray start --head\necho "$COMMAND" > c\n')
    script = f'export COMMAND="cd /opt/x && A=1 {_VERL} data.train_batch_size=8"\n'
    script += "sbatch --nodes=2 --gres=gpu:8 ray.sub\n"
    result, job = init(tmp_path, script)
    assert job["framework"] == "verl" and job["workdir"] == "/opt/x"
    assert job["env"] == {"A": "1"}
    assert "left out: `sbatch --nodes=2 --gres=gpu:8 ray.sub`" in result.stderr


@pytest.mark.parametrize(
    ("inner", "framework"),
    [
        (_VERL, "verl"),
        ("accelerate launch grpo.py --model_name_or_path m --learning_rate 1e-6 --output_dir o", "command"),
        ('bash -c "cd /x && python3 -m verl.trainer.main_ppo data.train_batch_size=8"', "command"),
        ("bash run_grpo.sh", "command"),
    ],
)
def test_a_training_in_a_container_stays_there(inner: str, framework: str, tmp_path: Path) -> None:
    result, job = init(tmp_path, f"docker run --rm -v /data:/data image:1 {inner}\n")
    assert job["framework"] == framework and job["command"][:3] == ["docker", "run", "--rm"]  # type: ignore[index]
    assert ("kept whole" in result.stderr) == (framework == "command")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ("trainer.experiment_name=azr/7b-coder", "7b-coder"),
        ("trainer.experiment_name=$NAME", "train"),
        ("trainer.experiment_name=your_experiment", "train"),
        ("trainer.project_name=p", "train"),
    ],
)
def test_a_job_has_the_name_of_its_run_before_that_of_its_script(
    settings: str, name: str, tmp_path: Path
) -> None:
    assert init(tmp_path, f"{_VERL} {settings}\n", name="train.sh")[1]["name"] == name


def test_plan_and_the_first_command_say_what_a_launch_will_refuse(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    job = {"name": "a", "framework": "command", "command": ["python3", "train.py"]}
    file.write_text(yaml.safe_dump({**job, "env": {"DATA": "/path/to/data"}}))
    for words in (["plan"], ["launch", "-n"]):
        result = CliRunner().invoke(main, [*words, str(file)])
        assert "`env.DATA`: " in result.output and "`autotune launch` refuses it" in result.output
        assert "Run it: autotune launch" not in result.output


@pytest.mark.parametrize("version", ["0.2.0.dev", "0.2.0.post2", "0.9.1"])
def test_a_path_is_no_switch_in_a_release_whose_default_is_false(version: str, tmp_path: Path) -> None:
    init(tmp_path, f"{_VERL} trainer.resume_from_path=/data/global_step_4\n")
    text = (tmp_path / "job.yaml").read_text() + f'framework_version: "{version}"\n'
    assert parse(text, file=str(tmp_path / "job.yaml")).settings["trainer.resume_from_path"]


@pytest.mark.parametrize(
    "around",
    [
        'ssh node "{}"',
        "kubectl exec trainer-0 -- bash -c '{}'",
        'tmux new -d "{}"',
        'screen -dmS run bash -c "{}"',
        'su me -c "{}"',
    ],
)
def test_a_training_in_the_text_of_another_shell_gets_no_setting_behind_it(
    around: str, tmp_path: Path
) -> None:
    result, job = init(tmp_path, around.format(_VERL) + "\n")
    assert job["framework"] == "command" and "settings" not in job
    assert "kept whole" in result.stderr


@pytest.mark.parametrize("value", ["$((SLURM_GPUS_ON_NODE * 2))", "$((2 * $WORLD_SIZE))"])
def test_a_number_made_of_what_a_scheduler_sets_needs_an_edit(value: str, tmp_path: Path) -> None:
    result, job = init(tmp_path, f"{_VERL} actor_rollout_ref.rollout.n={value}\n")
    assert result.exit_code == 1
    assert job["settings"]["actor_rollout_ref.rollout.n"] not in (0, "0")  # type: ignore[index]


def test_conda_run_and_exec_start_the_training_behind_their_options(tmp_path: Path) -> None:
    for around in ("conda run -n verl --no-capture-output", "exec -a trainer", "coproc"):
        _, job = init(tmp_path, f"{around} {_VERL}\n")
        assert job["framework"] == "verl" and job["command"] == ["python3", "-m", "verl.trainer.main_ppo"], (
            around
        )
        (tmp_path / "job.yaml").unlink()
