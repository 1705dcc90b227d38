"""A job whose settings are not all filled in, for a prediction with defaults in their place."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.orchestrator import placeholders
from autotune.orchestrator.config import secrets
from autotune.orchestrator.config.loader import parse_elsewhere, read_text, unfilled, written
from autotune.orchestrator.errors import JobErrors
from autotune.policies.values.job import Job


def load_unfinished(path: str | Path) -> tuple[Job, tuple[str, ...]]:
    """Return what `parse_unfinished` returns of the text in a file."""
    return parse_unfinished(read_text(path), file=str(path))


def parse_unfinished(
    text: str, *, file: str = "job.yaml", lookup: secrets.Lookup = os.environ.get
) -> tuple[Job, tuple[str, ...]]:
    """Return the job in a text that runs on another machine, and which of its files are not on this one.

    A setting that cannot be read before its value is filled in is left out, and the job names it in
    `unfilled`: a prediction then rests on the framework's default. Raises JobErrors for every other mistake.
    """
    left_out: tuple[str, ...] = ()
    first: JobErrors | None = None
    while True:
        try:
            return parse_elsewhere(text, file=file, lookup=lookup, leave_out=left_out)
        except JobErrors as error:
            first = first or error
            names = [name for name in _unfilled_settings(text, error) if name not in left_out]
            if not names:
                raise first from None
            left_out = (*left_out, *names)


def _unfilled_settings(text: str, error: JobErrors) -> list[str]:
    """Return the settings that errors are about and that nobody filled in."""
    job = written(text)
    if job is None:
        return []
    wrong = {(each.line, each.column) for each in error.complaints}
    places = zip(placeholders.unfilled(job), unfilled(text), strict=False)
    return [
        str(path[1]) for (path, _), at in places if path[0] == "settings" and (at.line, at.column) in wrong
    ]
