"""Settings of verl that older releases know under another name, or read from another setting."""

from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks.core.renames import names_in, translated
from autotune.launchers.frameworks.verl.keys import ENGINES, OLDER, RELEASES, keys_of
from autotune.launchers.frameworks.verl.renamed import RENAMED
from autotune.policies.values.job import Job

from .verl_jobs import JOBS, VERL, profile, with_settings

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
BUCKET = f"{ROLLOUT}.update_weights_bucket_megabytes"
OF_TODAY = f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes"
MIB = 1 << 20


def of(version: str, kind: str = "fsdp", **settings: Any) -> Job:
    return replace(with_settings(JOBS[kind], settings), framework_version=version)


def changes(job: Job, **knobs: Any) -> dict[str, Any]:
    return VERL.settings(job, replace(profile(job).knobs, **knobs))


@pytest.mark.parametrize("release", RELEASES)
def test_each_release_has_the_setting_of_every_knob(release: str) -> None:
    known = [keys_of(release, engine) for engine in ENGINES]
    older = names_in(RENAMED, release)
    names = {translated(name, older) for row in VERL.table.rows for name in row.keys if name}
    assert not {name for name in names if not any(name in keys for keys in known)}


_GRPO: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "trainer.n_gpus_per_node": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 128,
    "data.max_response_length": 2048,
}


def plain(version: str | None, **settings: Any) -> Job:
    return Job(
        name="j", framework="verl", framework_version=version, workdir="/w", settings={**_GRPO, **settings}
    )


@pytest.mark.parametrize(
    ("version", "engine", "requests", "graphs", "padded", "reference", "reference_bytes", "entropy"),
    [
        ("0.1", "vllm", 1024, "off", True, True, 2, True),
        ("0.2.0.dev", "vllm", 1024, "off", True, True, 2, True),
        ("0.3.1.dev", "vllm", 1024, "off", True, True, 2, True),
        ("0.4.1", "vllm", 1024, "off", True, False, 2, False),
        ("0.5.0", "vllm", 1024, "off", True, False, 2, False),
        ("0.6.1", "", 1024, "full", True, False, 4, False),
        ("0.7.0", "", 1024, "full", False, False, 4, False),
    ],
)
def test_a_recipe_has_the_defaults_of_its_release(
    version: str,
    engine: str,
    requests: int,
    graphs: str,
    padded: bool,
    reference: bool,
    reference_bytes: int,
    entropy: bool,
) -> None:
    job = plain(version)
    config, result = VERL.config(job), profile(job)
    assert (config.engine, config.most_requests) == (engine, requests)
    assert result.knobs.cuda_graphs == graphs
    layout = result.layout
    assert (layout.padded, layout.reference, layout.entropy) == (padded, reference, entropy)
    assert (layout.reference_bytes, layout.parameter_bytes) == (reference_bytes, 4)
    assert layout.reshard_after_forward and config.older_workers


def test_the_engine_of_every_older_release_sleeps_unless_the_job_says_otherwise() -> None:
    for release in OLDER:
        engine = {f"{ROLLOUT}.name": "vllm"}
        assert profile(plain(release, **engine)).layout.engine_sleeps, release
        awake = plain(release, **engine, **{f"{ROLLOUT}.free_cache_engine": False})
        assert profile(awake).layout.engine_sleeps is (release < "0.5"), release


@pytest.mark.parametrize(
    ("version", "entropy", "whole"),
    [("0.2.0", True, False), ("0.3.0", True, True), ("0.4.1", False, False), (None, False, False)],
)
def test_an_update_before_0_4_computes_the_entropy_and_vllm_in_0_3_wakes_with_its_pool(
    version: str | None, entropy: bool, whole: bool
) -> None:
    settings = {"actor_rollout_ref.actor.entropy_coeff": 0, f"{ROLLOUT}.name": "vllm"}
    layout = profile(plain(version, **settings)).layout
    assert (layout.entropy, layout.wakes_whole) == (entropy, whole)


