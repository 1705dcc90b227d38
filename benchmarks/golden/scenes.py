"""What the scripted histories are made of: the jobs, and what may happen to an attempt of them."""

from __future__ import annotations

from typing import TypeAlias

from msgspec.structs import replace

from autotune.policies.values.diagnosis import Facts, Line
from autotune.policies.values.events import (
    Accepted,
    Decided,
    Diagnosed,
    Ended,
    Event,
    GoalReached,
    Policy,
    Progressed,
)
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import RESUMED
from autotune.policies.values.job import Recovery
from autotune.policies.values.observation import Cancelled, Completed, Crashed, Hung, Lost, Peak
from autotune.policies.values.priors import Factor, Kind, Learned
from autotune.policies.values.profile import Grid, Placement
from tests.policies import jobs, stories

GIB = 1 << 30
CRASH = Crashed(exit_code=1)
ENGINE_PHASES = (Phase.ROLLOUT, Phase.ROLLOUT_INIT)
BRIEF, LONG = Recovery(relaunches=3), Recovery(relaunches=25)

Happening: TypeAlias = tuple[Event, ...]  # what follows a launch


# ------------------------------------------------------------------ what happens


def fails(
    cause: Cause, phase: Phase, *, step: int | None = None, fragmentation: bool = False, **figures: int
) -> Happening:
    """Return the end of an attempt that a failure of the job ended."""
    component = Component.ROLLOUT if phase in ENGINE_PHASES else Component.TRAINER
    line = Line(line=7, text=f"{cause.value} in {phase.value}", rule="golden")
    row = Diagnosed(
        cause=cause,
        phase=phase,
        component=component,
        step=step,
        evidence=(line,),
        facts=Facts(**figures),
        fragmentation=fragmentation,
    )
    return (Ended(outcome=CRASH, step=step), row)


def steps(
    first: int, last: int, *, saved: bool = False, growth: float = 0.0, reports: bool = True
) -> Happening:
    """Return completed steps whose peaks in backward grow by so many GiB each."""
    rows = []
    for step in range(first, last + 1):
        used = {"rollout": 60.0, "log_prob": 50.0, "backward": min(79.0, 55.0 + growth * (step - first))}
        peaks = jobs.peaks(upper_bound=not reports, **{name: size * GIB for name, size in used.items()})
        rows.append(Progressed(step=step, seconds=100.0, peaks=peaks, saved=step if saved else None))
    return tuple(rows)


def goal(step: int, *, marginal: bool = False) -> Happening:
    """Return that the goal was reached."""
    peak = {"backward": Peak(used_bytes=55 * GIB, capacity_bytes=79 * GIB)}
    return (GoalReached(step=step, marginal=marginal, headroom=0.3, peaks=peak),)


def lost(
    reason: str = "node 10.0.0.9 is gone", *, killed: bool = False, step: int | None = None
) -> Happening:
    """Return the end of an attempt that the cluster took away."""
    return (Ended(outcome=Lost(reason=reason, killed=killed), step=step),)


def hung(step: int | None = None) -> Happening:
    """Return the end of an attempt without a step for too long."""
    ended = Ended(outcome=Hung(silent_s=900.0), step=step)
    return (ended, Diagnosed(cause=Cause.HANG, phase=Phase.ROLLOUT, step=step))


def ended(by: str) -> Happening:
    """Return the end of an attempt that somebody stopped."""
    return (Ended(outcome=Cancelled(by=by)),)


RESUME: Happening = (Decided(reason=RESUMED),)  # the user goes on with the run
COMPLETE: Happening = (Ended(outcome=Completed()),)


# ------------------------------------------------------------------ jobs


def known(recovery: Recovery = BRIEF, *, policy: Policy = Policy.ESTIMATE, **fields: object) -> Accepted:
    """Return Qwen3-8B under verl on four H100, ranked by the estimate."""
    accepted = jobs.accepted(recovery=recovery)
    job = replace(accepted.job, **{name: fields.pop(name) for name in ("goal", "resume") if name in fields})
    return replace(accepted, job=job, policy=policy, **fields)


def plain(recovery: Recovery = LONG) -> Accepted:
    """Return a job of which no model is known, colocated."""
    profile = stories.profile(placement=Placement.COLOCATED)
    return replace(stories.accepted(profile, recovery=recovery), cluster=jobs.CLUSTER)


def wide(recovery: Recovery = BRIEF) -> Accepted:
    """Return the known job on 16 GPUs, whose engine may use more ranks than the model has KV heads."""
    accepted = known(recovery)
    support = accepted.profile.supported["rollout_tensor_parallel"]
    grid = replace(support, grid=Grid(values=(1, 2, 4, 8, 16)))
    profile = replace(
        accepted.profile,
        layout=replace(accepted.profile.layout, ranks=16, shards=16, engine_ranks=16),
        supported={**accepted.profile.supported, "rollout_tensor_parallel": grid},
    )
    cluster = replace(accepted.cluster, nodes=2, gpus_per_node=8)
    shape = replace(jobs.MODEL, kv_heads=2)
    return replace(accepted, profile=profile, cluster=cluster, job=replace(accepted.job, shape=shape))


def with_knobs(accepted: Accepted, **knobs: object) -> Accepted:
    """Return the job written with other knobs."""
    profile = accepted.profile
    return replace(accepted, profile=replace(profile, knobs=replace(profile.knobs, **knobs)))


def taught(*, mean: float) -> Accepted:
    """Return the known job after earlier runs whose training passes were off by a factor."""
    parts = ("activations", "logits", "buffers")
    factors = {
        f"{group}.{part}": Factor(mean=mean, error=0.02) for group in ("train", "score") for part in parts
    }
    kind = Kind(model="", gpu="H100", framework="verl", version="", placement="colocated")
    return known(learned=Learned(kind=kind, factors=factors, runs=3))
