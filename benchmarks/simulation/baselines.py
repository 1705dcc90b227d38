"""What others do about an out-of-memory failure, as their own code or documents describe it.

Each sees the same history as `decide` and answers with a configuration, ours with all that `decide` says of
a launch, or with None to give up. None of the others looks at the phase that failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from autotune.policies.recovery.decide import decide
from autotune.policies.remedies.legality import objections
from autotune.policies.values.events import Accepted, History, Launch
from autotune.policies.values.history import Run, fold
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Profile
from benchmarks.simulation.ablations import no_calibration, no_figures, no_relief, no_speeds
from benchmarks.simulation.everything import everything, everything_then_back

Policy: TypeAlias = Callable[[History], Knobs | Launch | None]


def autotune(history: History) -> Launch | None:
    """Return what this project decides."""
    action = decide(history)
    return action if isinstance(action, Launch) else None


def ladder(history: History) -> Launch | None:
    """Return what this project decides where it knows no model: the ladder alone."""
    first = history[0]
    assert isinstance(first, Accepted)
    unknown = msgspec.structs.replace(first, job=msgspec.structs.replace(first.job, shape=None))
    return autotune((unknown, *history[1:]))


def accelerate(history: History) -> Knobs | None:
    """Nine tenths of the batch after each failure (accelerate 1.x, find_executable_batch_size)."""
    return _scaled(fold(history), 0.9)


def composer(history: History) -> Knobs | None:
    """Half the micro-batch after each failure, down to one (Composer, device_train_microbatch_size=auto)."""
    return _scaled(fold(history), 0.5)


def bisect(history: History) -> Knobs | None:
    """Return the next experiment of DeepSpeed's autotuning of the micro-batch.

    The smallest micro-batch is profiled first; from what it needed follows the largest that should fit,
    tried times 1.05, 1.00 and 0.95; where none of them runs, a binary search between what ran and what did
    not follows. It ends with the largest that ran.
    """
    run = fold(history)
    profile = run.accepted.profile
    written, least = run.accepted.profile.knobs, _scaled_to(profile, profile.knobs, 0)
    attempts = run.attempts[1:]
    passed = [a.knobs for a in attempts if a.diagnosis is None]
    failed = [_tokens(a.knobs) for a in run.attempts if a.diagnosis is not None]
    if not attempts:
        return least if least != written else None
    if not passed:
        return None
    tried = {_tokens(a.knobs) for a in run.attempts}
    low, high = max(_tokens(k) for k in passed), min(failed)
    capacity = run.accepted.cluster.gpu_memory_bytes
    peaks = [p.used_bytes for a in attempts[:1] if a.goal is not None for p in a.goal.peaks.values()]
    aim = _tokens(least) * capacity / max(peaks) if peaks else (low + high) / 2
    probes = [aim * share for share in (1.05, 1.0, 0.95)] if len(attempts) < 4 else []
    for target in [*probes, (low + high) / 2]:
        knobs = _scaled_to(profile, written, target)
        tokens = _tokens(knobs)
        if low < tokens < high and tokens not in tried and (high - low) > 0.05 * high:
            return knobs
    return max(passed, key=_tokens)


def fixed_ladder(history: History) -> Knobs | None:
    """Return the next rung of one list for all failures, each rung on top of the last."""
    run = fold(history)
    profile, knobs = run.accepted.profile, run.attempts[-1].knobs
    used = len(run.attempts) - 1
    rungs = (
        _half_requests,
        _less_share,
        _half_tokens,
        _recompute,
        _offload_optimizer,
        _offload_params,
        _offload_kept,
    )
    for turn in range(len(rungs)):
        changes = rungs[(used + turn) % len(rungs)](profile, knobs)
        if changes and not objections(
            profile, knobs, msgspec.structs.replace(knobs, **changes), started=True
        ):
            return msgspec.structs.replace(knobs, **changes)
    return None


POLICIES: dict[str, Policy] = {
    "autotune": autotune,
    "ladder": ladder,
    "accelerate": accelerate,
    "composer": composer,
    "bisect": bisect,
    "fixed ladder": fixed_ladder,
    "everything": everything,
    "everything, back": everything_then_back,
    "no calibration": no_calibration,
    "no figures": no_figures,
    "no relief": no_relief,
    "no speeds": no_speeds,
}
# Goes on after a configuration that ran, until it answers with one that already did.
SEARCHES = frozenset({"bisect", "everything, back"})


def _scaled(run: Run, share: float) -> Knobs | None:
    last = run.attempts[-1].knobs
    knobs = _scaled_to(run.accepted.profile, last, _tokens(last) * share)
    return knobs if knobs != last else None


def least_batches(profile: Profile) -> Knobs:
    """Return the written configuration with the least micro-batches: all that a policy of batches can do."""
    return _scaled_to(profile, profile.knobs, 0)


def _scaled_to(profile: Profile, knobs: Knobs, tokens: float) -> Knobs:
    """Return the configuration with micro-batches of at most so many tokens, in all passes."""
    least = -(-(profile.longest_sequence or 1) // 256) * 256
    number = max(least, int(tokens) // 256 * 256)
    changes: dict[str, Setting] = {"tokens_per_microbatch": number}
    if knobs.logprob_tokens is not None and "logprob_tokens" in profile.supported:
        changes["logprob_tokens"] = number
    return msgspec.structs.replace(knobs, **changes)


def _tokens(knobs: Knobs) -> int:
    return knobs.tokens_per_microbatch or 1


def _half_requests(profile: Profile, knobs: Knobs) -> dict[str, Setting]:
    now = knobs.concurrency or 0
    return {"concurrency": now // 2} if now > 1 else {}


def _less_share(profile: Profile, knobs: Knobs) -> dict[str, Setting]:
    now = round((knobs.memory_fraction or 0) - 0.1, 2)
    return {"memory_fraction": now} if now >= 0.1 else {}


def _half_tokens(profile: Profile, knobs: Knobs) -> dict[str, Setting]:
    fewer = _scaled_to(profile, knobs, _tokens(knobs) / 2)
    changes: dict[str, Setting] = {"tokens_per_microbatch": fewer.tokens_per_microbatch}
    if fewer.logprob_tokens != knobs.logprob_tokens:
        changes["logprob_tokens"] = fewer.logprob_tokens
    return changes if fewer != knobs else {}


def _recompute(profile: Profile, knobs: Knobs) -> dict[str, Setting]:
    return {"recompute": "full"} if knobs.recompute != "full" else {}


def _offload_optimizer(profile: Profile, knobs: Knobs) -> dict[str, Setting]:
    return {"optimizer_offload": True} if knobs.optimizer_offload is False else {}


def _offload_params(profile: Profile, knobs: Knobs) -> dict[str, Setting]:
    return {"param_offload": True} if knobs.param_offload is False else {}


def _offload_kept(profile: Profile, knobs: Knobs) -> dict[str, Setting]:
    return {"activation_offload": True} if knobs.activation_offload is False else {}
