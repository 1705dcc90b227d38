"""The benchmark of `init` can fail: no setting is exempt, and a job's own code has the last word."""

from pathlib import Path

import msgspec
import pytest

from benchmarks import init_scripts, own_code
from tests.orchestrator.config.test_own_code import checkout


@pytest.mark.parametrize(
    "lost", ["trainer.logger", "trainer.max_actor_ckpt_to_keep", "data.train_batch_size"]
)
def test_every_lost_setting_is_wrong(lost: str) -> None:
    argv = ["python3", "-m", "verl.trainer.main_ppo", "actor_rollout_ref.rollout.n=8"]
    settings = {
        "trainer.logger": "[console]",
        "trainer.max_actor_ckpt_to_keep": "3",
        "data.train_batch_size": "64",
    }
    theirs = init_scripts._read([*argv, *(f"{name}={value}" for name, value in settings.items())], "verl")
    kept = {name: value for name, value in settings.items() if name != lost}
    job = {"command": argv[:3], "settings": {"actor_rollout_ref.rollout.n": 8, **kept}}

    given = init_scripts._of_job(job, "verl")

    assert [name for name in theirs if given.get(name) != theirs[name]] == [lost]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "True"),
        (None, "null"),
        ("1e-6", "1e-06"),
        (["console", "wandb"], "['console','wandb']"),
        (0.5, "0.50"),
    ],
)
def test_a_value_of_a_job_file_is_the_word_that_hydra_reads_alike(value: object, text: str) -> None:
    job = {"settings": {"actor_rollout_ref.x": value}}
    given = init_scripts._of_job(job, "verl")

    assert given == init_scripts._read([f"actor_rollout_ref.x={text}"], "verl")


def test_a_harm_a_refusal_and_a_wrong_value_are_not_accepted() -> None:
    right = init_scripts.Score(script="a/b/run.sh", exit=0, is_framework_right=True)

    assert right.is_accepted
    for wrong in (
        {"harms": ["memory_fraction"]},
        {"refusal": "no such key"},
        {"wrong": ["a.b"]},
        {"exit": 1},
    ):
        assert not msgspec.structs.replace(right, **wrong).is_accepted


def test_a_wrong_value_that_nobody_names_is_not_well_read() -> None:
    score = init_scripts.Score(
        script="a", exit=1, is_framework_right=True, wrong=["a.b", "a.c"], named=["a.b"]
    )

    assert not score.is_well_read
    assert msgspec.structs.replace(score, named=["a.b", "a.c"]).is_well_read


@pytest.mark.parametrize(("model", "is_public"), [("Qwen/Qwen2.5-7B", True), ("/models/mine", False)])
def test_a_shape_that_no_record_has_is_not_counted(model: str, is_public: bool, tmp_path: Path) -> None:
    repository, scratch = tmp_path / "repository", tmp_path / "scratch"
    repository.mkdir()
    scratch.mkdir()
    (repository / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm"
        f" actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.model.path={model}\n"
    )
    score = init_scripts.Score(script="run.sh")
    init_scripts._judge(score, init_scripts.Case(checkout="", path="run.sh"), repository, scratch)

    assert (score.has_shape, score.has_prediction) == (is_public, is_public)


def test_a_script_of_several_trainings_at_once_is_refused_with_reason(tmp_path: Path) -> None:
    repository, scratch = tmp_path / "repository", tmp_path / "scratch"
    repository.mkdir()
    scratch.mkdir()
    train = "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n"
    (repository / "run.sh").write_text(f"{train}=4 &\n{train}=8 &\nwait\n")
    score = init_scripts.Score(script="run.sh")
    init_scripts._judge(score, init_scripts.Case(checkout="", path="run.sh"), repository, scratch)

    assert score.exit == 1 and score.is_undecided
    assert score.is_to_fill_in and score.is_well_read and not score.is_accepted


@pytest.mark.parametrize(
    ("setting", "message", "changed"),
    [
        ("ppo_micro_batch_size=64", "ppo_micro_batch_size_per_gpu`: verl needs it", set()),
        ("use_dynamic_bsz=true", "", {"trainer.logger"}),  # adds a backend that the fork does not have
    ],
)
def test_a_fork_is_left_alone_unless_assumptions_count_as_known(
    setting: str, message: str, changed: set[str], tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    checkout(repository)
    (repository / "run.sh").write_text(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B trainer.save_freq=5"
        f" trainer.logger=[console] actor_rollout_ref.actor.{setting}\n"
    )

    def score(name: str) -> init_scripts.Score:
        (scratch := tmp_path / name).mkdir()
        result = init_scripts.Score(script=name)
        init_scripts._judge(result, init_scripts.Case(checkout="", path="run.sh"), repository, scratch)
        return result

    own = score("own")
    with init_scripts.nothing_assumed():
        known = score("known")

    assert (own.exit, known.exit) == (0, int(bool(message))) and message in known.output
    assert {*known.changed} & {"trainer.logger"} == changed and "trainer.logger" not in own.changed


def test_a_flag_that_the_checkout_does_not_define_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "slime"
    package.mkdir()
    (package / "arguments.py").write_text('parser.add_argument("--rollout-batch-size", type=int)\n')
    theirs = ["python3", "train.py", "--rollout-batch-size", "8", "--of-the-fork", "1"]

    assert own_code.refusal_of([*theirs, "--save", "/x"], theirs, "slime", tmp_path) == ""
    assert "--max-restarts" in (
        own_code.refusal_of([*theirs, "--max-restarts", "1"], theirs, "slime", tmp_path) or ""
    )
    assert own_code.refusal_of(theirs, theirs, "slime", tmp_path / "elsewhere") is None
