"""NeMo-RL both ways: a job becomes knobs, knobs become its own overrides, its lines become markers."""

import msgspec
import pytest
import yaml

from autotune.launchers.frameworks.dialects.interpolation import resolved
from autotune.launchers.frameworks.nemo_rl.adapter import NemoRL
from autotune.launchers.frameworks.nemo_rl.config import Config
from autotune.orchestrator.config.loader import JobErrors, load
from autotune.policies.remedies.legality import objections
from autotune.policies.values.failure import Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import PhaseStarted, Resumed, Saved, StepDone, TrainingDone
from autotune.policies.values.profile import Placement

from .nemo_rl_jobs import CLUSTER, JOBS, job

FRAMEWORK = NemoRL()
PACKAGE = "autotune.launchers.frameworks.nemo_rl"
PACKING, GENERATION = "policy.sequence_packing", "policy.generation"


def profile(of):
    return FRAMEWORK.profile(of, CLUSTER)


def changed(of, **changes):
    return FRAMEWORK.settings(of, msgspec.structs.replace(profile(of).knobs, **changes))


def words(of, knobs=None, **how):
    how = {"run": "7c1e", "attempt": 1, "resume": False, **how}
    return FRAMEWORK.command(of, knobs or Knobs(), **how).argv


@pytest.mark.parametrize(
    ("name", "changes", "settings"),
    [
        ("packed", {"tokens_per_microbatch": 8192}, {f"{PACKING}.train_mb_tokens": 8192}),
        ("packed", {"logprob_tokens": 8192}, {f"{PACKING}.logprob_mb_tokens": 8192}),
        ("dynamic", {"logprob_tokens": 8192}, {"policy.dynamic_batching.logprob_mb_tokens": 8192}),
        (
            "sequences",
            {"microbatch_size": 2},
            {"policy.train_micro_batch_size": 2, "policy.logprob_batch_size": 4},
        ),
        ("packed", {"cuda_graphs": "off"}, {f"{GENERATION}.vllm_cfg.enforce_eager": True}),
        ("packed", {"sync_buffer": 2 << 30}, {"policy.refit_buffer_size_gb": 2}),
        ("packed", {"logprob_chunk": 1024}, {"policy.logprob_chunk_size": 1024}),
        (
            "packed",
            {"allocator": "expandable"},
            {"policy.dtensor_cfg.env_vars.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        ),
        (
            "megatron",
            {"optimizer_offload_fraction": 1.0},
            {
                "policy.megatron_cfg.optimizer.optimizer_offload_fraction": 1.0,
                "policy.megatron_cfg.optimizer.optimizer_cpu_offload": True,
            },
        ),
        ("apart", {"optimizer_offload": True}, {"policy.offload_optimizer_for_logprob": True}),
    ],
)
def test_a_change_is_written_with_what_goes_with_it(name, changes, settings):
    assert changed(JOBS[name], **changes) == settings


def test_an_override_adds_the_keys_that_no_file_has_and_no_others():
    of = JOBS["limited"]
    knobs = msgspec.structs.replace(profile(of).knobs, concurrency=64, cuda_graphs="off", sync_buffer=2 << 30)
    argv = words(of, knobs)
    assert "++policy.generation.vllm_kwargs.max_num_seqs=64" in argv
    assert not any("max_num_seqs=256" in word for word in argv)
    assert "policy.generation.vllm_cfg.enforce_eager=True" in argv
    assert "++policy.refit_buffer_size_gb=2" in argv
    assert FRAMEWORK.words({"policy.refit_buffer_size_gb": 2, f"{PACKING}.train_mb_tokens": 4096}) == (
        "++policy.refit_buffer_size_gb=2",
        f"{PACKING}.train_mb_tokens=4096",
    )


EXPERTS = {"policy.megatron_cfg.moe_router_load_balancing_type": "aux_loss"}
PASSES = {"tokens_per_microbatch", "microbatch_size"}


@pytest.mark.parametrize(
    ("name", "settings", "offered"),
    [
        ("packed", {}, {"tokens_per_microbatch"}),
        ("packed", EXPERTS, {"tokens_per_microbatch"}),  # it is Megatron's
        ("sequences", {}, {"microbatch_size"}),
        ("megatron", {}, {"tokens_per_microbatch"}),
        ("megatron", EXPERTS, set()),
        ("megatron-sequences", EXPERTS, set()),
    ],
)
def test_passes_whose_size_is_part_of_the_loss_keep_it(name, settings, offered):
    of = job({**JOBS[name].settings, **settings})
    assert PASSES & set(profile(of).supported) == offered


def test_a_pass_holds_the_longest_sequence():
    job_profile = profile(JOBS["packed"])
    shorter = msgspec.structs.replace(job_profile.knobs, tokens_per_microbatch=4032)
    assert objections(job_profile, job_profile.knobs, shorter, started=False)
    short = job({f"{PACKING}.train_mb_tokens": 4095})  # its sequences may be shorter than allowed
    assert FRAMEWORK.check(short) == () and "cannot hold the longest sequence" in profile(short).warnings[0]


def test_the_placement_follows_the_job():
    assert profile(JOBS["packed"]).placement is Placement.COLOCATED
    apart = profile(JOBS["apart"])
    assert apart.placement is Placement.SEPARATE
    assert (apart.layout.ranks, apart.layout.engine_ranks) == (4, 4)
    ahead = job({**JOBS["apart"].settings, "grpo.async_grpo.enabled": True})
    assert profile(ahead).placement is Placement.ASYNCHRONOUS


def test_an_attempt_goes_on_from_the_folder_of_its_run_alone():
    first, second = words(job()), words(job(), attempt=2, resume=True)
    folder = "checkpointing.checkpoint_dir=/opt/nemo-rl/checkpoints/math-7c1e"
    assert folder in first and folder in second
    assert first[:3] == ("uv", "run", "examples/run_grpo.py")
    named = {"checkpointing.checkpoint_dir": "/data/grpo"}
    assert "checkpointing.checkpoint_dir=/data/grpo/7c1e" in words(job(named))
    assert "checkpointing.checkpoint_dir=/data/grpo" in words(job(named, resume=True), resume=True)


def test_a_job_without_checkpoints_is_told_so():
    job_profile = profile(job({"checkpointing.enabled": False}))
    assert not job_profile.resumable and "begins at step 0" in job_profile.warnings[0]


FILES = {
    "base.yaml": {
        "policy": {
            "max_total_sequence_length": 512,
            "train_micro_batch_size": 4,
            "dtensor_cfg": {"enabled": True, "tensor_parallel_size": 1},
            "sequence_packing": {
                "enabled": True,
                "train_mb_tokens": "${mul:${..max_total_sequence_length}, ${policy.train_micro_batch_size}}",
            },
        },
        "env": {"math": {"num_workers": 8}},
    },
    "recipes/mine.yaml": {
        "defaults": "../base.yaml",
        "policy": {"max_total_sequence_length": 4096},
        "env": {"_override_": True, "code": {"num_workers": 2}},
    },
}


@pytest.fixture
def checkout(tmp_path):
    for name, content in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(yaml.safe_dump(content))

    def written(**fields):
        text = {"name": "q", "framework": "nemo-rl", "config": "recipes/mine.yaml", **fields}
        text["workdir"] = str(tmp_path)
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(text))
        return tmp_path / "job.yaml"

    return written


def test_a_file_is_read_with_those_that_it_extends(checkout):
    of = load(checkout())
    assert of.document["env"] == {"code": {"num_workers": 2}}
    assert profile(of).knobs.tokens_per_microbatch == 4 * 4096
    argv = words(of)
    assert argv[:5] == ("uv", "run", "examples/run_grpo.py", "--config", "recipes/mine.yaml")
    eager = {f"{GENERATION}.vllm_cfg.enforce_eager": True}
    argv = words(msgspec.structs.replace(of, settings=eager))
    assert f"++{GENERATION}.vllm_cfg.enforce_eager=True" in argv  # this file has no such key


@pytest.mark.parametrize(
    ("extends", "says"),
    [
        ("nowhere.yaml", "no such file"),
        ("mine.yaml", "which extends it in turn"),
        (["../base.yaml", 7], "no such"),
    ],
)
def test_a_file_that_cannot_be_extended_is_one_error(checkout, extends, says):
    path = checkout()
    mine = path.parent / "recipes" / "mine.yaml"
    mine.write_text(yaml.safe_dump({**FILES["recipes/mine.yaml"], "defaults": extends}))
    with pytest.raises(JobErrors) as error:
        load(path)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("value", "comes_to"),
    [
        ("${mul:${a.b}, 3}", 12),
        ("${add:${.b},${..c}}", 11),
        ("${div:${a.b}, 0}", "${div:4, 0}"),
        ("${max:1.5, 2}", 2),
        ("${mul:${mul:2, ${a.b}}, ${c}}", 56),
        ("x/${a.b}/y", "x/4/y"),
        ("${a.loop}", "${a.loop}"),
        ("${oc.env:HOME}/runs", "${oc.env:HOME}/runs"),
        ("${", "${"),
    ],
)
def test_references_and_sums_are_followed(value, comes_to):
    values = {"a.b": 4, "c": 7, "a.loop": "${a.loop}", "a.x": value}
    assert resolved("a.x", values.get) == comes_to


