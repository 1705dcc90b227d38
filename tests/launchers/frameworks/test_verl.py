"""verl's settings, both ways, and what is refused, launched and offered."""

import re

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks.core.versions import choose
from autotune.launchers.frameworks.verl.config import Config
from autotune.policies.remedies.legality import objections
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement

from .verl_jobs import (
    ACTOR,
    HEADS_40,
    JOBS,
    REF,
    ROLLOUT,
    VERL,
    job,
    moves,
    profile,
    with_settings,
    written_jobs,
)

ALL = {**JOBS, **written_jobs()}
SCORING = f"{ROLLOUT}.log_prob_max_token_len_per_gpu"
# What is trained, and how: the user's own.
USERS = re.compile(
    r"batch_size$|\.lr|length$|rollout\.n$|epochs|\.seed|temperature|loss_|coeff?$|clip|adv_estimator"
)


@pytest.mark.parametrize("name", ALL)
def test_a_jobs_settings_for_a_knob_give_the_knob_back(name) -> None:
    of = ALL[name]
    names = set()
    for knob, value, after in moves(of):
        settings = VERL.settings(of, after)
        assert getattr(profile(with_settings(of, settings)).knobs, knob) == value, settings
        assert not any(USERS.search(key) for key in settings), settings
        names.add(knob)
    assert names >= set(profile(of).supported) - {"dynamic_batching"}


def changed(of: Job, **knobs) -> dict:
    return VERL.settings(of, replace(profile(of).knobs, **knobs))


def test_a_smaller_training_budget_leaves_scoring_as_it_is() -> None:
    of = JOBS["fsdp2-reference"]
    assert changed(of, tokens_per_microbatch=8192) == {
        f"{ACTOR}.ppo_max_token_len_per_gpu": 8192,
        SCORING: 16384,
        f"{REF}.log_prob_max_token_len_per_gpu": 16384,
    }
    assert changed(of, tokens_per_microbatch=8192, logprob_tokens=8192) == {
        f"{ACTOR}.ppo_max_token_len_per_gpu": 8192
    }


def test_a_smaller_scoring_budget_reaches_reference_and_critic() -> None:
    assert changed(JOBS["fsdp2-reference"], logprob_tokens=4096) == {
        SCORING: 4096,
        f"{REF}.log_prob_max_token_len_per_gpu": 4096,
    }
    assert changed(JOBS["critic"], logprob_tokens=4096) == {
        SCORING: 4096,
        "++critic.ppo_infer_max_token_len_per_gpu": 8192,
    }
    assert changed(JOBS["lora"], logprob_tokens=4096) == {SCORING: 4096}  # the reference is the actor itself


def test_the_critic_is_never_cut_below_the_longest_sequence() -> None:
    assert (
        changed(JOBS["critic"], tokens_per_microbatch=2048)["++critic.ppo_infer_max_token_len_per_gpu"]
        == 4096
    )
    long = with_settings(JOBS["critic"], {"++critic.ppo_infer_max_token_len_per_gpu": 3000})
    assert changed(long, tokens_per_microbatch=2048)["++critic.ppo_infer_max_token_len_per_gpu"] == 2048


def test_the_legacy_trainer_reads_two_limits_of_the_critic() -> None:
    of = with_settings(JOBS["critic"], {"trainer.use_v1": False})
    result = changed(of, tokens_per_microbatch=8192)
    assert (
        result["critic.ppo_max_token_len_per_gpu"]
        == result["++critic.ppo_infer_max_token_len_per_gpu"]
        == 16384
    )


def test_splitting_sequences_halves_the_tokens_of_a_card() -> None:
    assert changed(JOBS["critic"], sequence_parallel=2) == {
        f"{ACTOR}.ulysses_sequence_parallel_size": 2,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 8192,
        "critic.fsdp.ulysses_sequence_parallel_size": 2,
        "++critic.ppo_infer_max_token_len_per_gpu": 16384,
    }
    assert profile(JOBS["ulysses"]).knobs.tokens_per_microbatch == 16384


def test_actor_and_critic_are_offloaded_each_under_its_own_node() -> None:
    assert changed(JOBS["critic"], param_offload=True) == {
        f"{ACTOR}.fsdp_config.param_offload": True,
        "critic.fsdp.param_offload": True,
    }
    half = with_settings(JOBS["critic"], {f"{ACTOR}.fsdp_config.param_offload": True})
    assert profile(half).knobs.param_offload is False  # until both are
    assert changed(half, param_offload=True) == {"critic.fsdp.param_offload": True}


