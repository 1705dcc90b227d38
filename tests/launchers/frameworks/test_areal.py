"""AReaL both ways: what a job says becomes knobs, what knobs change becomes AReaL's own overrides."""

import msgspec
import pytest
import yaml

from autotune.launchers.base import Status
from autotune.launchers.frameworks.areal.adapter import Areal
from autotune.launchers.frameworks.areal.backend import BackendError, from_allocation_mode, parse
from autotune.launchers.frameworks.areal.config import Config, known
from autotune.policies.remedies.legality import completed, lowest, objections
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.job import Recovery
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import (
    Peak,
    PhaseEnded,
    PhaseStarted,
    Resumed,
    StepDone,
    TrainingDone,
)
from autotune.policies.values.profile import FixedDuringRun, Placement
from autotune.policies.values.remedy import Effect

from .areal_jobs import CLUSTER, COLOCATED, CRITIC, JOBS, REFERENCE, ROOT, SHAPE, job

FRAMEWORK = Areal()
every_job = pytest.mark.parametrize("each", JOBS.values(), ids=JOBS.keys())
# What is trained and from which samples: no remedy may touch any of it.
THE_USERS = (
    "batch_size",
    "n_samples",
    "max_new_tokens",
    "max_tokens",
    "max_length",
    "lr",
    "ppo_n_minibatches",
    "dtype",
    "kv_cache_dtype",
    "kl_ctl",
    "temperature",
    "context_length",
    "total_train_steps",
    "seed",
    "path",
)


def profile(of):
    return FRAMEWORK.profile(of, CLUSTER)