def test_references_that_multiply_end_soon():
    values = {f"a{n}": f"${{a{n + 1}}}${{a{n + 1}}}" for n in range(60)} | {"a60": ""}
    assert "${" in resolved("a0", values.get)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"policy.train_micro_batchsize": 4}, "did you mean policy.train_micro_batch_size?"),
        ({f"{PACKING}.enabled": "perhaps"}, "must be true or false"),
        ({"policy.logprob_batch_size": "16k"}, "policy.logprob_batch_size must be a number, not '16k'"),
        ({f"{PACKING}.enabled": False, "policy.train_micro_batch_size": 7}, "does not divide"),
        ({"policy.megatron_cfg.enabled": True}, "both are enabled"),
        ({"policy.dtensor_cfg.enabled": False}, "none is enabled"),
        ({"policy.dynamic_batching.enabled": True}, "excludes sequence packing"),
        ({"policy.dtensor_cfg.tensor_parallel_size": 3}, "8 GPUs cannot be split by 3"),
        ({f"{GENERATION}.vllm_cfg.tensor_parallel_size": 3}, "8 GPUs of engines cannot be split by 3"),
    ],
)
def test_what_nemo_rl_would_refuse_is_found_before_the_launch(settings, says):
    problems = FRAMEWORK.check(job(settings))
    assert any(says in f"{problem.message} {problem.hint}" for problem in problems), problems


