"""What autotune needs of Ray beyond its public API, and what it does on a Ray that has moved it.

No other module names a private part of Ray. Every function asks Ray's own tables or settings first, as they
need no dashboard, and falls back to a public way when Ray has them elsewhere. The fallback of the tables is
Ray's state API: it needs the cluster's dashboard and does not tell the GPUs that an actor was given.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

MOVED = (ImportError, AttributeError, TypeError)  # how a private part that is no longer there shows
_MOST_ROWS = 10_000  # as many as Ray's state API returns at once
_NO_TYPE = "node_"  # of nodes that no autoscaler started
_CURRENT_CLUSTER = "ray_current_cluster"  # where `ray start` writes its address

Result = TypeVar("Result")


class JobRow(NamedTuple):
    """A Ray job: a program that called `ray.init`."""

    job: str  # hexadecimal
    marks: Mapping[str, str]  # its metadata and the variables of its runtime environment


class ActorRow(NamedTuple):
    """An actor of a job, dead ones included."""

    name: str
    namespace: str
    node: str
    pid: int
    dead: bool
    detached: bool
    places: tuple[int, ...]  # GPUs that Ray gave it; empty where Ray's state API was asked


class GroupRow(NamedTuple):
    """A placement group."""

    group: str  # hexadecimal
    name: str
    job: str  # that created it
    removed: bool


class Growth(NamedTuple):
    """Whether a cluster's autoscaler starts nodes, and what it does at the moment."""

    grows: bool | None  # None: nothing that watches the cluster has reported yet
    note: str = ""  # what it does or fails to do, in words


class TablesUnreadable(RuntimeError):  # noqa: N818 - a state of the world, as Unreachable
    """Neither Ray's own tables nor its state API tell what runs on the cluster."""


def job_rows() -> list[JobRow]:
    """Return the cluster's jobs; raises TablesUnreadable."""
    return _either(_own_jobs, _listed_jobs)


def actor_rows(job: str) -> list[ActorRow]:
    """Return the actors of a job; raises TablesUnreadable."""
    return _either(lambda: _own_actors(job), lambda: _listed_actors(job))


def group_rows() -> list[GroupRow]:
    """Return the placement groups of all jobs; raises TablesUnreadable."""
    return _either(_own_groups, _listed_groups)


def growth() -> Growth:
    """Return whether the cluster has an autoscaler; without any where this Ray keeps that elsewhere.

    Ray reports on a cluster without one in the same form: there each node has a type of its own, named after
    its id (`format_readonly_node_type`).
    """
    try:
        raylet: Any = importlib.import_module("ray._raylet")
        from ray.experimental.internal_kv import _internal_kv_get

        space, second = raylet.GCS_AUTOSCALER_STATE_NAMESPACE, raylet.GCS_AUTOSCALER_V2_ENABLED_KEY
        if _internal_kv_get(second.encode(), namespace=space.encode()) == b"1":
            return growth_of_second(_second_status())
        status = _internal_kv_get(b"__autoscaling_status")
        return Growth(None) if status is None else growth_of_first(json.loads(status))
    except (*MOVED, ValueError):
        return Growth(False)


def growth_of_first(status: Mapping[str, Any]) -> Growth:
    """Return what the status that Ray's first autoscaler writes into the cluster's key-value store tells."""
    report = status.get("autoscaler_report") or {}
    starting = dict(report.get("pending_launches") or {})
    for _, kind, *_ in report.get("pending_nodes") or ():
        starting[kind] = starting.get(kind, 0) + 1
    refused = {}
    availability = (report.get("node_availability_summary") or {}).get("node_availabilities") or {}
    for kind, state in availability.items():
        why = state.get("unavailable_node_information")
        if not state.get("is_available", True) and why:
            refused[kind] = why.get("description") or why.get("category") or "not available"
    kinds = (*(report.get("active_nodes") or ()), *starting, *refused)
    return Growth(any(not kind.startswith(_NO_TYPE) for kind in kinds), _activity(starting, refused))


def _second_status() -> Any:
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    return get_cluster_status(ray.get_runtime_context().gcs_address)


def growth_of_second(status: Any) -> Growth:
    """Return what a `ClusterStatus` of Ray's second autoscaler tells: its nodes have instance ids."""
    starting: dict[str, int] = {}
    for launch in status.pending_launches:
        starting[launch.ray_node_type_name] = starting.get(launch.ray_node_type_name, 0) + launch.count
    for node in status.pending_nodes:
        starting[node.ray_node_type_name] = starting.get(node.ray_node_type_name, 0) + 1
    refused = {each.ray_node_type_name: each.details or "not available" for each in status.failed_launches}
    nodes = (*status.active_nodes, *status.idle_nodes)
    grows = bool(starting or refused or any(node.instance_id for node in nodes))
    return Growth(grows, _activity(starting, refused))


def _activity(starting: Mapping[str, int], refused: Mapping[str, str]) -> str:
    parts = [f"{count} × {kind} starting" for kind, count in starting.items()]
    parts += [f"{kind} could not be started: {' '.join(why.split())[:200]}" for kind, why in refused.items()]
    return "; ".join(parts)


def has_own_tables() -> bool:
    """Return whether this Ray's tables can be read without its dashboard, as far as its code tells."""
    try:
        from ray._private.state import state
        from ray.core.generated import gcs_pb2
    except ImportError:
        return False
    reachable = hasattr(state, "_connect_and_get_accessor") or hasattr(state, "_check_connected")
    return reachable and hasattr(gcs_pb2, "JobTableData")


def worker_logs() -> str:
    """Return the folder of this Ray worker's log; empty when Ray writes it to no file."""
    try:
        from ray._private.worker import global_worker

        return str(global_worker.node.get_logs_dir_path())
    except MOVED:
        own = Path("/proc/self/fd/1").readlink()
        return str(own.parent) if own.is_absolute() and own.name.startswith("worker-") else ""