def values(of, name):
    """Legal values of a knob, as a remedy or a search would take them."""
    grid = of.supported[name].grid
    if grid.values:
        return grid.values
    present = getattr(of.knobs, name)
    low = lowest(of, name) or 0
    if isinstance(present, float):
        return (round(low, 2), 0.5, grid.maximum)
    step = int(grid.multiple or 1)
    return tuple(-(-max(low, n) // step) * step for n in (0, present // 2, present * 2))


def changed(of, name, value):
    """The knobs with one of them changed and what must go with it."""
    return msgspec.structs.replace(of.knobs, **completed(of, of.knobs, {name: value}))


def legal_changes(of):
    for name in of.supported:
        for value in values(of, name):
            knobs = changed(of, name, value)
            if not objections(of, of.knobs, knobs, started=False):
                yield name, value, knobs


@every_job
def test_knobs_survive_the_way_to_settings_and_back(each):
    job_profile = profile(each)
    for name, value, knobs in legal_changes(job_profile):
        settings = FRAMEWORK.settings(each, knobs)
        again = msgspec.structs.replace(each, settings={**each.settings, **settings})
        assert profile(again).knobs == knobs, (name, value, settings)
        assert FRAMEWORK.settings(again, knobs) == {}
        assert FRAMEWORK.check(again) == (), (name, value, settings)


@every_job
def test_no_change_touches_what_is_trained(each):
    for _, _, knobs in legal_changes(profile(each)):
        for name in FRAMEWORK.settings(each, knobs):
            assert name in known()
            assert name.rpartition(".")[2] not in THE_USERS


# --------------------------------------------------------------------------- the profile


def test_the_profile_of_the_example():
    job_profile = profile(job())
    assert job_profile.knobs.concurrency == 512  # 256 rollouts of 8 answers on 4 engines
    assert job_profile.knobs.memory_fraction == 0.9
    assert job_profile.knobs.tokens_per_microbatch == 16384
    assert (job_profile.knobs.recompute, job_profile.knobs.sync_mode, job_profile.knobs.allocator) == (
        "off",
        "memory",
        "default",
    )
    assert job_profile.longest_sequence == 1024 + 3072
    assert (job_profile.placement, job_profile.engine, job_profile.engine_version) == (
        Placement.ASYNCHRONOUS,
        "sglang",
        "0.5.10.post1",
    )
    layout = job_profile.layout
    assert (layout.strategy, layout.ranks, layout.shards, layout.engine_ranks) == ("fsdp2", 4, 4, 4)
    assert (layout.sequences, layout.prompt_tokens, layout.response_tokens) == (2048, 1024, 3072)
    assert job_profile.resumable
    assert job_profile.warnings == ()


def test_the_layout_says_how_fsdp_reduces_and_computes_the_loss():
    layout = profile(job()).layout
    assert (
        layout.sequence_parallel
        and layout.reshard_after_forward
        and layout.reshards_root
        and not layout.head_apart
    )
    assert (layout.reduce_bytes, layout.loss) == (4, "pieces")
    assert profile(job(actor__grad_reduce_dtype="bfloat16")).layout.reduce_bytes == 2


def test_a_silent_job_gets_areals_own_defaults():
    knobs = profile(
        job(
            rollout__max_concurrent_rollouts=...,
            sglang__mem_fraction_static=...,
            train_dataset__num_workers=...,
            actor__mb_spec=...,
            actor__weight_update_mode=...,
        )
    ).knobs
    assert knobs.concurrency == 512  # by consumer_batch_size, which refers to the batch
    assert (knobs.memory_fraction, knobs.dataloader_workers, knobs.sync_mode) == (0.9, 0, "memory")
    assert knobs.tokens_per_microbatch == 512 * 4096  # unlimited: all sequences of a data-parallel rank


def test_placement_and_who_is_resident():
    assert profile(job(rollout__max_head_offpolicyness=0)).placement is Placement.SEPARATE
    job_profile = profile(job(**COLOCATED))
    assert job_profile.placement is Placement.COLOCATED
    assert job_profile.layout.engine_sleeps
    assert (
        "rollout" not in job_profile.resident["backward"]
    )  # the engine is asleep: its pool cures nothing there
    assert job_profile.resident["rollout_init"] == (
        "trainer",
        "rollout",
    )  # models leave only once all are built
    assert "sync_mode" in job_profile.unsupported
    assert {"allocator", "host_allocator"} <= set(job_profile.unsupported)


def test_a_budget_may_not_fall_below_the_longest_sequence():
    job_profile = profile(job())
    short = changed(job_profile, "tokens_per_microbatch", 2048)
    assert "is larger than capacity" in objections(job_profile, job_profile.knobs, short, started=False)[0]
    wide = profile(job(actor__backend="fsdp:d2c2"))
    assert lowest(wide, "tokens_per_microbatch") == 4096  # counted before a sequence is split


def test_without_a_prompt_limit_only_the_engines_context_bounds_a_sequence():
    for each in (job(train_dataset__max_length=None), job(workflow={"max_turns": 4})):
        job_profile = profile(each)
        assert job_profile.longest_sequence == 8192
        assert any("longest sequence" in warning for warning in job_profile.warnings)
        assert not FRAMEWORK.can_force_longest(each)
    assert FRAMEWORK.can_force_longest(job())


@pytest.mark.parametrize(("heads", "legal"), [(40, (1, 2, 4, 8)), (28, (1, 2, 4)), (64, (1, 2, 4, 8, 16))])
def test_sequences_split_only_as_far_as_the_heads_do(heads, legal):
    shape = msgspec.structs.replace(SHAPE, heads=heads, kv_heads=8 if heads != 28 else 4)
    each = job(how={"shape": shape}, actor__backend="fsdp:d16", cluster__n_nodes=4)
    job_profile = profile(each)
    assert job_profile.supported["sequence_parallel"].grid.values == legal
    assert objections(
        job_profile, job_profile.knobs, changed(job_profile, "sequence_parallel", 32), started=False
    )


def test_what_a_recover_checkpoint_depends_on_is_fixed_during_a_run():
    job_profile = profile(job())
    fixed = {c.knob for c in job_profile.constraints if isinstance(c, FixedDuringRun)}
    assert fixed == {"tensor_parallel", "sequence_parallel"}
    split = changed(job_profile, "sequence_parallel", 2)
    assert objections(job_profile, job_profile.knobs, split, started=False) == ()
    assert objections(job_profile, job_profile.knobs, split, started=True)
    engine = changed(job_profile, "rollout_tensor_parallel", 2)
    assert objections(job_profile, job_profile.knobs, engine, started=True) == ()


def test_devices_stay_the_same_however_they_are_split():
    job_profile = profile(job())
    settings = FRAMEWORK.settings(job(), changed(job_profile, "rollout_tensor_parallel", 2))
    # Half as many engines would get twice the requests each: they keep what they had.
    assert settings == {"rollout.backend": "sglang:d2t2", "sglang.max_running_requests": 512}
    both = msgspec.structs.replace(job_profile.knobs, sequence_parallel=4, tensor_parallel=4)
    assert objections(job_profile, job_profile.knobs, both, started=False)


@pytest.mark.parametrize(
    ("settings", "key", "before"),
    [
        ({}, "sglang.max_running_requests", 512),
        ({"sglang.max_running_requests": 100}, "sglang.max_running_requests", 100),
        ({"rollout.backend": "vllm:d4"}, "vllm.max_num_seqs", 256),
    ],
)
def test_the_limit_of_requests_is_the_engines_own_and_exact(settings, key, before):
    each = job(settings)
    job_profile = profile(each)
    support = job_profile.supported["concurrency"]
    assert (job_profile.knobs.concurrency, support.setting, support.effect) == (before, key, Effect.EXACT)
    assert FRAMEWORK.settings(each, changed(job_profile, "concurrency", 64)) == {key: 64}


@pytest.mark.parametrize(
    ("version", "is_known"), [("2.0.0", False), ("1.1.0", True), (None, True), ("main", True)]
)
def test_nothing_of_areal_1_is_assumed_of_areal_2(version, is_known):
    problems = FRAMEWORK.check(msgspec.structs.replace(job(), framework_version=version))
    assert (problems == ()) == is_known
    assert is_known or (
        "nothing is known of AReaL 2.0.0" in problems[0].message and "command" in problems[0].hint
    )


def test_too_few_rollouts_would_not_hold_a_batch():
    mistakes = FRAMEWORK.check(job({"rollout.max_concurrent_rollouts": 8}))
    assert [p.path for p in mistakes] == [("settings", "rollout.max_concurrent_rollouts")]


def test_offloaded_weights_take_the_optimizer_along():
    job_profile = profile(job())
    alone = msgspec.structs.replace(job_profile.knobs, param_offload=True)
    assert objections(job_profile, job_profile.knobs, alone, started=False)
    assert FRAMEWORK.settings(job(), changed(job_profile, "param_offload", True)) == {
        "actor.fsdp.offload_params": True,
        "actor.fsdp.per_layer_optim_step": True,
    }
    assert job_profile.supported["optimizer_offload"].effect is Effect.NUMERIC
    assert "optimizer_offload" in profile(job(actor__optimizer__type="sgd")).unsupported


def test_every_model_of_fsdp_is_loaded_on_the_host_together():
    own = profile(job({}, **REFERENCE, actor__kl_ctl=0.01))
    assert own.layout.loads_whole
    assert own.knobs.memory_efficient_load is False
    assert own.supported["memory_efficient_load"].effect is Effect.EXACT
    written = FRAMEWORK.settings(job({}, **REFERENCE, actor__kl_ctl=0.01), Knobs(memory_efficient_load=True))
    assert written == {"actor.fsdp.memory_efficient_load": True, "ref.fsdp.memory_efficient_load": True}
    half = {"actor.fsdp.memory_efficient_load": True}
    assert profile(job(half, **REFERENCE, actor__kl_ctl=0.01)).knobs.memory_efficient_load is False
    assert profile(job(half)).knobs.memory_efficient_load is True
    assert (
        "init_from_scratch"
        in profile(job({"actor.init_from_scratch": True})).unsupported["memory_efficient_load"]
    )
    megatron = profile(job({"actor.backend": "megatron:d4"}))
    assert not megatron.layout.loads_whole
    assert "memory_efficient_load" in megatron.unsupported


@pytest.mark.parametrize(
    ("settings", "parameter", "gradient", "optimizer"),
    [
        ({}, 4, 4, 8),
        ({"actor.optimizer_dtype": "bfloat16"}, 2, 2, 4),
        ({"actor.optimizer_dtype": "bfloat16", "actor.optimizer.type": "adam_bf16"}, 2, 2, 6),
        ({"actor.optimizer.type": "sgd"}, 4, 4, 0),
        ({"actor.backend": "megatron:d4"}, 2, 4, 12),
        ({"actor.backend": "megatron:d4", "actor.optimizer.type": "sgd"}, 2, 4, 8),
        ({"actor.backend": "megatron:d4", "actor.optimizer.type": "adam_bf16"}, 2, 4, 6),
        ({"actor.backend": "megatron:d4", "actor.megatron.ddp.grad_reduce_in_fp32": False}, 2, 2, 12),
        (
            {
                "actor.backend": "megatron:d4",
                "actor.megatron.use_precision_aware_optimizer": True,
                "actor.megatron.exp_avg_sq_dtype": "bfloat16",
            },
            2,
            4,
            8,
        ),
    ],
)
def test_types_of_gradients_and_moments_come_from_the_settings(settings, parameter, gradient, optimizer):
    layout = profile(job(settings)).layout
    assert (layout.parameter_bytes, layout.gradient_bytes, layout.optimizer_bytes) == (
        parameter,
        gradient,
        optimizer,
    )


def test_roles_that_share_a_phase_follow_the_actors_budget():
    each = job(**CRITIC, **REFERENCE, actor__kl_ctl=0.01)
    knobs = msgspec.structs.replace(profile(each).knobs, tokens_per_microbatch=8192, recompute="full")
    settings = FRAMEWORK.settings(each, knobs)
    for role in ("actor", "critic", "ref"):
        assert settings[f"{role}.mb_spec.max_tokens_per_mb"] == 8192
    assert settings["critic.gradient_checkpointing"] is True
    apart = JOBS["reference alone scores"]
    assert profile(apart).supported["logprob_tokens"].setting == "ref.mb_spec.max_tokens_per_mb"
    assert "ref.mb_spec.max_tokens_per_mb" not in FRAMEWORK.settings(apart, Knobs(tokens_per_microbatch=8192))


def test_the_trainers_allocator_does_not_reach_the_engine():
    settings = FRAMEWORK.settings(job(), Knobs(allocator="expandable"))
    (trainer,), (engine,) = settings["actor.scheduling_spec"], settings["rollout.scheduling_spec"]
    assert trainer["env_vars"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert trainer["gpu"] == 1
    assert engine["env_vars"] == {}
    both = FRAMEWORK.settings(job(), Knobs(allocator="expandable", host_allocator="jemalloc"))
    assert both["actor.scheduling_spec"][0]["env_vars"] == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "LD_PRELOAD": "libjemalloc.so.2",
    }
    swapped = job(actor__scheduling_spec="${rollout.scheduling_spec}", rollout__scheduling_spec=[{"gpu": 1}])
    assert FRAMEWORK.settings(swapped, Knobs(host_allocator="tcmalloc")) == {
        "actor.scheduling_spec": [{"gpu": 1, "env_vars": {"LD_PRELOAD": "libtcmalloc.so.4"}}]
    }


def test_what_refers_to_a_changed_setting_stays_as_it_is():
    each = job(
        {"sglang.max_running_requests": 256}, train_dataset__batch_size="${sglang.max_running_requests}"
    )
    assert FRAMEWORK.settings(each, Knobs(concurrency=128)) == {
        "sglang.max_running_requests": 128,
        "train_dataset.batch_size": 256,
        "rollout.consumer_batch_size": 256,
    }
    critic = job(**{**CRITIC, "critic": {**CRITIC["critic"], "backend": "${actor.backend}"}})
    assert FRAMEWORK.settings(critic, Knobs(tensor_parallel=2)) == {"actor.backend": "fsdp:d2t2"}


def test_a_profile_of_memory_is_switched_off_whole():
    each = job(memory_profiler={"profile_steps": [0, 1]})
    assert profile(each).knobs.memory_profile is True
    assert FRAMEWORK.settings(each, Knobs(memory_profile=False)) == {"memory_profiler": None}
    assert FRAMEWORK.settings(job(), Knobs(memory_profile=True)) == {
        "memory_profiler": {"profile_steps": [0, 1]}
    }


def test_megatrons_distributed_optimizer_stays_on() -> None:
    switch = "actor.megatron.ddp.use_distributed_optimizer"
    off = job({"actor.backend": "megatron:d4", switch: False})
    assert [p.path for p in Areal().check(off) if "asserts" in p.message] == [("settings", switch)]
    warnings = profile(JOBS["megatron"]).warnings
    assert any("recover.no_save_optim" in text and switch not in text for text in warnings)
    adapters = profile(job({"actor.backend": "megatron:d4", "actor.use_lora": True}))
    assert any("cannot save Megatron's adapters" in text for text in adapters.warnings)


def test_megatron_recomputes_a_dense_model_selectively_or_in_full():
    each = JOBS["megatron"]
    assert profile(each).supported["recompute"].grid.values == ("off", "selective", "full")
    assert FRAMEWORK.settings(each, Knobs(recompute="selective")) == {
        "actor.gradient_checkpointing": True,
        "actor.megatron.recompute_granularity": "selective",
        "actor.megatron.recompute_method": None,
        "actor.megatron.recompute_num_layers": None,
    }


# --------------------------------------------------------------------------- backends


def test_an_old_allocation_mode_is_translated():
    each = JOBS["old allocation mode"]
    job_profile = profile(each)
    assert (job_profile.knobs.rollout_tensor_parallel, job_profile.knobs.sequence_parallel) == (1, 2)
    assert any("rollout.backend=sglang:d4 and actor.backend=fsdp:d2c2" in w for w in job_profile.warnings)
    argv = FRAMEWORK.command(each, job_profile.knobs, run="7c1e", attempt=1, resume=False).argv
    assert {"++rollout.backend=sglang:d4", "++actor.backend=fsdp:d2c2"} <= set(argv)


def test_allocation_modes():
    rollout, actor, shared = from_allocation_mode("sglang[rollout]:d8p1t1|fsdp[actor]:d8p1t1")
    assert (rollout.ranks, actor.ranks, shared) == (8, 8, True)
    rollout, actor, shared = from_allocation_mode("sglang:d2t2 + megatron:(attn:d2t2|ffn:d2e2)")
    assert (rollout.tensor, actor.expert, shared) == (2, 2, False)
    assert str(actor) == "megatron:(attn:d2t2|ffn:d2e2)"


@pytest.mark.parametrize(
    ("mode", "rollout", "actor"),
    [
        ("sglang:d4+d4", "sglang:d4", "fsdp:d4"),
        ("sglang.d4p1t1+d4p1t1", "sglang:d4", "fsdp:d4"),
        ("vllm:d2t2+d2p2", "vllm:d2t2", "megatron:d2p2"),
        ("sglang[rollout]:d4+[actor]:d2t2", "sglang:d4", "fsdp:d2t2"),
        ("sglang:d4+attn:d2t2|ffn:d2e2", "sglang:d4", "megatron:(attn:d2t2|ffn:d2e2)"),
    ],
)
def test_a_trainer_of_an_allocation_mode_may_lack_its_engine(mode: str, rollout: str, actor: str) -> None:
    result = from_allocation_mode(mode)
    assert (str(result[0]), str(result[1]), result[2]) == (rollout, actor, False)


@pytest.mark.parametrize(("version", "wrong"), [(None, False), ("1.0.4", True)])
def test_a_backend_of_0_3_names_its_engine_alone(version: str | None, wrong: bool) -> None:
    older = JOBS["old allocation mode"]
    own = msgspec.structs.replace(
        older, settings={**older.settings, "actor.backend": "fsdp"}, framework_version=version
    )
    assert any("a backend is" in problem.message for problem in FRAMEWORK.check(own)) is wrong


@pytest.mark.parametrize(
    "wrong",
    [
        "d4",
        "[actor]:d4",
        "fsdp.d4",
        "fsdp:d2p2",
        "fsdp:d4e2",
        "sglang:d4c2",
        "fsdp:d4+sglang:d4",
        "fsdp:d0",
        "FSDP:d4",
    ],
)
def test_backends_that_areal_refuses(wrong):
    with pytest.raises(BackendError):
        parse(wrong)
    place = "actor" if "sglang:" not in wrong[:7] else "rollout"
    assert any(
        p.path == ("settings", f"{place}.backend") for p in FRAMEWORK.check(job({f"{place}.backend": wrong}))
    )


# --------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"max_concurrent_rollouts": 200}, "write rollout.max_concurrent_rollouts"),
        ({"actor.mb_spec.max_token_per_mb": 4096}, "did you mean `actor.mb_spec.max_tokens_per_mb`?"),
        ({"sglang.mem_fraction": 0.8}, "did you mean `sglang.mem_fraction_static`?"),
        ({"actor.weight_chunked_mem_mb": 512}, "actor.weight_update_mode=disk needs no such buffer"),
        ({"++actor.fsdp.cpu_offload": True}, ""),
    ],
)
def test_unknown_settings_are_named_with_what_was_meant(settings, hint):
    (problem,) = FRAMEWORK.check(job(settings))
    assert problem.path == ("settings", next(iter(settings)))
    assert "unknown setting" in problem.message
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("settings", "document"),
    [({"rewards.scale": 2}, {}), ({"actor.zigzag": 2}, {}), ({}, {"rewards": {"scale": 2}})],
)
def test_a_setting_that_only_the_script_may_know_is_passed_on_and_told(settings, document):
    given = job(settings)
    given = msgspec.structs.replace(given, document={**given.document, **document})
    assert FRAMEWORK.check(given) == ()
    (warning,) = (each for each in FRAMEWORK.profile(given, CLUSTER).warnings if "passed on" in each)
    name = next(iter(settings or document))
    assert f"areal 1.0.4 does not have the setting {name}; it is passed on" in warning


