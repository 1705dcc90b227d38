"""The fastest configuration that is predicted to be safe for a model on some cards, as a job file."""

from __future__ import annotations

import msgspec

from autotune.launchers import frameworks
from autotune.orchestrator.cluster_fit import with_gpu_memory
from autotune.orchestrator.config.loader import assumed, parse_elsewhere
from autotune.orchestrator.config.schema import LITERAL
from autotune.orchestrator.config.yaml_edit import Edit, edited
from autotune.orchestrator.errors import JobErrors
from autotune.orchestrator.first_job import Wish, first_texts, of_experts
from autotune.orchestrator.search.presets import presets
from autotune.policies.estimate.constants import has_speed
from autotune.policies.search.feasibility import Foresight, foreseen, judged
from autotune.policies.search.next_trial import SearchSpace
from autotune.policies.search.space import legal, space
from autotune.policies.values.events import Accepted
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.profile import Profile
from autotune.policies.values.value import Value

_CHOSEN = "predicted: the fastest that fits"
_NEXT_TO_NOTHING = 1.005  # of a step's time: below what a search calls a gain
_ROUNDS = 3  # searches, each around the fastest of the one before


class Start(Value, frozen=True, kw_only=True):
    """A configuration that is predicted to be safe."""

    text: str  # of the job file
    step_s: float | None  # predicted seconds of a step; None where the card's speed is not known
    host_bytes: int  # predicted peak of host memory on a node, whose size is not known
    looked_at: int  # configurations that fit


def starting_job(wish: Wish) -> Start | None:
    """Return the fastest configuration that is predicted to fit with headroom; None if none is.

    Raises JobErrors where the wish itself is no legal job.
    """
    refused: JobErrors | None = None
    for text in first_texts(wish):
        try:
            result = _fastest(wish, text)
        except JobErrors as errors:
            refused = refused or errors
            continue
        if result is not None:
            return result
    if refused is not None:
        raise refused
    return None


def _fastest(wish: Wish, text: str) -> Start | None:
    """Return the fastest configuration of a first job that is predicted to fit."""
    job, _ = parse_elsewhere(text, file="this model")
    if experts := of_experts(wish, job):
        text = edited(text, experts, literal=LITERAL)
        job, _ = parse_elsewhere(text, file="this model")
    framework = frameworks.find(job.framework)
    cluster = assumed(job)
    job = with_gpu_memory(job, cluster)
    profile = framework.profile(job, cluster)
    accepted = Accepted(run="plan", job=job, profile=profile, cluster=cluster)
    free = _without_limits(job)
    dimensions = space(free, profile, profile.knobs)
    starts = (profile.knobs, *presets(framework, job, accepted, profile.knobs, dimensions))
    varied = SearchSpace(profile=profile, dimensions=dimensions, starts=starts, min_gain=0.0)
    sight = foreseen(accepted, (), (), dimensions, neighbours=varied.neighbours)
    if sight is None:
        return None
    centers, result = starts, tuple[Knobs, ...]()
    for _ in range(_ROUNDS):
        result = sight.proposals(centers, gain=0.0)
        if not result or result[0] == centers[0]:
            break
        centers = (result[0], *starts)
    if not result:
        return None
    chosen = _with_defaults(sight, profile, result[0])
    changes = framework.settings(job, chosen)
    edits = [Edit(("settings", key), value, _CHOSEN) for key, value in changes.items()]
    estimate = judged(sight, (chosen,)).estimate
    return Start(
        text=edited(text, edits, literal=LITERAL).rstrip() + "\n",
        step_s=float(estimate.step_s[0]) if has_speed(cluster.gpu_name) else None,
        host_bytes=int(estimate.host[:, 0].max()),
        looked_at=len(result),
    )


def _with_defaults(sight: Foresight, profile: Profile, knobs: Knobs) -> Knobs:
    """Return a configuration with every knob back at the framework's default that gains next to nothing."""
    fastest = float(judged(sight, (knobs,)).estimate.step_s[0])
    for name in changed(profile.knobs, knobs):
        plain = msgspec.structs.replace(knobs, **{name: getattr(profile.knobs, name)})
        if not legal(profile, profile.knobs, plain, started=False):
            continue
        one = judged(sight, (plain,))
        if one.allowed[0] and float(one.estimate.step_s[0]) <= _NEXT_TO_NOTHING * fastest:
            knobs = plain
    return knobs


def _without_limits(job: Job) -> Job:
    """Return the job with every knob open to choice: none of its values is a person's yet."""
    return msgspec.structs.replace(job, settings={})
