"""The advice when no remedy is left: by how much the nearest configuration misses, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from autotune.policies.recovery.outlook import Outlook, outlook
from autotune.policies.recovery.ranking import Ranked, nearest, overflowing
from autotune.policies.recovery.remedy_text import words
from autotune.policies.values.architecture.model import Layout
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
    return Shortfall(
        nearest=f"{text}, predicted to be {short}",
        would_fit=tuple(_alternatives(view, present, where, started=started)),
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
    for share in (2, 4, 8):
        if layout.response_tokens // share < 1:
            break
        shorter = msgspec.structs.replace(layout, response_tokens=layout.response_tokens // share)
        ranked = _fits(view, present, profile=_shorter(profile, shorter), started=started)
        if ranked is not None:
            yield (
                f"responses of {shorter.response_tokens} tokens instead of {layout.response_tokens} "
                f"({_figure(ranked, where)})"
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
    split = (knobs.tensor_parallel or 1) * layout.pipeline_parallel
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