def test_counted_micro_batches_shrink_in_scoring_too() -> None:
    assert changed(JOBS["static"], microbatch_size=2) == {
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4,
        f"{REF}.log_prob_micro_batch_size_per_gpu": 4,
    }


def test_megatron_takes_its_groups_together() -> None:
    of = JOBS["megatron"]
    node = f"{ACTOR}.megatron.override_transformer_config.recompute"
    assert changed(of, recompute="full") == {
        f"{node}_granularity": "full",
        f"{node}_method": "uniform",
        f"{node}_num_layers": 1,
    }
    adam = f"++{ACTOR}.optim.override_optimizer_config"
    assert changed(of, optimizer_offload_fraction=1.0) == {
        f"{adam}.optimizer_cpu_offload": True,
        f"{adam}.optimizer_offload_fraction": 1.0,
        f"{adam}.use_precision_aware_optimizer": True,
        f"{adam}.overlap_cpu_optimizer_d2h_h2d": False,
    }


def test_older_ways_of_choosing_megatron_are_understood() -> None:
    alias = replace(JOBS["fsdp"], command=("python3", "-m", "x", "--config-name=ppo_megatron_trainer"))
    for of in (alias, with_settings(JOBS["fsdp"], {f"{ACTOR}.strategy": "megatron"})):
        assert profile(of).layout.strategy == "megatron"


def test_engines_have_their_own_words_for_graphs() -> None:
    limited = [1, 2, 4, 8, 16, 32]
    assert changed(JOBS["fsdp"], cuda_graphs="limited") == {f"{ROLLOUT}.cudagraph_capture_sizes": limited}
    sglang = f"++{ROLLOUT}.engine_kwargs.sglang.cuda_graph_max_bs"
    assert changed(JOBS["sglang"], cuda_graphs="limited") == {sglang: 32}
    assert changed(JOBS["sglang"], cuda_graphs="off") == {f"{ROLLOUT}.enforce_eager": True}


def test_an_allocator_reaches_the_workers_beside_what_is_preloaded() -> None:
    key = "++ray_kwargs.ray_init.runtime_env.env_vars.LD_PRELOAD"
    assert changed(JOBS["fsdp"], host_allocator="jemalloc") == {key: "libjemalloc.so.2"}
    other = with_settings(JOBS["fsdp"], {key: "/opt/libtrace.so"})
    result = changed(other, host_allocator="tcmalloc")
    assert result == {key: "libtcmalloc.so.4:/opt/libtrace.so"}
    assert changed(with_settings(other, result), host_allocator="default") == {key: "/opt/libtrace.so"}


def test_settings_keep_the_jobs_own_spelling() -> None:
    of = with_settings(JOBS["critic"], {"+critic.ppo_infer_max_token_len_per_gpu": 32768})
    assert "+critic.ppo_infer_max_token_len_per_gpu" in changed(of, tokens_per_microbatch=8192)


# --------------------------------------------------------------------------- legality


def against(of: Job, *, started: bool = False, **knobs) -> str:
    own = profile(of)
    return "; ".join(objections(own, own.knobs, replace(own.knobs, **knobs), started=started))


@pytest.mark.parametrize(
    ("size", "legal"), [(1, True), (2, True), (4, True), (8, True), (16, False), (32, False)]
)
def test_ulysses_splits_40_heads_up_to_8_ways(size, legal) -> None:
    of = job(HEADS_40, trainer__nnodes=8)
    text = against(of, sequence_parallel=size)
    assert (text == "") == legal
    assert legal or "Ulysses divides the model's 40 attention heads" in text
    written = with_settings(of, {f"{ACTOR}.ulysses_sequence_parallel_size": size})
    assert (VERL.check(written) == ()) == legal


@pytest.mark.parametrize(
    ("of", "knobs", "wording"),
    [
        ("fsdp", {"tokens_per_microbatch": 1984}, "max_prompt_length"),
        ("fsdp", {"logprob_tokens": 1024}, "longest sequence"),
        ("fsdp", {"max_model_len": 2000}, "longest sequence"),
        ("fsdp", {"rollout_tensor_parallel": 3}, "divides the engines' GPUs"),
        ("fsdp", {"rollout_tensor_parallel": 8}, "attention heads"),
        ("fsdp", {"microbatch_size": 1}, "up to a number of tokens"),
        ("static", {"tokens_per_microbatch": 8192}, "counted in sequences"),
        ("static", {"microbatch_size": 3}, "128 sequences of a mini-batch"),
        ("fsdp", {"grad_offload": True}, "FSDP2"),
        ("megatron", {"tensor_parallel": 3}, "not a legal value"),
        ("megatron", {"activation_offload": True}, "fine_grained_activation_offloading"),
        ("fsdp", {"allocator": "expandable"}, "CUDA IPC"),
        ("fsdp", {"sync_mode": "disk"}, "no mode through files"),
        ("fsdp", {"dynamic_batching": False}, "not a legal value"),
    ],
)
def test_what_verl_would_refuse_is_never_proposed(of, knobs, wording) -> None:
    assert wording in against(JOBS[of], **knobs)


