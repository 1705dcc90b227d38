"""Correction factors of the estimate, learned from runs and carried to later jobs of the same kind."""

from __future__ import annotations

import math

import msgspec

from autotune.policies.values.value import Value

# A new version of a framework may move memory between phases: half of a factor's deviation from 1 is kept,
# and its error grows by as much as published releases moved peaks (verl 0.4 -> 0.5 and SGLang 0.4 -> 0.5
# notes: about 10 %).
_VERSION_ERROR = 0.10
_VERSION_SHARE = 0.5
_LEAST_ERROR = 0.01  # two runs of one job differ by about this much


class Factor(Value, frozen=True, kw_only=True):
    """By how much a part of the estimate is to be multiplied, and how sure that is."""

    mean: float  # expected value; 1: no correction
    error: float  # one standard deviation


class Kind(Value, frozen=True, kw_only=True):
    """Which jobs learn from each other."""

    model: str  # family, layers, hidden size and vocabulary, as `qwen2-24x896-151936`; empty: unknown
    gpu: str  # model of the GPUs; empty: unknown
    framework: str  # framework, sharding strategy and engine, as `verl/fsdp/vllm`
    version: str  # version of the framework; empty: unknown
    placement: str  # colocated | separate | asynchronous


class Learned(Value, frozen=True, kw_only=True):
    """The factors of one kind of job, by group of phases and part, such as `train.activations`."""

    kind: Kind
    factors: dict[str, Factor] = {}  # by name; a part without one is not corrected
    runs: int = 0  # number of runs that they come from


def merged(older: Learned, newer: Learned) -> Learned:
    """Return both combined, factors weighted by inverse variance; raises ValueError for different kinds."""
    if older.kind != newer.kind:
        raise ValueError("what different kinds of jobs taught is not merged")
    factors = dict(older.factors)
    for name, factor in newer.factors.items():
        known = factors.get(name)
        factors[name] = factor if known is None else _weighed(known, factor)
    return msgspec.structs.replace(newer, factors=factors, runs=older.runs + newer.runs)


def widened(learned: Learned, *, version: str) -> Learned:
    """Return `learned` with weaker factors for another framework version; unchanged for its own."""
    if version == learned.kind.version:
        return learned
    factors = {
        name: Factor(
            mean=1 + _VERSION_SHARE * (factor.mean - 1), error=math.hypot(factor.error, _VERSION_ERROR)
        )
        for name, factor in learned.factors.items()
    }
    kind = msgspec.structs.replace(learned.kind, version=version)
    return msgspec.structs.replace(learned, kind=kind, factors=factors)


def _weighed(one: Factor, other: Factor) -> Factor:
    first, second = 1 / one.error**2, 1 / other.error**2
    mean = (one.mean * first + other.mean * second) / (first + second)
    return Factor(mean=mean, error=max(_LEAST_ERROR, (first + second) ** -0.5))
