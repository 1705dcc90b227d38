"""The verdict of a run that gives up: by how much the nearest configuration misses, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from autotune.policies.diagnosis.memory_users import largest
from autotune.policies.recovery.growth import growth_behind, obstacle
from autotune.policies.recovery.next_remedy import next_remedy
from autotune.policies.recovery.outlook import Outlook, outlook
from autotune.policies.recovery.permissions import started_before
from autotune.policies.recovery.ranking import Ranked, nearest, overflowing
from autotune.policies.recovery.remedy_text import words
from autotune.policies.remedies.allow_deny import denied
from autotune.policies.remedies.ladder import candidates
from autotune.policies.remedies.proposals import free_before_relaunch
from autotune.policies.remedies.step_size import missing_bytes
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import GaveUp
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.formatting import show_gib
from autotune.policies.values.history import Run
from autotune.policies.values.job import Cluster, Recovery
from autotune.policies.values.knobs import Knobs, new_values
from autotune.policies.values.profile import AtLeast, Profile
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value

_LORA_RANK = 32
_TOKEN_KNOBS = frozenset({"tokens_per_microbatch", "logprob_tokens", "max_model_len"})
_LIKELY = 0.5
_HIGHER_LIMIT = "a higher limit of the process"
_MEMORY = {
    Cause.GPU_OOM: "GPU memory",
    Cause.HOST_OOM: "host memory",
    Cause.KV_POOL: "the KV cache",
    Cause.POOL_TOO_SMALL: "the KV cache",
    Cause.SHM: "shared memory",
    Cause.OBJECT_STORE: "Ray's object store",
}


def gave_up(run: Run, spent: str = "") -> GaveUp:
    """Return the verdict when no remedy is left, or a budget is spent (`spent` names it)."""
    last = run.attempts[-1]
    diagnosis = last.diagnosis
    if diagnosis is None:
        return GaveUp(reason=spent or "the last failure has no diagnosis")
    where = "" if diagnosis.phase is Phase.NONE else f" in {diagnosis.phase.value}"
    reason = spent or f"no remedy is left for {diagnosis.cause.value}{where}"
    grown, helps = growth_behind(run, last, diagnosis), obstacle(run, last)
    restarts = (helps,) if grown is not None and helps else ()
    if restarts and grown is not None and grown.per_step_bytes:
        nearest = "; ".join(filter(None, (grown.text, diagnosis.own_limit)))
        limit = (_HIGHER_LIMIT,) if diagnosis.own_limit else ()
        return GaveUp(reason=reason, nearest=nearest, would_help=(*restarts, *limit))
    if spent and not restarts and (remedy := next_remedy(run)) is not None:
        untried = f"a limit under `recovery` leaves untried: {words(last.knobs, remedy.changes)}"
        return GaveUp(reason=reason, nearest=f"{_nearest(run, diagnosis)}; {untried}")
    missing = None if diagnosis.own_limit else shortfall(run, started=started_before(run))
    if missing is None:
        helping = (*restarts, *_would_help(run, diagnosis))
        return GaveUp(reason=reason, nearest=_nearest(run, diagnosis), would_help=helping)
    nearest = "; ".join(text for text in (missing.nearest, _closest(run, diagnosis)) if text)
    # If something is predicted to fit, changes that may not suffice are not advised.
    fitting = (*_held_by_others(diagnosis), *missing.would_fit) or _would_help(run, diagnosis)
    return GaveUp(reason=reason, nearest=nearest, would_help=(*restarts, *fitting))


def _nearest(run: Run, diagnosis: Diagnosis) -> str:
    closest = _closest(run, diagnosis)
    if diagnosis.own_limit:
        return "; ".join(text for text in (diagnosis.own_limit, closest) if text)
    return f"closest: {closest}" if closest else "how much memory was missing is not known"


def _closest(run: Run, diagnosis: Diagnosis) -> str:
    """Return the attempt that missed by the smallest amount in its message; empty if no message has one."""
    misses = [
        (missing, attempt.number)
        for attempt in run.attempts
        if (own := attempt.diagnosis) is not None
        and (own.cause, own.phase) == (diagnosis.cause, diagnosis.phase)
        and (missing := missing_bytes(own.facts)) is not None
    ]
    if not misses:
        return ""
    missing, number = min(misses)
    return f"attempt #{number}, {show_gib(missing)} of {_MEMORY.get(diagnosis.cause, 'memory')} short"


_LORA = "LoRA, which keeps less optimizer state"
_SHORTER = "shorter prompts or responses"
_WITH_TOKENS = frozenset({Phase.NONE, Phase.ROLLOUT, Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD})
_USERS = {
    "gpu": (_SHORTER, "more or larger GPUs", "a smaller model", _LORA),
    "gpu_pool": ("a smaller maximum length", "more GPUs for the engine", "a smaller or quantised model"),
    "host": ("more host memory or more nodes", _LORA),
    "shm": ("a larger /dev/shm (in a container: --shm-size or an emptyDir of medium Memory)",),
    "object_store": ("a larger object store (ray start --object-store-memory)",),
}

_HARDWARE = {
    **_USERS,
    "gpu": _USERS["gpu"][1:2],
    "gpu_pool": _USERS["gpu_pool"][1:2],
    "host": _USERS["host"][:1],
}


def _would_help(run: Run, diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return the changes that only the user may make."""
    profile, recovery, knobs = run.accepted.profile, run.accepted.job.recovery, run.attempts[-1].knobs
    now = list(candidates(profile, knobs, diagnosis, started=started_before(run)))
    anew = candidates(profile, knobs, diagnosis, started=False)
    result = [*_held_by_others(diagnosis)]
    result += [
        f"{remedy.name}, which recovery.allow or recovery.deny excludes"
        for remedy in now
        if denied(recovery, profile, knobs, remedy)
    ]
    legal = [remedy.changes for remedy in now]
    result += [
        f"a new run with {', '.join(f'{knob} = {value}' for knob, value in remedy.changes.items())}, "
        "which a checkpoint of this run does not allow"
        for remedy in anew
        if remedy.changes not in legal
    ]
    if profile.unknown_program and not profile.supported:
        result.append(
            "a `{knob}` placeholder in the command, such as `--micro-batch={tokens_per_microbatch}`"
        )
    if diagnosis.own_limit:
        result.append(_HIGHER_LIMIT)
    elif profile.unknown_program:
        result += _HARDWARE.get(diagnosis.cause.resource, ())
    else:
        general = _USERS.get(diagnosis.cause.resource, ())
        idle = {_LORA} if profile.layout.lora_rank else set[str]()
        idle |= set() if diagnosis.phase in _WITH_TOKENS else {_SHORTER}
        result += [text for text in general if text not in idle]
    return tuple(dict.fromkeys(result))


