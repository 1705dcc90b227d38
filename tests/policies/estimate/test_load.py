"""What the formulas read of a job: its knobs with their defaults, and how its sequences are divided."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.load import Load, load_of
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.knobs import Knobs
from tests.policies.estimate.toy import KNOBS, LAYOUT, MEGATRON, NODE, job, load

SIXTEEN = replace(LAYOUT, sequences=16)  # of 32 tokens, on four ranks
FREE = Knobs()
BUDGET = Knobs(dynamic_batching=True, tokens_per_microbatch=64)


def of(layout: Layout, knobs: Knobs) -> Load:
    return load_of(replace(job(layout), knobs=knobs), NODE, [knobs])


def first(matched: Load, *names: str) -> list[float]:
    return [float(getattr(matched, name)[0]) for name in names]


def test_a_switch_that_a_job_does_not_have_is_off():
    bare = replace(job(), knobs=Knobs())
    resolved = load_of(bare, NODE, [Knobs()])
    switches = {
        field.name
        for field in fields(resolved)
        if isinstance(value := getattr(resolved, field.name), np.ndarray) and value.dtype == np.bool_
    }
    assert {"activation_offload", "param_offload", "fused", "disk", "streamed", "expandable"} <= switches
    of_the_layout = {"layered_sync", "reshard"}
    assert not any(first(resolved, *switches - of_the_layout))
    assert first(resolved, "tensor", "split", "replicas", "concurrency", "workers") == [1, 1, 4, 256, 0]


def test_a_candidate_without_a_knob_has_the_jobs_own():
    own = replace(job(), knobs=replace(KNOBS, concurrency=7, recompute="full", param_offload=True))
    result = load_of(own, NODE, [Knobs(), Knobs(concurrency=9, recompute="off", param_offload=False)])
    assert result.count == 2
    assert result.concurrency.tolist() == [7, 9]
    assert result.recompute_full.tolist() == result.param_offload.tolist() == [True, False]


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp", "fsdp2", "megatron"])
def test_ranks_of_every_strategy_but_megatrons_may_share_a_sequence_by_its_heads(strategy):
    result = load(replace(LAYOUT, strategy=strategy), sequence_parallel=2)
    assert first(result, "split", "replicas") == ([1, 4] if strategy == "megatron" else [2, 2])
    split = load(replace(LAYOUT, strategy=strategy), context_parallel=2)
    assert first(split, "split", "replicas") == [2, 2]


def test_tensor_and_pipeline_parallelism_leave_fewer_copies():
    assert first(load(MEGATRON, tensor_parallel=2), "tensor", "replicas", "shards") == [2, 2, 2]
    assert first(load(replace(MEGATRON, pipeline_parallel=2)), "replicas") == [2]
    assert first(load(MEGATRON, tensor_parallel=8), "replicas", "shards") == [1, 1]


@pytest.mark.parametrize(
    ("layout", "knobs", "rows", "update", "tokens"),
    [
        # A step has four sequences on each rank.
        (SIXTEEN, FREE, 4, 4, 4 * 32),
        (SIXTEEN, BUDGET, 4, 2, 2 * 32),
        (SIXTEEN, replace(BUDGET, dynamic_batching=False), 4, 4, 4 * 32),  # then no pass has a budget
        (SIXTEEN, Knobs(microbatch_size=1), 4, 1, 32),
        (replace(SIXTEEN, mini_batch=8), FREE, 4, 2, 2 * 32),
        (replace(SIXTEEN, mini_batch=64), FREE, 4, 4, 4 * 32),
        # Of a job that does not say how many, eight passes.
        (replace(LAYOUT, sequences=0), Knobs(microbatch_size=3), 8 * 3, 3, 3 * 32),
        (replace(LAYOUT, sequences=0), BUDGET, 8 * 2, 2, 2 * 32),
        (replace(LAYOUT, sequences=0), replace(BUDGET, tokens_per_microbatch=8), 8, 1, 32),
        (replace(LAYOUT, sequences=0), FREE, 8, 8, 8 * 32),
    ],
)
def test_the_sequences_of_a_step_and_of_a_pass(layout, knobs, rows, update, tokens):
    result = of(layout, knobs)
    assert first(result, "step_sequences", "step_tokens") == [rows, rows * 32]
    assert first(result, "tokens") == pytest.approx([tokens])
    assert first(result, "usual_tokens") == pytest.approx([update * 32])


def test_a_budget_is_of_a_rank_or_of_all_that_share_a_sequence():
    assert first(of(SIXTEEN, replace(BUDGET, sequence_parallel=2)), "tokens") == pytest.approx([64])
    before = replace(SIXTEEN, tokens_before_split=True)
    assert first(of(before, replace(BUDGET, sequence_parallel=2)), "tokens") == pytest.approx([64 / 2])


def test_log_probabilities_have_the_budget_of_training_unless_they_have_their_own():
    assert first(of(SIXTEEN, BUDGET), "tokens", "scored") == pytest.approx([64, 64])
    assert first(of(SIXTEEN, replace(BUDGET, logprob_tokens=128)), "tokens", "scored") == pytest.approx(
        [64, 128]
    )


def test_a_scoring_micro_batch_has_more_sequences_where_the_job_says_so():
    twice = replace(SIXTEEN, scored_sequences=2.0)
    assert first(of(twice, KNOBS), "tokens", "scored", "passes", "score_passes") == [32, 64, 4, 2]
    assert first(of(twice, BUDGET), "tokens", "scored") == pytest.approx([64, 64])  # tokens are counted


@pytest.mark.parametrize(
    ("changes", "knobs", "streamed", "away", "updated_there"),
    [
        ({}, {}, 0, 0, 0),
        ({"reduce_bucket_bytes": 1}, {}, 0, 0, 0),
        ({}, {"optimizer_offload": True}, 0, 1, 0),
        ({"reduce_bucket_bytes": 1}, {"optimizer_offload": True}, 1, 1, 0),
        ({"optimizer_stays_offloaded": True}, {"optimizer_offload": True}, 0, 1, 1),
        ({}, {"optimizer_offload": True, "optimizer_offload_fraction": 0.25}, 0, 0.25, 0),
        # All of it, as verl's Megatron does at a fraction of zero.
        ({}, {"optimizer_offload": True, "optimizer_offload_fraction": 0.0}, 0, 1, 0),
        ({}, {"optimizer_offload": False, "optimizer_offload_fraction": 0.25}, 0, 0, 0),
        ({"optimizer_stays_offloaded": True}, {"grad_offload": True}, 1, 0, 0),
        ({"grad_offload_takes_optimizer": True}, {"grad_offload": True}, 0, 1, 0),
        ({"parameters_stay_offloaded": True}, {"param_offload": True}, 1, 1, 1),
        ({"grad_offload_takes_all": True}, {"grad_offload": True}, 1, 1, 1),
    ],
)
def test_what_is_in_host_memory_between_updates_and_during_one(changes, knobs, streamed, away, updated_there):
    result = load(replace(LAYOUT, **changes), **knobs)
    assert first(result, "streamed", "optimizer_away", "host_update") == [streamed, away, updated_there]