@pytest.mark.parametrize(
    "document",
    [
        {"actor": "${actor.backend}"},
        {"a": "${b}", "b": "${a}", "actor": {"path": "${a}", "backend": "${b}"}},
        {"a": "${a}${a}", "actor": {"path": "${a}x", "backend": "${a}"}},
    ],
)
def test_references_in_a_circle_are_a_mistake_and_no_crash(document):
    each = job(how={"document": document})
    assert any("`actor.backend`" in problem.message for problem in FRAMEWORK.check(each))
    assert profile(each).longest_sequence == 32768


def test_a_reference_fills_in_another_value():
    each = job({"ref": "${actor}", "actor.kl_ctl": 0.1, "sglang.model_path": "${actor.path}/own"})
    assert profile(each).layout.reference
    trained = Config(each)
    assert trained.get("ref.mb_spec.max_tokens_per_mb") == 16384
    assert trained.get("sglang.model_path") == "Qwen/Qwen2.5-7B-Instruct/own"
    assert trained.get("sglang.dtype") == "bfloat16"
    assert trained.reference("ref") == "actor" and trained.reference("ref.path") is None


def test_a_section_is_removed_with_null_and_not_with_hydras_tilde():
    (problem,) = FRAMEWORK.check(job({"~ref": None}))
    assert problem.hint == "null removes a section"
    assert FRAMEWORK.check(job({"ref": None})) == ()


