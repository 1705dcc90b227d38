"""Jobs of older releases: read by the names and defaults of their time, written as their release has them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autotune.launchers.frameworks import find
from autotune.launchers.frameworks.core.renames import Renamed, names_of, release_before
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.profile import Placement, Profile

CLUSTER = Cluster(
    address="local", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)
ROWS = (
    Renamed("plain", "section.plain", since="2.0"),
    Renamed("part", "section.part", since="3.0"),
    Renamed("gone", since="1.5", hint="it was removed"),
    Renamed("never", "always"),
)


def job(framework: str, settings: dict[str, Any], *, version: str | None = None, processes: int = 8) -> Job:
    return Job(
        name="mine",
        framework=framework,
        framework_version=version,
        settings=settings,
        env={"NPROC_PER_NODE": str(processes)} if framework == "ms-swift" else {},
        workdir="/home/me",
    )


def profile(of: Job) -> Profile:
    return find(of.framework).profile(of, CLUSTER)


def written(of: Job, **knobs: Any) -> dict[str, Any]:
    return find(of.framework).settings(of, replace(profile(of).knobs, **knobs))


@pytest.mark.parametrize(
    ("given", "names", "release"),
    [
        ({"plain"}, {"section.plain": "plain", "section.part": "part"}, "1.9"),
        ({"plain", "section.plain"}, {}, "1.9"),
        ({"part.of_it"}, {"section.part": "part"}, "2.9"),
        ({"part.of_it", "plain"}, {"section.part": "part", "section.plain": "plain"}, "1.9"),
        ({"gone"}, {}, "1.9"),  # no release on record is so old
        ({"never", "section.plain"}, {}, ""),
    ],
)
def test_the_names_of_a_job_tell_its_release(given: set[str], names: dict[str, str], release: str) -> None:
    assert names_of(ROWS, given) == names
    assert release_before(ROWS, given, ("1.9", "2.9", "3.1")) == release


SWIFT_3: dict[str, Any] = {
    "rlhf_type": "grpo",
    "train_type": "full",
    "use_vllm": True,
    "vllm_gpu_memory_utilization": 0.5,
    "num_generations": 8,
    "per_device_train_batch_size": 4,
}


def test_ms_swift_3_trains_all_weights_where_it_says_so() -> None:
    own = job("ms-swift", {**SWIFT_3, "vllm_mode": "colocate"})
    assert find("ms-swift").release_by_settings(own) == "3.12.6"
    assert profile(own).layout.lora_rank == 0
    lora = job("ms-swift", {**SWIFT_3, "vllm_mode": "colocate", "train_type": "lora"})
    assert profile(lora).layout.lora_rank == 8  # the default of its time
    words = find("ms-swift").command(own, profile(own).knobs, run="r", attempt=1, resume=False).argv
    assert words[words.index("--train_type") + 1] == "full" and "--tuner_type" not in words


def test_the_engines_of_ms_swift_before_3_6_share_the_cards_if_there_is_one_on_each() -> None:
    beside = job("ms-swift", {**SWIFT_3, "num_infer_workers": 1}, processes=7)
    shared = job("ms-swift", {**SWIFT_3, "num_infer_workers": 8, "tensor_parallel_size": 4})
    assert profile(beside).placement is Placement.SEPARATE
    assert profile(shared).placement is Placement.COLOCATED
    assert profile(shared).knobs.rollout_tensor_parallel == 4
    assert written(shared, rollout_tensor_parallel=2) == {"tensor_parallel_size": 2}
    assert written(shared, fused_kernels=True) == {"use_liger": True}
    assert "anew" in profile(shared).unsupported["microbatch_size"]


@pytest.mark.parametrize(
    ("version", "settings", "placement"),
    [
        ("3.8.3", {}, Placement.COLOCATED),
        ("3.8.3", {"vllm_server_host": "10.0.0.2"}, Placement.SEPARATE),
        ("3.12.6", {"vllm_mode": "server"}, Placement.SEPARATE),
    ],
)
def test_the_server_of_ms_swift_3_is_where_its_release_looks_for_it(
    version: str, settings: dict[str, Any], placement: Placement
) -> None:
    own = job("ms-swift", {**SWIFT_3, **settings}, version=version)
    assert profile(own).placement is placement
    assert all(each.origin.value == "assumed" for each in find("ms-swift").check(own))


def test_a_renamed_setting_is_refused_by_the_release_that_has_the_new_name() -> None:
    (result, *_) = find("ms-swift").check(job("ms-swift", SWIFT_3, version="4.6.0"))
    assert result.path == ("settings", "train_type") and result.hint == "write tuner_type"


SKYRL_TRAIN: dict[str, Any] = {
    "trainer.placement.policy_num_gpus_per_node": 8,
    "trainer.use_sample_packing": False,
    "generator.num_inference_engines": 8,
    "generator.inference_engine_tensor_parallel_size": 1,
    "generator.gpu_memory_utilization": 0.8,
}


def test_the_engine_of_skyrl_train_is_read_and_changed_under_its_names() -> None:
    own = job("skyrl", SKYRL_TRAIN)
    knobs = profile(own).knobs
    assert find("skyrl").release_by_settings(own) == "0.2.0"
    assert (knobs.memory_fraction, knobs.rollout_tensor_parallel, knobs.cuda_graphs) == (0.8, 1, "off")
    assert profile(own).layout.padded
    assert written(own, memory_fraction=0.6) == {"generator.gpu_memory_utilization": 0.6}
    assert written(own, concurrency=512) == {
        "generator.max_num_seqs": 512
    }  # a name that the job does not use
    assert written(own, rollout_tensor_parallel=2) == {
        "generator.inference_engine_tensor_parallel_size": 2,
        "generator.num_inference_engines": 4,
    }


def test_what_an_older_release_does_not_have_is_not_offered() -> None:
    unsupported = profile(job("skyrl", SKYRL_TRAIN)).unsupported
    assert unsupported["logprob_chunk"] == "skyrl 0.2.0 has no trainer.logprobs_chunk_size"
    assert "memory_fraction" not in unsupported


def test_what_a_release_refuses_is_only_a_doubt_where_names_tell_another() -> None:
    result = find("skyrl").check(job("skyrl", {**SKYRL_TRAIN, "generator.num_inference_engines": 4}))
    assert result and all(each.origin.value == "assumed" for each in result)


def test_other_gpus_change_the_sizes_under_the_names_of_the_job() -> None:
    resized = find("skyrl").on_gpus(job("skyrl", SKYRL_TRAIN), nodes=1, per_node=4)
    assert resized is not None and resized.settings["generator.num_inference_engines"] == 4
    assert not [name for name in resized.settings if name.startswith("generator.inference_engine.")]


@pytest.mark.parametrize(
    ("flag", "release", "fraction"),
    [("use_kl_estimator_k3", "0.5.9.post1", 0.9), ("deepcompile", "0.7.5", 0.95)],
)
def test_the_flags_of_openrlhf_tell_the_defaults_of_their_time(
    flag: str, release: str, fraction: float
) -> None:
    own = job(
        "openrlhf", {"pretrain": "Qwen/Qwen3-4B", "vllm_num_engines": 8, "flash_attn": True, flag: True}
    )
    job_profile = profile(own)
    assert find("openrlhf").release_by_settings(own) == release
    assert (job_profile.knobs.memory_fraction, job_profile.knobs.microbatch_size) == (fraction, 4)
    assert written(own, memory_fraction=0.8) == {"vllm_gpu_memory_utilization": 0.8}
    assert "logprob_tokens" in job_profile.unsupported and "tokens_per_microbatch" in job_profile.unsupported
    assert "--train." not in " ".join(job_profile.unsupported.values())


def test_what_an_older_parser_has_under_no_name_is_no_fault_of_the_job() -> None:
    own = job("openrlhf", {"pretrain": "q", "vllm_num_engines": 8, "use_kl_estimator_k3": True, "mine": 3})
    assert not find("openrlhf").check(own)
    assert any("--mine is no flag" in text for text in profile(own).warnings)


OPEN_R1: dict[str, Any] = {
    "use_vllm": True,
    "torch_dtype": "bfloat16",
    "max_prompt_length": 512,
    "max_completion_length": 1024,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "num_processes": 7,
}


@pytest.mark.parametrize(
    ("version", "settings", "release", "placement"),
    [
        (None, {}, "0.24.0", Placement.SEPARATE),  # the newest that limits prompts; a server is its default
        (None, {"vllm_mode": "colocate"}, "0.24.0", Placement.COLOCATED),
        (None, {"vllm_device": "auto", "vllm_gpu_memory_utilization": 0.7}, "0.15.2", Placement.SEPARATE),
        ("0.17.0", {}, "0.17.0", Placement.SEPARATE),
        ("0.29.1", {}, "0.29.1", Placement.SEPARATE),
        ("1.12.0", {}, "1.0.0", Placement.COLOCATED),
    ],
)
def test_vllm_of_trl_generates_where_its_release_has_it(
    version: str | None, settings: dict[str, Any], release: str, placement: Placement
) -> None:
    own = job("trl", {**OPEN_R1, **settings}, version=version)
    job_profile = profile(own)
    assert (find("trl").config(own).release.version, job_profile.placement) == (release, placement)
    assert ("memory_fraction" in job_profile.supported) is (placement is Placement.COLOCATED)
    assert job_profile.layout.parameter_bytes == 2 and not job_profile.layout.chunked_head
    assert not find("trl").check(own)


@pytest.mark.parametrize(
    ("framework", "server"), [("trl", ("trl", "vllm-serve")), ("ms-swift", ("swift", "rollout"))]
)
def test_a_server_of_the_job_generates_on_gpus_of_its_own(framework: str, server: tuple[str, ...]) -> None:
    settings = {"use_vllm": True, "num_generations": 8, "per_device_train_batch_size": 8}
    settings |= {"rlhf_type": "grpo", "vllm_tensor_parallel_size": 1} if framework == "ms-swift" else {}
    own = job(framework, settings)
    beside = profile(replace(own, server=server))
    assert beside.placement is Placement.SEPARATE and "memory_fraction" not in beside.supported
    assert any(" ".join(server) in warning for warning in beside.warnings)
    written_mode = replace(own, server=server, settings={**settings, "vllm_mode": "colocate"})
    assert profile(written_mode).placement is Placement.COLOCATED


def test_trl_limits_prompts_until_0_27_and_generates_for_every_pass_before_0_18() -> None:
    assert profile(job("trl", OPEN_R1)).longest_sequence == 1536
    assert profile(job("trl", {"num_generations": 8})).longest_sequence is None
    early = profile(job("trl", OPEN_R1, version="0.17.0")).unsupported["microbatch_size"]
    assert early.startswith("its release generates for every pass anew")
