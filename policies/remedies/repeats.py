"""Whether a configuration asks for no less of a memory than one that already failed on it."""

from __future__ import annotations

from autotune.policies.remedies.catalogue import MOVES, SAVING
from autotune.policies.values.evidence import Diagnosis
from autotune.policies.values.types import (
    ENGINE_KNOBS,
    KNOBS,
    Cause,
    Knobs,
    Phase,
    Placement,
    Profile,
    Setting,
)

# How each knob moves the memory of a device: modes from more to less; numbers: a larger one asks for more.
_MODES: dict[str, tuple[Setting, ...]] = {
    "cuda_graphs": ("full", "limited", "off"),
    "recompute": ("off", "selective", "full"),
    "activation_offload": (False, True),
    "param_offload": (False, True),
    "grad_offload": (False, True),
    "optimizer_offload": (False, True),
    "fused_kernels": (False, True),
    "loss_recompute": (False, True),
    "entropy_chunking": (False, True),
    "entropy_recompute": (False, True),
    "allocator": ("default", "expandable"),
    "sync_mode": ("memory", "disk"),
}
# Restarts return what grew; they do not make a step smaller.
_WAYS = {knob: turn.way for knob, (_, turn) in SAVING.items() if knob != "restart_every"}
_MORE_IS_MORE = frozenset({"max_model_len", *(knob for knob, way in _WAYS.items() if way == "lower")})
_MORE_IS_LESS = frozenset(knob for knob, way in _WAYS.items() if way in ("more", "raise"))
# What moves host memory: offload and copies ask for more of it.
_HOST_MORE: dict[str, tuple[Setting, ...]] = dict.fromkeys(
    (*MOVES["reduce_host_offload"].turns, "weights_backup"), (True, False)
)
_HOST_NUMBERS = frozenset(
    {"dataloader_workers", "optimizer_offload_fraction", "concurrency", "microbatch_size"}
)

_DIAGNOSTICS = frozenset({"memory_snapshot", "nccl_memory_check", "memory_profile"})
_HOST_ONLY = frozenset({"host_allocator", "weights_backup", "dataloader_workers"})
_SCORING = frozenset({"logprob_tokens"})
_SYNC = frozenset({"sync_mode", "sync_buffer"})
_ENGINE_PHASES = frozenset({Phase.ROLLOUT, Phase.ROLLOUT_INIT, Phase.WEIGHT_SYNC, Phase.COMM, Phase.NONE})


def repeats(profile: Profile, failed: Knobs, diagnosis: Diagnosis, proposed: Knobs) -> bool:
    """Return whether `proposed` would fail as `failed` did, because nothing that matters asks for less.

    True also for the same knobs again. False as soon as one knob asks for less of the memory, or moves
    it in a way that is not known.
    """
    neutral = _neutral(profile, diagnosis)
    return all(
        name in neutral
        or _asks_no_less(name, getattr(failed, name), getattr(proposed, name), diagnosis.cause)
        for name in KNOBS
    )


def _neutral(profile: Profile, diagnosis: Diagnosis) -> frozenset[str]:
    """Return the knobs that cannot move the memory of the phase that failed."""
    found = _DIAGNOSTICS
    if diagnosis.cause is Cause.HOST_OOM:
        return found
    if diagnosis.cause is Cause.GPU_OOM:
        found |= _HOST_ONLY
        if diagnosis.phase not in (Phase.LOG_PROB, Phase.NONE):
            found |= _SCORING
        if diagnosis.phase not in (Phase.WEIGHT_SYNC, Phase.COMM, Phase.NONE):
            found |= _SYNC
        if profile.placement is not Placement.COLOCATED and diagnosis.phase not in _ENGINE_PHASES:
            found |= ENGINE_KNOBS
    return found


def _asks_no_less(name: str, failed: Setting, proposed: Setting, cause: Cause) -> bool:
    if failed == proposed:
        return True
    if cause is Cause.HOST_OOM:
        if name in _HOST_NUMBERS:
            return _at_least(proposed, failed)
        return _mode_at_least(_HOST_MORE.get(name, ()), proposed, failed)
    if cause in (Cause.POOL_TOO_SMALL, Cause.KV_POOL) and name == "memory_fraction":
        return _at_least(failed, proposed)
    if cause is Cause.KV_POOL and name == "concurrency":
        return _at_least(proposed, failed)
    if cause is not Cause.GPU_OOM:
        return False
    if name in _MORE_IS_MORE:
        return _at_least(proposed, failed)
    if name in _MORE_IS_LESS:
        return _at_least(failed, proposed)
    return _mode_at_least(_MODES.get(name, ()), proposed, failed)


def _at_least(larger: Setting, smaller: Setting) -> bool:
    numbers = isinstance(larger, int | float) and isinstance(smaller, int | float)
    return numbers and larger >= smaller  # type: ignore[operator]  # both are numbers


def _mode_at_least(order: tuple[Setting, ...], proposed: Setting, failed: Setting) -> bool:
    """Return whether `proposed` stands no later than `failed` from more to less; unset means off."""
    if not order:
        return False
    places: dict[Setting, int] = {mode: place for place, mode in enumerate(order)}
    places[None] = places.get(False, 0)
    return proposed in places and failed in places and places[proposed] <= places[failed]