def test_mistakes_in_the_yaml_are_found_too():
    (problem,) = FRAMEWORK.check(job(actor__mb_spec={"max_tokens": 1}))
    assert problem.path == ("config", "actor", "mb_spec", "max_tokens")
    assert problem.hint == "did you mean `actor.mb_spec.max_tokens_per_mb`?"
    assert (
        FRAMEWORK.check(job(workflow={"tools": ["python"]})) == ()
    )  # a script may bring settings of its own


@pytest.mark.parametrize(
    "settings",
    [
        {"actor.weight_update_mode": "nccl"},
        {"scheduler.type": "slurm"},
        {"scheduler.type": "kubernetes"},
        {"rollout.max_concurrent_rollouts": "many"},
        {"actor.gradient_checkpointing": 2},
        {"recover.mode": "resume"},
        {"actor.backend": "sglang:d4"},
        {"rollout.backend": "sglang:d8"},  # with the trainer's four: more than the eight devices
        {"actor.offload": True},
        {"rollout.scheduling_strategy.type": "colocation", "rollout.scheduling_strategy.target": "actor"},
    ],
)
def test_what_areal_would_only_say_once_the_models_are_loaded(settings):
    assert FRAMEWORK.check(job(settings))


def test_a_job_without_script_file_or_names():
    bare = job(how={"command": (), "config": None})
    assert {p.path for p in FRAMEWORK.check(bare)} == {("command",), ("config",)}
    missing = FRAMEWORK.check(job(trial_name=..., rollout__backend=...))
    assert {p.message for p in missing} == {"`trial_name` is missing", "`rollout.backend` is missing"}


