"""A framework's presets as configurations of a job."""

from __future__ import annotations

import msgspec

from autotune.launchers.base import Framework
from autotune.policies.remedies.allow_deny import legal
from autotune.policies.search.space import Dimension, assembled
from autotune.policies.values.events import Accepted
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs


def presets(
    framework: Framework, job: Job, accepted: Accepted, base: Knobs, dimensions: tuple[Dimension, ...]
) -> tuple[Knobs, ...]:
    """Return those of the framework's presets that are legal for this job, as configurations of it."""
    result: dict[Knobs, None] = {}
    for settings in framework.presets.values():
        wanted = msgspec.structs.replace(job, settings={**job.settings, **settings})
        if framework.check(wanted):
            continue
        offered = framework.profile(wanted, accepted.cluster).knobs
        values = {d.knob: getattr(offered, d.knob) for d in dimensions}
        knobs = assembled(
            accepted.profile, base, dimensions, {k: v for k, v in values.items() if v is not None}
        )
        if knobs != base and legal(accepted.profile, job.recovery, base, knobs, started=job.resume):
            result[knobs] = None
    return tuple(result)
