"""The lengths of a job's sequences according to its settings."""

from __future__ import annotations

import msgspec

from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.job import Job


def with_lengths(layout: Layout, job: Job) -> Layout:
    """Return the layout with the mean lengths, in tokens, that `lengths:` of the job names."""
    return msgspec.structs.replace(
        layout,
        prompt_mean=float(job.lengths.prompt or layout.prompt_mean),
        response_mean=float(job.lengths.response or layout.response_mean),
    )
