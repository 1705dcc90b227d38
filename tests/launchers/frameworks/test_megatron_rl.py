"""What slime, Relax and miles have in common: knobs both ways, legality, checkpoints, trials."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from autotune.launchers.frameworks.dialects.engine_arguments import arguments_of, releases
from autotune.launchers.frameworks.dialects.flags import bare
from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.orchestrator.config.loader import parse
from autotune.policies.remedies.legality import objections
from autotune.policies.values.knobs import KNOBS, Knobs
from autotune.policies.values.profile import Grid, Placement
from autotune.policies.values.remedy import Effect

from .megatron_jobs import APART, COLOCATED, EVERY, MILES, NEVER, RELAX, SLIME, dashed, flag, job
from .megatron_replay import CLUSTER

CONFIGS = sorted(
    path
    for path in (Path(__file__).parents[3] / "configs").glob("*.yaml")
    if path.name.startswith(("slime", "relax", "miles"))
)
PACKED_BY_COUNT = {
    **{name: value for name, value in COLOCATED.items() if name != "max-tokens-per-gpu"},
    "use-dynamic-batch-size": False,
    "micro-batch-size": 4,
}
JOBS = [
    pytest.param(framework, settings, id=f"{framework.name}-{label}")
    for framework in EVERY
    for label, settings in (
        ("colocated", COLOCATED),
        ("apart", APART),
        ("dashed", dashed(COLOCATED)),
        ("counted", PACKED_BY_COUNT),
        (
            "blocks",
            {
                **COLOCATED,
                "recompute-granularity": "full",
                "recompute-method": "block",
                "recompute-num-layers": 4,
            },
        ),
        ("offloaded", {**COLOCATED, "optimizer-cpu-offload": True, "use-precision-aware-optimizer": True}),
        (
            "awake",
            {
                **COLOCATED,
                "no-offload-train": True,
                "use-kl-loss": True,
                "log-probs-max-tokens-per-gpu": 30720,
            },
        ),
    )
]


def values_of(grid: Grid, present: Any) -> tuple[Any, ...]:
    """Return values of a grid: all that it lists, or its ends and some between."""
    if grid.values:
        return grid.values
    step = grid.multiple or 1
    low = grid.minimum if grid.minimum is not None else step
    high = grid.maximum if grid.maximum is not None else low + 40 * step
    kind = float if isinstance(present, float) else int
    return tuple(kind(round(low + step * round(k / 4 * (high - low) / step), 6)) for k in range(5))


@pytest.mark.parametrize(("framework", "settings"), JOBS)
def test_every_offered_value_comes_back_from_the_flags_that_set_it(framework, settings) -> None:
    written = job(framework, settings)
    profile = framework.profile(written, CLUSTER)
    assert framework.settings(written, profile.knobs) == {}
    for knob, support in profile.supported.items():
        for value in values_of(support.grid, getattr(profile.knobs, knob)):
            changes = framework.settings(written, msgspec.structs.replace(Knobs(), **{knob: value}))
            again = framework.profile(
                msgspec.structs.replace(written, settings={**settings, **changes}), CLUSTER
            ).knobs
            if knob == "concurrency":
                assert again.concurrency == min(value, profile.knobs.concurrency)
            else:
                assert getattr(again, knob) == value, (knob, value, changes)
            assert not {bare(key) for key in changes} & set(NEVER)


@pytest.mark.parametrize(("framework", "settings"), JOBS)
def test_what_a_remedy_writes_is_legal_for_the_framework_itself(framework, settings) -> None:
    written = job(framework, settings)
    profile = framework.profile(written, CLUSTER)
    before = {problem.message for problem in framework.check(written)}
    for knob, support in profile.supported.items():
        for value in values_of(support.grid, getattr(profile.knobs, knob)):
            wanted = msgspec.structs.replace(profile.knobs, **{knob: value})
            if objections(profile, profile.knobs, wanted, started=False):
                continue
            changes = framework.settings(written, wanted)
            changed = msgspec.structs.replace(written, settings={**settings, **changes})
            assert {problem.message for problem in framework.check(changed)} <= before, (knob, value, changes)


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_every_knob_is_offered_or_declined_with_a_reason(framework) -> None:
    for settings in (COLOCATED, APART, PACKED_BY_COUNT):
        profile = framework.profile(job(framework, settings), CLUSTER)
        assert set(profile.supported) | set(profile.unsupported) == set(KNOBS)
        assert not set(profile.supported) & set(profile.unsupported)
        assert all(profile.unsupported.values())


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_flags_that_go_together_come_together(framework) -> None:
    written = job(framework)
    assert framework.settings(written, Knobs(optimizer_offload=True)) == {
        "optimizer-cpu-offload": True,
        "use-precision-aware-optimizer": True,
    }
    assert framework.settings(written, Knobs(recompute="full")) == {
        "recompute-granularity": "full",
        "recompute-method": "uniform",
        "recompute-num-layers": 1,
    }
    full = job(framework, {**COLOCATED, **framework.settings(written, Knobs(recompute="full"))})
    assert framework.settings(full, Knobs(recompute="selective")) == {
        "recompute-granularity": "selective",
        "recompute-method": None,
        "recompute-num-layers": None,
    }
    assert framework.settings(written, Knobs(tensor_parallel=4)) == {
        "tensor-model-parallel-size": 4,
        "sequence-parallel": True,
    }
    assert framework.profile(written, CLUSTER).supported["optimizer_offload"].effect is Effect.NUMERIC


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_the_longest_sequence_bounds_the_budget_as_the_framework_counts_it(framework) -> None:
    profile = framework.profile(job(framework), CLUSTER)
    assert profile.longest_sequence == 8192
    too_small = msgspec.structs.replace(profile.knobs, tokens_per_microbatch=4096)
    assert "below 8192" in objections(profile, profile.knobs, too_small, started=False)[0]
    split = {**COLOCATED, "context-parallel-size": 2, "calculate-per-token-loss": True}
    profile = framework.profile(job(framework, split), CLUSTER)
    assert not objections(profile, profile.knobs, too_small, started=False)


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
@pytest.mark.parametrize(
    ("change", "started", "why"),
    [
        ({"rollout_tensor_parallel": 3}, False, "not a legal value"),
        ({"optimizer_offload": True}, True, "stays False during a run"),
        ({"tensor_parallel": 4}, True, "stays 2 during a run"),
        ({"optimizer_offload_overlap": True}, False, "is not possible with optimizer_offload = False"),
        ({"concurrency": 100_000}, False, "no engine is given more"),
        ({"max_model_len": 4096}, False, "lengths are the user's"),
        ({"dataloader_workers": 0}, False, "no loader processes"),
        ({"allocator": "expandable"}, False, "torch_memory_saver"),
    ],
)
def test_illegal_changes_say_why(framework, change, started, why) -> None:
    profile = framework.profile(job(framework), CLUSTER)
    wanted = msgspec.structs.replace(profile.knobs, **change)
    assert any(why in text for text in objections(profile, profile.knobs, wanted, started=started))


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_forty_heads_take_parallel_sizes_of_1_2_4_and_8(framework) -> None:
    wide = {**COLOCATED, "num-attention-heads": 40, "num-query-groups": 40, "actor-num-nodes": 4}
    profile = framework.profile(job(framework, wide), CLUSTER)

    def legal(size: int) -> bool:
        wanted = msgspec.structs.replace(profile.knobs, tensor_parallel=size)
        return not objections(profile, profile.knobs, wanted, started=False)

    assert [size for size in (1, 2, 4, 8, 16, 32) if legal(size)] == [1, 2, 4, 8]


def test_a_trainer_that_sleeps_sends_its_weights_from_host_memory() -> None:
    again = {"rematerialize-param-from-master-weight": True}
    for framework, more, expected in (
        (SLIME, {}, True),
        (MILES, {}, True),
        (SLIME, {"no-offload-train": True}, False),
        (MILES, again, False),
        (RELAX, {}, False),
    ):
        layout = framework.profile(job(framework, {**COLOCATED, **more}), CLUSTER).layout
        assert layout.sends_from_host is expected


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_a_sleeping_engine_is_not_on_the_card_while_training_runs(framework) -> None:
    asleep = framework.profile(job(framework), CLUSTER)
    assert "rollout" not in asleep.resident["backward"]
    assert "rollout" not in asleep.resident["weight_sync"]
    assert asleep.layout.engine_sleeps
    awake = framework.profile(job(framework, {**COLOCATED, "offload-rollout": False}), CLUSTER)
    assert "rollout" in awake.resident["backward"]
    assert not awake.layout.engine_sleeps
    changed = framework.settings(
        job(framework, {**COLOCATED, "offload-rollout": False}), Knobs(engine_sleep=True)
    )
    assert changed == {"offload-rollout": True}
    apart = framework.profile(job(framework, APART), CLUSTER)
    assert (apart.resident, apart.placement) == ({}, Placement.SEPARATE)


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_a_layout_follows_the_flags(framework) -> None:
    settings = {
        **COLOCATED,
        "pipeline-model-parallel-size": 2,
        "expert-model-parallel-size": 2,
        "use-kl-loss": True,
        "sglang-quantization": "fp8",
        "sglang-kv-cache-dtype": "fp8_e5m2",
    }
    layout = framework.profile(job(framework, settings), CLUSTER).layout
    assert (layout.ranks, layout.shards, layout.pipeline_parallel, layout.expert_parallel) == (8, 2, 2, 2)
    assert (layout.engine_ranks, layout.engine_bytes, layout.kv_bytes) == (8, 1, 1)
    assert (layout.optimizer_bytes, layout.sequences) == (12, 256)
    assert layout.reference
    assert (layout.prompt_tokens, layout.response_tokens) == (1024, 7168)


def test_uneven_stages_and_fp8_follow_the_flags() -> None:
    flags = {
        "decoder-first-pipeline-num-layers": 5,
        "decoder-last-pipeline-num-layers": 6,
        "account-for-embedding-in-pipeline-split": True,
        "account-for-loss-in-pipeline-split": True,
        "microbatch-group-size-per-virtual-pipeline-stage": 3,
        "overlap-moe-expert-parallel-comm": True,
        "fp8-format": "hybrid",
        "fp8-param-gather": True,
        "moe-token-dispatcher-type": "flex",
        "recompute-modules": "moe layernorm",
        "mtp-num-layers": 1,
        "enable-mtp-training": True,
    }
    for framework in EVERY:
        plain, result = (
            framework.profile(job(framework, {**COLOCATED, **settings}), CLUSTER).layout
            for settings in ({}, flags)
        )
        assert result == msgspec.structs.replace(
            plain,
            first_stage_layers=5,
            last_stage_layers=6,
            embedding_is_layer=True,
            loss_is_layer=True,
            pipeline_group=3,
            pipeline_ahead=1,
            fp8=True,
            fp8_weights=True,
            dispatcher="flex",
            recompute_modules=("moe", "layernorm"),
            predicting_layers=1,
            predicting_loss=True,
        )


@pytest.mark.parametrize(
    ("settings", "chunks"),
    [
        ({}, 1),
        ({"num-virtual-stages-per-pipeline-rank": 3}, 3),
        ({"num-layers": 28, "num-layers-per-virtual-pipeline-stage": 7}, 2),
    ],
)
def test_the_chunks_of_interleaved_stages_follow_the_flags(settings, chunks) -> None:
    for framework in EVERY:
        of = job(framework, {**COLOCATED, "pipeline-model-parallel-size": 2, **settings})
        assert framework.profile(of, CLUSTER).layout.pipeline_chunks == chunks


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        ({"use-precision-aware-optimizer": True}, 10),
        ({"use-precision-aware-optimizer": True, "exp-avg-dtype": "fp8", "exp-avg-sq-dtype": "bf16"}, 5),
        ({"use-precision-aware-optimizer": True, "main-params-dtype": "fp16"}, 10),
        ({"use-precision-aware-optimizer": True, "optimizer-cpu-offload": True}, 12),
        ({"optimizer": "sgd"}, 8),
    ],
)
def test_the_optimizers_types_follow_the_flags(settings, optimizer) -> None:
    for framework in EVERY:
        layout = framework.profile(job(framework, {**COLOCATED, **settings}), CLUSTER).layout
        assert layout.optimizer_bytes == optimizer


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 0),
        ({"grad-reduce-in-bf16": True}, 4),
        ({"grad-reduce-in-bf16": True, "use-precision-aware-optimizer": True}, 0),
    ],
)
def test_gradients_in_16_bits_are_copied_for_the_update(settings, size) -> None:
    for framework in EVERY:
        layout = framework.profile(job(framework, {**COLOCATED, **settings}), CLUSTER).layout
        assert layout.optimizer_temporary_bytes == size


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_flags_describe_the_model_where_no_config_does(framework) -> None:
    written = parse((CONFIGS[0].parent / f"{framework.name}-colocated.yaml").read_text())
    shape = framework.shape(msgspec.structs.replace(written, shape=None, model=None))
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (36, 2560, 32, 8)
    assert (shape.head_dim, shape.intermediate, shape.vocab) == (128, 9728, 151936)
    assert (shape.tied, shape.qk_norm, shape.norm, shape.gated) == (True, "head", "rms", True)
    assert not shape.qkv_bias
    assert framework.shape(job(framework, {"num-layers": 4})) is None
    mixture = {
        **written.settings,
        "num-experts": 128,
        "moe-router-topk": 8,
        "moe-ffn-hidden-size": 768,
        "moe-layer-freq": "([0]*3+[1]*33)",
        "multi-latent-attention": True,
        "kv-lora-rank": 512,
    }
    shape = framework.shape(job(framework, mixture))
    assert (shape.experts, shape.experts_per_token, shape.expert_intermediate) == (128, 8, 768)
    assert (shape.dense_layers, shape.kv_lora_rank, shape.head_dim) == (3, 512, 192)


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_a_relative_folder_is_below_the_jobs_own(framework) -> None:
    written = job(framework, {**COLOCATED, "save": "./ck", "load": "./ck"})
    assert framework.checkpoint_folder(written) == "/home/me/ck"
    knobs = framework.profile(written, CLUSTER).knobs
    command = framework.command(written, knobs, run="r7", attempt=2, resume=True)
    assert (flag(command.argv, "save"), command.cwd) == ("/home/me/ck/q3-r7", "/home/me")
    going_on = msgspec.structs.replace(written, resume=True)
    for attempt in (1, 2):
        argv = framework.command(going_on, knobs, run="r7", attempt=attempt, resume=True).argv
        assert flag(argv, "load") == flag(argv, "save") == "/home/me/ck"


# --------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        ({"max-token-per-gpu": 4096}, "max-token-per-gpu", "unknown flag"),
        ({"max_tokens_per_gpu": 4096}, "max_tokens_per_gpu", "unknown flag"),
        ({"sglang-mem-fraction": 0.7}, "sglang-mem-fraction", "unknown flag"),
        ({"--max-tokens-per-gpu": 9000}, "--max-tokens-per-gpu", "they are one flag"),
        ({"sglang-tp-size": 2}, "sglang-tp-size", "of the engine itself"),
        ({"optimizer-cpu-offload": True}, "optimizer-cpu-offload", "--use-precision-aware-optimizer"),
        ({"recompute-granularity": "full"}, "recompute-granularity", "needs --recompute-method"),
        (
            {"recompute-granularity": "selective", "recompute-method": "uniform"},
            "recompute-method",
            "must not have",
        ),
        ({"recompute-granularity": "all"}, "recompute-granularity", "has no 'all'"),
        ({"max-tokens-per-gpu": "many"}, "max-tokens-per-gpu", "is a whole number"),
        ({"global-batch-size": "16k"}, "global-batch-size", "is a whole number, not '16k'"),
        ({"num-layers": "36 layers"}, "num-layers", "is a whole number"),
        ({"lr": [1e-6, 2e-6]}, "lr", "is a number"),
        ({"sequence-parallel": "maybe"}, "sequence-parallel", "is a switch, true or false, not 'maybe'"),
        ({"max-tokens-per-gpu": None}, "use-dynamic-batch-size", "needs --max-tokens-per-gpu"),
        ({"tensor-model-parallel-size": 3}, "tensor-model-parallel-size", "does not divide 8 GPUs"),
        ({"tensor-model-parallel-size": 16}, "tensor-model-parallel-size", "8 key-value heads"),
        ({"rollout-num-gpus-per-engine": 3}, "rollout-num-gpus-per-engine", "do not fill"),
        ({"actor-num-nodes": 2}, "actor-num-gpus-per-node", "wants 16 GPUs"),
        ({"memory-recorder": "memray"}, "memory-recorder", "--memory-snapshot-num-steps"),
        ({"kl-coef": 0.1, "kl-loss-coef": 0.1}, "kl-coef", "only one"),
    ],
)
def test_mistakes_are_found_before_anything_starts(framework, change, name, words) -> None:
    problems = framework.check(job(framework, {**COLOCATED, **change}))
    assert [p for p in problems if p.path == ("settings", name) and words in p.message], problems


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_a_flag_of_its_own_is_none_of_the_engine_whatever_its_prefix(framework) -> None:
    assert framework.check(job(framework, {**COLOCATED, "sglang-config": "engines.yaml"})) == ()


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_engines_need_cards_of_their_own_or_the_trainers(framework) -> None:
    (problem,) = framework.check(job(framework, {**COLOCATED, "colocate": False}))
    assert "no GPUs are left for the engines" in problem.message


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_a_flag_that_nobody_knows_is_only_warned_about(framework) -> None:
    own = job(framework, {**COLOCATED, "frobnicate-the-rewards": 3})
    assert framework.check(own) == ()
    assert any("frobnicate-the-rewards" in text for text in framework.profile(own, CLUSTER).warnings)


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_a_misspelt_flag_is_answered_with_the_right_one(framework) -> None:
    (problem,) = framework.check(job(framework, {**COLOCATED, "recompute-los-function": True}))
    assert problem.hint == "did you mean --recompute-loss-function?"


# --------------------------------------------------------------------------- examples


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_example_jobs_are_without_a_mistake(path) -> None:
    written = parse(path.read_text())
    framework = next(each for each in EVERY if each.name == written.framework)
    assert framework.check(written) == ()
    profile = framework.profile(written, CLUSTER)
    assert len(profile.warnings) == 1  # where the checkpoints go
    assert framework.settings(written, profile.knobs) == {}


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_presets_are_without_a_mistake(framework) -> None:
    for preset in framework.presets.values():
        assert framework.check(job(framework, {**COLOCATED, **preset})) == ()


@pytest.mark.parametrize("framework", EVERY, ids=lambda framework: framework.name)
def test_advice_says_why_and_what_instead(framework) -> None:
    for row in framework.advice:
        assert row.reason, row
        assert row.status.value != "replaced" or row.instead, row
    settings = [row.setting for row in framework.advice]
    assert len(settings) == len(set(settings))


@pytest.mark.parametrize(
    ("framework", "name", "value", "wrong"),
    [
        (SLIME, "sglang-max-queued-requests", "16k", "is a whole number"),
        (SLIME, "sglang-schedule-conservativeness", "high", "is a number"),
        (SLIME, "--sglang-enable-dp-attention", "maybe", "is true or false"),
        (SLIME, "sglang-tensor-parallel-size", "two", "is a whole number"),
        (SLIME, "sglang-context-length", "16k", ""),
        (RELAX, "sglang-context-length", "16k", "is a whole number"),  # SGLang 0.5.9 takes no unit
        (MILES, "eval-sglang-max-running-requests", "16k", "is a whole number"),
        (MILES, "sglang-lora-target-modules", ["all"], ""),
    ],
)
def test_a_value_that_sglang_would_refuse_is_refused_at_once(
    framework: MegatronRl, name: str, value: Any, wrong: str
) -> None:
    given = job(framework, {**COLOCATED, name: value})
    items = [each for each in framework.check(given) if each.path == ("settings", name)]
    assert [each.message for each in items] == (
        [f"--{name.lstrip('-')} {wrong}, not {value!r}"] if wrong else []
    )


OLD, NEW = "sglang-cuda-graph-max-bs", "sglang-cuda-graph-max-bs-decode"
SMALL_CARD = msgspec.structs.replace(job(SLIME).cluster, gpu_memory_bytes=24 << 30)


@pytest.mark.parametrize("framework", [SLIME, MILES], ids=lambda each: each.name)
@pytest.mark.parametrize("dashes", ["", "--"])
def test_a_flag_is_read_and_written_under_each_name_that_the_engine_gives_it(framework, dashes):
    small = job(framework, {f"{dashes}{OLD}": 16})
    assert framework.profile(small, CLUSTER).knobs.cuda_graphs == "limited"
    large = job(framework, {f"{dashes}{OLD}": 256})
    assert framework.profile(large, CLUSTER).knobs.cuda_graphs == "full"
    assert framework.settings(large, Knobs(cuda_graphs="limited")) == {f"{dashes}{OLD}": 32}
    both = job(framework, {OLD: 256, NEW: 8})
    assert framework.profile(both, CLUSTER).knobs.cuda_graphs == "limited"  # the last one counts
    command = framework.command(large, Knobs(cuda_graphs="limited"), run="r", attempt=1, resume=False).argv
    assert f"--{NEW}" not in command and command[command.index(f"--{OLD}") + 1] == "32"


@pytest.mark.parametrize(
    ("framework", "settings", "state", "limited"),
    [
        (SLIME, {"sglang-cuda-graph-bs": [1, 2, 64]}, "full", {"sglang-cuda-graph-bs": [1, 2]}),
        (SLIME, {"sglang-cuda-graph-bs-decode": [1, 2]}, "limited", {}),
        (RELAX, {"sglang-cuda-graph-bs": [48, 64]}, "full", {"sglang-cuda-graph-bs": [48]}),
        (SLIME, {"sglang-cuda-graph-backend-decode": "disabled"}, "off",
         {"sglang-cuda-graph-backend-decode": None, NEW: 32}),
        (SLIME, {"sglang-cuda-graph-config": '{"decode": {"max_bs": 16}}'}, None, None),
    ],
)  # fmt: skip
def test_limited_graphs_are_never_more_than_before(framework, settings, state, limited):
    written = job(framework, settings)
    assert framework.profile(written, CLUSTER).knobs.cuda_graphs == state
    if limited is not None:
        assert framework.settings(written, Knobs(cuda_graphs="limited")) == limited


def test_a_small_card_has_limited_graphs_by_itself():
    written = msgspec.structs.replace(job(SLIME), cluster=SMALL_CARD)
    assert SLIME.profile(written, CLUSTER).knobs.cuda_graphs == "limited"
    off = msgspec.structs.replace(job(SLIME, {"sglang-disable-cuda-graph": True}), cluster=SMALL_CARD)
    assert SLIME.settings(off, Knobs(cuda_graphs="limited"))[NEW] == 24


@pytest.mark.parametrize("framework", EVERY, ids=lambda each: each.name)
def test_an_engine_that_nobody_limits_works_on_what_its_client_sends(framework: MegatronRl) -> None:
    many = {**COLOCATED, "rollout-batch-size": 4096, "sglang-server-concurrency": 1024}
    assert framework.profile(job(framework, many), CLUSTER).knobs.concurrency == 1024
    few = {**many, "sglang-max-running-requests": 64}
    assert framework.profile(job(framework, few), CLUSTER).knobs.concurrency == 64


@pytest.mark.parametrize(
    ("gib", "installed", "chunk", "fraction"),
    [
        (24, {}, 2048, 0.84),
        (24, {"sglang": "0.5.23"}, 4096, 0.72),
        (80, {}, 8192, 0.83),
        (80, {"sglang": "0.5.23"}, 8192, 0.83),
    ],
)
def test_what_sglang_chooses_by_its_card_is_that_of_the_jobs_release(gib, installed, chunk, fraction) -> None:
    flags = {key: value for key, value in COLOCATED.items() if not key.startswith("sglang-")}
    written = job(SLIME, flags)
    spec = msgspec.structs.replace(written.cluster, gpu_memory_bytes=gib << 30)
    written = msgspec.structs.replace(written, cluster=spec, engine_versions=installed)
    knobs = SLIME.profile(written, CLUSTER).knobs
    assert (knobs.max_batched_tokens, knobs.memory_fraction) == (chunk, fraction)


def test_every_release_of_sglang_says_what_it_chooses_by_its_card() -> None:
    for version in releases("sglang"):
        tiers = arguments_of("sglang", version).by_card
        assert tiers[0].below_mib == 1 and tiers[-1].below_mib is None, version