# --------------------------------------------------------------------------- the command


def argv_of(each, *, attempt=1, resume=False, knobs=None):
    return FRAMEWORK.command(each, knobs or profile(each).knobs, run="7c1e", attempt=attempt, resume=resume)


def test_a_command_is_the_script_its_yaml_and_the_overrides():
    command = argv_of(job({"total_train_epochs": 5}), knobs=Knobs(tokens_per_microbatch=8192))
    assert command.argv[:4] == ("{python}", "examples/math/gsm8k_rl.py", "--config", "gsm8k.yaml")
    assert "++total_train_epochs=5" in command.argv
    assert command.argv[-1] == "++actor.mb_spec.max_tokens_per_mb=8192"
    assert (command.cwd, command.ray_native) == ("/home/me/AReaL", True)


def test_no_attempt_continues_the_checkpoint_of_another_run():
    first = argv_of(job()).argv
    assert first == argv_of(job(), attempt=2, resume=True).argv
    assert "++recover.fileroot=/data/areal/autotune/7c1e" in first
    own = argv_of(job(how={"resume": True})).argv
    assert not any(word.startswith("++recover.fileroot") for word in own)


def test_a_job_without_checkpoints_gets_them_and_no_blind_retries():
    each = job(recover__mode="disabled", recover__freq_steps=...)
    argv = argv_of(each).argv
    assert {"++recover.mode='on'", "++recover.freq_secs=1200", "++recover.retries=0"} <= set(argv)
    assert len(profile(each).warnings) == 2
    often = job(how={"recovery": Recovery(save_every=3)}, recover__freq_steps=...)
    assert "++recover.freq_steps=3" in argv_of(often).argv
    refused = job({"recover.mode": "disabled"})
    assert not profile(refused).resumable
    assert not any("recover.fileroot" in word for word in argv_of(refused).argv)
    assert not profile(job({"actor._version": "v2", "rollout._version": "v2"})).resumable


