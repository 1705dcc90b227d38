"""SkyRL both ways: a job becomes knobs, knobs become its own overrides, its lines become markers."""

import msgspec
import pytest

from autotune.launchers.frameworks.skyrl.adapter import SkyRL
from autotune.policies.remedies.legality import objections
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.failure import Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import (
    PhaseEnded,
    PhaseStarted,
    Resumed,
    Saved,
    StepDone,
    TrainingDone,
)
from autotune.policies.values.profile import Placement
from autotune.policies.values.provenance import OwnCode

from .skyrl_jobs import CLUSTER, JOBS, job

FRAMEWORK = SkyRL()
PACKAGE = "autotune.launchers.frameworks.skyrl"
TRAIN, SCORE = "trainer.micro_train_batch_size_per_gpu", "trainer.micro_forward_batch_size_per_gpu"
ENGINE = "generator.inference_engine"


def profile(of):
    return FRAMEWORK.profile(of, CLUSTER)


def changed(of, **changes):
    job_profile = profile(of)
    return FRAMEWORK.settings(of, msgspec.structs.replace(job_profile.knobs, **changes))


@pytest.mark.parametrize(
    ("each", "changes", "settings"),
    [
        (JOBS["sequences"], {"microbatch_size": 2}, {TRAIN: 2, SCORE: 4}),
        (JOBS["tokens"], {"tokens_per_microbatch": 4096}, {"trainer.max_tokens_per_microbatch": 4096}),
        (
            JOBS["tokens"],
            {"rollout_tensor_parallel": 2},
            {f"{ENGINE}.tensor_parallel_size": 2, f"{ENGINE}.num_engines": 4},
        ),
        (
            JOBS["tokens"],
            {"sequence_parallel": 2},
            {"trainer.policy.sequence_parallel_size": 2, "trainer.ref.sequence_parallel_size": 2},
        ),
        (JOBS["tokens"], {"cuda_graphs": "off"}, {f"{ENGINE}.enforce_eager": True}),
        (
            JOBS["tokens"],
            {"sync_buffer": 512 << 20},
            {f"{ENGINE}.weight_transfer_threshold_cuda_ipc_GB": 0.5},
        ),
        (
            JOBS["megatron"],
            {"optimizer_offload_fraction": 0.5},
            {
                f"trainer.policy.megatron_config.optimizer_config_kwargs.{name}": value
                for name, value in {
                    "optimizer_offload_fraction": 0.5,
                    "optimizer_cpu_offload": True,
                    "use_precision_aware_optimizer": True,
                }.items()
            },
        ),
    ],
)
def test_a_change_is_written_with_what_goes_with_it(each, changes, settings):
    assert changed(each, **changes) == settings


ENTROPY = {"trainer.algorithm.use_entropy_loss": True}
PASSES = {"tokens_per_microbatch", "microbatch_size"}


@pytest.mark.parametrize(
    ("name", "settings", "offered"),
    [
        ("sequences", {}, {"microbatch_size"}),
        ("tokens", {}, {"tokens_per_microbatch"}),
        ("sequences", ENTROPY, set()),
        ("tokens", ENTROPY, set()),
        ("megatron", {}, {"microbatch_size"}),  # passes of one size: the mean of their means is the mean
        ("megatron", ENTROPY, set()),
        ("megatron-tokens", {}, set()),  # SkyRL's default has the KL loss
        ("megatron-tokens", {"trainer.algorithm.use_kl_loss": False}, {"tokens_per_microbatch"}),
        ("megatron-tokens", {"trainer.algorithm.use_kl_loss": False, **ENTROPY}, set()),
    ],
)
def test_passes_whose_size_is_part_of_the_loss_keep_it(name, settings, offered):
    of = job({**JOBS[name].settings, **settings})
    assert PASSES & set(profile(of).supported) == offered
    for preset in FRAMEWORK.presets.values():  # nor does a start change what is not offered
        started = msgspec.structs.replace(of, settings={**of.settings, **preset})
        wanted = {knob: getattr(profile(started).knobs, knob) for knob in PASSES - offered}
        written = FRAMEWORK.settings(of, msgspec.structs.replace(profile(of).knobs, **wanted))
        assert not {TRAIN, SCORE, "trainer.max_tokens_per_microbatch"} & set(written)