def _held_by_others(diagnosis: Diagnosis) -> tuple[str, ...]:
    """Return what other programs hold of the memory that ran out, in words."""
    group = largest(diagnosis.facts) if diagnosis.cause is Cause.HOST_OOM else None
    if group is not None and group.foreign:
        return (f"the {show_gib(group.held_bytes)} of host memory that {group.command} holds",)
    return tuple(remedy.reason for remedy in free_before_relaunch(diagnosis))


class Shortfall(Value, frozen=True, kw_only=True):
    """Predicted shortfall of the closest configuration, and alternatives that are predicted to fit."""

    nearest: str
    would_fit: tuple[str, ...]


def shortfall(run: Run, *, started: bool) -> Shortfall | None:
    """Return the estimated shortfall of a run that gives up; None if the estimate shows none."""
    view = outlook(run)
    if view is None or not run.attempts:
        return None
    present = run.attempts[-1].knobs
    closest = nearest(view, present, started=started)
    misses = overflowing(view, closest)
    if not misses:
        return None
    where, missing = misses[0]
    short = f"{show_gib(missing)} of " + (
        "host memory short" if where == "host" else f"GPU memory short in {where}"
    )
    changes = new_values(run.accepted.profile.knobs, closest.knobs)
    text = f"closest: {words(run.accepted.profile.knobs, changes) or 'the job as written'}"
    host = ("more host memory on each node",) if where == "host" else ()
    return Shortfall(
        nearest=f"{text}, predicted to be {short}",
        would_fit=(*host, *_alternatives(view, present, where, started=started)),
    )


