"""How attempts and trials of a verl job are started."""

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks.verl.adapter import FILES
from autotune.policies.values.job import Job, Recovery
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.provenance import OwnCode

from .verl_jobs import ACTOR, CLUSTER, GRPO, JOBS, ROLLOUT, VERL, profile, with_settings


def words(of: Job, *, attempt: int = 1, resume: bool = False, run: str = "7c1e") -> dict[str, str]:
    argv = VERL.command(of, profile(of).knobs, run=run, attempt=attempt, resume=resume).argv
    return dict(word.split("=", 1) for word in argv if "=" in word)


def test_an_attempt_is_verls_entry_point_with_overrides() -> None:
    of = JOBS["fsdp"]
    command = VERL.command(
        of, replace(profile(of).knobs, memory_fraction=0.4), run="r", attempt=1, resume=False
    )
    assert command.argv[:3] == ("{python}", "-m", "verl.trainer.main_ppo")
    assert f"{ROLLOUT}.gpu_memory_utilization=0.4" in command.argv
    assert command.env["RAY_DEDUP_LOGS"] == "0"
    assert command.ray_native


def test_checkpoints_are_the_runs_own_and_absolute() -> None:
    bare = Job(
        name="j",
        framework="verl",
        framework_version="0.9.1",
        workdir="/home/me",
        settings={f"{ROLLOUT}.name": "vllm"},
    )
    first = words(bare)
    assert first["trainer.default_local_dir"] == "/home/me/checkpoints/j-7c1e"
    assert first["trainer.resume_mode"] == "disable"
    assert first["trainer.save_freq"] == "10"
    assert first["trainer.max_actor_ckpt_to_keep"] == "2"
    assert words(bare, attempt=2, resume=True)["trainer.resume_mode"] == "auto"
    assert words(replace(bare, recovery=Recovery(save_every=3)))["trainer.save_freq"] == "3"
    named = with_settings(bare, {"trainer.default_local_dir": "ckpt", "trainer.save_freq": 5})
    assert words(named)["trainer.default_local_dir"] == "/home/me/ckpt/7c1e"
    assert words(named)["trainer.save_freq"] == "5"


def test_a_foreign_checkpoint_is_continued_only_where_the_job_says_so() -> None:
    named = with_settings(JOBS["fsdp"], {"trainer.default_local_dir": "/ck"})
    assert words(named, attempt=2, resume=True)["trainer.default_local_dir"] == "/ck/7c1e"
    reported = replace(named, resume=True)
    assert words(reported, resume=True)["trainer.default_local_dir"] == "/ck"
    assert words(reported, resume=True)["trainer.resume_mode"] == "auto"
    default = replace(JOBS["fsdp"], resume=True)
    assert (
        words(default, resume=True)["trainer.default_local_dir"] == "/home/me/checkpoints/verl_examples/gsm8k"
    )
    never = with_settings(JOBS["fsdp"], {"trainer.resume_mode": "disable"})
    assert words(never, attempt=2, resume=True)["trainer.resume_mode"] == "disable"


def test_loggers_go_on_where_they_stopped() -> None:
    of = with_settings(JOBS["fsdp"], {"trainer.logger": ["wandb", "tensorboard"]})
    first, second = words(of), words(of, attempt=2, resume=True)
    assert first["trainer.logger"] == "[wandb,tensorboard,console,file]"
    node = "++ray_kwargs.ray_init.runtime_env.env_vars"
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "TENSORBOARD_DIR"):
        assert first[f"{node}.{name}"] == second[f"{node}.{name}"]
    assert first[f"{node}.VERL_FILE_LOGGER_ROOT"] != second[f"{node}.VERL_FILE_LOGGER_ROOT"]
    own = replace(of, env={"WANDB_RUN_ID": "mine"})
    assert f"{node}.WANDB_RUN_ID" not in words(own)
    assert f"{node}.WANDB_RUN_ID" not in words(JOBS["fsdp"])


def test_waiting_for_dead_rollouts_is_silent() -> None:
    name = "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS"
    assert words(JOBS["fsdp"])[name] == "'86400'"  # a text: Ray refuses numbers among the variables
    assert words(with_settings(JOBS["fsdp"], {name: 5}))[name] == "'5'"


def test_a_command_of_ones_own_takes_the_place_of_the_entry_point() -> None:
    command = (
        "python3",
        "-m",
        "recipe.main",
        f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
        "trainer.save_freq=7",
    )
    of = replace(JOBS["fsdp"], command=command)
    assert profile(of).knobs.tokens_per_microbatch == 8192
    argv = VERL.command(of, profile(of).knobs, run="r", attempt=1, resume=False).argv
    assert argv[:3] == ("python3", "-m", "recipe.main")
    assert argv.count(f"{ACTOR}.ppo_max_token_len_per_gpu=8192") == 1
    assert "trainer.save_freq=10" in argv  # settings stand over the command


