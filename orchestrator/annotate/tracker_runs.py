"""Where trackers keep the run of a job: what its log, its settings and its environment say of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from autotune.launchers.base import OWN_SOURCE, Tracked
from autotune.orchestrator.run.log_parts import LogReader
from autotune.policies.values.job import Tracker

# Names of a place, by tracker, of which one set is enough to find a run; `uri`, `store` and `space` say more
# of where it is. A name that begins with `default_` counts where nothing says the name without it.
ENOUGH: Mapping[Tracker, tuple[tuple[str, ...], ...]] = {
    Tracker.WANDB: (("project", "id"),),
    Tracker.MLFLOW: (("id",), ("experiment",), ("default_experiment",)),
    Tracker.TENSORBOARD: (("folder",),),
    Tracker.SWANLAB: (("workspace", "project", "id"),),
    Tracker.TRACKIO: (("project", "name"),),
}
# Variables of the job that say the same to the tracker itself.
VARIABLES: Mapping[Tracker, Mapping[str, str]] = {
    Tracker.WANDB: {"WANDB_ENTITY": "entity", "WANDB_PROJECT": "project", "WANDB_RUN_ID": "id"},
    Tracker.MLFLOW: {
        "MLFLOW_TRACKING_URI": "uri",
        "MLFLOW_EXPERIMENT_NAME": "experiment",
        "MLFLOW_RUN_ID": "id",
    },
    Tracker.TENSORBOARD: {"TENSORBOARD_LOGGING_DIR": "folder", "TENSORBOARD_DIR": "folder"},
}
_READ_BYTES = 64 << 20  # of a log; the lines stand where a tracker begins
_LONGEST = 2000  # characters of such a line
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class _Words(NamedTuple):
    tracker: Tracker
    literal: bytes  # in every such line
    pattern: re.Pattern[str]


def _words(tracker: Tracker, literal: str, pattern: str) -> _Words:
    return _Words(tracker, literal.encode(), re.compile(pattern))


# What trackers print of a run themselves. Of a URL only names are taken: which server is asked with the
# user's credentials is for the environment to say, not for a log.
_PRINTED = (
    _words(
        Tracker.WANDB,
        "wandb",
        r"wandb: .{0,20}View run\b.{0,300}?https?://[^/\s]+/(?P<entity>[^/\s@#]+)/(?P<project>[^/\s]+)"
        r"/runs/(?P<id>[^/\s?]+)",
    ),
    _words(
        Tracker.SWANLAB,
        "/@",
        r"https?://[^/\s]+/@(?P<workspace>[^/\s]+)/(?P<project>[^/\s]+)/runs/(?P<id>[^/\s?]+)",
    ),
    _words(Tracker.MLFLOW, "View run", r"View run .{0,300}/experiments/\d+/runs/(?P<id>[0-9a-f]{32})\b"),
    _words(
        Tracker.MLFLOW,
        "run",
        r"(?i)\bmlflow\b.{0,300}?\brun[ _-]?id\b\W{1,4}(?P<id>[0-9a-f]{32})\b",
    ),
    _words(Tracker.TRACKIO, "Trackio", r"\* Trackio project initialized: (?P<project>.+)"),
    _words(Tracker.TRACKIO, "Trackio", r"\* Trackio metrics logged to: (?P<store>.+)"),
    _words(Tracker.TRACKIO, "* ", r"\* (?:Created new|Resumed existing) run: (?P<name>.+)"),
)

Places = dict[Tracker, dict[str, str]]


def places(
    log: Path, tracked: Iterable[Tracked], variables: Mapping[str, str], *, folder: str
) -> tuple[Places, tuple[Tracker, ...]]:
    """Return where each tracker keeps the run, and the trackers of which too little is known for that.

    The settings decide, then the variables. The output of a job can hold anything: what a line of the log
    says of a run fills what neither says, and only where all of it agrees. Folders are absolute, or below
    `folder`.
    """
    tracked = tuple(tracked)

    def fitted(name: str, value: str) -> str:
        return str(Path(folder, Path(value).expanduser())) if name == "folder" else value

    result: Places = {}
    for tracker, name, value in (
        *((each.tracker, name, value) for each in tracked for name, value in each.place.items() if value),
        *_of_variables(variables),
    ):
        result.setdefault(tracker, {}).setdefault(name, fitted(name, value))
    other: set[Tracker] = set()  # trackers whose last named run was another one
    for tracker, line in _of_log(log, tracked):
        place, fields = result.setdefault(tracker, {}), {name: fitted(name, line[name]) for name in line}
        elsewhere = "id" in fields and "experiment" in place  # it does not say in which experiment
        if elsewhere or any(place.get(name, value) != value for name, value in fields.items()):
            other.add(tracker)
        elif tracker not in other or "project" in fields:
            other.discard(tracker)
            place |= fields
    whole = {
        tracker: place
        for tracker, place in result.items()
        if any(all(map(place.get, names)) for names in ENOUGH[tracker])
    }
    # That a variable is set, or that a line is known, does not say that the job uses the tracker.
    used = {each.tracker for each in tracked if each.place}
    return whole, tuple(tracker for tracker in Tracker if tracker in used and tracker not in whole)


def _of_variables(variables: Mapping[str, str]) -> Iterator[tuple[Tracker, str, str]]:
    for tracker, names in VARIABLES.items():
        for variable, name in names.items():
            if variables.get(variable):
                yield tracker, name, variables[variable]


def _of_log(log: Path, tracked: Iterable[Tracked]) -> Iterator[tuple[Tracker, dict[str, str]]]:
    """Yield what each line of a log says of a run."""
    known = (*_PRINTED, *(_of_template(each.tracker, line) for each in tracked for line in each.lines))
    reader, size = LogReader(log), 0
    try:
        for line in reader.new():
            size += len(line.data)
            if size > _READ_BYTES:
                return
            if line.source != OWN_SOURCE:
                yield from _of_line(line.data, known)
    finally:
        reader.close()


def _of_line(data: bytes, known: Iterable[_Words]) -> Iterator[tuple[Tracker, dict[str, str]]]:
    text = ""
    for words in known:
        if words.literal not in data:
            continue
        text = text or _COLOR.sub("", data[:_LONGEST].decode("utf-8", "replace")).rstrip()
        match = words.pattern.search(text)
        if match is not None:
            plain = unquote if words.tracker in _BY_URL else str.strip
            yield words.tracker, {name: plain(value) for name, value in match.groupdict().items()}


_BY_URL = (Tracker.WANDB, Tracker.SWANLAB)


def _of_template(tracker: Tracker, template: str) -> _Words:
    """Return what finds the lines of a template, such as `Saving tensorboard log to {folder}.`, in a log."""
    head, _, rest = template.partition("{")
    name, _, tail = rest.partition("}")
    return _words(tracker, head, f"{re.escape(head)}(?P<{name}>.+?){re.escape(tail)}$")