@pytest.mark.parametrize(
    ("of", "knobs"),
    [
        ("fsdp", {"sharding": "fsdp2"}),
        ("fsdp", {"dataloader_workers": 2}),
        ("megatron", {"tensor_parallel": 4}),
        ("megatron", {"optimizer_offload_fraction": 1.0}),
    ],
)
def test_what_a_checkpoint_depends_on_stays_during_a_run(of, knobs) -> None:
    assert against(JOBS[of], **knobs) == ""
    assert "during a run" in against(JOBS[of], started=True, **knobs)


@pytest.mark.parametrize(
    ("settings", "key", "wording"),
    [
        ({f"{ROLLOUT}.gpu_mem_utilization": 0.5}, f"{ROLLOUT}.gpu_mem_utilization", "unknown"),
        ({f"{ACTOR}.fsdp_config.cpu_offload": True}, f"{ACTOR}.fsdp_config.cpu_offload", "unknown"),
        ({f"++{ACTOR}.fsdp_config.offload_params": True}, f"++{ACTOR}.fsdp_config.offload_params", "unknown"),
        ({f"{ACTOR}.megatron.param_offload": True}, f"{ACTOR}.megatron.param_offload", "unknown"),
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": "16k"}, f"{ACTOR}.ppo_max_token_len_per_gpu", "16k"),
        ({"data.filter_overlong_prompts": "maybe"}, "data.filter_overlong_prompts", "true or false"),
        ({"global_profiler.enabled": True}, "global_profiler.enabled", "unknown"),
        ({f"{ROLLOUT}.name": None}, f"{ROLLOUT}.name", "needs an inference engine"),
        ({f"{ROLLOUT}.name": "hf"}, f"{ROLLOUT}.name", "engine `hf`"),
        ({f"{ACTOR}.use_dynamic_bsz": False}, f"{ACTOR}.ppo_micro_batch_size_per_gpu", "needs it"),
        ({f"{ACTOR}.ppo_max_token_len_per_gpu": 2047}, f"{ACTOR}.ppo_max_token_len_per_gpu", "below"),
        ({f"{ROLLOUT}.max_model_len": 2047}, f"{ROLLOUT}.max_model_len", "below"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 8}, f"{ROLLOUT}.tensor_model_parallel_size", "divide"),
        ({"trainer.resume_mode": "resume_path"}, "trainer.resume_mode", "its own run"),
        ({f"{ROLLOUT}.name": "???"}, f"{ROLLOUT}.name", "verl needs an inference engine"),
        ({"model_engine": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": 3}, None, "GPUs"),
    ],
)
def test_mistakes_are_found_before_anything_starts(settings, key, wording) -> None:
    result = VERL.check(with_settings(JOBS["fsdp"], settings))
    assert any(wording in problem.message for problem in result), result
    assert key is None or any(problem.path == ("settings", key) for problem in result)


def test_unknown_settings_come_with_the_name_of_today() -> None:
    def hint(key: str) -> str:
        return VERL.check(with_settings(JOBS["fsdp"], {key: True}))[0].hint

    assert "gpu_memory_utilization" in hint(f"{ROLLOUT}.gpu_memory_utilisation")
    assert "param_offload" in hint(f"{ACTOR}.megatron.grad_offload")
    assert hint(f"{ACTOR}.megatron.param_offload") == "it belongs to `model_engine: megatron`"
    assert "checkpoint_engine" in hint(f"{ROLLOUT}.update_weights_bucket_megabytes")
    assert "model_engine" in hint(f"{ACTOR}.model_engine")
    assert "+reward.reward_kwargs" in hint("reward_model.overlong_buffer.enable")


def test_what_only_hydra_adds_is_taken() -> None:
    rewards = {"+reward_model.reward_kwargs.max_resp_len": 8192}
    assert VERL.check(with_settings(JOBS["fsdp"], rewards)) == ()
    own = f"++{REF}.megatron.override_transformer_config.gradient_accumulation_fusion"
    assert VERL.check(with_settings(JOBS["megatron"], {own: False})) == ()


def test_sizes_for_all_gpus_together_are_to_be_divided() -> None:
    counted = {f"{ACTOR}.use_dynamic_bsz": False, f"{ACTOR}.ppo_micro_batch_size": 64}
    problem = VERL.check(with_settings(JOBS["fsdp"], counted))[0]
    assert problem.path == ("settings", f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    assert "divide it" in problem.hint


def test_settings_of_a_recipe_are_its_own() -> None:
    own = {"recipe.temperature": 2, "+trainer.my_switch": True}
    of = with_settings(JOBS["fsdp"], own)
    assert VERL.check(of) == ()
    assert any(
        "does not have the setting recipe.temperature; it is passed on" in w for w in profile(of).warnings
    )
    assert VERL.check(replace(of, command=("python", "-m", "recipe.dapo.main_dapo"))) == ()


def test_settings_of_another_release_are_passed_on_and_named() -> None:
    misspelt = {f"{ROLLOUT}.gpu_memory_utilisation": 0.5}
    for version in ("0.10.0", "0.9.2.dev0"):
        of = replace(with_settings(JOBS["fsdp"], misspelt), framework_version=version)
        assert VERL.check(of) == ()
        assert any("is passed on (did you mean" in text for text in profile(of).warnings)
        wrong = with_settings(of, {f"{ACTOR}.ppo_max_token_len_per_gpu": "16k"})
        assert [p.path[1] for p in VERL.check(wrong)] == [f"{ACTOR}.ppo_max_token_len_per_gpu"]


def test_a_misspelt_setting_of_no_known_release_is_an_error_unless_the_job_insists() -> None:
    name = f"{ACTOR}.ppo_max_token_len_per_gup"
    unknown = replace(JOBS["fsdp"], framework_version=None)
    (problem,) = VERL.check(with_settings(unknown, {name: 24576}))
    assert problem.path == ("settings", name)
    assert f"did you mean {ACTOR}.ppo_max_token_len_per_gpu?" in problem.hint
    assert problem.hint.endswith(f"If verl has it: ++{name}")
    assert VERL.check(with_settings(unknown, {f"++{name}": 24576})) == ()
    alike = {f"{ACTOR}.ppo_max_token_len_per_cpu": 1, f"{ROLLOUT}.gpu_memory_utilisation": 0.5}
    of_another_release = {"actor_rollout_ref.rollout.update_weights_bucket_megabytes": 512}
    assert VERL.check(with_settings(unknown, alike | of_another_release)) == ()
    beside = {name: 24576, f"{ACTOR}.ppo_max_token_len_per_gpu": 24576}
    assert VERL.check(with_settings(unknown, beside)) == ()


def test_values_of_several_types_and_names_in_a_mapping_are_accepted() -> None:
    own = {
        "algorithm.rollout_correction.rollout_is_threshold": "0.5_4.0",
        f"+{ACTOR}.fsdp_config.mixed_precision.reduce_dtype": "fp32",
    }
    assert VERL.check(replace(with_settings(JOBS["fsdp"], own), framework_version="0.9.1")) == ()


def test_sequences_that_an_unknown_model_engine_splits_are_not_refused() -> None:
    short = {f"{ACTOR}.ppo_max_token_len_per_gpu": 64}
    assert VERL.check(with_settings(JOBS["fsdp"], short)) != ()
    assert VERL.check(with_settings(JOBS["fsdp"], {**short, "model_engine": "veomni"})) == ()


def test_each_release_has_its_own_settings_and_defaults() -> None:
    def of(version: str, **settings: object) -> Job:
        return replace(with_settings(JOBS["fsdp"], settings), framework_version=version)

    old = {f"{ROLLOUT}.skip.enable": True}
    assert VERL.check(of("0.8.0", **old)) == ()
    assert [p.path[1] for p in VERL.check(of("0.9.1+cu128", **old))] == list(old)
    assert Config(of("0.8.0")).count(f"{ROLLOUT}.max_num_seqs") == 1024
    assert Config(of("0.9.1")).count(f"{ROLLOUT}.max_num_seqs") == 256
    assert not Config(of("0.7.1")).flag("trainer.use_v1")
    assert Config(of("0.9.1")).key("trainer.use_v1") == "trainer.use_v1"
    assert Config(of("0.8.0")).key("trainer.use_v1") == "++trainer.use_v1"
    changed = replace(profile(of("0.8.0")).knobs, entropy_chunking=True)
    words = VERL.command(of("0.8.0"), changed, run="7c1e", attempt=1, resume=False).argv
    assert f"{ACTOR}.entropy_from_logits_with_chunking=True" in words


@pytest.mark.parametrize(
    ("wanted", "version", "exact"),
    [
        ("0.9.1", "0.9.1", True),
        ("0.9.1+cu128", "0.9.1", True),
        ("v0.8.0", "0.8.0", True),
        ("0.10.0", "0.9.1", False),
        ("0.9.1.dev3", "0.9.0", False),
        ("0.7.5", "0.7.1", False),
        ("0.4.0", "0.7.0", False),
        (None, "0.9.1", False),
        ("main", "0.9.1", False),
    ],
)
def test_the_release_that_stands_for_a_version(wanted: str, version: str, exact: bool) -> None:
    release = choose(wanted, VERL.releases)
    assert (release.version, release.exact) == (version, exact)


def test_settings_without_effect_are_named() -> None:
    of = with_settings(JOBS["critic"], {"critic.ppo_max_token_len_per_gpu": 16384})
    assert any("++critic.ppo_infer_max_token_len_per_gpu" in text for text in profile(of).warnings)
    assert any("cannot be resumed" in t for t in profile(job(trainer__save_freq=-1)).warnings)
    assert not profile(job(trainer__save_freq=-1)).resumable
    assert profile(job()).resumable


# --------------------------------------------------------------------------- placement


def test_a_sleeping_engine_holds_nothing_while_training_runs() -> None:
    own = profile(JOBS["critic"])
    assert own.placement is Placement.COLOCATED
    for phase in (Phase.LOG_PROB, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT):
        assert Component.ROLLOUT not in own.resident[phase]
    assert Component.ROLLOUT in own.resident[Phase.WEIGHT_SYNC]
    awake = profile(job(**{f"{ROLLOUT}.free_cache_engine": False}))
    assert Component.ROLLOUT in awake.resident[Phase.BACKWARD]
    assert not awake.layout.engine_sleeps
    assert (awake.knobs.engine_sleep, own.knobs.engine_sleep) == (False, True)
    woken = {f"{ROLLOUT}.free_cache_engine": False, f"{ROLLOUT}.enable_sleep_mode": False}
    assert VERL.settings(job(**woken), Knobs(engine_sleep=True)) == dict.fromkeys(woken, True)
    apart = profile(
        job(**{"trainer.v1.trainer_mode": "separate_async", f"{ROLLOUT}.nnodes": 1, "trainer.nnodes": 1})
    )
    assert apart.placement is Placement.ASYNCHRONOUS
    assert apart.resident[Phase.ROLLOUT] == (Component.ROLLOUT,)


def test_programs_that_generate_beside_the_training_have_engines_apart() -> None:
    own = {"rollout.nnodes": 1, "rollout.n_gpus_per_node": 6, "trainer.n_gpus_per_node": 2}
    one_step = profile(job(**own, **{"data.train_batch_size": 64}))
    assert one_step.placement is Placement.ASYNCHRONOUS
    assert one_step.resident[Phase.ROLLOUT] == (Component.ROLLOUT,)
    assert (one_step.layout.ranks, one_step.layout.engine_ranks) == (2, 6)
    assert one_step.layout.sequences == 64 * 4
    sizes = {"data.train_batch_size": 0, f"{ACTOR}.ppo_mini_batch_size": 32}
    module = "verl.experimental.fully_async_policy.fully_async_main"
    written = replace(
        job(**sizes, **{"async_training.require_batches": 4}), command=("python3", "-m", module)
    )
    asynchronous = profile(written)
    assert asynchronous.placement is Placement.ASYNCHRONOUS
    assert asynchronous.layout.engine_ranks == 8
    assert (asynchronous.layout.sequences, asynchronous.layout.mini_batch) == (32 * 4 * 4, 32 * 4)


def test_the_layout_says_how_a_job_is_spread() -> None:
    layout = profile(JOBS["critic"]).layout
    assert (layout.strategy, layout.ranks, layout.shards, layout.engine_ranks) == ("fsdp", 8, 8, 8)
    assert (layout.parameter_bytes, layout.gradient_bytes, layout.optimizer_bytes) == (4, 4, 8)
    assert layout.critic and layout.engine_sleeps and layout.tokens_before_split
    assert (layout.sequences, layout.prompt_tokens, layout.response_tokens) == (4096, 512, 1536)
    half = profile(job(**{f"{ACTOR}.fsdp_config.model_dtype": "bf16"})).layout
    assert (half.parameter_bytes, half.optimizer_bytes) == (2, 4)
    megatron = profile(JOBS["megatron"]).layout
    assert (megatron.strategy, megatron.shards, megatron.optimizer_bytes) == ("megatron", 4, 12)
    assert profile(JOBS["fsdp2-reference"]).layout.reference_offload
    policy = profile(
        job(**{f"{ACTOR}.strategy": "fsdp2", f"{ACTOR}.fsdp_config.offload_policy": True})
    ).layout
    assert policy.grad_offload_takes_all and not megatron.grad_offload_takes_all
    ignored = profile(job(**{f"{ACTOR}.fsdp_config.offload_policy": True})).layout  # by FSDP1
    assert not ignored.grad_offload_takes_all


@pytest.mark.parametrize(
    ("settings", "parameter", "compute", "gradient", "optimizer"),
    [
        ({}, 4, 2, 4, 8),
        ({"fsdp_config.mixed_precision": {"param_dtype": "fp32"}}, 4, 4, 4, 8),
        ({"fsdp_config.mixed_precision.param_dtype": "fp32"}, 4, 4, 4, 8),
        ({"fsdp_config.model_dtype": "bf16", "optim.optimizer": "AdamW8bit"}, 2, 2, 2, 2),
        ({"optim.optimizer": "SGD"}, 4, 2, 4, 0),
        ({"optim.optimizer": "SGD", "optim.override_optimizer_config": {"momentum": 0.9}}, 4, 2, 4, 4),
    ],
)
def test_types_of_fsdp_come_from_their_settings(settings, parameter, compute, gradient, optimizer) -> None:
    layout = profile(job(**{f"{ACTOR}.{name}": value for name, value in settings.items()})).layout
    assert (layout.parameter_bytes, layout.compute_bytes) == (parameter, compute)
    assert (layout.gradient_bytes, layout.optimizer_bytes) == (gradient, optimizer)
    assert (layout.reduce_bytes, layout.reference_bytes) == (4, 4)


_PRECISE = {"optim.use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("settings", "gradient", "optimizer"),
    [
        (_PRECISE, 4, 10),  # of the fp32 master only what the weight lacks
        (
            {"optim.exp_avg_dtype": "bf16", "optim.main_grads_dtype": "bf16"},
            4,
            12,
        ),  # without it nothing moves
        (_PRECISE | {"optim.exp_avg_dtype": "bf16", "optim.exp_avg_sq_dtype": "bf16"}, 4, 6),
        (_PRECISE | {"optim.main_grads_dtype": "bf16"}, 2, 10),
        ({"megatron.override_ddp_config": {"grad_reduce_in_fp32": False}}, 2, 12),
        (_PRECISE | {"optim.override_optimizer_config.optimizer_cpu_offload": True}, 4, 12),
        (_PRECISE | {"megatron.dtype": "float16", "optim.exp_avg_dtype": "bf16"}, 4, 12),
        ({"optim.optimizer": "sgd"}, 4, 8),
        ({"optim.optimizer": "muon"}, 4, 8),
    ],
)
def test_types_of_megatron_come_from_their_settings(settings, gradient, optimizer) -> None:
    changes = {f"{ACTOR}.{name}": value for name, value in settings.items()}
    layout = profile(with_settings(JOBS["megatron"], changes)).layout
    assert (layout.gradient_bytes, layout.optimizer_bytes) == (gradient, optimizer)


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({}, True),
        ({f"{ROLLOUT}.layered_summon": True}, False),
        ({f"{ACTOR}.strategy": "fsdp2"}, False),
        ({"actor_rollout_ref.model.lora.merge": True}, False),
        ({"actor_rollout_ref.model.lora_rank": 0}, False),
    ],
)
def test_a_sync_of_adapters_gathers_the_whole_model_unless_layer_by_layer(changes, whole) -> None:
    own = profile(with_settings(JOBS["lora"], changes))
    assert own.layout.gathers_whole is whole
    assert any("layered_summon" in text for text in own.warnings) is whole