def test_a_script_may_add_sections_of_its_own():
    """AReaL's tau2 recipes have an `econfig` beside `gconfig`; alone it would be a misspelt `gconfig`."""
    own = job(econfig={"domain": "airline"})
    assert Areal().check(own) == ()
    assert Areal().check(job({"econfig.domain": "retail"}, econfig={"domain": "airline"})) == ()
    lost = {**own.document}
    del lost["gconfig"]
    result = Areal().check(msgspec.structs.replace(own, document=lost))
    assert any("unknown setting `econfig`" in problem.message for problem in result)


def test_a_logger_goes_on_with_its_own_run():
    assert "++stats_logger.wandb.id_suffix='7c1e'" in argv_of(job()).argv
    named = job(stats_logger__wandb__id_suffix="mine")
    assert not any("id_suffix" in word for word in argv_of(named).argv)
    assert (
        "++stats_logger.wandb.id_suffix='7c1e'"
        in argv_of(job({"stats_logger.wandb.id_suffix": "timestamp"})).argv
    )


def test_swanlab_goes_on_too():
    assert argv_of(job()).env == {}
    command = argv_of(job(stats_logger__swanlab={"mode": "cloud"}, how={"env": {"HF_HOME": "/hf"}}))
    assert command.env == {
        "SWANLAB_RUN_ID": "autotune7c1e000000000",
        "SWANLAB_RESUME": "allow",
        "HF_HOME": "/hf",
    }


@pytest.mark.parametrize(
    ("kind", "words", "native"),
    [
        ("ray", (), True),
        ("local", (), False),
        (None, ("++scheduler.type=ray",), True),
    ],
)
def test_the_scheduler_says_who_holds_the_devices(kind, words, native):
    command = argv_of(job(scheduler__type=kind))
    assert set(words) <= set(command.argv)
    assert command.ray_native is native


def test_the_old_launchers_read_an_allocation_mode():
    command = ("python3", "-m", "areal.infra.launcher.local", "train.py")
    each = job(how={"command": command}, scheduler=...)
    rendered = argv_of(each, knobs=Knobs(rollout_tensor_parallel=2))
    assert "++allocation_mode=sglang:d2t2+fsdp:d4" in rendered.argv
    assert not any("scheduler" in word for word in rendered.argv)
    assert rendered.ray_native is False


