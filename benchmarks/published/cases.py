"""The cases on disk: a job file, a model's shape and what is known of how the job went."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from autotune.launchers import frameworks
from autotune.orchestrator.config.loader import assumed, load
from autotune.orchestrator.planner import Plan, plan

CASES = Path(__file__).parent / "cases"


class Truth(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a job went, where it ran and who says so."""

    id: str
    url: str
    date: str = ""  # of the report; empty: not recorded
    added: str = ""  # the day on which it was written, before any prediction of it; empty: before 2026-11-29
    framework: str  # in words, with what job.yaml cannot say
    hardware: str
    model_source: str = ""  # file and commit of the shape; empty: not recorded
    scope: Literal["all", "trainer", "engine"]  # what the report is about
    outcome: Literal["ran", "oom"]
    phase: str = ""  # where it failed, by the names of the plan; empty: not told
    memory: Literal["gpu", "host"] = "gpu"
    complete: bool  # whether every setting that decides memory is reported
    used_in: str = ""  # where the project used the case before
    figures: dict[str, float] = {}  # measured: bytes, or tokens of the pool
    cure: tuple[str, ...] = ()  # knobs, one of which was confirmed to help
    cure_by: str = ""
    fixed_by: str = ""  # the case of the recipe that ran after the cure
    note: str = ""
    published_lengths: dict[str, float] = {}  # tokens; shares of responses


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A case: its folder and its truth."""

    folder: Path
    truth: Truth

    @property
    def held_out(self) -> bool:
        """Whether no constant may be fitted to it: a coin thrown by its name."""
        return is_held_out(self.truth.id)


def is_held_out(name: str) -> bool:
    """Return the half of a published outcome: a coin thrown by its name."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def cases(folder: Path = CASES) -> Iterator[Case]:
    """Yield the cases of a folder by name; raises msgspec.ValidationError for a truth that is malformed."""
    for path in sorted(folder.glob("*/truth.json")):
        truth = msgspec.json.decode(path.read_bytes(), type=Truth)
        if truth.id != path.parent.name:
            raise ValueError(f"{path} says that it is `{truth.id}`")
        yield Case(folder=path.parent, truth=truth)


def planned(case: Case) -> Plan:
    """Return what `autotune plan` says of a case, uncalibrated; raises what a wrong job file raises."""
    with contextlib.chdir(case.folder):
        job = load("job.yaml")
        return plan(
            job,
            frameworks.find(job.framework),
            assumed(job),
            render=lambda *_: (),
            remedies=bool(case.truth.cure),
        )