def test_the_placement_follows_the_job():
    assert profile(JOBS["tokens"]).placement is Placement.COLOCATED
    assert profile(JOBS["apart"]).placement is Placement.SEPARATE
    ahead = job({**JOBS["apart"].settings, "trainer.fully_async.enabled": True})
    assert profile(ahead).placement is Placement.ASYNCHRONOUS


def words(of, **how):
    return FRAMEWORK.command(of, Knobs(), **{"run": "7c1e", "attempt": 1, "resume": False, **how}).argv


def test_an_attempt_has_checkpoints_of_its_own_and_goes_on_from_them_alone():
    first, second = words(job()), words(job(), attempt=2, resume=True)
    folder = "trainer.ckpt_path=/home/me/SkyRL/checkpoints/gsm8k-7c1e"
    assert folder in first and folder in second
    assert "trainer.resume_mode=none" in first and "trainer.resume_mode=latest" in second
    assert "trainer.ckpt_interval=10" in first
    assert first[:3] == ("{python}", "-m", "skyrl.train.entrypoints.main_base")


def test_a_job_that_goes_on_from_what_is_there_gets_that_folder_itself():
    named = words(job({"trainer.ckpt_path": "/data/ckpts"}, resume=True), resume=True)
    assert "trainer.ckpt_path=/data/ckpts" in named and "trainer.resume_mode=latest" in named
    assert "trainer.ckpt_path=/data/ckpts/7c1e" in words(job({"trainer.ckpt_path": "/data/ckpts"}))
    assert not any("ckpt_path" in word for word in words(job(resume=True), resume=True))


@pytest.mark.parametrize("written", [None, "none", "null"])
def test_a_job_that_starts_anew_goes_on_from_its_own_checkpoints_once_relaunched(written):
    of = job({"trainer.resume_mode": written})
    assert profile(of).resumable and FRAMEWORK.check(of) == ()
    assert "trainer.resume_mode=none" in words(of)
    again = words(of, attempt=2, resume=True)
    assert [word for word in again if "resume_mode" in word] == ["trainer.resume_mode=latest"]
    assert "trainer.ckpt_path=/home/me/SkyRL/checkpoints/gsm8k-7c1e" in again


def test_a_job_without_checkpoints_is_left_so_and_told():
    of = job({"trainer.ckpt_interval": -1})
    assert not profile(of).resumable and "begins at step 0" in profile(of).warnings[0]
    assert "trainer.resume_mode=none" in words(of, attempt=2, resume=True)


def test_the_job_s_own_program_and_overrides_in_it_are_kept():
    own = ("uv", "run", "-m", "skyrl.train.entrypoints.main_base", "trainer.seed=7")
    argv = words(job(command=own))
    assert argv[:4] == own[:4] and argv.count("trainer.seed=7") == 1


def test_what_workers_print_reaches_the_log():
    command = FRAMEWORK.command(job(), Knobs(), run="7c1e", attempt=1, resume=False)
    assert command.env["SKYRL_DUMP_INFRA_LOG_TO_STDOUT"] == "1"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"trainer.max_token_per_microbatch": 4096}, "did you mean trainer.max_tokens_per_microbatch?"),
        ({TRAIN: "many"}, "must be a whole number"),
        ({TRAIN: 7}, "does not divide"),
        ({f"{ENGINE}.num_engines": 4}, "the engines take 4 GPUs"),
        ({"trainer.strategy": "deepspeed"}, "there is no trainer deepspeed"),
        ({"trainer.resume_mode": "from_path"}, "its own run"),
        ({"trainer.ckpt_path": "~/ckpts"}, "does not expand"),
    ],
)
def test_what_skyrl_would_refuse_is_found_before_the_launch(settings, says):
    problems = FRAMEWORK.check(job(settings))
    assert any(says in f"{problem.message} {problem.hint}" for problem in problems), problems


