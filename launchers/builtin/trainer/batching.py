"""Splits a step into updates, and those into padded micro-batches, over which the objective is summed.

The objective is PPO's with two clips and a k3 penalty.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from autotune.launchers.builtin.data.task import Sample


class Update(NamedTuple):
    """The samples of one update of the weights."""

    own: range  # this rank's, among all that it has of the step
    tokens: int  # generated, over all ranks


class Batch(NamedTuple):
    """One padded micro-batch on the device."""

    indices: list[int]
    tokens: torch.Tensor
    responses: torch.Tensor  # which tokens were generated
    weight: float  # 0 for a rank that only keeps step with the others


def updates(
    samples: Sequence[Sample], *, count: int, rank: int, ranks: int
) -> tuple[list[Sample], list[Update]]:
    """Return a rank's share of a step's samples, and the updates that they are for, in their own order."""
    share: list[Sample] = []
    result: list[Update] = []
    for number in range(count):
        first, last = (len(samples) * edge // count for edge in (number, number + 1))
        together = samples[first:last]
        own = together[rank::ranks]
        result.append(
            Update(
                own=range(len(share), len(share) + len(own)),
                tokens=sum(len(sample.response) for sample in together),
            )
        )
        share += own
    return share, result


def padded(samples: Sequence[Sample], indices: list[int], *, weight: float, device: torch.device) -> Batch:
    """Return the chosen samples as one rectangle, padded on the right."""
    members = [samples[index] for index in indices]
    width = max(sample.tokens for sample in members)
    tokens = torch.zeros((len(members), width), dtype=torch.long)
    responses = torch.zeros((len(members), width), dtype=torch.bool)
    for row, sample in enumerate(members):
        tokens[row, : sample.tokens] = torch.tensor(sample.prompt + sample.response)
        responses[row, len(sample.prompt) : sample.tokens] = True
    return Batch(indices, tokens.to(device), responses.to(device), weight)


def by_tokens(lengths: Sequence[int], *, limit: int | None) -> list[list[int]]:
    """Return indices in groups whose padded size (count x longest) stays within `limit` tokens.

    Longest first, so that neighbours have like lengths and the largest group is met first. A sequence
    longer than the limit stands alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if limit is None:
        return [order] if order else []
    groups: list[list[int]] = []
    for index in order:
        if groups and (len(groups[-1]) + 1) * lengths[groups[-1][0]] <= limit:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def by_count(lengths: Sequence[int], *, size: int | None) -> list[list[int]]:
    """Return indices in their own order in groups of at most `size` sequences."""
    count = len(lengths)
    step = count if size is None else size
    return [list(range(start, min(start + step, count))) for start in range(0, count, max(1, step))]


def plan(
    lengths: Sequence[int], *, dynamic: bool, tokens: int | None, sequences: int | None
) -> list[list[int]]:
    """Return the micro-batches that the settings ask for."""
    return by_tokens(lengths, limit=tokens) if dynamic else by_count(lengths, size=sequences)


class TokenTerms(NamedTuple):
    """What the objective needs to know about a micro-batch's response tokens, one entry per token."""

    old_logprobs: torch.Tensor
    advantages: torch.Tensor
    reference_logprobs: torch.Tensor | None


class Objective(NamedTuple):
    """Sums over the micro-batch's tokens, divided by the whole update's token count."""

    loss: torch.Tensor
    kl: torch.Tensor
    clipped: torch.Tensor  # the share of tokens whose gradient a clip took away


def objective(
    logprobs: torch.Tensor,
    terms: TokenTerms,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float,
    update_tokens: int,
) -> Objective:
    """Return the micro-batch's share of the update's loss; shares add up to the loss of the undivided one.

    A mean of micro-batch means would weigh tokens by how they were packed (10 to 24 % wrong gradients).
    """
    ratio = torch.exp(logprobs - terms.old_logprobs)
    gain = ratio * terms.advantages
    limit = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * terms.advantages
    per_token = -torch.minimum(gain, limit)
    clipped = (limit < gain).sum() / update_tokens
    kl = torch.zeros((), device=logprobs.device)
    if terms.reference_logprobs is not None:
        difference = terms.reference_logprobs - logprobs
        k3 = torch.exp(difference) - difference - 1.0
        per_token = per_token + kl_coef * k3
        kl = k3.detach().sum() / update_tokens
    return Objective(loss=per_token.sum() / update_tokens, kl=kl, clipped=clipped)
