"""Several updates of the weights from the samples of one rollout."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.launchers.builtin.config.settings import SettingsError, parse_settings
from autotune.launchers.builtin.data.task import Sample
from autotune.launchers.builtin.trainer.batching import TokenTerms, objective, updates
from autotune.launchers.builtin.trainer.rank import TrainerRank
from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.policies.values.job import Cluster, Job


def fractions(rank: TrainerRank, samples: list[Sample], *, count: int) -> list[float]:
    """Train on one rollout and return each update's share of clipped tokens."""
    rank.take(samples)
    rank.log_prob(1)
    results = []
    for number in range(count):
        results.append(rank.train(1, number).values["clip_fraction"])
        rank.optimize(1)
    return results


@given(st.lists(st.integers(1, 9), min_size=12, max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_every_sample_is_in_one_update_of_one_rank(lengths: list[int], count: int, ranks: int) -> None:
    samples = [
        Sample(prompt=[number], response=[1] * length, logprobs=[], reward=0.0, advantage=0.0)
        for number, length in enumerate(lengths)
    ]
    prompts_of: list[list[int]] = [[] for _ in range(count)]
    for rank in range(ranks):
        share, parts = updates(samples, count=count, rank=rank, ranks=ranks)
        assert [index for part in parts for index in part.own] == list(range(len(share)))
        for number, part in enumerate(parts):
            assert len(part.own) > 0
            prompts_of[number] += [share[index].prompt[0] for index in part.own]
    # In the order of the rollout: the first update has the first samples.
    assert [number for part in prompts_of for number in sorted(part)] == list(range(len(lengths)))
    tokens = [sum(lengths[number] for number in part) for part in prompts_of]
    assert [part.tokens for part in parts] == tokens


def test_clips_act_from_the_second_update_on(
    trainer: Callable[..., TrainerRank], ragged_samples: list[Sample]
) -> None:
    # Alternating signs, so that the first update moves the policy both ways.
    samples = [
        msgspec.structs.replace(sample, advantage=(-1.0) ** number)
        for number, sample in enumerate(ragged_samples)
    ]
    assert fractions(trainer(lr=0.01), samples, count=1) == [0.0]
    first, *later = fractions(trainer(lr=0.01, updates_per_rollout=3), samples, count=3)
    assert first == 0.0
    assert all(fraction > 0 for fraction in later)


def test_a_clipped_token_has_no_gradient() -> None:
    # Ratios 1.5 and 0.5, each with both signs of the advantage: a clip acts where the policy went too far.
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    logprobs = ratios.log().requires_grad_()
    terms = TokenTerms(torch.zeros(5), torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]), None)
    result = objective(logprobs, terms, clip_low=0.2, clip_high=0.28, kl_coef=0.0, update_tokens=5)
    result.loss.backward()
    assert logprobs.grad is not None
    assert (logprobs.grad == 0).tolist() == [True, False, False, True, False]
    assert result.clipped.item() == pytest.approx(0.4)


def test_an_update_without_a_sequence_for_every_rank_is_refused() -> None:
    document: dict[str, Any] = {"save_every": 0, "prompts": 4, "samples": 2, "ranks": 2}
    parse_settings(document | {"updates_per_rollout": 4})
    with pytest.raises(SettingsError) as caught:
        parse_settings(document | {"updates_per_rollout": 5})
    assert [error.key for error in caught.value.errors] == ["updates_per_rollout"]


@pytest.mark.parametrize(
    ("settings", "mini_batch", "tokens", "scored"),
    [
        ({}, 0, 8 * 16, 8 * 16),
        ({"updates_per_rollout": 2}, 4, 4 * 16, 8 * 16),
        ({"updates_per_rollout": 2, "tokens_per_microbatch": 32}, 4, 32, 32),
    ],
)
def test_the_profile_knows_how_much_an_update_holds(
    settings: dict[str, Any], mini_batch: int, tokens: int, scored: int
) -> None:
    job = Job(
        name="j",
        framework="builtin",
        settings={"prompts": 4, "samples": 2, "prompt_tokens": 6, "response_tokens": 10, **settings},
    )
    cluster = Cluster(address="", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=8 << 30)
    profile = Builtin().profile(job, cluster)
    assert profile.layout.mini_batch == mini_batch
    assert (profile.knobs.tokens_per_microbatch, profile.knobs.logprob_tokens) == (tokens, scored)