def test_a_snapshot_is_kept_beside_the_checkpoints() -> None:
    of = JOBS["fsdp"]
    argv = VERL.command(of, Knobs(memory_snapshot=True), run="r", attempt=3, resume=True).argv
    assert "global_profiler.tool=torch_memory" in argv
    assert "global_profiler.save_path=/home/me/checkpoints/story-r/memory/attempt-0003" in argv


def test_a_trial_touches_nothing_of_the_user() -> None:
    of = with_settings(JOBS["fsdp"], {"trainer.default_local_dir": "/ck", "trainer.logger": ["wandb"]})
    short = VERL.trial(of, folder="/runs/1/trials/2", steps=5, longest=True)
    settings = words(short)
    assert settings["trainer.default_local_dir"].startswith("/runs/1/trials/2/")
    assert settings["trainer.logger"] == "[console,file]"
    assert settings["trainer.total_training_steps"] == "5"
    assert settings["trainer.save_freq"] == settings["trainer.test_freq"] == "-1"
    assert settings["trainer.val_before_train"] == "False"
    assert settings[f"{ROLLOUT}.ignore_eos"] == "True"
    assert settings["trainer.project_name"] == "autotune"
    assert "/ck" not in " ".join(settings.values())
    assert VERL.can_force_longest(of)
    assert not VERL.can_force_longest(JOBS["sglang"])


def test_the_model_is_found_in_the_settings() -> None:
    assert VERL.model_path(JOBS["fsdp"]) == GRPO["actor_rollout_ref.model.path"]
    assert VERL.model_path(Job(name="j", framework="verl")) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer.logger": ["console", "wandb"]}, "trainer.logger=[console,wandb]"),
        ({"data.train_files": "~/a b.parquet"}, "data.train_files='~/a b.parquet'"),
        ({"trainer.experiment_name": "it's"}, "trainer.experiment_name='it\\'s'"),
        ({f"{ACTOR}.optim.lr": "1e-6"}, f"{ACTOR}.optim.lr=1e-6"),
        ({f"{ROLLOUT}.max_model_len": None}, f"{ROLLOUT}.max_model_len=null"),
        ({f"{ACTOR}.use_dynamic_bsz": True}, f"{ACTOR}.use_dynamic_bsz=True"),
        ({"+critic.ppo_infer_max_token_len_per_gpu": 1}, "++critic.ppo_infer_max_token_len_per_gpu=1"),
        ({"critic.ppo_infer_max_token_len_per_gpu": 1}, "++critic.ppo_infer_max_token_len_per_gpu=1"),
        ({"~trainer.v1": None}, "~trainer.v1"),
    ],
)
def test_words_are_hydra_overrides(settings, message) -> None:
    assert VERL.words(settings) == (message,)


def test_workers_have_the_interpreter_of_the_job() -> None:
    name = "ray_kwargs.ray_init.runtime_env.py_executable"
    assert name not in words(JOBS["fsdp"])
    own = replace(JOBS["fsdp"], python="/opt/verl/bin/python")
    assert words(own)[name] == "{python}"  # filled in where it starts
    settings = {**own.settings, name: "uv run --frozen"}
    assert words(replace(own, settings=settings))[name] == "'uv run --frozen'"


def test_a_verl_that_is_not_known_gets_what_every_verl_takes() -> None:
    written = {f"{ROLLOUT}.name": "vllm", "trainer.logger": ["console", "wandb"]}
    unknown = Job(name="j", framework="verl", workdir="/home/me", settings=written)
    first = words(unknown)
    assert first["trainer.logger"] == "[console,wandb]"  # verl before 0.6 has no logger of files
    own = {key for key in first if key.startswith(("trainer.", "++trainer."))} - {"trainer.logger"}
    assert own and all(key.startswith("++") for key in own)  # Hydra takes any key so
    assert not any("VERL_FILE_LOGGER_ROOT" in key for key in first)
    loggers = {"trainer.logger", "++trainer.logger"}
    assert loggers.isdisjoint(
        words(replace(unknown, settings={f"{ROLLOUT}.name": "vllm"}))
    )  # as its verl has it
    bare = words(replace(unknown, settings={**written, "trainer.logger": ["wandb"]}))
    assert bare["trainer.logger"] == "[wandb,console]"
    nearest = words(replace(unknown, framework_version="0.2.0.dev"))
    assert nearest["trainer.logger"] == "[console,wandb]" and "++trainer.max_actor_ckpt_to_keep" in nearest