def test_a_launcher_of_an_earlier_release_gets_only_settings_that_it_has():
    command = ("python3", "-m", "areal.launcher.local", "train.py")
    mode = {"allocation_mode": "sglang:d4+fsdp:d4"}
    how = {"command": command, "framework_version": None}
    each = job(mode, how=how, scheduler=..., recover=...)
    rendered = argv_of(each)
    added = [word.partition("=")[0] for word in rendered.argv if word.startswith("++")]
    assert not any("scheduler" in name or name.endswith(".backend") for name in added)
    assert "++recover.mode=auto" in rendered.argv
    assert rendered.ray_native is False
    assert [fact.is_open for fact in profile(each).facts if fact.name == "release"] == [True]
    notes = [*FRAMEWORK.warnings(Config(each))]
    assert any("recover.mode=auto is added" in note for note in notes)
    assert not any("scheduler.type" in note or "deprecated" in note for note in notes)


def test_a_trial_has_names_and_folders_of_its_own_and_leaves_no_trace():
    each = FRAMEWORK.trial(job({"trial_name": "t"}), folder="/runs/7c1e/trials/3", steps=4, longest=True)
    argv = argv_of(each).argv
    assert "++total_train_steps=4" in argv
    assert "++gconfig.ignore_eos=true" in argv
    assert "++cluster.fileroot=/runs/7c1e/trials/3" in argv
    assert "++stats_logger.wandb.mode=disabled" in argv
    assert "++recover.mode=disabled" in argv
    assert "++saver.freq_epochs=null" in argv
    assert "++trial_name=autotuneruns7c1etrials3" in argv
    assert not any("recover.fileroot" in word for word in argv)
    literal = FRAMEWORK.trial(job(saver__fileroot="/data/mine"), folder="/f", steps=1, longest=False)
    assert literal.settings["saver.fileroot"] == "/f"
    assert FRAMEWORK.check(each) == ()


def test_words_are_hydras():
    assert FRAMEWORK.words(
        {
            "a.b": True,
            "c": None,
            "d": "on",
            "e": "fsdp:d4t2",
            "f": "it's two words",
            "g": ["x", 1],
            "h": {"k": "v=1"},
            "i": 1e-05,
            "j": "${actor.path}",
            "k": "a\\b c",
        }
    ) == (
        "++a.b=true",
        "++c=null",
        "++d='on'",
        "++e=fsdp:d4t2",
        "++f='it\\'s two words'",
        "++g=[x,1]",
        "++h={k:'v=1'}",
        "++i=1e-05",
        "++j=${actor.path}",
        "++k='a\\b c'",
    )


def test_settings_are_read_from_a_command_line_in_a_log():
    text = (
        "+ python examples/math/gsm8k_rl.py --config gsm8k.yaml ++actor.mb_spec.max_tokens_per_mb=8192 "
        "rollout.backend=sglang:d4 +memory_profiler.profile_steps=[0,1] no.such=1 recover.mode=on "
        "total_train_epochs=3 actor.optimizer.lr=1e-06 'actor.scheduling_spec=[{gpu:1,env_vars:{A:x}}]'\n"
        "it's --config without a value a.b=c\n"
    )
    assert FRAMEWORK.printed(text) == {
        "actor.mb_spec.max_tokens_per_mb": 8192,
        "rollout.backend": "sglang:d4",
        "memory_profiler.profile_steps": [0, 1],
        "recover.mode": "on",
        "total_train_epochs": 3,
        "actor.optimizer.lr": 1e-06,
        "actor.scheduling_spec": [{"gpu": 1, "env_vars": {"A": "x"}}],
    }


def test_the_model_is_the_actors():
    assert FRAMEWORK.model_path(job()) == "Qwen/Qwen2.5-7B-Instruct"
    assert FRAMEWORK.model_path(job({"actor.path": "/models/mine"})) == "/models/mine"
    assert FRAMEWORK.model_path(job(how={"document": {}})) is None


# --------------------------------------------------------------------------- the guide and the log


def test_the_guides_remedies_are_all_judged():
    text = " ".join(f"{a.setting} {a.instead}" for a in FRAMEWORK.advice)
    for named in (
        "allocation_mode",
        "train_dataset.max_length",
        "gconfig.max_new_tokens",
        "max_tokens_per_mb",
        "max_concurrent_rollouts",
        "mem_fraction_static",
        "train_dataset.batch_size",
        "fsdp:d2c2",
        "from_disk",
        "weight_chunked_mem_mb",
        "llm_server.log",
        "FSDP sharding",
    ):
        assert named in text
    for advice in FRAMEWORK.advice:
        assert advice.reason
        assert advice.phase == "any" or advice.phase in tuple(Phase)
        if advice.status is Status.REPLACED:
            assert advice.instead


def test_presets_and_examples_are_jobs_that_pass_the_check():
    for name, settings in FRAMEWORK.presets.items():
        assert FRAMEWORK.check(job(dict(settings))) == (), name
    for path in sorted((ROOT / "configs").glob("areal-*.yaml")):
        written = yaml.safe_load(path.read_text())
        each = job(written["settings"], how={"command": tuple(written["command"])})
        assert FRAMEWORK.check(each) == ()
        assert written["config"] == "configs/areal/gsm8k.yaml"
        assert written["model"] == {k: getattr(SHAPE, k) for k in written["model"]}


