"""Ray jobs of an attempt's framework: their environment, their GPUs and their leftovers."""

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
    """Return the variables with which the framework's `ray.init()` marks its job and all workers.

    Ray reads them as under `ray job submit` and merges them with the program's runtime_env; the override lets
    a program set the same variables. `python` is the workers' interpreter: by default Ray uses the node
    process's, which may lack the framework. `variables` are the job's: workers inherit the node's
    environment, not the program's.
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
    """Return the job configuration of this process, if it runs under `ray job submit`."""
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
    """The GPUs that Ray gave to a job's actors on one node."""

    places: tuple[int, ...]  # GPUs, counted from 0 whatever CUDA_VISIBLE_DEVICES names there
    pids: tuple[int, ...]  # of the processes that they were given to


def claims_of(jobs: tuple[str, ...]) -> dict[str, Claim]:
    """Return the GPUs that Ray gave to the jobs' actors, including dead ones, by node id."""
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