_APART = {
    "cluster.num_nodes": 21,
    f"{GENERATION}.colocated.enabled": False,
    f"{GENERATION}.colocated.resources.num_nodes": 8,
    f"{GENERATION}.colocated.resources.gpus_per_node": 8,
    "policy.dtensor_cfg.tensor_parallel_size": 4,
    "policy.dtensor_cfg.context_parallel_size": 8,
}
_GYM = {"env.should_use_nemo_gym": True, "++env.nemo_gym.num_gpu_nodes": 5}
_TEACHERS = {
    "++on_policy_distillation.enabled": True,
    "++on_policy_distillation.non_colocated_teachers.enabled": True,
    "++on_policy_distillation.non_colocated_teachers.default_teacher_cfg.num_nodes": 2,
    "++on_policy_distillation.non_colocated_teachers.teacher_overrides.code.num_nodes": 3,
    "++on_policy_distillation.teacher_model_by_agent_name.math": "a/teacher",
    "++on_policy_distillation.teacher_model_by_agent_name.logic": "a/teacher",
    "++on_policy_distillation.teacher_model_by_agent_name.code": "another/teacher",
}
_REWARD = {"data.default.env_name": "reward_model", "++env.reward_model.resources.num_nodes": 5}


@pytest.mark.parametrize(
    ("settings", "version", "gpus"),
    [
        ({}, "0.7.0", 104),
        (_GYM, "0.7.0", 104),  # beside the cluster
        (_GYM, "0.6.0.dev1", 64),  # in it: 104 GPUs cannot be split by 32
        (_TEACHERS, "0.7.0", 64),
        (
            {**_TEACHERS, "++on_policy_distillation.deduplicate_shared_teacher_checkpoints": False},
            "0.7.0",
            48,
        ),
        (_REWARD, "0.7.0", 64),
        ({"++env.reward_model.resources.num_nodes": 5}, "0.7.0", 104),  # no data names the environment
    ],
)
def test_the_trainer_has_the_gpus_that_nobody_else_takes(settings, version, gpus):
    whole = job({**_APART, **settings}, framework_version=version)
    config = Config(whole)
    assert config.world == gpus
    assert any("cannot be split" in each.message for each in FRAMEWORK.check(whole)) == bool(gpus % 32)
    beside = [each for each in profile(whole).warnings if "NeMo Gym needs 5 nodes beside" in each]
    assert bool(beside) == (settings is _GYM and version == "0.7.0")


