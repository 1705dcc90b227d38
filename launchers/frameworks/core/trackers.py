"""Where an experiment tracker keeps a job's run, by the framework's settings and log lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from autotune.launchers.base import Tracked
from autotune.policies.values.job import Job, Tracker

_SETTING = re.compile(r"\{([^{}]+)\}")
_UNSAFE = re.compile(r"[^\w.-]+")
_OFF = ("", "no", "none", "null", "false", "disabled")


def one_wandb_run(job: Job, run: str) -> dict[str, str]:
    """Return environment variables that make all attempts one W&B run; invalid id characters are replaced."""
    return {"WANDB_RUN_ID": _UNSAFE.sub("-", f"{job.name}-{run}"), "WANDB_RESUME": "allow"}


class TrackerRow(NamedTuple):
    """A tracker of a framework; `{name}` in a text stands for the value of a setting."""

    tracker: Tracker
    named_in: str = ""  # setting that lists the job's trackers
    on: str = ""  # setting that enables this one: true, or a text such as a path
    place: Mapping[str, str] = {}  # entries whose settings are unset are left out
    lines: tuple[str, ...] = ()  # log lines that print the place as `{folder}`


def tracked(
    rows: Iterable[TrackerRow], get: Callable[[str], Any], *, given: Mapping[str, str] | None = None
) -> tuple[Tracked, ...]:
    """Return the trackers that a job uses; `get` returns its settings by name, `given` are others."""

    def value_of(name: str) -> str:
        value = (given or {}).get(name) or get(name)
        return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""

    return tuple(
        Tracked(tracker=row.tracker, place=_place(row.place, value_of), lines=row.lines)
        for row in rows
        if _is_used(row, get)
    )


def _is_used(row: TrackerRow, get: Callable[[str], Any]) -> bool:
    if row.named_in and not _names(get(row.named_in), row.tracker):
        return False
    return not row.on or _is_on(get(row.on))


def _place(texts: Mapping[str, str], value_of: Callable[[str], str]) -> dict[str, str]:
    return {
        key: _SETTING.sub(lambda match: value_of(match[1]), text)
        for key, text in texts.items()
        if all(map(value_of, _SETTING.findall(text)))
    }


def _names(value: Any, tracker: Tracker) -> bool:
    return not {tracker.value, "all"}.isdisjoint(re.findall(r"\w+", str(value).lower()))


def _is_on(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.strip().lower() not in _OFF)
