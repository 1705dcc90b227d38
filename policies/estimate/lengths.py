"""The lengths of sequences, and the tokens of the micro-batches formed from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.parts import Flags, Floats
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.profile import Profile

UNBOUNDED = 1e18


class Assumption(StrEnum):
    """Which micro-batch an estimate is for."""

    TYPICAL = "typical"  # of sequences of mean length
    EXPECTED = "expected"  # the largest of so many steps
    LONGEST = "longest"  # every sequence as long as the job allows


def longest_of(profile: Profile) -> float:
    """Return the tokens of the longest sequence that a job allows, at least 1."""
    layout = profile.layout
    return float(profile.longest_sequence or layout.prompt_tokens + layout.response_tokens or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of the sequences of one job, prompt and response together."""

    mean: float
    response: float  # of `mean`
    variation: float  # standard deviation between sequences over their mean
    longest: float

    def largest(self, sequences: Floats | float, chances: Floats | float) -> Floats:
        """Return the tokens of the largest of `chances` groups of `sequences` sequences each.

        Lengths are assumed log-normal and independent, a group's sum log-normal with the same mean and
        variance (Fenton 1960), and at most that of sequences which are all the longest.
        """
        count = np.minimum(np.asarray(sequences, dtype=np.float64), UNBOUNDED)
        variance = np.log1p(self.variation**2 / np.maximum(1.0, count))
        beyond = np.exp(_upper_quantile(chances) * np.sqrt(variance) - variance / 2)
        result: Floats = np.minimum(count * self.longest, count * self.mean * np.maximum(1.0, beyond))
        return result


def lengths_of(layout: Layout, *, longest: float, deviation: float = 0.0) -> Lengths:
    """Return the lengths of a job's sequences, in tokens.

    If the job states no mean, it is the median of published runs, as a share of the longest allowed;
    `deviation` shifts it by so many standard deviations of its uncertainty. Without responses all sequences
    have the longest length, as in training on packed text.
    """
    if not layout.response_tokens:
        return Lengths(mean=longest, response=0.0, variation=0.0, longest=longest)
    prompt = _mean(layout.prompt_mean, layout.prompt_tokens, kind="prompt", deviation=deviation)
    response = _mean(layout.response_mean, layout.response_tokens, kind="response", deviation=deviation)
    mean = max(1.0, prompt + response)
    within = min(1.0, longest / mean)
    deviations = (
        _deviation(prompt, layout.prompt_tokens, constant("prompt_variation")),
        _deviation(response, layout.response_tokens, constant("response_variation")),
    )
    return Lengths(
        mean=mean * within,
        response=response * within,
        variation=math.hypot(*deviations) / mean,
        longest=longest,
    )


# Standard deviations within which a measured mean is searched: peaks are assumed to be linear in them, and
# beyond them hardly a sequence is left that could be longer.
_REACH = 2.0


def deviation_of(layout: Layout, *, longest: float, mean: float) -> float | None:
    """Return the deviation of a measured mean length (tokens) in standard deviations of its uncertainty.

    None if lengths are certain, or if no sequences of the job could have that mean, so that something else
    was measured.
    """
    if not 0 < mean <= longest:
        return None
    grid = np.linspace(-_REACH, _REACH, 17)
    means = [lengths_of(layout, longest=longest, deviation=float(each)).mean for each in grid]
    if means[-1] - means[0] < 1.0:
        return None
    return float(np.interp(mean, means, grid))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """How a framework forms micro-batches from the sequences of one update on the ranks that share them."""

    update: Floats  # sequences of one update, on one replica of the model
    dynamic: Flags  # formed by a token budget, otherwise by a number of sequences
    budget: Floats  # tokens
    sequences: Floats  # of one micro-batch
    padded: bool  # every sequence takes as much memory as the longest
    updates: Floats  # of all replicas in the steps of an estimate

    def tokens(self, lengths: Lengths, assumption: Assumption) -> Floats:
        """Return the tokens of one micro-batch.

        Token budgets split an update's sequences evenly (verl's and Megatron's balanced partitions): an
        update slightly above the budget becomes two micro-batches of about half of it.
        """
        own = np.minimum(self.sequences, self.update)
        within = np.where(self.dynamic, self.budget, UNBOUNDED)
        if self.padded or assumption is Assumption.LONGEST:
            whole = self.update * lengths.longest
            fixed = own * lengths.longest
            budget = within
            if self.padded:
                budget = np.floor(within / lengths.longest) * lengths.longest
            group = np.minimum(np.where(self.dynamic, budget, fixed), whole)
            return np.maximum(group, lengths.longest)
        if assumption is Assumption.TYPICAL:
            whole = self.update * lengths.mean
            parts = np.ceil(np.maximum(1.0, whole / within))
            return np.maximum(np.where(self.dynamic, whole / parts, own * lengths.mean), lengths.mean)
        groups = self.updates * np.maximum(1.0, self.update / np.maximum(1.0, own))
        singles = self.updates * np.minimum(self.update, 1e6)
        sizes = np.stack((self.update, own, np.ones_like(own)))
        whole, group, one = lengths.largest(sizes, np.stack((self.updates, groups, singles)))
        drawn: Floats = np.maximum(np.where(self.dynamic, np.minimum(within, whole), group), one)
        return drawn

    def passes(self, lengths: Lengths, tokens: Floats) -> Floats:
        """Return the number of micro-batches of one update, each of `tokens`."""
        one = lengths.longest if self.padded else lengths.mean
        return np.maximum(1.0, np.ceil(self.update * one / tokens - 1e-9))


def _mean(known: float, longest: int, *, kind: str, deviation: float) -> float:
    """Return a mean length in tokens; `deviation` shifts its share of the longest in log odds."""
    share, doubt = constant(f"{kind}_share"), constant(f"{kind}_share_doubt")
    if known:
        share, doubt = min(0.999, known / max(1, longest)), constant("known_length_doubt")
    if share >= 0.999:
        return float(longest)
    odds = math.log(share / (1.0 - share)) + deviation * doubt
    return longest / (1.0 + math.exp(-odds))


def _deviation(mean: float, longest: int, variation: float) -> float:
    """Return the standard deviation of lengths in tokens, at most the widest between 0 and the longest."""
    return min(variation * mean, math.sqrt(max(0.0, mean * (longest - mean))))


def _upper_quantile(draws: Floats | float) -> Floats:
    """Return the median of the largest of `draws` standard normal deviates.

    Approximation 26.2.22 of Abramowitz and Stegun, within 0.003.
    """
    chance = -np.expm1(-math.log(2.0) / np.maximum(1.0, np.asarray(draws, dtype=np.float64)))
    root = np.sqrt(-2.0 * np.log(chance))
    result: Floats = root - (2.30753 + 0.27061 * root) / (1.0 + root * (0.99229 + 0.04481 * root))
    return result
