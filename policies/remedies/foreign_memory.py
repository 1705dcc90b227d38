"""Detect failures caused by other programs' memory on a GPU, for which the job's settings do not change."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from autotune.policies.remedies.step_size import UNSET_SHARE, missing_bytes
from autotune.policies.values.diagnosis import Line
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.history import Attempt, Run
from autotune.policies.values.profile import Placement, Profile

OCCUPIED = "gpu-occupied"
_CONTEXTS = 0.1  # share of a GPU for contexts, graphs and the remains of sleeping processes of the job
_EXPLAINS = 0.25  # share of a GPU that others must hold to be named as the reason
# The least part of its share that an engine holds while it is awake: it allocates weights and cache at its
# start, and frees the activations of its profiling (vllm/v1/worker/gpu_worker.py,
# determine_available_memory).
_HELD_AWAKE = 0.9
_SETTLED = 20  # steps with the same settings, after which one failure's figures show whether it sleeps
_PROVEN = 2  # steps with the same settings, after which every process of the job has allocated its memory
_CARDS = (Cause.GPU_OOM, Cause.POOL_TOO_SMALL)
_HOLDER = re.compile(r"[Pp]rocess (\d+) has (\d+(?:\.\d+)? [GM]iB) (?:memory )?in use")


def without_foreign(run: Run) -> Run:
    """Return the run with failures that others' memory explains changed to failures of the infrastructure.

    The settings must have run for _PROVEN steps before, in an earlier attempt if a start failed, and the
    memory of the GPU outside the failed process must be far more than the job's other processes may hold.
    Stronger evidence than a message is GPU memory that stays in use although no process of the attempt is
    left; a failure at the next start with the same settings has the same reason.
    """
    attempts: list[Attempt] = []
    for attempt in run.attempts:
        diagnosis = attempt.diagnosis
        at_start = diagnosis is not None and diagnosis.phase.is_start
        evidence = attempts if at_start else (*attempts, attempt)
        steps = max((len(a.progress) for a in evidence if a.knobs == attempt.knobs), default=0)
        text = ""
        if steps >= _PROVEN:
            text = _witnessed(attempts, attempt) or _text(run.accepted.profile, attempt, steps)
        if diagnosis is not None and text:
            line = Line(line=0, text=text, rule=OCCUPIED)
            changed = msgspec.structs.replace(
                diagnosis, cause=Cause.INFRASTRUCTURE, evidence=(line, *diagnosis.evidence)
            )
            attempt = msgspec.structs.replace(attempt, diagnosis=changed)
        attempts.append(attempt)
    return msgspec.structs.replace(run, attempts=tuple(attempts))


def foreign_bytes(profile: Profile, attempt: Attempt, steps: int) -> int:
    """Return the bytes of the GPU that others certainly held at a failure; 0 if they do not explain it.

    Memory that the job's own engine may hold, awake or asleep, does not count. After _SETTLED `steps` with
    the same settings, an engine that would not fit awake beside the failed process must be asleep.
    """
    diagnosis = attempt.diagnosis
    if diagnosis is None or diagnosis.cause is not Cause.GPU_OOM:
        return 0
    facts, missing = diagnosis.facts, missing_bytes(diagnosis.facts)
    if facts.outside_bytes is None or not facts.capacity_bytes or missing is None:
        return 0
    share = _CONTEXTS
    if profile.placement is Placement.COLOCATED:
        if diagnosis.component in (Component.ROLLOUT, Component.REWARD):
            return 0  # how much the trainer beside it may hold is unknown
        asleep = attempt.knobs.engine_sleep
        own = attempt.knobs.memory_fraction or UNSET_SHARE * ("memory_fraction" in profile.supported)
        beside = (facts.outside_bytes + (facts.free_bytes or 0)) / facts.capacity_bytes
        sleeps = profile.layout.engine_sleeps if asleep is None else asleep
        sleeps = sleeps or (steps >= _SETTLED and beside < _HELD_AWAKE * own)
        awake = diagnosis.phase.is_start or diagnosis.phase in (Phase.ROLLOUT, Phase.WEIGHT_SYNC)
        if awake or not sleeps:
            share += own
    foreign = facts.outside_bytes - int(share * facts.capacity_bytes)
    return foreign if foreign >= max(_EXPLAINS * facts.capacity_bytes, missing) else 0


def _witnessed(before: Sequence[Attempt], attempt: Attempt) -> str:
    """Return the GPU memory, in words, that others held after an attempt ran out; empty if unknown."""
    if attempt.diagnosis is None or attempt.diagnosis.cause not in _CARDS or attempt.ended is None:
        return ""
    if attempt.ended.foreign:
        return attempt.ended.held
    last = before[-1] if before else None
    if last is None or last.diagnosis is None or last.knobs != attempt.knobs or attempt.progress:
        return ""
    line = last.diagnosis.evidence[0] if last.diagnosis.evidence else None
    held = (a.ended.held for a in before if a.ended is not None and a.ended.foreign)
    return line.text if line is not None and line.rule == OCCUPIED and line.text in held else ""


def _text(profile: Profile, attempt: Attempt, steps: int) -> str:
    """Return, in words, who holds how much of which GPU by the failure's message; empty if it is not why."""
    diagnosis, foreign = attempt.diagnosis, foreign_bytes(profile, attempt, steps)
    if diagnosis is None or not foreign:
        return ""
    held = (_HOLDER.search(line.text) for line in diagnosis.evidence)
    holder = next((f" (process {one[1]}: {one[2]})" for one in held if one is not None), "")
    card = "the card" if diagnosis.rank is None else f"the card of rank {diagnosis.rank}"
    alone = "" if diagnosis.rank is None or diagnosis.other_ranks else ", and no other rank failed"
    return f"at least {show_gib(foreign)} of {card} are held by others{holder}{alone}"