def test_on_one_node_a_reward_model_takes_gpus_of_the_trainer():
    reward = {"data.train.env_name": "reward_model", "++env.reward_model.resources.gpus_per_node": 2}
    assert Config(job(reward)).world == 6


def test_a_key_of_one_s_own_is_added_as_hydra_says_it():
    assert FRAMEWORK.check(job({"++policy.my_own.key": 1})) == ()
    assert "++policy.my_own.key=1" in words(job({"++policy.my_own.key": 1}))


def test_a_trial_reports_and_saves_nothing():
    trial = FRAMEWORK.trial(job(), folder="/runs/1", steps=5, longest=False)
    assert FRAMEWORK.check(trial) == ()
    assert not profile(trial).resumable and trial.settings["grpo.max_num_steps"] == 5


def test_the_last_step_is_known_of_an_asynchronous_training_alone():
    steps = {"grpo.max_num_steps": 50}
    assert FRAMEWORK.last_step(job(steps)) is None  # its data may end before
    assert FRAMEWORK.last_step(job({**steps, "grpo.async_grpo.enabled": True})) == 50


def test_the_final_configuration_is_read_where_a_log_shows_it():
    text = "MasterConfig(policy={'model_name': 'm', 'sequence_packing': {'train_mb_tokens': 8192}}, "
    result = FRAMEWORK.printed(
        f"{text}loss_fn=ClippedPGLossConfig(ratio_clip_min=0.2), cluster={{'num_nodes': 2}})\n"
    )
    assert result == {"cluster.num_nodes": 2, "policy.model_name": "m", f"{PACKING}.train_mb_tokens": 8192}
    assert FRAMEWORK.printed(text[:-5]) == {}


@pytest.mark.parametrize(
    ("line", "marker"),
    [
        ("Logged data to logs/exp_001/train_data_step7.jsonl", StepDone(step=7)),
        ("Logged data to logs/exp_001/val_data_step7.jsonl", None),
        ("========================= Step 3/58 =========================", None),
        ("▶ Generating responses for batch of size 512...", PhaseStarted(phase=Phase.ROLLOUT, step=0)),
        ("▶ Computing logprobs...", PhaseStarted(phase=Phase.LOG_PROB, step=0)),
        ("▶ Training policy...", PhaseStarted(phase=Phase.FORWARD, step=0)),
        ("Saving checkpoint for step 10...", PhaseStarted(phase=Phase.CHECKPOINT, step=0)),
        ("  • checkpointing: 12.31s (20.1%)", Saved(step=None, last=True)),
        ("(x pid=9) Loading weights from /c/run/step_10/policy/weights", Resumed(step=10)),
        ("Max number of steps has been reached, stopping training early", TrainingDone(step=0)),
        ("Timeout has been reached, stopping training early", None),
    ],
)
def test_lines_are_read(line, marker):
    assert FRAMEWORK.marker(line) == marker


