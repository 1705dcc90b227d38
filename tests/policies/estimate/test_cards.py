"""What measurements on a card taught the estimate: budgets, attention in fp32, offloaded moments, loading."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.passes import pass_of
from autotune.policies.estimate.peaks import estimates
from autotune.policies.values.failure import Phase
from autotune.policies.values.profile import Placement

from .toy import CPU, GIB, KNOBS, LAYER, LAYOUT, LOCAL, MEGATRON, NODE, TOY, WHOLE, by_phase, job, load

ALONE = replace(LAYOUT, strategy="fsdp2", ranks=1, shards=1, engine_ranks=1, embedding_apart=False)


def of(layout=LAYOUT, *, engine="none", placement=Placement.SEPARATE, trainer=None, rollout=None, **knobs):
    profile = replace(
        job(layout, placement=placement, engine=engine),
        trainer_budget_bytes=trainer,
        engine_budget_bytes=rollout,
    )
    return estimates(profile, NODE, TOY, [replace(KNOBS, **knobs)])


def test_a_budget_counts_what_the_allocator_holds_and_nothing_outside_of_it():
    whole, budgeted = by_phase(of(), "outside"), by_phase(of(trainer=5 * GIB), "outside")
    left = constant("context") + constant("modules") + constant("collectives")
    for phase in (Phase.LOG_PROB, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT):
        assert whole[phase] - budgeted[phase] == pytest.approx(left)
        assert budgeted[phase] >= constant("workspaces")
    engine = by_phase(of(engine="sglang", trainer=5 * GIB, rollout=3 * GIB), "outside")
    assert engine[Phase.ROLLOUT] == 0
    assert by_phase(of(engine="sglang"), "outside")[Phase.ROLLOUT] == constant("context")


def test_actors_that_take_turns_within_budgets_do_not_count_each_others_memory():
    asleep = replace(ALONE, engine_sleeps=True)
    shared = of(asleep, engine="sglang", placement=Placement.COLOCATED)
    budgets = {"trainer": 5 * GIB, "rollout": 3 * GIB}
    apart = of(asleep, engine="sglang", placement=Placement.COLOCATED, **budgets)
    assert by_phase(shared, "residue")[Phase.BACKWARD] == constant("residue")
    assert by_phase(apart, "residue")[Phase.BACKWARD] == 0
    assert by_phase(shared, "optimizer")[Phase.ROLLOUT] == pytest.approx(8 * LOCAL, rel=0.01)
    assert by_phase(apart, "optimizer")[Phase.ROLLOUT] == 0
    # Its pool, which wakes last, is what the engine's share of a weight sync is.
    assert by_phase(apart, "kv_pool")[Phase.WEIGHT_SYNC] == by_phase(apart, "kv_pool")[Phase.ROLLOUT] > 0


def test_a_cache_that_grows_with_the_answers_is_not_there_at_the_start():
    result = by_phase(of(engine="light", trainer=GIB, rollout=GIB), "kv_pool")
    assert result[Phase.ROLLOUT_INIT] == 0 < result[Phase.ROLLOUT]


@pytest.mark.parametrize(
    ("layout", "model", "cluster", "scores"),
    [
        ({"compute_bytes": 4}, {}, NODE, 1),
        ({"compute_bytes": 2}, {}, NODE, 0),
        ({"compute_bytes": 4}, {"kv_heads": 2}, NODE, 0),  # a fused kernel has heads of one size
        ({"compute_bytes": 4}, {}, CPU, 0),
        ({"compute_bytes": 4, "strategy": "megatron"}, {}, NODE, 0),
    ],
)
def test_fp32_with_grouped_heads_keeps_the_scores_of_attention(layout, model, cluster, scores):
    base = MEGATRON if "strategy" in layout else LAYOUT
    loads = load(replace(base, **layout), cluster=cluster)
    toy = replace(TOY, **model)
    short = dataclasses.replace(loads, sequence=16)
    one = np.full(loads.count, 1.0)
    more = pass_of(toy, loads, tokens=one).layer - pass_of(toy, short, tokens=one).layer
    assert more == pytest.approx(scores * 4 * 2 * 16)  # two heads, 16 more keys
    working = pass_of(toy, loads, tokens=one).working - pass_of(toy, short, tokens=one).working
    assert working == pytest.approx(2 * scores * 4 * 2 * 16)


def test_moments_that_pass_through_a_card_leave_their_temporaries_on_it():
    stays = replace(ALONE, optimizer_stays_offloaded=True, per_tensor_optimizer=True)
    stays = replace(stays, optimizer_temporary_bytes=16)
    for layout, temporaries in ((stays, 0), (replace(stays, optimizer_passes_through=True), 16 * 32 * 8)):
        result = of(layout, optimizer_offload=True)
        assert by_phase(result, "optimizer")[Phase.OPTIMIZER] == 0
        assert by_phase(result, "buffers")[Phase.OPTIMIZER] == temporaries


@pytest.mark.parametrize(
    ("apart", "model", "unit"),
    [
        (False, TOY, LAYER),
        (False, replace(TOY, vocab=128), 2 * 128 * 8),  # the root has embedding and head
        (True, replace(TOY, vocab=128), 128 * 8),
    ],
)
@pytest.mark.parametrize("shards", [1, 4])
def test_a_model_that_is_sharded_on_its_device_has_a_unit_twice(apart, model, unit, shards):
    layout = replace(ALONE, ranks=shards, shards=shards, loads_whole=True, embedding_apart=apart)
    predicted = estimates(job(layout, placement=Placement.SEPARATE), NODE, model, [KNOBS])
    whole = WHOLE + 2 * 8 * (model.vocab - TOY.vocab)
    assert by_phase(predicted, "weights")[Phase.INIT] == pytest.approx(4 * (whole + unit / shards))


@pytest.mark.parametrize(("gpu", "helps"), [("NVIDIA H200", True), ("AMD Instinct MI300X", False)])
def test_expandable_segments_count_only_where_the_device_has_them(gpu, helps):
    node = replace(NODE, gpu_name=gpu)
    always = load(replace(LAYOUT, expandable_segments=True), cluster=node)
    assert always.expandable.all() == helps
    assert not load(LAYOUT, cluster=node).expandable.any()
