"""Arguments that a framework hands on to its inference engine, against the releases of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.frameworks.core.types import misfit
from autotune.launchers.frameworks.dialects.engine_arguments import arguments_of, engine_of, releases
from autotune.policies.values.job import Cluster, Job
from tests.launchers.frameworks import skyrl_jobs, verl_jobs

CLUSTER = Cluster(address="", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40)
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def verl(settings: dict[str, Any], **own: Any) -> Job:
    return Job(
        name="gsm8k",
        framework="verl",
        settings={**verl_jobs.GRPO, **settings},
        shape=verl_jobs.QWEN_7B,
        **own,
    )


def wording(job: Job) -> list[str]:
    """Return what the plan warns of, about arguments of an engine."""
    warnings = FRAMEWORKS[job.framework].profile(job, CLUSTER).warnings
    return [line for line in warnings if "has no argument" in line]


def refused(job: Job) -> list[tuple[str, str]]:
    result = FRAMEWORKS[job.framework].check(job)
    return [
        (each.message, each.hint)
        for each in result
        if "argument" in each.message or " of vLLM " in each.message
    ]


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_several_releases_are_known_and_their_defaults_fit_their_types(engine: str) -> None:
    assert len(releases(engine)) >= 3
    for version in releases(engine):
        facts = arguments_of(engine, version)
        assert len(facts.types) > 200 and facts.defaults.keys() <= facts.types.keys()
        for name, default in facts.defaults.items():
            assert misfit(facts.types[name], default) == "", (version, name)


def test_the_releases_have_what_the_frameworks_rely_on() -> None:
    for version in releases("vllm"):
        taken = arguments_of("vllm", version).types
        assert {
            "gpu_memory_utilization",
            "max_num_seqs",
            "max_num_batched_tokens",
            "enforce_eager",
        } <= taken.keys()
        assert {"host", "api_server_count"} <= taken.keys()  # of `vllm serve`, which verl and SkyRL start
    for version in releases("sglang"):
        assert arguments_of("sglang", version).types["mem_fraction_static"] == "float?"


def test_a_misspelt_argument_is_an_error_where_the_engine_is_known() -> None:
    wrong = {f"+{VLLM}.max_num_seq": 64}
    pinned = verl(wrong, framework_version="0.9.1")
    assert refused(pinned) == [("vLLM 0.24.0 has no argument max_num_seq", "did you mean max_num_seqs?")]
    installed = verl(wrong, engine_versions={"vllm": "0.33.0+cu128"})
    assert refused(installed) == [("vLLM 0.33.0 has no argument max_num_seq", "did you mean max_num_seqs?")]
    assert wording(pinned) == []


def test_it_is_a_warning_where_the_engine_is_not_known() -> None:
    result = verl({f"+{VLLM}.max_num_seq": 64}, framework_version="0.9.1", engine_versions={"vllm": "0.24.1"})
    assert refused(result) == []
    (sentence,) = wording(result)
    assert sentence == (
        "vLLM 0.24.0, the nearest release known here, has no argument max_num_seq; it is passed on "
        "(did you mean max_num_seqs?)"
    )


def test_an_argument_like_no_other_is_passed_on_with_the_release_that_has_it() -> None:
    strange = verl({f"+{VLLM}.my_plugin": 1, f"+{VLLM}.sleep_mode_backend": "x"}, framework_version="0.9.1")
    assert refused(strange) == []
    assert wording(strange) == [
        "vLLM 0.24.0 has no argument my_plugin; it is passed on",
        "vLLM 0.24.0 has no argument sleep_mode_backend; it is passed on (vLLM 0.33.0 has it)",
    ]


def test_values_are_checked_against_their_types() -> None:
    result = verl({f"+{VLLM}.max_num_batched_tokens": "big"}, framework_version="0.9.1")
    assert refused(result) == [
        ("max_num_batched_tokens of vLLM 0.24.0 must be a whole number, not 'big'", "")
    ]


def test_what_a_newer_release_takes_is_not_misspelt() -> None:
    newer = f"+{VLLM}.kda_prefill_backend"  # like gdn_prefill_backend
    result = verl({newer: "triton"}, framework_version="0.9.1")
    assert refused(result) == []
    assert wording(result) == [
        "vLLM 0.24.0 has no argument kda_prefill_backend; it is passed on (vLLM 0.33.0 has it)"
    ]


@pytest.mark.parametrize(
    "known",
    [
        {f"+{VLLM}.max-num-seqs": 64},
        {f"+{VLLM}.no_enable_prefix_caching": True},
        {VLLM: {"max_num_seqs": 64}},
        {f"+{VLLM}.compilation_config.mode": 3},
        {f"+{VLLM}.max_num_batched_tokens": "16k"},
        {"+actor_rollout_ref.rollout.engine_kwargs.sglang.cuda_graph_max_bs": 16},
    ],
)
def test_what_an_engine_takes_is_no_matter(known: dict[str, Any]) -> None:
    result = verl(known, framework_version="0.9.1")
    assert refused(result) == [] and wording(result) == []


def test_skyrls_engine_is_the_one_that_its_release_pins() -> None:
    settings = {
        "generator.inference_engine.engine_init_kwargs.max_num_seq": 64,
        "generator.inference_engine.engine_init_kwargs.hf_overrides.rope_theta": 1,
    }
    result = skyrl_jobs.job(settings, framework_version="0.4.0")
    assert refused(result) == [("vLLM 0.30.0 has no argument max_num_seq", "did you mean max_num_seqs?")]
    other = skyrl_jobs.job(settings, framework_version="0.4.9")
    assert refused(other) == [] and len(wording(other)) == 1


def test_an_engine_without_facts_is_left_alone() -> None:
    assert engine_of("trtllm", Job(name="j", framework="verl"), {}, exact=True) is None


# Names that set no argument of another name: switches for one value, and what is gone.
_OF_THEIR_OWN = """
    collect_tokens_histogram config disable_piecewise_cuda_graph enable_breakable_cuda_graph
    enable_piecewise_cuda_graph enforce_piecewise_cuda_graph hybrid_kvcache_ratio monokernel_backend
    prefill_round_robin_balance
"""


@pytest.mark.parametrize("version", releases("sglang"))
def test_every_other_name_on_the_command_line_of_sglang_is_an_alias_of_an_argument(version: str) -> None:
    known = arguments_of("sglang", version)
    assert known.command_line.keys() - known.aliases.keys() <= set(_OF_THEIR_OWN.split())
    assert set(known.aliases.values()) <= known.types.keys()
