"""OpenRLHF: knobs both ways, legality, checkpoints, trials, its lines and its first remedies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.launchers.frameworks.dialects.flag_facts import flag_facts
from autotune.launchers.frameworks.openrlhf.adapter import OpenRlhf
from autotune.orchestrator.config.loader import parse
from autotune.policies.remedies.legality import objections
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import ClusterSpec, Job
from autotune.policies.values.knobs import KNOBS, Knobs
from autotune.policies.values.observation import PhaseEnded, PhaseStarted, Resumed, Saved, StepDone
from autotune.policies.values.profile import Placement
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.remedy import Effect

from .megatron_replay import CLUSTER, cure
from .test_megatron_rl import values_of

OPENRLHF = OpenRlhf()
NEVER = {  # what is trained: no remedy may write it
    "train.batch_size",
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "rollout.max_new_tokens",
    "data.max_len",
    "data.max_samples",
    "train.dynamic_batch_enable",
    "actor.adam.lr",
}
PACKED: dict[str, Any] = {
    "actor.model_name_or_path": "Qwen/Qwen3-4B",
    "train.agent_func_path": "agent.py",
    "algo.advantage.estimator": "reinforce_baseline",
    "data.max_len": 8192,
    "rollout.max_new_tokens": 7168,
    "rollout.batch_size": 128,
    "rollout.n_samples_per_prompt": 8,
    "train.batch_size": 1024,
    "train.dynamic_batch_enable": True,
    "train.max_tokens_per_gpu": 16384,
    "train.colocate_all": True,
    "vllm.num_engines": 4,
    "vllm.tensor_parallel_size": 2,
    "vllm.gpu_memory_utilization": 0.8,
    "vllm.enable_sleep": True,
    "ds.zero_stage": 3,
}
COUNTED = {
    **PACKED,
    "train.dynamic_batch_enable": False,
    "train.micro_batch_size": 4,
    "rollout.micro_batch_size": 8,
}
APART = {
    **PACKED,
    "train.colocate_all": False,
    "vllm.enable_sleep": False,
    "actor.num_gpus_per_node": 4,
    "ds.zero_stage": 2,
    "vllm.num_engines": 2,
    "ds.adam_offload": True,
}
BEFORE_0_10: dict[str, Any] = {  # COUNTED in the names of 0.9
    "pretrain": "Qwen/Qwen3-4B",
    "agent_func_path": "agent.py",
    "advantage_estimator": "reinforce_baseline",
    "max_len": 8192,
    "max_new_tokens": 7168,
    "rollout_batch_size": 128,
    "n_samples_per_prompt": 8,
    "train_batch_size": 1024,
    "micro_train_batch_size": 4,
    "micro_rollout_batch_size": 8,
    "colocate_all_models": True,
    "vllm_num_engines": 4,
    "vllm_tensor_parallel_size": 2,
    "vllm_gpu_memory_utilization": 0.8,
    "vllm_enable_sleep": True,
    "zero_stage": 3,
}
JOBS = {
    "before 0.10": BEFORE_0_10,
    "packed": PACKED,
    "counted": COUNTED,
    "apart": APART,
    "dashed": {f"--{name}": value for name, value in PACKED.items()},
}
EACH = pytest.mark.parametrize("settings", JOBS.values(), ids=JOBS.keys())


def job(settings: dict[str, Any] | None = None, **fields: Any) -> Job:
    spec = ClusterSpec(gpus_per_node=8, gpu_memory_bytes=80 << 30)
    values = {"name": "q3", "workdir": "/home/me", "cluster": spec, **fields}
    return Job(framework="openrlhf", settings=PACKED if settings is None else settings, **values)


@EACH
def test_every_offered_value_comes_back_and_is_legal(settings: dict[str, Any]) -> None:
    written = job(settings)
    profile = OPENRLHF.profile(written, CLUSTER)
    assert OPENRLHF.check(written) == ()
    assert OPENRLHF.settings(written, profile.knobs) == {}
    assert set(profile.supported) | set(profile.unsupported) == set(KNOBS)
    assert not set(profile.supported) & set(profile.unsupported)
    for knob, support in profile.supported.items():
        for value in values_of(support.grid, getattr(profile.knobs, knob)):
            wanted = msgspec.structs.replace(profile.knobs, **{knob: value})
            changes = OPENRLHF.settings(written, wanted)
            changed = msgspec.structs.replace(written, settings={**settings, **changes})
            assert getattr(OPENRLHF.profile(changed, CLUSTER).knobs, knob) == value, (knob, changes)
            assert not {name.lstrip("-") for name in changes} & NEVER
            if not objections(profile, profile.knobs, wanted, started=False):
                assert OPENRLHF.check(changed) == (), (knob, value, changes)


def test_engines_keep_their_cards_when_they_grow() -> None:
    assert OPENRLHF.settings(job(), Knobs(rollout_tensor_parallel=4)) == {
        "vllm.tensor_parallel_size": 4,
        "vllm.num_engines": 2,
    }


def test_the_scoring_count_keeps_its_ratio_to_the_training_count_and_is_never_raised() -> None:
    assert OPENRLHF.profile(job(COUNTED), CLUSTER).layout.scored_sequences == 2.0
    assert OPENRLHF.settings(job(COUNTED), Knobs(microbatch_size=2)) == {
        "train.micro_batch_size": 2,
        "rollout.micro_batch_size": 4,
    }
    alone = {**COUNTED, "rollout.micro_batch_size": 1}
    assert OPENRLHF.settings(job(alone), Knobs(microbatch_size=2)) == {"train.micro_batch_size": 2}


def test_the_longest_sequence_bounds_the_budget() -> None:
    split = {**APART, "ds.tensor_parallel_size": 2}
    for settings, floor in ((PACKED, 8192), (split, 4096)):
        profile = OPENRLHF.profile(job(settings), CLUSTER)
        short = msgspec.structs.replace(profile.knobs, tokens_per_microbatch=floor - 64)
        assert any(
            f"below {floor}" in text for text in objections(profile, profile.knobs, short, started=False)
        )
        fits = msgspec.structs.replace(profile.knobs, tokens_per_microbatch=floor)
        assert not objections(profile, profile.knobs, fits, started=False)


def test_what_a_checkpoint_fixes_and_what_only_rounds() -> None:
    profile = OPENRLHF.profile(job(), CLUSTER)
    offloaded = msgspec.structs.replace(profile.knobs, optimizer_offload=True)
    assert not objections(profile, profile.knobs, offloaded, started=False)
    assert "during a run" in objections(profile, profile.knobs, offloaded, started=True)[0]
    assert profile.supported["optimizer_offload"].effect is Effect.NUMERIC
    assert profile.supported["recompute"].effect is Effect.EXACT


def test_placement_and_who_is_on_the_cards() -> None:
    asleep = OPENRLHF.profile(job(), CLUSTER)
    assert asleep.placement is Placement.COLOCATED
    assert "rollout" not in asleep.resident["backward"] and "trainer" in asleep.resident["rollout"]
    awake = OPENRLHF.profile(job({**PACKED, "vllm.enable_sleep": False}), CLUSTER)
    assert "rollout" in awake.resident["backward"]
    assert any("--vllm.enable_sleep" in text for text in awake.warnings)
    apart = OPENRLHF.profile(job(APART), CLUSTER)
    assert (apart.placement, apart.resident) == (Placement.SEPARATE, {})
    running = {**APART, "train.async_enable": True}
    assert OPENRLHF.profile(job(running), CLUSTER).placement is Placement.ASYNCHRONOUS


@pytest.mark.parametrize(
    ("stage", "strategy", "shards"), [(0, "ddp", 1), (1, "ddp", 8), (2, "ddp", 8), (3, "fsdp2", 8)]
)
def test_a_layout_follows_the_flags(stage: int, strategy: str, shards: int) -> None:
    layout = OPENRLHF.profile(job({**PACKED, "ds.zero_stage": stage}), CLUSTER).layout
    assert (layout.strategy, layout.shards, layout.engine_ranks) == (strategy, shards, 8)
    assert (layout.shards_gradients, layout.gradients_stay) == (stage == 2, stage == 3)
    assert (layout.sequences, layout.mini_batch, layout.critic) == (1024, 1024, False)
    assert (layout.prompt_tokens, layout.response_tokens) == (1024, 7168)
    assert OPENRLHF.profile(job({**PACKED, "algo.advantage.estimator": "gae"}), CLUSTER).layout.critic
    wide = {"ds.grad_accum_dtype": "fp32", "ds.overlap_comm": True, "ds.tensor_parallel_size": 2}
    wider = OPENRLHF.profile(job({**PACKED, "ds.zero_stage": stage, **wide}), CLUSTER).layout
    assert wider.reduce_bucket_bytes == 2 * layout.reduce_bucket_bytes == 2e9
    assert (wider.gradient_bytes, wider.gradients_stay) == (4 if stage else 2, stage in (1, 3))
    assert wider.shards == (4 if stage else 1)


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"train.max_token_per_gpu": 1}, "train.max_token_per_gpu", "unknown flag"),
        ({"--data.max_len": 4096}, "--data.max_len", "they are one flag"),
        ({"train.max_tokens_per_gpu": "many"}, "train.max_tokens_per_gpu", "a whole number"),
        ({"vllm.gpu_memory_utilization": True}, "vllm.gpu_memory_utilization", "a number"),
        ({"train.colocate_all": "maybe"}, "train.colocate_all", "a switch"),
        ({"algo.advantage.estimator": "grpo"}, "algo.advantage.estimator", "is one of gae"),
        ({"vllm.num_engines": 2}, "vllm.num_engines", "as many"),
        ({"train.async_enable": True}, "vllm.enable_sleep", "never pause"),
        ({"rollout.micro_batch_size": 512}, "rollout.micro_batch_size", "fewer scoring batches"),
        ({"train.partial_rollout_enable": True}, "train.partial_rollout_enable", "--train.async_enable"),
    ],
)
def test_mistakes_are_found_before_anything_starts(change: dict[str, Any], name: str, words: str) -> None:
    problems = OPENRLHF.check(job({**PACKED, **change}, framework_version="0.11.2"))
    assert [p for p in problems if p.path == ("settings", name) and words in p.message], problems


def test_the_names_of_flags_before_0_10_mean_what_todays_mean() -> None:
    today = {**COUNTED, "train.max_tokens_per_gpu": None}
    older, newer = (OPENRLHF.profile(job(settings), CLUSTER) for settings in (BEFORE_0_10, today))
    assert older.knobs == newer.knobs and older.layout == newer.layout
    assert older.supported.keys() == newer.supported.keys()
    assert older.supported["microbatch_size"].setting == "micro_train_batch_size"
    assert not any("--train." in text for text in (*older.unsupported.values(), *older.warnings))
    assert OPENRLHF.release_by_settings(job(BEFORE_0_10)) == "0.9.10"
    assert OPENRLHF.release_by_settings(job(PACKED)) == ""
    defaults = OPENRLHF.profile(job({"pretrain": "Qwen/Qwen3-4B", "vllm_num_engines": 8}), CLUSTER)
    assert defaults.knobs.microbatch_size == 4


@pytest.mark.parametrize(("version", "certain"), [(None, False), ("0.9.10", False), ("0.11.2", True)])
def test_older_names_are_a_mistake_only_where_the_release_is_newer(
    version: str | None, certain: bool
) -> None:
    problems = OPENRLHF.check(job(BEFORE_0_10, framework_version=version))
    assert bool(problems) is certain
    if certain:
        assert any(problem.hint == "did you mean --train.batch_size?" for problem in problems)


def test_flags_that_0_11_2_took_away_are_known_of_0_11_0() -> None:
    settings = {**PACKED, "--algo.advantage.is_correction_enable": True}
    assert OPENRLHF.release_by_settings(job(settings)) == "0.11.0"
    assert not OPENRLHF.check(job(settings, framework_version="0.11.0"))
    assert OPENRLHF.check(job(settings, framework_version="0.11.2"))


def test_attempts_trials_and_rehearsals_keep_the_names_of_the_release() -> None:
    known = flag_facts("autotune.launchers.frameworks.openrlhf", "facts/0.9.10.json").flags
    settings = {**BEFORE_0_10, "--ckpt_path": "/ck", "eval_dataset": "e", "eval_steps": 5}
    written = job(settings)
    wanted = msgspec.structs.replace(OPENRLHF.profile(written, CLUSTER).knobs, microbatch_size=2)
    jobs = [written, OPENRLHF.trial(written, folder="/t", steps=3, longest=False)]
    jobs += [OPENRLHF.rehearsal(written, folder="/t", part=part, longest=False) for part in Part]
    for each in jobs:
        argv = OPENRLHF.command(each, wanted, run="r1", attempt=2, resume=True).argv
        assert {word[2:] for word in argv if word.startswith("--")} <= known.keys()
        assert _flag(argv, "micro_train_batch_size") == "2" and _flag(argv, "micro_rollout_batch_size") == "4"
        assert _flag(argv, "train_batch_size") == "1024"
    first, trial, *rehearsals = (
        OPENRLHF.command(each, Knobs(), run="r1", attempt=1, resume=True).argv for each in jobs
    )
    assert _flag(first, "ckpt_path") == "/ck/q3-r1" and "--load_checkpoint" in first
    assert not {"--ckpt_path", "--eval_dataset"} & set(trial) and _flag(trial, "max_samples") == "384"
    for argv in rehearsals:
        assert (_flag(argv, "save_steps"), _flag(argv, "eval_dataset")) == ("2", "e")


def test_a_job_of_0_8_limits_prompts_and_responses_apart() -> None:
    older = {name: value for name, value in BEFORE_0_10.items() if name not in ("max_len", "max_new_tokens")}
    own = job({**older, "prompt_max_len": 1024, "generate_max_len": 4096, "bf16": True})
    assert OPENRLHF.release_by_settings(own) == "0.8.11"
    assert OPENRLHF.is_on_record("generate_max_len") and not OPENRLHF.is_on_record("env_file")
    assert OPENRLHF.profile(own, CLUSTER).longest_sequence == 5120
    shorter = job({name: value for name, value in own.settings.items() if name != "generate_max_len"})
    assert OPENRLHF.profile(shorter, CLUSTER).longest_sequence == 2048  # 1024 of each by default


def test_an_unknown_flag_is_warned_about() -> None:
    own = job({**PACKED, "frobnicate": 3})
    assert any("--frobnicate is no flag" in text for text in OPENRLHF.profile(own, CLUSTER).warnings)


@pytest.mark.parametrize("release", [None, "0.12.0"])
def test_a_flag_like_a_known_one_may_be_one_of_another_release(release: str | None) -> None:
    own = job({**PACKED, "train.max_token_per_gpu": 1}, framework_version=release)
    assert OPENRLHF.check(own) == ()
    assert any(
        "(did you mean --train.max_tokens_per_gpu?)" in text
        for text in OPENRLHF.profile(own, CLUSTER).warnings
    )


# --------------------------------------------------------------------------- attempts and trials


def _flag(argv: tuple[str, ...], name: str) -> str | None:
    return argv[argv.index(f"--{name}") + 1] if f"--{name}" in argv else None


def test_an_attempt_continues_its_own_runs_checkpoint_and_no_other() -> None:
    written = job({**PACKED, "ckpt.path": "/ck", "ckpt.load_enable": True})
    first, second = (
        OPENRLHF.command(written, Knobs(), run="r1", attempt=n, resume=n > 1).argv for n in (1, 2)
    )
    assert first[:3] == ("{python}", "-m", "openrlhf.cli.train_ppo_ray")
    assert _flag(first, "ckpt.path") == _flag(second, "ckpt.path") == "/ck/q3-r1"
    assert _flag(first, "ckpt.save_steps") is not None
    assert ("--ckpt.load_enable" in first, "--ckpt.load_enable" in second) == (False, True)
    own = OPENRLHF.command(
        msgspec.structs.replace(written, resume=True), Knobs(), run="r1", attempt=1, resume=True
    )
    assert _flag(own.argv, "ckpt.path") == "/ck" and "--ckpt.load_enable" in own.argv


def test_a_relative_folder_is_below_the_jobs_own() -> None:
    written = job({**PACKED, "ckpt.path": "./out/ck/"})
    assert OPENRLHF.checkpoint_folder(written) == "/home/me/out/ck"
    for resume, folder in ((False, "/home/me/out/ck/q3-r1"), (True, "/home/me/out/ck")):
        of = msgspec.structs.replace(written, resume=resume)
        command = OPENRLHF.command(of, Knobs(), run="r1", attempt=1, resume=resume)
        assert (_flag(command.argv, "ckpt.path"), command.cwd) == (folder, "/home/me")


@pytest.mark.parametrize("settings", [PACKED, COUNTED], ids=["packed", "counted"])
def test_passes_keep_their_size_where_experts_are_balanced_within_each(settings: dict[str, Any]) -> None:
    sizes = {"tokens_per_microbatch", "microbatch_size"}
    for coefficient, offered in ((0.0, 1), (0.001, 0)):
        profile = OPENRLHF.profile(job({**settings, "actor.aux_loss_coef": coefficient}), CLUSTER)
        assert len(sizes & set(profile.supported)) == offered
        assert sizes <= set(profile.supported) | set(profile.unsupported)


@pytest.mark.parametrize("change", [{"ckpt.path": None}, {"ckpt.disable_ds": True}])
def test_without_checkpoints_a_relaunch_begins_anew(change: dict[str, Any]) -> None:
    written = job({**PACKED, "ckpt.load_enable": True, **change})
    argv = OPENRLHF.command(written, Knobs(), run="r", attempt=2, resume=True).argv
    assert "--ckpt.load_enable" not in argv
    profile = OPENRLHF.profile(written, CLUSTER)
    assert not profile.resumable and any("begins at step 0" in text for text in profile.warnings)


def test_a_trial_is_short_and_leaves_nothing_behind() -> None:
    written = job({**PACKED, "--ckpt.path": "/ck", "ckpt.save_steps": 10, "logger.wandb.key": "k"})
    trial = OPENRLHF.trial(written, folder="/t", steps=3, longest=False)
    argv = OPENRLHF.command(trial, Knobs(), run="r", attempt=1, resume=False).argv
    assert _flag(argv, "data.max_samples") == str(3 * 128)
    assert not {"--ckpt.path", "--ckpt.save_steps", "--logger.wandb.key"} & set(argv)
    assert _flag(argv, "ckpt.output_dir") == "/t/model"


def test_one_record_in_the_tracker_for_all_attempts() -> None:
    written = job({**PACKED, "logger.wandb.key": "k"})
    names = {
        _flag(
            OPENRLHF.command(written, Knobs(), run="r7", attempt=n, resume=n > 1).argv,
            "logger.wandb.run_name",
        )
        for n in (1, 2)
    }
    assert names == {"q3-r7"}


# --------------------------------------------------------------------------- its lines

TRAINER = "\x1b[36m(PPOTrainer pid=4128)\x1b[0m INFO 08-22 10:00:12 ppo_trainer.py:551] "
STATUS = (
    "{'policy_loss': nan, 'total_length': 2048.0, 'rollout/num_samples': 100.0, 'timing/step_total': 64.0}"
)


@pytest.mark.parametrize(
    ("line", "marker"),
    [
        (
            f"{TRAINER}✨ Global step 7: {STATUS}",
            StepDone(
                step=7,
                seconds=64.0,
                tokens_per_second=3200.0,
                metrics={"total_length": 2048.0, "rollout/num_samples": 100.0, "timing/step_total": 64.0},
            ),
        ),
        (f"{TRAINER}Global step 7: {{'policy_loss': 0.1}}", StepDone(step=7, metrics={"policy_loss": 0.1})),
        (f"{TRAINER}✨ Global step 7: {{'policy_loss': 0.1, 'timing", None),
        (
            "Generate samples:   0%|          | 0/32 [00:00<?, ?it/s]",
            PhaseStarted(phase=Phase.ROLLOUT, step=0),
        ),
        ("🚀 Starting experience making with 256 samples", PhaseStarted(phase=Phase.LOG_PROB, step=0)),
        ("✨ Experience making completed in 0:00:21", PhaseEnded(phase=Phase.LOG_PROB, step=0, seconds=0.0)),
        ("Train epoch [1/1]:   0%|          | 0/8 [00:00<?]", PhaseStarted(phase=Phase.FORWARD, step=0)),
        ("[Rank 0] [Torch] Checkpoint global_step20 is about to be saved!", Saved(step=20)),
        (f"{TRAINER}checkpoint_states: {{'episode': 0, 'global_step': 20, 'x': {{}}}}", Resumed(step=20)),
        (f"{TRAINER}checkpoint_states: {{'episode': 0, 'global_step': 0}}", None),
        ("✨ Evaluation completed in 0:00:21, global_step 20, eval_metrics: {}", None),
    ],
)
def test_lines_of_the_log(line: str, marker: object) -> None:
    assert OPENRLHF.marker(line) == marker


def test_the_printed_namespace_gives_the_flags_back() -> None:
    text = (
        "namespace(actor=namespace(num_nodes=1, adam=namespace(lr=5e-07, betas=(0.9, 0.95)), "
        "gradient_checkpointing_enable=True), ckpt=namespace(max_mem=inf), "
        "train=namespace(colocate_all=True, max_tokens_per_gpu=16192, async_enable=False), use_ms=False)\n"
    )
    assert OPENRLHF.printed(text) == {
        "actor.num_nodes": 1,
        "actor.adam.lr": 5e-07,
        "actor.adam.betas": (0.9, 0.95),
        "actor.gradient_checkpointing_enable": True,
        "train.colocate_all": True,
        "train.max_tokens_per_gpu": 16192,
    }
    assert OPENRLHF.printed(text[:60]) == {}
    older = "+ python3 -m openrlhf.cli.train_ppo_ray --micro_train_batch_size 4 --colocate_all_models\n"
    assert OPENRLHF.printed(older) == {"micro_train_batch_size": 4, "colocate_all_models": True}
    traced = "+ python3 -m openrlhf.cli.train_ppo_ray --train.max_tokens_per_gpu 8192 --train.colocate_all\n"
    assert OPENRLHF.printed(traced) == {"train.max_tokens_per_gpu": 8192, "train.colocate_all": True}


@pytest.mark.parametrize(
    ("name", "remedy", "words"),
    [
        ("backward", "reduce_tokens_per_mb", "--train.max_tokens_per_gpu 8192"),
        ("log_prob", "reduce_tokens_per_mb", "--train.max_tokens_per_gpu 8192"),  # scoring follows
        ("pool_too_small", "increase_mem_fraction", "--vllm.gpu_memory_utilization 0.85"),
    ],
)
def test_a_failure_gets_its_first_remedy(name: str, remedy: str, words: str) -> None:
    proposal = cure(OPENRLHF, job(), name)
    assert (proposal.remedy, proposal.words[0]) == (remedy, words)
    if name != "pool_too_small":
        assert proposal.diagnosis.phase == name


def test_the_example_job_is_without_a_mistake() -> None:
    written = parse((Path(__file__).parents[3] / "configs" / "openrlhf-hybrid.yaml").read_text())
    assert OPENRLHF.check(written) == ()
    profile = OPENRLHF.profile(written, CLUSTER)
    where, first = profile.warnings
    assert where.startswith("checkpoints go to") and "KeyError 'episode'" in first
    assert OPENRLHF.settings(written, profile.knobs) == {}
    for preset in OPENRLHF.presets.values():
        assert OPENRLHF.check(job({**PACKED, **preset})) == ()


def test_a_second_copy_of_the_weights_is_shared_by_the_ranks_of_zpg() -> None:
    shared = [OPENRLHF.profile(job({**PACKED, **zpg}), CLUSTER).layout for zpg in ({}, {"ds.zpg": 4})]
    assert [layout.secondary_shards for layout in shared] == [0, 4]