def test_a_colocated_trainer_sleeps_in_host_memory_but_for_megatrons_plain_copy_of_the_weights():
    precise = "policy.megatron_cfg.optimizer.use_precision_aware_optimizer"
    megatron = JOBS["megatron"].settings
    for settings, weights, masters in (
        ({}, True, False),
        (megatron, True, False),
        ({**megatron, precise: False}, True, True),
        (
            {**megatron, precise: False, "policy.megatron_cfg.optimizer.optimizer_cpu_offload": True},
            True,
            True,
        ),
        (JOBS["apart"].settings, False, False),
    ):
        job_profile = profile(job(settings)).layout
        assert (job_profile.weights_sleep, job_profile.masters_stay) == (weights, masters)


def test_tensor_parallelism_of_megatron_is_offered_where_padding_does_not_depend_on_it():
    job_profile = profile(JOBS["megatron"]).supported["tensor_parallel"]
    assert job_profile.grid.values == (2, 4, 8)
    with_experts = {
        **JOBS["megatron"].settings,
        "policy.megatron_cfg.expert_model_parallel_size": 4,
        "policy.megatron_cfg.expert_tensor_parallel_size": None,
    }
    assert profile(job(with_experts)).supported["tensor_parallel"].grid.values == (2,)
    padded = {**JOBS["megatron-sequences"].settings, "policy.megatron_cfg.sequence_parallel": True}
    assert "tensor_parallel" not in profile(job(padded)).supported
    assert "tensor_parallel" not in profile(JOBS["packed"]).supported


def test_products_in_fp8_follow_their_own_section():
    section = "policy.megatron_cfg.fp8_cfg"
    named = {**JOBS["megatron"].settings, f"{section}.fp8": "hybrid", f"{section}.fp8_param": False}
    for enabled in (False, True):
        job_profile = profile(job({**named, f"{section}.enabled": enabled})).layout
        assert (job_profile.fp8, job_profile.fp8_weights) == (enabled, False)


def test_a_value_of_the_file_is_checked_too_unless_an_override_replaces_it():
    document = {
        "policy": {"logprob_chunk_size": "1k", "train_micro_batch_size": "two"},
        "data": {"mine": "x"},
    }
    of = job(document=document, config="mine.yaml")  # an override gives train_micro_batch_size
    (problem,) = (each for each in FRAMEWORK.check(of) if "must be" in each.message)
    assert problem.path == ("config", "policy", "logprob_chunk_size")
    assert problem.message == "policy.logprob_chunk_size must be a whole number, not '1k'"


def test_copies_of_the_optimizer_overlap_by_a_key_that_its_example_does_not_have():
    knobs = msgspec.structs.replace(
        profile(JOBS["megatron"]).knobs, optimizer_offload_fraction=1.0, optimizer_offload_overlap=True
    )
    key = "policy.megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d"
    assert f"++{key}=True" in words(JOBS["megatron"], knobs)
    assert "Megatron" in profile(JOBS["packed"]).unsupported["optimizer_offload_overlap"]


def test_log_probabilities_of_megatron_are_chunked_in_every_pass_and_of_dtensor_in_scoring_alone():
    deferred = "policy.megatron_cfg.defer_fp32_logits"
    megatron = {**JOBS["megatron"].settings, "policy.logprob_chunk_size": 512}
    for late, size in ((False, 4), (True, 2)):
        job_profile = profile(job({**megatron, deferred: late}))
        assert (job_profile.layout.loss, job_profile.layout.logits_bytes) == ("logprob", size)
        assert ("logprob_chunk" in job_profile.supported) is late
    assert job_profile.supported["logprob_chunk"].phases == ()  # of the knob
    assert profile(JOBS["packed"]).supported["logprob_chunk"].phases == (Phase.LOG_PROB,)
