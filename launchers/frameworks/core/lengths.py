"""The lengths of a job's sequences according to its settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from autotune.launchers.base import Prompts
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.job import Job
from autotune.policies.values.value import Value


def with_lengths(layout: Layout, job: Job) -> Layout:
    """Return the layout with the mean lengths, in tokens, that `lengths:` of the job or its data tell."""
    measured = job.prompts.mean if job.prompts is not None else 0
    return msgspec.structs.replace(
        layout,
        prompt_mean=float(job.lengths.prompt or measured or layout.prompt_mean),
        response_mean=float(job.lengths.response or layout.response_mean),
    )


# What frameworks append to a path to take a part of its rows: `FILE@[0:100]` (slime), `FILE#500` (ms-swift).
_PART = re.compile(r"(@\[[^\]]*\]|#\d+)$")


class PromptKeys(Value, frozen=True, kw_only=True):
    """Which settings name the data of a training's prompts."""

    files: str
    field: str  # of a row, that holds the prompt, where no setting names it
    field_key: str = ""

    def named(self, get: Callable[[str], Any]) -> Prompts | None:
        """Return the data that the settings of a job name; None if they name none."""
        files = get(self.files)
        names = [str(each) for each in (files if isinstance(files, list | tuple) else [files]) if each]
        field = (get(self.field_key) if self.field_key else None) or self.field
        files = tuple(_PART.sub("", each) for each in names)
        return Prompts(files=files, field=str(field)) if files else None
