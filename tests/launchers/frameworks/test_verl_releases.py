"""Settings of verl that older releases know under another name, or read from another setting."""

from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks.core.renames import names_in, translated
from autotune.launchers.frameworks.verl.keys import ENGINES, RELEASES, keys_of
from autotune.launchers.frameworks.verl.renamed import RENAMED
from autotune.policies.values.job import Job

from .verl_jobs import JOBS, VERL, profile, with_settings

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
