"""A plain baseline that knows no model: everything that saves at once, and step by step back where wanted.

The first failure switches on whatever saves device memory and takes the least micro-batches; further ones
lower the engine's share of the card. It looks at the cause and never at the phase or at a message's figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from autotune.policies.remedies.legality import completed, lowest, objections
from autotune.policies.values.events import History
from autotune.policies.values.failure import Cause
from autotune.policies.values.history import Attempt, Run, fold
from autotune.policies.values.knob_table import ROWS, Memory, Part, Unit
from autotune.policies.values.knobs import Knobs, Setting
from autotune.policies.values.profile import Profile

_BATCHES = (Unit.PASS_TOKENS, Unit.SEQUENCES)
_SHARE_STEP = 0.1  # of the card, by which the engine's share moves
_LEAST_SHARE = 0.1
_MOST_SHARE = 0.95
_OFFLOADS = ("activation_offload", "param_offload", "optimizer_offload")
_MOST_ATTEMPTS = 11  # of a run, after which it no longer climbs
# What is restored together once a configuration is stable; what costs most time first.
_BACK: tuple[tuple[str, ...], ...] = (
    ("activation_offload", "cuda_graphs", "sync_mode"),
    ("tokens_per_microbatch", "logprob_tokens"),
    ("optimizer_offload", "param_offload"),
    ("recompute",),
)


def everything(history: History) -> Knobs | None:
    """Switch on all that saves and take the least micro-batches, then lower the engine's share."""
    run = fold(history)
    last = run.attempts[-1]
    if last.diagnosis is None:
        return None
    for proposed in _answers(run, last):
        if all(proposed != attempt.knobs for attempt in run.attempts):
            return proposed
    return None


def everything_then_back(history: History) -> Knobs | None:
    """Do the same, and restore one group of settings after the other once it is stable."""
    run = fold(history)
    last = run.attempts[-1]
    stable = [a.knobs for a in run.attempts if a.goal is not None and a.diagnosis is None]
    if not stable:
        return everything(history)
    best = stable[-1]
    tried = [a.knobs for a in run.attempts]
    if len(run.attempts) < _MOST_ATTEMPTS:
        for group in _BACK:
            proposed = _restored(run, best, group)
            if proposed not in tried:
                return proposed
    return best if last.diagnosis is not None else None


def _answers(run: Run, last: Attempt) -> Iterator[Knobs]:
    """Yield what to do about a failure, best first."""
    profile, knobs, diagnosis = run.accepted.profile, last.knobs, last.diagnosis
    assert diagnosis is not None
    saving = _saving(run)
    if len(run.attempts) == 1:
        yield saving
    match diagnosis.cause:
        case Cause.HOST_OOM:
            yield _legal(run, knobs, {"dataloader_workers": 0, "weights_backup": False})
            for knob in _OFFLOADS:
                if getattr(knobs, knob) is True:
                    yield _legal(run, knobs, {knob: False})
        case Cause.POOL_TOO_SMALL:
            yield _with_share(run, knobs, _SHARE_STEP)
            yield _with_share(run, knobs, 2 * _SHARE_STEP)
        case _:
            yield _with_share(run, knobs, -_SHARE_STEP)
            if knobs.concurrency is not None:
                yield _legal(run, knobs, {"concurrency": max(1, knobs.concurrency // 4)})
            ranks = knobs.rollout_tensor_parallel
            if ranks is not None and "rollout_tensor_parallel" in profile.supported:
                yield _legal(run, knobs, {"rollout_tensor_parallel": ranks * 2})


def _saving(run: Run) -> Knobs:
    """Return the written configuration with all that saves device memory."""
    profile = run.accepted.profile
    changes: dict[str, Setting] = {}
    for row in ROWS:
        if row.name not in profile.supported or Memory.GPU not in row.saves:
            continue
        if row.order:
            legal = profile.supported[row.name].grid.values or row.order
            changes[row.name] = [mode for mode in row.towards(Memory.GPU) if mode in legal][-1]
        elif row.part is Part.TRAINER and row.unit in _BATCHES and getattr(profile.knobs, row.name):
            changes[row.name] = _least(profile, row.name)
    return _legal(run, profile.knobs, changes)


def _least(profile: Profile, knob: str) -> int:
    multiple = int(profile.supported[knob].grid.multiple or 1)
    return -(-int(max(1.0, lowest(profile, knob) or 1.0)) // multiple) * multiple


def _with_share(run: Run, knobs: Knobs, step: float) -> Knobs:
    if knobs.memory_fraction is None:
        return knobs
    share = min(_MOST_SHARE, max(_LEAST_SHARE, round(knobs.memory_fraction + step, 2)))
    return _legal(run, knobs, {"memory_fraction": share})


def _restored(run: Run, knobs: Knobs, group: Iterable[str]) -> Knobs:
    """Return the configuration with a group as written."""
    written = run.accepted.profile.knobs
    return _legal(run, knobs, {knob: getattr(written, knob) for knob in group})


def _legal(run: Run, knobs: Knobs, changes: dict[str, Setting]) -> Knobs:
    """Return the configuration with those of the changes that are legal, each with what it demands."""
    profile, started = run.accepted.profile, run.best_step is not None
    for knob, value in changes.items():
        if knob not in profile.supported or getattr(knobs, knob) == value:
            continue
        moved = msgspec.structs.replace(knobs, **completed(profile, knobs, {knob: value}))
        if not objections(profile, knobs, moved, started=started):
            knobs = moved
    return knobs