def latest_address() -> str | None:
    """Return the address that the last `ray start` on this machine noted; its cluster may be gone."""
    try:
        from ray._private import services

        result = services.find_bootstrap_address(None)
    except MOVED:
        folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - Ray's own rule
        file = Path(folder, "ray", _CURRENT_CLUSTER)
        result = file.read_text().strip() if file.exists() else None
    return str(result) if result else None


def dashboard_url(address: str) -> str:
    """Return the URL of a cluster's Jobs API; raises what Ray raises when the cluster cannot be asked."""
    try:
        from ray.dashboard.utils import ray_address_to_api_server_url

        return str(ray_address_to_api_server_url(address))
    except MOVED:
        from ray.job_submission import JobSubmissionClient

        return str(JobSubmissionClient(address).get_address())


@contextmanager
def daemons_apart() -> Iterator[None]:
    """Give the daemons of a Ray that starts inside process groups of their own.

    Who signals the driver's group, as `timeout` does, asks only the driver, which then ends them. On a Ray
    that starts its daemons elsewhere they stay in the driver's group.
    """
    try:
        services: Any = importlib.import_module("ray._private.services")
        before = services.ConsolePopen
    except MOVED:
        yield
        return
    services.ConsolePopen = partial(before, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = before


def use_token(*, of_user: bool) -> None:
    """Make this process send a token, and its own Ray ask for one: the user's, or that of RAY_AUTH_TOKEN.

    Older Ray knows no tokens. Ray reads RAY_AUTH_MODE when it is imported: where it cannot be made to
    read it again, the variable works only if Ray was not imported before.
    """
    if of_user and not _has_token():
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    try:
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
    except MOVED:
        return


def _has_token() -> bool:
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    return bool(os.environ.get("RAY_AUTH_TOKEN")) or path.is_file()


def _either(own: Callable[[], Result], listed: Callable[[], Result]) -> Result:
    import ray

    try:
        return own()
    except MOVED as moved:
        try:
            return listed()
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise TablesUnreadable(
                f"Ray {ray.__version__} keeps its tables where autotune does not know them ({moved}), "
                f"and its dashboard cannot be asked: {reason}"
            ) from error


def _accessor() -> Any:
    from ray._private.state import state

    if hasattr(state, "_connect_and_get_accessor"):
        return state._connect_and_get_accessor()
    state._check_connected()  # Ray 2.51 and older
    return state.global_state_accessor


def _own_jobs() -> list[JobRow]:
    from ray.core.generated import gcs_pb2

    rows = _accessor().get_job_table(skip_submission_job_info_field=True, skip_is_running_tasks_field=True)
    jobs = [gcs_pb2.JobTableData.FromString(row) for row in rows]
    return [JobRow(job.job_id.hex(), dict(job.config.metadata)) for job in jobs]


def _own_actors(job: str) -> list[ActorRow]:
    import ray
    from ray.core.generated import gcs_pb2

    rows = _accessor().get_actor_table(ray.JobID.from_hex(job), None)
    return [
        ActorRow(
            name=actor.name,
            namespace=actor.ray_namespace,
            node=actor.node_id.hex(),
            pid=actor.pid,
            dead=actor.state == gcs_pb2.ActorTableData.DEAD,
            detached=actor.is_detached,
            places=tuple(
                entry.index
                for resource in actor.resource_mapping
                if resource.name == "GPU" or resource.name.startswith("GPU_group_")
                for entry in resource.resource_ids
                if entry.quantity > 0
            ),
        )
        for actor in map(gcs_pb2.ActorTableData.FromString, rows)
    ]


def _own_groups() -> list[GroupRow]:
    from ray.core.generated import gcs_pb2

    return [
        GroupRow(
            group=group.placement_group_id.hex(),
            name=group.name,
            job=group.creator_job_id.hex(),
            removed=group.state == gcs_pb2.PlacementGroupTableData.REMOVED,
        )
        for group in map(gcs_pb2.PlacementGroupTableData.FromString, _accessor().get_placement_group_table())
    ]


def _listed_jobs() -> list[JobRow]:
    """Return the jobs; what Ray runs below a submitted job shows only in its actors' variables."""
    from ray.util.state import list_actors, list_jobs

    rows = [JobRow(job.job_id, job.metadata or {}) for job in list_jobs(**_how()) if job.job_id]
    for actor in list_actors(**_how()):
        runtime = json.loads(actor.serialized_runtime_env or "{}")
        rows.append(JobRow(actor.job_id, runtime.get("env_vars") or {}))
    return rows


def _listed_actors(job: str) -> list[ActorRow]:
    from ray.util.state import list_actors

    return [
        ActorRow(
            name=actor.name or "",
            namespace=actor.ray_namespace or "",
            node=actor.node_id or "",
            pid=actor.pid or 0,
            dead=actor.state == "DEAD",
            detached=bool(actor.is_detached),
            places=(),
        )
        for actor in list_actors(filters=[("job_id", "=", job)], **_how())
    ]


def _listed_groups() -> list[GroupRow]:
    from ray.util.state import list_placement_groups

    return [
        GroupRow(
            group=group.placement_group_id,
            name=group.name or "",
            job=group.creator_job_id,
            removed=group.state == "REMOVED",
        )
        for group in list_placement_groups(**_how())
    ]


def _how() -> dict[str, Any]:
    """Return how to ask the state API: this cluster, whatever else runs on the machine, and all of it."""
    import ray

    address = ray.get_runtime_context().gcs_address
    return {"address": address, "detail": True, "limit": _MOST_ROWS, "raise_on_missing_output": False}