CRITIC = {
    "trainer.critic.model.path": "Qwen/Qwen2.5-7B-Instruct",
    "trainer.critic_mini_batch_size": 24,  # 24 x 5 samples over 4 ranks: 30 sequences; 40 of the policy
    "trainer.placement.critic_num_gpus_per_node": 8,
    "trainer.critic.sequence_parallel_size": 2,
    TRAIN: 5,
}


def test_a_micro_batch_divides_the_critic_s_mini_batch_too():
    job_profile = profile(job(CRITIC))
    assert job_profile.supported["microbatch_size"].grid.values == (10, 5, 2, 1)
    eight = msgspec.structs.replace(job_profile.knobs, microbatch_size=8)
    assert objections(job_profile, job_profile.knobs, eight, started=False)
    assert FRAMEWORK.check(job(CRITIC)) == ()
    (problem,) = FRAMEWORK.check(job({**CRITIC, TRAIN: 8}))
    assert "8 does not divide 10" in problem.message and "critic" in problem.message
    assert FRAMEWORK.check(job({**CRITIC, "trainer.critic.model.path": None, TRAIN: 8})) == ()
    uneven = profile(job({**CRITIC, "trainer.critic_mini_batch_size": 13}))
    assert "microbatch_size" in uneven.unsupported


def test_a_program_with_settings_of_its_own_is_passed_on():
    of = job({"trainer.own_setting": 1}, command=("python", "my_entry.py"))
    assert FRAMEWORK.check(of) == ()
    assert any("trainer.own_setting" in warning for warning in profile(of).warnings)


def test_a_file_of_settings_is_refused():
    (problem,) = FRAMEWORK.check(job(config="skyrl.yaml"))
    assert problem.path == ("config",) and "no file" in problem.message


def test_a_trial_reports_and_saves_nothing():
    trial = FRAMEWORK.trial(job(), folder="/runs/1", steps=5, longest=True)
    assert FRAMEWORK.check(trial) == ()
    assert FRAMEWORK.last_step(trial) == 5 and not profile(trial).resumable
    assert trial.settings["generator.sampling_params.additional_kwargs.ignore_eos"] is True


@pytest.mark.parametrize(
    "older", [{"framework_version": "0.2.0"}, {"own_code": OwnCode(folder="/x", names=())}]
)
def test_what_an_older_trainer_does_not_have_is_left_out_of_a_trial(older):
    absent = {
        "trainer.max_training_steps",
        "trainer.print_example_interval",
        "trainer.num_logger_train_samples",
    }
    settings = job().settings
    assert absent <= FRAMEWORK.trial(job(), folder="/runs/1", steps=5, longest=True).settings.keys()
    trial = FRAMEWORK.trial(job(**older), folder="/runs/1", steps=5, longest=True)
    assert absent.isdisjoint(trial.settings) and trial.settings.keys() >= settings.keys()


def test_the_package_before_skyrl_is_read_and_imported_where_a_job_starts_it():
    before = job(command=("python", "-m", "skyrl_train.entrypoints.main_base"))
    assert FRAMEWORK.modules_of(before) == ("skyrl_train",) and FRAMEWORK.modules_of(job()) == ("skyrl",)
    assert FRAMEWORK.code_query(before).package == "skyrl_train"


BAR = "(skyrl_entrypoint pid=9) \rTraining Batches Processed:  50%|█████     | "
LOGGED = "\x1b[32m2026-09-03 10:03:02\x1b[0m | \x1b[1mINFO\x1b[0m | skyrl.train.utils.utils:__enter__:52 - "