@pytest.mark.parametrize(
    ("job", "changes", "copied"),
    [
        ("critic", {}, True),
        ("critic", {f"{ACTOR}.strategy": "fsdp2"}, False),
        ("lora", {}, False),
        ("lora", {"actor_rollout_ref.model.lora.merge": True}, True),
        ("megatron", {}, False),
    ],
)
def test_a_sync_from_fsdp1_copies_the_shards(job, changes, copied) -> None:
    assert profile(with_settings(JOBS[job], changes)).layout.copies_shards is copied


@pytest.mark.parametrize(("engine", "buckets"), [("vllm", 0), ("sglang", 2)])
def test_a_colocated_vllm_opens_the_buffer_of_the_trainer(engine, buckets) -> None:
    changes = {f"{ROLLOUT}.name": engine}
    assert profile(with_settings(JOBS["critic"], changes)).layout.sync_buckets == buckets


def test_the_layout_counts_the_chunks_of_interleaved_stages() -> None:
    staged = {f"{ACTOR}.megatron.pipeline_model_parallel_size": 2}
    assert profile(with_settings(JOBS["megatron"], staged)).layout.pipeline_chunks == 1
    chunks = {**staged, f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": 4}
    assert profile(with_settings(JOBS["megatron"], chunks)).layout.pipeline_chunks == 4


def test_the_layout_counts_the_layers_of_uneven_stages() -> None:
    transformer = f"+{ACTOR}.megatron.override_transformer_config"
    uneven = {
        f"{transformer}.num_layers_in_first_pipeline_stage": 5,
        f"{transformer}.num_layers_in_last_pipeline_stage": "many",
        f"{transformer}.account_for_loss_in_pipeline_split": True,
    }
    job_profile = profile(with_settings(JOBS["megatron"], uneven)).layout
    assert (job_profile.first_stage_layers, job_profile.last_stage_layers) == (5, 0)
    assert job_profile.loss_is_layer
    assert not job_profile.embedding_is_layer


def test_the_layout_counts_layers_of_multi_token_prediction_and_written_stages() -> None:
    mtp = "actor_rollout_ref.model.mtp"
    for changes, result in (
        ({}, (0, False)),
        ({f"{mtp}.enable": True}, (1, False)),
        ({f"{mtp}.enable": True, f"{mtp}.enable_train": True}, (1, True)),
    ):
        layout = profile(with_settings(JOBS["megatron"], changes)).layout
        assert (layout.predicting_layers, layout.predicting_loss) == result
    transformer = f"+{ACTOR}.megatron.override_transformer_config"
    stages = {
        f"{ACTOR}.megatron.pipeline_model_parallel_size": 2,
        f"{transformer}.pipeline_model_parallel_layout": "Et*13|t*15L",
    }
    assert profile(with_settings(JOBS["megatron"], stages)).layout.stage_layers == (13, 15)


def test_the_layout_says_how_tokens_reach_their_experts_and_what_is_computed_again() -> None:
    transformer = f"+{ACTOR}.megatron.override_transformer_config"
    plain = profile(JOBS["megatron"]).layout
    assert (plain.dispatcher, plain.recompute_modules) == ("alltoall", ())
    chosen = {
        f"{transformer}.moe_token_dispatcher_type": "flex",
        f"{transformer}.recompute_modules": ["moe_act", "core_attn"],
    }
    job_profile = profile(with_settings(JOBS["megatron"], chosen)).layout
    assert (job_profile.dispatcher, job_profile.recompute_modules) == ("flex", ("moe_act", "core_attn"))
    odd = {f"{transformer}.moe_token_dispatcher_type": "pigeons", f"{transformer}.recompute_modules": 3}
    job_profile = profile(with_settings(JOBS["megatron"], odd)).layout
    assert (job_profile.dispatcher, job_profile.recompute_modules) == ("alltoall", ())


def test_megatrons_adam_needs_room_only_for_gradients_in_16_bits() -> None:
    narrow = {f"+{ACTOR}.megatron.override_ddp_config.grad_reduce_in_fp32": False}
    for changes, size in (({}, 0), (narrow, 4)):
        layout = profile(with_settings(JOBS["megatron"], changes)).layout
        assert layout.optimizer_temporary_bytes == size


def test_the_layout_says_how_fsdp_wraps_reduces_and_computes_the_loss() -> None:
    layout = profile(JOBS["fsdp2-reference"]).layout
    assert (
        layout.head_apart
        and layout.reshard_after_forward
        and layout.reshards_root
        and not layout.reduces_last
    )
    assert (layout.reduce_bytes, layout.optimizer_temporary_bytes, layout.per_tensor_optimizer) == (
        4,
        4,
        False,
    )
    assert (layout.loss, layout.compiled_loss, layout.scaled_logits) == ("kernel", True, False)
    fsdp = f"{ACTOR}.fsdp_config"
    changed = profile(
        job(
            **{
                f"{ACTOR}.strategy": "fsdp2",
                f"{fsdp}.model_dtype": "bf16",
                f"{fsdp}.mixed_precision.reduce_dtype": "bf16",
                f"{fsdp}.reshard_after_forward": False,
                f"{fsdp}.use_no_sync_for_gradient_accumulation": True,
                f"{fsdp}.use_torch_compile": False,
                f"{ACTOR}.optim.override_optimizer_config.foreach": False,
                f"{ROLLOUT}.temperature": 0.7,
            }
        )
    ).layout
    assert changed.reduces_last and not changed.reshard_after_forward
    assert (changed.reduce_bytes, changed.optimizer_temporary_bytes, changed.per_tensor_optimizer) == (
        2,
        4,
        True,
    )
    assert changed.scaled_logits and not changed.compiled_loss
    assert profile(job(**{f"{ACTOR}.calculate_sum_pi_squared": True})).layout.loss == "softmax"
    assert profile(JOBS["megatron"]).layout.loss == "softmax"
    padded = {"actor_rollout_ref.model.use_remove_padding": False}
    assert (profile(job(**padded)).layout.loss, profile(job(**padded)).layout.compiled_loss) == (
        "kernel",
        False,
    )
    sdpa = {"+actor_rollout_ref.model.override_config.attn_implementation": "sdpa"}
    assert profile(job(**padded, **sdpa)).layout.loss == "rows"
    assert profile(job(**sdpa)).layout.loss == "kernel"


def test_concurrency_counts_no_more_requests_than_there_are() -> None:
    own = profile(JOBS["no-validation"])  # 64 prompts x 4 answers on 4 engines
    assert own.knobs.concurrency == 64
    assert own.supported["concurrency"].grid.maximum == 64
    assert profile(JOBS["fsdp"]).knobs.concurrency == 256  # validation asks for everything at once


@pytest.mark.parametrize(
    ("card", "gib", "requests"),
    [("H100-80GB", 80, 1024), ("A100-80GB", 80, 256), ("L40S-48GB", 48, 256), (None, 80, 256)],
)
def test_a_limit_of_requests_left_to_the_engine_is_its_default_for_the_card(card, gib, requests) -> None:
    of = job(**{f"{ROLLOUT}.max_num_seqs": None})
    of = replace(of, cluster=replace(of.cluster, gpu=card, gpu_memory_bytes=gib << 30))
    assert profile(of).knobs.concurrency == requests
    assert not VERL.settings(of, profile(of).knobs)


def test_what_leaves_a_phase_as_it_was_is_no_cure_of_it() -> None:
    own = profile(JOBS["fsdp"]).supported  # scoring has a budget of its own, the update computes no entropy
    assert Phase.LOG_PROB not in own["tokens_per_microbatch"].phases
    assert Phase.BACKWARD not in own["entropy_chunking"].phases
    assert not profile(JOBS["critic"]).supported["tokens_per_microbatch"].phases
    assert not profile(JOBS["entropy"]).supported["entropy_chunking"].phases


def test_entropies_are_chunked_where_the_path_that_reads_the_setting_is_taken() -> None:
    padded = {"actor_rollout_ref.model.use_remove_padding": False}
    reason = profile(with_settings(JOBS["fsdp"], padded)).unsupported["entropy_chunking"]
    assert "use_remove_padding" in reason
    assert "entropy_chunking" in profile(JOBS["fsdp"]).supported
    assert "entropy_chunking" in profile(with_settings(JOBS["megatron"], padded)).supported


@pytest.mark.parametrize("model", ["actor_rollout_ref", "critic"])
def test_a_timeout_that_verl_does_not_read_is_named(model: str) -> None:
    job_profile = profile(with_settings(JOBS["fsdp"], {f"{model}.nccl_timeout": 60})).warnings
    assert any(text.startswith(f"{model}.nccl_timeout has no effect in verl 0.9.1") for text in job_profile)


@pytest.mark.parametrize(("engine", "says"), [("vllm", False), ("sglang", True)])
def test_only_sglang_s_memory_saver_needs_fixed_segments(engine: str, says: bool) -> None:
    of = with_settings(JOBS["fsdp"], {f"{ROLLOUT}.name": engine})
    exported = replace(of, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert any("expandable_segments" in text for text in profile(exported).warnings) is says


def test_the_optimizer_that_mindspeed_swaps_is_in_host_memory_between_updates() -> None:
    swap = f"{ACTOR}.megatron.override_transformer_config.swap_optimizer"
    plain, swapped = profile(JOBS["megatron"]), profile(with_settings(JOBS["megatron"], {f"+{swap}": True}))
    assert (plain.knobs.optimizer_offload, swapped.knobs.optimizer_offload) == (False, True)
    assert swapped.layout.optimizer_stays_offloaded and swapped.layout.optimizer_passes_through
    assert "swap_optimizer" in swapped.unsupported["optimizer_offload"]
    assert not profile(
        with_settings(JOBS["fsdp2-reference"], {f"+{swap}": True})
    ).layout.optimizer_passes_through


def test_a_reward_model_on_the_same_gpus_is_named_because_it_is_not_estimated() -> None:
    shared = profile(job(reward__reward_model__enable=True)).warnings
    assert any("the reward model's engine takes 50% of the same GPUs" in each for each in shared)
    apart = profile(job(reward__reward_model__enable=True, reward__reward_model__enable_resource_pool=True))
    assert not any("reward model's engine" in each for each in apart.warnings)
