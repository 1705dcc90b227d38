"""verl's guide to memory failures, row by row, and its templates."""

import pytest

from autotune.launchers.base import Status
from autotune.policies.values.job import Job

from .verl_jobs import CLUSTER, GRPO, VERL, written_jobs


def test_every_piece_of_advice_is_complete() -> None:
    for row in VERL.advice:
        assert row.reason and row.setting
        assert row.status is not Status.REPLACED or row.instead, row


@pytest.mark.parametrize(
    "name",
    [
        "gpu_memory_utilization",
        "enforce_eager",
        "cudagraph_capture_sizes",
        "ppo_micro_batch_size_per_gpu",
        "use_dynamic_bsz",
        "ppo_max_token_len_per_gpu",
        "critic.ppo_max_token_len_per_gpu",
        "enable_gradient_checkpointing",
        "recompute_",
        "enable_activation_offload",
        "megatron.param_offload",
        "megatron.grad_offload",
        "megatron.optimizer_offload",
        "ref.megatron.param_offload",
        "cpu_offload",
        "offload_params",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "use_precision_aware_optimizer",
        "entropy_from_logits_with_chunking",
        "entropy_checkpointing",
        "use_liger",
        "ulysses_sequence_parallel_size",
        "critic.ulysses_sequence_parallel_size",
        "strategy: fsdp2",
        "libtcmalloc",
        "libjemalloc",
        "aarch64",
        "global_profiler.enabled",
        "trace_alloc_max_entries",
        "log_gpu_memory_usage",
        "dataloader_num_workers",
        "tensor_model_parallel_size",
    ],
)
def test_every_setting_of_the_guide_has_a_row(name) -> None:
    assert any(name in row.setting for row in VERL.advice)


def test_the_templates_of_the_guide_are_starts() -> None:
    assert set(VERL.presets) == {"memory-constrained", "large-model", "very-large-model"}
    for name, preset in VERL.presets.items():
        of = Job(name=name, framework="verl", settings={**GRPO, **preset})
        assert VERL.check(of) == ()
        assert VERL.profile(of, CLUSTER).knobs.dynamic_batching
        example = written_jobs()[f"verl-{name}"].settings
        assert {k: v for k, v in preset.items() if example.get(k) != v} == {}