def test_settings_that_the_jobs_own_verl_lacks_are_not_added() -> None:
    names = ("trainer", "resume_mode")
    own = OwnCode(folder="/home/me/verl", names=names, defaults={"trainer.save_freq": -1})
    fork = Job(
        name="j",
        framework="verl",
        framework_version="0.2.0.dev",
        workdir="/home/me",
        settings={f"{ROLLOUT}.name": "vllm", "trainer.logger": ["console"]},
        own_code=own,
    )
    first = words(fork)
    assert first["trainer.save_freq"] == "10"  # its configuration has the key
    assert "++trainer.default_local_dir" in first and "++trainer.resume_mode" in first
    assert not any("ckpt_to_keep" in key or "ray_kwargs" in key for key in first)
    newer = (*names, "max_actor_ckpt_to_keep", "ray_kwargs", "ray_init", "runtime_env", FILES)
    later = words(replace(fork, own_code=replace(own, names=newer)))
    assert later["++trainer.max_actor_ckpt_to_keep"] == "2"
    assert later["trainer.logger"] == "[console,file]"


def test_a_verl_without_resumption_is_not_told_to_resume() -> None:
    settings = {f"{ROLLOUT}.name": "vllm", "trainer.save_freq": 10}
    own = OwnCode(folder="/home/me/verl", names=("trainer",))
    first = Job(
        name="j", framework="verl", framework_version="0.1", workdir="/w", settings=settings, own_code=own
    )
    assert not any("resume_mode" in key for key in words(first))
    job_profile = VERL.profile(first, CLUSTER)
    assert not job_profile.resumable
    assert "the job's own verl resumes no checkpoint: every relaunch begins at step 0" in job_profile.warnings
    later = replace(first, own_code=replace(own, names=("resume_mode", "trainer")))
    assert words(later)["++trainer.resume_mode"] == "disable" and VERL.profile(later, CLUSTER).resumable


@pytest.mark.parametrize(
    ("version", "names", "last"),
    [
        ("0.2.0", None, 5),
        ("0.2.0.dev", ("trainer",), 5),
        ("0.2.0.dev", ("is_last_step", "trainer"), 6),  # its loop was taken from a later release
        ("0.3.0", ("trainer",), 6),
        (None, None, 6),
    ],
)
def test_the_loop_of_verl_before_0_3_ends_a_step_early(
    version: str | None, names: tuple[str, ...] | None, last: int
) -> None:
    code = None if names is None else OwnCode(folder="/home/me/verl", names=names)
    settings = {f"{ROLLOUT}.name": "vllm", "trainer.total_training_steps": 6}
    own = Job(name="j", framework="verl", framework_version=version, settings=settings, own_code=code)
    assert VERL.last_step(own) == VERL.training(own).steps == last
    assert VERL.last_step(VERL.trial(own, folder="/tmp/t", steps=3, longest=False)) == 3


def test_the_engine_of_verl_before_0_7_plans_for_the_jobs_lengths() -> None:
    def warned(version: str) -> bool:
        own = Job(name="j", framework="verl", framework_version=version, settings={f"{ROLLOUT}.name": "vllm"})
        return any("max_model_len is unset" in each for each in VERL.profile(own, CLUSTER).warnings)

    assert [warned(version) for version in ("0.2.0.dev", "0.6.1", "0.7.0", "0.9.1")] == [
        False,
        False,
        True,
        True,
    ]


def test_an_engine_of_verl_before_0_5_sleeps_whatever_the_job_says() -> None:
    def sleeps(version: str | None) -> bool:
        settings = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.free_cache_engine": False}
        of = Job(name="j", framework="verl", framework_version=version, settings=settings)
        return VERL.profile(of, CLUSTER).layout.engine_sleeps

    assert [sleeps(v) for v in ("0.2.0.dev", "0.4.1", "0.5.0", "0.9.1", None)] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("version", "words"),
    [("0.4.1", ""), ("0.9.1", "never sleeps: "), (None, "never sleeps, from verl 0.5 on: ")],
)
def test_that_the_engine_never_sleeps_is_said_of_the_releases_in_which_it_is_so(
    version: str | None, words: str
) -> None:
    settings = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.free_cache_engine": False}
    of = Job(name="j", framework="verl", framework_version=version, settings=settings)
    items = [warning for warning in VERL.profile(of, CLUSTER).warnings if "never sleeps" in warning]
    assert len(items) == bool(words) and all(words in warning for warning in items)
