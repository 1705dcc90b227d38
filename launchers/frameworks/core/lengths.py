"""Mean sequence lengths of a job, and the data of its prompts."""

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
    """Return the layout with mean lengths, in tokens, from the job's `lengths:` or measured on its data."""
    measured = job.prompts.mean if job.prompts is not None else 0
    return msgspec.structs.replace(
        layout,
        prompt_mean=float(job.lengths.prompt or measured or layout.prompt_mean),
        response_mean=float(job.lengths.response or layout.response_mean),
    )


# Suffixes of a path that select some of its rows: `FILE@[0:100]` (slime), `FILE#500` (ms-swift).
_PART = re.compile(r"(@\[[^\]]*\]|#\d+)$")


class PromptKeys(Value, frozen=True, kw_only=True):
    """The settings that name the training's prompt data."""

    files: str
    field: str  # default name of the prompt field of a row
    field_key: str = ""

    def named(self, get: Callable[[str], Any]) -> Prompts | None:
        """Return the prompt data that a job's settings name; None if they name none."""
        files = get(self.files)
        names = [str(each) for each in (files if isinstance(files, list | tuple) else [files]) if each]
        field = (get(self.field_key) if self.field_key else None) or self.field
        files = tuple(_PART.sub("", each) for each in names)
        return Prompts(files=files, field=str(field)) if files else None