@pytest.mark.parametrize(
    ("line", "marker"),
    [
        (f"{BAR}3/6 [00:41<00:41, 13.7s/it]{LOGGED}Started: 'step'", StepDone(step=3, of=6)),
        (f"{BAR}6/6 [00:41<00:00, 1.7it/s]{LOGGED}Reached max_training_steps=6", StepDone(step=6, of=6)),
        (f"{BAR}6/6 [00:41<00:00, 1.7it/s]{BAR}6/6 [00:41<00:00, 1.7it/s]", StepDone(step=6, of=6)),
        (f"{BAR}6/6 [00:41<00:00, 1.7it/s]", None),  # drawn once more as it closes
        (f"{BAR}2/6 [00:00<?, ?it/s]{LOGGED}Started: 'step'", None),  # where a resumed run begins
        (
            "Training Step Progress:  10%|#| 1/10 [00:41<00:41, 13.7s/it]" + LOGGED,
            StepDone(step=1, of=10),
        ),
        (f"{LOGGED}Started: 'generate'", PhaseStarted(phase=Phase.ROLLOUT, step=0)),
        (
            f"{LOGGED}Finished: 'train_critic_and_policy', time cost: 12.34s",
            PhaseEnded(phase=Phase.FORWARD, step=0, seconds=12.34),
        ),
        (f"{LOGGED}Started: 'convert_to_training_input'", None),
        (f"{LOGGED}Successfully saved checkpoint for global_step_4 to: /c/global_step_4", Saved(step=4)),
        (f"{LOGGED}Resuming from global_step: 4", Resumed(step=4)),
        (f"{LOGGED}Training done!", TrainingDone(step=0)),
        ("(vllm) Processed prompts:  50%|#####     | 3/6 [00:41<00:41, 13.7s/it] done", None),
    ],
)
def test_lines_are_read(line, marker):
    assert FRAMEWORK.marker(line) == marker


@pytest.mark.parametrize(
    ("settings", "leaves"),
    [
        ({}, True),
        ({"trainer.policy.optimizer_config.offload_after_step": False}, False),
        (
            {
                "trainer.strategy": "megatron",
                "trainer.policy.optimizer_config.offload_after_step": False,
            },
            True,
        ),
    ],
)
def test_only_fsdps_optimizer_can_stay_on_the_card_while_the_engines_generate(settings, leaves):
    job_profile = FRAMEWORK.profile(job(settings), CLUSTER)
    assert ("trainer" not in job_profile.resident[Phase.ROLLOUT.value]) is leaves
    assert job_profile.layout.weights_sleep


def test_megatron_computes_only_named_modules_of_experts_again():
    section = "trainer.policy.megatron_config.transformer_config_kwargs"
    own = {f"{section}.recompute_granularity": "selective"}
    for of, mode in (
        (JOBS["experts"], "full"),
        (job({**JOBS["experts"].settings, **own}, shape=JOBS["experts"].shape), "selective"),
    ):
        job_profile = profile(of)
        assert job_profile.knobs.recompute == mode
        assert job_profile.supported["recompute"].grid.values == ("off", "selective", "modules", "full")
        assert changed(of, recompute="off") == {"trainer.gradient_checkpointing": False}
    modules = {"recompute_granularity": "selective", "recompute_method": None, "recompute_num_layers": None}
    modules |= {"recompute_modules": ["moe_act", "layernorm"]}
    assert changed(JOBS["experts"], recompute="modules") == {
        f"{section}.{name}": value for name, value in modules.items()
    }


def test_an_older_megatron_computes_no_layer_of_state_spaces_again():
    shape = Model(
        layers=2, hidden=8, heads=1, kv_heads=1, head_dim=8, intermediate=8, vocab=8, linear="mamba2"
    )
    for version, kept in (("0.2.0", True), ("0.4.0", False)):
        of = msgspec.structs.replace(JOBS["megatron"], framework_version=version, shape=shape)
        job_profile = profile(of)
        assert job_profile.layout.keeps_hybrids is kept
        assert ("recompute" in job_profile.supported) is not kept