def test_a_knob_whose_setting_came_later_is_not_offered() -> None:
    later = {
        "0.2.0.post2": {"max_model_len", "fused_kernels", "entropy_chunking", "grad_offload"},
        "0.6.1": set[str](),
    }
    for release, absent in later.items():
        job_profile = profile(
            plain(release, **{"actor_rollout_ref.model.use_remove_padding": True})
        ).unsupported
        for knob in ("max_model_len", "fused_kernels", "entropy_chunking", "grad_offload"):
            assert (f"verl {release} has no" in job_profile.get(knob, "")) is (knob in absent), (
                release,
                knob,
            )


def test_a_micro_batch_of_all_gpus_is_read_and_written_as_such() -> None:
    whole = {f"{ACTOR}.ppo_micro_batch_size": 64, f"{ROLLOUT}.log_prob_micro_batch_size": 128}
    for version in ("0.1", "0.2.0.post2", "0.6.1", None):
        job = plain(version, **whole)
        assert profile(job).knobs.microbatch_size == 8
        assert changes(job, microbatch_size=4) == {
            f"{ACTOR}.ppo_micro_batch_size": 32,
            f"{ROLLOUT}.log_prob_micro_batch_size": 64,
        }
    assert any("divide it" in problem.hint for problem in VERL.check(plain("0.9.1", **whole)))


def test_the_buckets_of_a_sync_are_those_of_the_release() -> None:
    engine = {f"{ROLLOUT}.name": "sglang"}
    assert profile(of("0.7.0", **engine)).knobs.sync_buffer == 512 * MIB
    assert profile(of("0.7.0", **engine, **{BUCKET: 256})).knobs.sync_buffer == 256 * MIB
    assert changes(of("0.7.0", **engine), sync_buffer=128 * MIB) == {BUCKET: 128}
    assert profile(of("0.7.1", **engine)).knobs.sync_buffer == 2048 * MIB
    assert changes(of("0.7.1", **engine), sync_buffer=128 * MIB) == {OF_TODAY: 128}
    own = of("0.7.0", **engine, **{BUCKET: 256})
    words = VERL.command(
        own, replace(profile(own).knobs, sync_buffer=64 * MIB), run="r", attempt=1, resume=False
    )
    assert [word for word in words.argv if "bucket" in word] == [f"{BUCKET}=64"]


def test_vllm_has_buckets_from_0_7_1_on() -> None:
    older = profile(of("0.7.0"))
    assert "sync_buffer" in older.unsupported and older.knobs.sync_buffer == 0
    assert "sync_buffer" in profile(of("0.7.1")).supported


@pytest.mark.parametrize(
    ("release", "node"), [("0.7.1", "critic.model.fsdp_config"), ("0.8.0", "critic.fsdp")]
)
def test_a_critic_is_offloaded_where_its_release_reads_it(release: str, node: str) -> None:
    offloaded = of(release, "critic", **{f"{node}.param_offload": True})
    assert not profile(offloaded).knobs.param_offload  # the actor is not
    changed = changes(of(release, "critic"), param_offload=True)
    assert changed == {
        "actor_rollout_ref.actor.fsdp_config.param_offload": True,
        f"{node}.param_offload": True,
    }


@pytest.mark.parametrize(
    ("impl", "key"),
    [("auto", "critic.ppo_max_token_len_per_gpu"), ("disable", "critic.ppo_infer_max_token_len_per_gpu")],
)
def test_the_older_critic_has_a_limit_of_its_update(impl: str, key: str) -> None:
    limits = {"critic.ppo_max_token_len_per_gpu": 16384, "++critic.ppo_infer_max_token_len_per_gpu": 16384}
    job = of("0.7.1", "critic", **limits, **{"trainer.use_legacy_worker_impl": impl})
    before = profile(job).knobs.tokens_per_microbatch
    assert before is not None
    changed = {
        name.lstrip("+"): value for name, value in changes(job, tokens_per_microbatch=before // 2).items()
    }
    assert changed[key] == 8192
    assert changed["critic.ppo_max_token_len_per_gpu"] == 8192


def test_a_limit_of_the_older_critics_values_of_its_own_follows() -> None:
    values = "critic.forward_max_token_len_per_gpu"
    job = of("0.7.0", "critic", **{values: 32768})
    before = profile(job).knobs.tokens_per_microbatch
    assert before is not None
    assert changes(job, tokens_per_microbatch=before // 2)[values] == 16384
    assert values not in changes(of("0.7.0", "critic"), tokens_per_microbatch=before // 2)
