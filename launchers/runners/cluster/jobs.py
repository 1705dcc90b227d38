"""What the framework's own Ray jobs leave in the cluster's tables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from autotune.launchers.runners.cluster.internals import actor_rows, group_rows, job_rows
from autotune.launchers.runners.node.processes import MARKER

METADATA = "autotune_attempt"
_INJECTED = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def job_environment(
    attempt: str,
    *,
    inherited: str | None,
    python: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables that make `ray.init()` of the framework mark its job and all workers.

    Ray reads them as it does under `ray job submit` and merges them with the program's own runtime_env; with
    the override a program may set the same variables itself. Ray starts workers with the interpreter of its
    own node process, which lacks the framework where that has an interpreter of its own: `python` is theirs.
    `variables` are the job's own: a worker inherits the environment of its node, not of the program.
    """
    config: dict[str, Any] = json.loads(inherited) if inherited else {}
    runtime = dict(config.get("runtime_env") or {})
    if python is not None:
        runtime.setdefault("py_executable", python)
    runtime["env_vars"] = {**runtime.get("env_vars", {}), **(variables or {}), MARKER: attempt}
    metadata = {**(config.get("metadata") or {}), METADATA: attempt}
    return {
        _INJECTED: json.dumps({**config, "runtime_env": runtime, "metadata": metadata}),
        "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",
    }


def inherited_job_config() -> str | None:
    """Return the job configuration that this process itself was started with, under `ray job submit`."""
    return os.environ.get(_INJECTED)


def jobs_of(attempt: str) -> tuple[str, ...]:
    """Return the ids of the Ray jobs that an attempt's framework has started."""
    return tuple(sorted(job for job, name in _marked_jobs() if name == attempt))


def attempts_with_jobs(run: str) -> tuple[str, ...]:
    """Return the attempts `<run>/<n>` whose frameworks have started Ray jobs."""
    return tuple(sorted({name for _, name in _marked_jobs() if name.startswith(f"{run}/")}))


def _marked_jobs() -> set[tuple[str, str]]:
    return {
        (row.job, name) for row in job_rows() if (name := row.marks.get(METADATA) or row.marks.get(MARKER))
    }


class Claim(NamedTuple):
    """What Ray gave to the actors of a job on one node."""

    places: tuple[int, ...]  # GPUs, counted from 0 whatever CUDA_VISIBLE_DEVICES names there
    pids: tuple[int, ...]  # of the processes that they were given to


def claims_of(jobs: tuple[str, ...]) -> dict[str, Claim]:
    """Return the GPUs that Ray gave to the jobs' actors, dead ones included, by the id of their node."""
    result: dict[str, tuple[set[int], set[int]]] = {}
    for row in (row for job in jobs for row in actor_rows(job) if row.places):
        places, pids = result.setdefault(row.node, (set(), set()))
        places.update(row.places)
        pids.add(row.pid)
    return {
        node: Claim(tuple(sorted(places)), tuple(sorted(pids))) for node, (places, pids) in result.items()
    }


def remove_leftovers(jobs: tuple[str, ...]) -> tuple[str, ...]:
    """Remove the detached actors and the placement groups of ended jobs; return what was removed."""
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    removed = []
    for row in (row for job in jobs for row in actor_rows(job) if row.detached and not row.dead):
        try:
            ray.kill(ray.get_actor(row.name, namespace=row.namespace), no_restart=True)
        except ValueError:
            continue  # ended meanwhile
        removed.append(f"actor {row.name}")
    for group in group_rows():
        if group.job in jobs and not group.removed:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group.group))))
            removed.append(f"placement group {group.name or group.group}")
    return tuple(removed)