GIB = 1 << 30
HEAD = "\x1b[1;38;2;180;140;80m(AReaL)\x1b[0m \x1b[92m20260822-10:01:07.512 "


@pytest.mark.parametrize(
    ("line", "marker"),
    [
        (
            HEAD + "StatsLogger INFO: Epoch 1/10 Step 3/29 Train step 3/290 done.\x1b[0m",
            StepDone(step=3, of=290),
        ),
        (
            (
                "(RayRPCServer pid=71) (AReaL) 20260822-10:01:07.512 StatsLogger INFO: "
                "Epoch 2/10 Step 1/29 Train step 30/290 done."
            ),
            StepDone(step=30, of=290),
        ),
        (
            HEAD + "Recover INFO: Recovering from StepInfo(epoch=0, epoch_step=20, global_step=20, "
            "steps_per_epoch=29).\x1b[0m",
            Resumed(step=20),
        ),
        (
            HEAD
            + "IOStruct INFO: Memory-Usage ppo update: memory allocated (GB): 28.40, memory reserved (GB): "
            "70.15, device memory used/total (GB): 70.00/79.00\x1b[0m",
            PhaseEnded(
                phase=Phase.BACKWARD,
                step=0,
                seconds=0.0,
                peak=Peak(used_bytes=70 * GIB, capacity_bytes=79 * GIB, upper_bound=True),
            ),
        ),
        (
            (
                "IOStruct INFO: Memory-Usage ref logp: memory allocated (GB): 1.00, memory reserved (GB): "
                "2.00, device memory used/total (GB): 3.00/4.00"
            ),
            PhaseEnded(
                phase=Phase.LOG_PROB,
                step=0,
                seconds=0.0,
                peak=Peak(
                    used_bytes=3 * GIB, capacity_bytes=4 * GIB, component=Component.REF, upper_bound=True
                ),
            ),
        ),
        (
            "IOStruct INFO: Memory-Usage before model creation/loading: memory allocated (GB): 0.00, ",
            PhaseStarted(phase=Phase.INIT, step=0),
        ),
        ("RemoteInfEngine INFO: Waiting for server ready...", PhaseStarted(phase=Phase.ROLLOUT_INIT, step=0)),
        (
            "RemoteInfEngine INFO: Servers are all ready!",
            PhaseEnded(phase=Phase.ROLLOUT_INIT, step=0, seconds=0.0),
        ),
        ("StatsLogger INFO: Training completes! Total time elapsed 412.44.", TrainingDone(step=0)),
        ("IOStruct INFO: Memory-Usage compute advantages: memory allocated (GB): 1.00", None),
        ("Epoch 1/10 Step 3/29 Train step 3/", None),
        ("a server of somebody else", None),
        # Torn and overwritten lines: no number, or one that no run has.
        ("│ ppo_actor/update/n_tokens │ 1.2.3 │", None),
        (f"Epoch 1/1 Step 1/1 Train step {'9' * 5000}/{'9' * 5000} done.", None),
        (
            (
                "Memory-Usage ppo update: memory allocated (GB): 1.0, memory reserved (GB): 2.0, "
                "device memory used/total (GB): ../79.0"
            ),
            None,
        ),
        (  # of a processor, which it does not measure
            (
                "Memory-Usage recompute logp: memory allocated (GB): 0.00, memory reserved (GB): 0.00, "
                "device memory used/total (GB): 0.00/0.00"
            ),
            PhaseEnded(phase=Phase.LOG_PROB, step=0, seconds=0.0),
        ),
    ],
)
def test_lines_of_the_log(line, marker):
    assert FRAMEWORK.marker(line) == marker


def test_the_table_of_settings_is_a_tree():
    facts = known()
    assert facts.kind_of("actor.mb_spec.max_tokens_per_mb") == "int?"
    assert facts.kind_of("train_dataset.dataset_kwargs.anything") == "any"
    assert facts.kind_of("actor.mb_spec") == "section"
    assert facts.kind_of("actor.mb_spec.max_tokens") is None
    assert "actor.mb_spec" in facts and "actor.mb_spec.max_tokens" not in facts
    assert len(facts.kinds) > 1000 and facts.kinds.keys() > facts.types.keys()


def test_numbers_and_truths_may_be_written_as_texts() -> None:
    texts = {
        "sglang.mem_fraction_static": "0.92",
        "actor.mb_spec.max_tokens_per_mb": "32768",
        "actor.gradient_checkpointing": "true",
    }
    knobs = profile(job(texts)).knobs
    assert (knobs.memory_fraction, knobs.tokens_per_microbatch, knobs.recompute) == (0.92, 32768, "full")
    assert not FRAMEWORK.settings(job(texts), knobs)