def _alternatives(view: Outlook, present: Knobs, where: str, *, started: bool) -> Iterator[str]:
    accepted = view.run.accepted
    profile, layout, recovery = accepted.profile, accepted.profile.layout, accepted.job.recovery
    anything = msgspec.structs.replace(recovery, allow=tuple(Effect), deny=())
    if anything != recovery:
        ranked = _fits(view, present, recovery=anything, started=started)
        if ranked is not None:
            changes = words(present, new_values(present, ranked.knobs))
            why = "of which recovery.allow or recovery.deny excludes some"
            yield f"{changes}, {why} ({_figure(ranked, where)})"
    for factor in (2, 4, 8):
        cluster = msgspec.structs.replace(accepted.cluster, nodes=accepted.cluster.nodes * factor)
        spread = widened(layout, present, factor)
        ranked = _fits(view, present, profile=_with(profile, spread), cluster=cluster, started=started)
        if ranked is not None:
            yield f"{factor} times the GPUs ({_figure(ranked, where)})"
            break
    for tokens in filter(None, (layout.response_tokens // share for share in (2, 4, 8))):
        shorter = msgspec.structs.replace(layout, response_tokens=tokens)
        ranked = _fits(view, present, profile=_shorter(profile, shorter), started=started)
        if ranked is not None:
            yield (
                f"responses of {tokens} tokens instead of {layout.response_tokens} ({_figure(ranked, where)})"
            )
            break
    if not layout.lora_rank:
        lora = msgspec.structs.replace(layout, lora_rank=_LORA_RANK)
        ranked = _fits(view, present, profile=_with(profile, lora), started=started)
        if ranked is not None:
            yield f"LoRA of rank {_LORA_RANK} ({_figure(ranked, where)})"


def _fits(
    view: Outlook,
    present: Knobs,
    *,
    started: bool,
    profile: Profile | None = None,
    cluster: Cluster | None = None,
    recovery: Recovery | None = None,
) -> Ranked | None:
    job = view.run.accepted.job
    accepted = msgspec.structs.replace(
        view.run.accepted,
        job=msgspec.structs.replace(job, recovery=recovery or job.recovery),
        profile=profile or view.run.accepted.profile,
        cluster=cluster or view.run.accepted.cluster,
    )
    other = Outlook(
        run=msgspec.structs.replace(view.run, accepted=accepted),
        model=view.model,
        calibration=view.calibration,
    )
    least = accepted.profile.longest_sequence
    if profile is not None and least is not None and present.tokens_per_microbatch is not None:
        present = msgspec.structs.replace(
            present, tokens_per_microbatch=min(present.tokens_per_microbatch, max(least, 1))
        )
    ranked = nearest(other, present, started=started)
    return ranked if ranked.least_risk < _LIKELY else None


def widened(layout: Layout, knobs: Knobs, factor: int) -> Layout:
    """Return the layout on `factor` times the devices.

    State sharded over all of them is sharded further. State with copies, by replicas or hybrid sharding's
    groups, gets more copies: each rank holds as much as before.
    """
    split = (knobs.tensor_parallel or 1) * (knobs.pipeline_parallel or layout.pipeline_parallel)
    copied = layout.strategy == "none" or layout.shards * split < layout.ranks
    return msgspec.structs.replace(
        layout,
        strategy="ddp" if layout.strategy == "none" else layout.strategy,
        ranks=layout.ranks * factor,
        shards=layout.shards * (1 if copied else factor),
        expert_shards=layout.expert_shards * (1 if copied else factor),
        engine_ranks=layout.engine_ranks * factor,
    )


def _with(profile: Profile, layout: Layout) -> Profile:
    return msgspec.structs.replace(profile, layout=layout)


def _shorter(profile: Profile, layout: Layout) -> Profile:
    """Return the profile of a job with shorter responses; bounds of a whole sequence shrink with it."""
    longest = layout.prompt_tokens + layout.response_tokens
    bounds = tuple(
        msgspec.structs.replace(c, value=min(c.value, float(longest)))
        if isinstance(c, AtLeast) and c.knob in _TOKEN_KNOBS
        else c
        for c in profile.constraints
    )
    return msgspec.structs.replace(profile, layout=layout, longest_sequence=longest, constraints=bounds)


def _figure(ranked: Ranked, where: str) -> str:
    if where == "host":
        return f"predicted host {show_gib(ranked.host)}"
    size = next(size for phase, size in ranked.gpu.items() if phase.value == where)
    return f"predicted {where} {show_gib(size)}"
