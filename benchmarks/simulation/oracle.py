"""The best that a stated grid offers: every legal combination of eight knobs, judged by the truth."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np

from autotune.policies.remedies.candidate_values import values_near
from autotune.policies.remedies.legality import objections
from autotune.policies.values.knob_table import KNOB_TABLE, Memory
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Requires
from autotune.policies.values.value import Value
from benchmarks.simulation.cluster import holds
from benchmarks.simulation.columns import columns
from benchmarks.simulation.speed import step_seconds
from benchmarks.simulation.world import World

TOKEN_SHARES = (1.0, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0)  # of the written budget; at least one sequence
FRACTIONS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # and the written one
CONCURRENCIES = (1.0, 0.5, 0.25)  # of the written one
KNOBS = (
    "tokens_per_microbatch",
    "memory_fraction",
    "rollout_tensor_parallel",
    "recompute",
    "activation_offload",
    "param_offload",
    "optimizer_offload",
    "concurrency",
)

USERS = ("max_model_len",)  # a length: never a policy's to change


class Best(Value, frozen=True, kw_only=True):
    """The fastest configuration of the grid that holds for a day."""

    knobs: Knobs
    step_s: float
    feasible: int  # configurations of the grid that hold
    of: int


def best(world: World) -> Best | None:
    """Return the best of the grid, None where nothing on it holds."""
    grid = configurations(world)
    result: Best | None = None
    feasible = 0
    for start in range(0, len(grid), 4096):
        part = grid[start : start + 4096]
        c = columns(world, part)
        fits = holds(world, c)
        feasible += int(fits.sum())
        if not fits.any():
            continue
        seconds = np.where(fits, step_seconds(world, c), np.inf)
        first = int(seconds.argmin())
        if result is None or seconds[first] < result.step_s:
            result = Best(knobs=part[first], step_s=float(seconds[first]), feasible=0, of=len(grid))
    if result is None:
        return None
    return msgspec.structs.replace(result, feasible=feasible)


def configurations(world: World) -> list[Knobs]:
    """Return every legal combination of the grid."""
    profile = world.accepted.profile
    before = profile.knobs
    choices: list[list[tuple[str, Setting]]] = []
    for knob in KNOBS:
        values = [v for v in _values(world, knob) if knob in profile.supported or v == getattr(before, knob)]
        own = getattr(before, knob)
        legal = [v for v in dict.fromkeys([own, *values]) if v == own or not _alone_illegal(world, knob, v)]
        choices.append([(knob, v) for v in legal])
    scored = before.logprob_tokens is not None and "logprob_tokens" in profile.supported
    result = []
    for combination in itertools.product(*choices):
        changes = dict(combination)
        if scored and changes["tokens_per_microbatch"] != before.tokens_per_microbatch:
            changes["logprob_tokens"] = changes["tokens_per_microbatch"]
        knobs = msgspec.structs.replace(before, **changes)
        if not _combination_illegal(world, knobs):
            result.append(knobs)
    return result


def leanest(world: World) -> dict[str, Setting]:
    """Return the values that take least device memory of the knobs that the grid leaves as written."""
    profile, knobs = world.accepted.profile, world.accepted.profile.knobs
    for name in profile.supported:
        row = KNOB_TABLE[name]
        if name in KNOBS or name in USERS or Memory.GPU not in row.saves:
            continue
        for value in values_near(profile, knobs, name):
            after = msgspec.structs.replace(knobs, **{name: value})
            less = row.asks_less(Memory.GPU, getattr(knobs, name), value)
            if less and not objections(profile, profile.knobs, after, started=False):
                knobs = after
    return {name: getattr(knobs, name) for name in KNOB_TABLE if name not in KNOBS}


def _values(world: World, knob: str) -> tuple[Setting, ...]:
    profile, before = world.accepted.profile, world.accepted.profile.knobs
    match knob:
        case "tokens_per_microbatch":
            longest = profile.longest_sequence or 1
            tokens = before.tokens_per_microbatch or longest
            return tuple(-(-int(max(longest, tokens * share)) // 256) * 256 for share in TOKEN_SHARES)
        case "memory_fraction":
            return FRACTIONS
        case "rollout_tensor_parallel":
            return (1, 2, 4, 8)
        case "recompute":
            return profile.supported["recompute"].grid.values
        case "concurrency":
            return tuple(max(1, int((before.concurrency or 64) * share)) for share in CONCURRENCIES)
        case _:
            return (False, True)


def _alone_illegal(world: World, knob: str, value: Setting) -> bool:
    """Return whether a value is out of its own range, whatever the others are."""
    profile = world.accepted.profile
    after = msgspec.structs.replace(profile.knobs, **{knob: value})
    texts = objections(profile, profile.knobs, after, started=True)
    return any("not possible with" not in text for text in texts)


def _combination_illegal(world: World, knobs: Knobs) -> bool:
    """Return whether a rule about several knobs at once forbids a combination of legal values."""
    profile = world.accepted.profile
    if not any(isinstance(rule, Requires) for rule in profile.constraints):
        return False
    return bool(objections(profile, profile.knobs, knobs, started=True))
