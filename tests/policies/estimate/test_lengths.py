"""How many tokens micro-batches hold: against drawn lengths, against the budgets, and in the belief."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autotune.policies.estimate.lengths import Assumption, Grouping, Lengths, deviation_of, lengths_of
from autotune.policies.estimate.load import load_of
from autotune.policies.estimate.peaks import PHASES, estimates
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.failure import Phase
from autotune.policies.values.knobs import Knobs
from tests.policies.estimate.test_peaks import CLUSTER, FSDP, QWEN, profile

BACKWARD = PHASES.index(Phase.BACKWARD)
ROWS = Knobs(microbatch_size=16, dynamic_batching=False)
BUDGET = Knobs(tokens_per_microbatch=16_384, dynamic_batching=True)


def tokens(knobs: Knobs, assumption: Assumption, layout: Layout = FSDP) -> float:
    return float(load_of(profile(layout, knobs), CLUSTER, [knobs], assumption=assumption).tokens[0])


def peak(knobs: Knobs, layout: Layout, assumption: Assumption = Assumption.EXPECTED) -> float:
    predicted = estimates(profile(layout, knobs), CLUSTER, QWEN, (knobs,), assumption=assumption)
    return float(predicted.gpu[BACKWARD, 0])


@pytest.mark.parametrize("rows", [1, 2, 8, 32])
@pytest.mark.parametrize("groups", [20, 640])
def test_the_largest_group_is_as_large_as_drawn_ones(rows: int, groups: int) -> None:
    mean, variation, longest = 1000.0, 0.6, 8000.0
    lengths = Lengths(mean=mean, response=900.0, variation=variation, longest=longest)
    rng = random.Random(5)
    sigma = np.sqrt(np.log1p(variation**2))
    center = np.log(mean) - sigma**2 / 2
    largest = [
        max(sum(min(longest, rng.lognormvariate(center, sigma)) for _ in range(rows)) for _ in range(groups))
        for _ in range(60)
    ]
    assert float(lengths.largest(rows, groups)) == pytest.approx(np.median(largest), rel=0.12)


def test_the_more_steps_the_larger_and_never_above_the_longest() -> None:
    items = [
        float(load_of(profile(FSDP, ROWS), CLUSTER, [ROWS], steps=steps).tokens[0])
        for steps in (1, 20, 1000, 10**9)
    ]
    assert items == sorted(items) and items[0] < items[-1]
    assert items[-1] <= tokens(ROWS, Assumption.LONGEST) == 16 * 4096


def test_a_number_of_sequences_fills_less_than_their_longest() -> None:
    typical, expected, longest = (tokens(ROWS, assumption) for assumption in Assumption)
    assert typical == 16 * lengths_of(FSDP, longest=4096).mean
    assert typical < expected < 0.8 * longest


def test_a_budget_is_filled_as_far_as_an_update_goes() -> None:
    many = replace(FSDP, mini_batch=512)
    few = replace(FSDP, mini_batch=32)  # four sequences on each of eight ranks
    mean = lengths_of(FSDP, longest=4096).mean
    assert tokens(BUDGET, Assumption.EXPECTED, many) == 16_384
    assert tokens(BUDGET, Assumption.TYPICAL, few) == pytest.approx(4 * mean)
    assert 4 * mean < tokens(BUDGET, Assumption.EXPECTED, few) < 16_384
    assert tokens(BUDGET, Assumption.LONGEST, few) == 16_384


def test_micro_batches_of_a_budget_are_even() -> None:
    grouping = Grouping(
        update=np.array([10.0]),
        dynamic=np.array([True]),
        budget=np.array([4000.0]),
        sequences=np.array([1e18]),
        padded=False,
        updates=np.array([20.0]),
    )
    lengths = Lengths(mean=500.0, response=400.0, variation=0.0, longest=4000.0)
    assert grouping.tokens(lengths, Assumption.TYPICAL).tolist() == [2500.0]
    assert grouping.passes(lengths, np.array([2500.0])).tolist() == [2.0]


def test_padding_takes_the_room_of_the_longest() -> None:
    padded = replace(FSDP, padded=True)
    assert {tokens(ROWS, assumption, padded) for assumption in Assumption} == {16 * 4096}


def test_without_responses_all_sequences_are_the_longest() -> None:
    packed = replace(FSDP, prompt_tokens=4096, response_tokens=0)
    assert {tokens(ROWS, assumption, packed) for assumption in Assumption} == {16 * 4096}


def test_lengths_that_the_job_says_are_used_and_leave_less_doubt() -> None:
    message = replace(FSDP, prompt_mean=300.0, response_mean=2400.0)
    assert lengths_of(message, longest=4096).mean == 2700.0
    own = estimates(profile(message, ROWS), CLUSTER, QWEN, (ROWS,))
    guessed = estimates(profile(FSDP, ROWS), CLUSTER, QWEN, (ROWS,))
    assert own.gpu[BACKWARD, 0] > guessed.gpu[BACKWARD, 0]
    assert own.lengths[BACKWARD, 0] < 0.5 * guessed.lengths[BACKWARD, 0]
    assert guessed.lengths[PHASES.index(Phase.OPTIMIZER), 0] == 0


def test_a_mean_as_long_as_allowed_is_every_sequence() -> None:
    full = replace(FSDP, prompt_mean=1024.0, response_mean=3072.0)
    assert {tokens(ROWS, assumption, full) for assumption in Assumption} == {16 * 4096}
    assert estimates(profile(full, ROWS), CLUSTER, QWEN, (ROWS,)).lengths.max() == 0


def test_a_measured_mean_is_so_many_deviations_off_and_never_far():
    lengths = [lengths_of(FSDP, longest=4096, deviation=each).mean for each in (-1.0, 0.0, 0.5)]
    items = [deviation_of(FSDP, longest=4096, mean=mean) for mean in lengths]
    assert items == pytest.approx([-1.0, 0.0, 0.5], abs=0.01)
    assert deviation_of(FSDP, longest=4096, mean=4096) == 2.0
    assert deviation_of(FSDP, longest=4096, mean=5000) is None
    full = replace(FSDP, prompt_mean=1024.0, response_mean=3072.0)
    assert deviation_of(full, longest=4096, mean=2000) is None


def test_forced_longest_sequences_are_not_predicted_beyond_themselves():
    one = estimates(profile(FSDP, ROWS), CLUSTER, QWEN, (ROWS,))
    worst = peak(ROWS, FSDP, Assumption.LONGEST)
    assert one.gpu[BACKWARD, 0] + 2.0 * one.lengths[BACKWARD, 0] < 1.15 * worst


@settings(max_examples=60)
@given(
    rows=st.integers(1, 256),
    budget=st.integers(4096, 65_536),
    dynamic=st.booleans(),
    update=st.sampled_from([0, 8, 64, 512]),
    response=st.floats(0, 3072),
)
def test_typical_expected_and_longest_are_in_order(
    rows: int, budget: int, dynamic: bool, update: int, response: float
) -> None:
    knobs = Knobs(microbatch_size=rows, tokens_per_microbatch=budget, dynamic_batching=dynamic)
    layout = replace(FSDP, mini_batch=update, response_mean=response, prompt_mean=response / 4)
    typical, expected, longest = (tokens(knobs, assumption, layout) for assumption in Assumption)
    assert 0 < typical <= expected * (1 + 1e-9) and expected <= longest * (1 + 1e-9)
    peaks = [peak(knobs, layout, assumption) for assumption in Assumption]
    assert peaks == sorted(peaks)
