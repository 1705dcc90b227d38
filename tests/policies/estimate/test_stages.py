"""A pipeline's stages: their layers, and their chunks in flight."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autotune.policies.estimate.load import load_of
from autotune.policies.estimate.passes import logits_of, pass_of, with_predicting
from autotune.policies.estimate.peaks import Estimates, estimates
from autotune.policies.estimate.shapes import parameters
from autotune.policies.estimate.stages import in_flight, stages_of
from autotune.policies.estimate.training import fullest, states_of
from autotune.policies.values.knobs import Knobs

from .test_peaks import CLUSTER, MEGATRON, QWEN, profile

FOUR = replace(MEGATRON, pipeline_parallel=4, ranks=4, shards=1, mini_batch=512)
TIED = replace(QWEN, tied=True)


def loaded(layout):
    return load_of(profile(layout, Knobs(microbatch_size=1)), CLUSTER, [Knobs()])


def test_a_configuration_in_more_stages_is_a_job_with_as_many():
    knobs = [Knobs(pipeline_parallel=size, tensor_parallel=2) for size in (4, None, 2, 1)]
    joined = estimates(profile(MEGATRON), CLUSTER, QWEN, knobs)
    for place, (size, shards) in enumerate(((4, 2), (1, 8), (2, 4), (1, 8))):
        layout = replace(MEGATRON, pipeline_parallel=size, shards=shards)
        own = estimates(profile(layout), CLUSTER, QWEN, [Knobs(tensor_parallel=2)])
        for field in fields(Estimates):
            if field.name not in ("error", "host_capacity"):
                np.testing.assert_allclose(
                    getattr(joined, field.name)[..., place], getattr(own, field.name)[..., 0]
                )


@pytest.mark.parametrize(
    ("uneven", "layers"),
    [
        ({}, (7, 7)),
        ({"first_stage_layers": 4, "last_stage_layers": 6}, (4, 9, 6)),
        ({"first_stage_layers": 10}, (10, 6)),
        ({"last_stage_layers": 1}, (9, 1)),
        ({"embedding_is_layer": True, "loss_is_layer": True, "pipeline_parallel": 5}, (5, 6, 5)),
        ({"pipeline_parallel": 2, "first_stage_layers": 10, "last_stage_layers": 18}, (10, 18)),
    ],
)
def test_layers_are_spread_as_megatron_spreads_them(uneven, layers):
    result = stages_of(QWEN, replace(FOUR, **uneven))
    assert tuple(stage.layers for stage in result) == layers
    assert [stage.first for stage in result] == [True] + [False] * (len(layers) - 1)
    assert [stage.last for stage in result] == [False] * (len(layers) - 1) + [True]
    stages = uneven.get("pipeline_parallel", 4)
    assert [stage.after for stage in result] == [stages - 1, *[stages - 2] * (len(layers) - 2), 0]


@pytest.mark.parametrize(
    ("written", "fullest"),
    [
        # Those with more layers than any in the middle before them; the ends have the embedding and the head.
        ((7, 7, 7, 7), [(7, 3), (7, 2), (7, 0)]),
        ((4, 8, 8, 8), [(4, 3), (8, 2), (8, 0)]),
        ((4, 6, 9, 9), [(4, 3), (6, 2), (9, 1), (9, 0)]),
        ((9, 8, 7, 4), [(9, 3), (8, 2), (4, 0)]),
        ((0, 1, 1, 0), [(0, 3), (1, 2), (0, 0)]),
        ((0, 0, 2, 0), [(0, 3), (0, 2), (2, 1), (0, 0)]),
    ],
)
def test_of_written_stages_those_are_counted_that_can_be_the_fullest(written, fullest):
    result = stages_of(replace(QWEN, layers=sum(written)), replace(FOUR, stage_layers=written))
    assert [(stage.layers, stage.after) for stage in result] == fullest
    assert [stage.first for stage in result] == [True] + [False] * (len(result) - 1)
    assert [stage.last for stage in result] == [False] * (len(result) - 1) + [True]


def schedule(stage, *, stages, chunks, micro_batches, group, ahead):
    """Return the most chunks in flight, by playing the schedule: a warm-up, then one forward, one back."""
    total = micro_batches * chunks
    warm_up = stages - stage - 1
    if chunks > 1:
        warm_up = 2 * warm_up + (chunks - 1) * group + ahead
    events = [1] * min(warm_up, total) + [1, -1] * max(0, total - warm_up)
    held = most = 0
    for event in events:
        held += event
        most = max(most, held)
    return most


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(1, 6), st.integers(1, 40), st.integers(0, 4), st.sampled_from([0, 1]))
def test_chunks_in_flight_are_those_of_the_schedule(stages, chunks, micro_batches, larger, ahead):
    group = stages + larger
    layout = replace(
        FOUR,
        pipeline_parallel=stages,
        ranks=stages,
        pipeline_chunks=chunks,
        pipeline_group=group,
        pipeline_ahead=ahead,
        sequences=micro_batches,
        mini_batch=micro_batches,
    )
    for stage in stages_of(QWEN, layout):
        played = schedule(
            stages - 1 - stage.after,
            stages=stages,
            chunks=chunks,
            micro_batches=micro_batches,
            group=group,
            ahead=ahead,
        )
        assert in_flight(loaded(layout), stage)[0] * chunks == pytest.approx(played)


@pytest.mark.parametrize("model", [QWEN, TIED], ids=["untied", "tied"])
def test_the_first_stage_has_the_embedding_and_the_last_a_head_of_its_own(model):
    counts = parameters(model)
    layer = counts.attention + counts.mlp + counts.norms
    layout = replace(FOUR, first_stage_layers=4, last_stage_layers=6)
    first, second, last = (float(each.local[0]) for each in states_of(model, loaded(layout)))
    assert first == pytest.approx(4 * layer + counts.embedding)
    assert second == pytest.approx(9 * layer)
    assert last == pytest.approx(6 * layer + counts.embedding)


def test_between_updates_a_rank_of_the_fullest_stage_counts():
    layout = replace(FOUR, first_stage_layers=1, last_stage_layers=3)
    states = states_of(QWEN, loaded(layout))
    assert fullest(states).stage.layers == 12


def test_no_configuration_of_a_pipeline_needs_nothing():
    assert estimates(profile(FOUR), CLUSTER, QWEN, []).gpu.shape[1] == 0


@pytest.mark.parametrize(
    ("written", "after", "layers"),
    [
        ((7, 7, 7, 7), 0, [(7, 3, 0), (7, 2, 0), (7, 0, 1)]),
        ((5, 8, 10, 5), 0, [(5, 3, 0), (8, 2, 0), (10, 1, 0), (5, 0, 1)]),
        ((9, 10, 9, 0), 1, [(9, 3, 0), (10, 2, 0), (9, 1, 1), (0, 0, 0)]),
        ((7, 7, 7), 0, [(7, 3, 0), (7, 0, 1)]),  # of three stages, where the job has four
        ((9, 9, 9, 9), 0, [(7, 3, 0), (7, 0, 1)]),  # of another model
    ],
)
def test_stages_whose_layers_are_written_are_taken_as_they_are(written, after, layers):
    layout = replace(FOUR, stage_layers=written, predicting_layers=1, predicting_after=after)
    stages = stages_of(QWEN, layout)
    assert [(stage.layers, stage.after, stage.predicting) for stage in stages] == layers
    assert [stage.first for stage in stages] == [True] + [False] * (len(layers) - 1)
    assert [stage.last for stage in stages] == [False] * (len(layers) - 1) + [True]


@pytest.mark.parametrize("stages", [1, 4])
def test_layers_of_multi_token_prediction_are_whole_layers_with_a_product_and_an_embedding(stages):
    counts = parameters(QWEN)
    own = replace(FOUR, pipeline_parallel=stages)
    plain, more = (
        states_of(QWEN, loaded(replace(own, predicting_layers=count)))[-1].local[0] for count in (0, 2)
    )
    added = 2 * (counts.layer + 2 * QWEN.hidden**2 + 3 * QWEN.hidden)
    assert more - plain == pytest.approx(added + (counts.embedding if stages > 1 else 0))


def test_layers_of_multi_token_prediction_keep_their_activations_and_their_softmax():
    one = replace(FOUR, pipeline_parallel=1)
    plain, layers, trained = (
        loaded(replace(one, **settings))
        for settings in ({}, {"predicting_layers": 1}, {"predicting_layers": 1, "predicting_loss": True})
    )
    passes = [pass_of(QWEN, load, tokens=load.tokens) for load in (plain, layers)]
    assert float((passes[1].kept - passes[0].kept)[0]) == pytest.approx(float(passes[0].kept_layer[0]))
    rows = 5 * 2 * QWEN.hidden * plain.tokens[0]
    assert float((passes[1].ends - passes[0].ends)[0]) == pytest.approx(rows)
    kept = [
        with_predicting(
            logits_of(QWEN, load, tokens=load.tokens, scored=load.scored), QWEN, load, tokens=load.tokens
        )
        for load in (plain, layers, trained)
    ]
    assert float(kept[0].backward[0]) == float(kept[1].backward[0])
    assert float((kept[2].backward - kept[0].backward)[0]) == pytest.approx(4 * QWEN.vocab * plain.tokens[0])
