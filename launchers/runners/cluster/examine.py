"""Examines all nodes of a cluster in parallel; an unresponsive node does not delay the others."""

from __future__ import annotations

from autotune.launchers.base import Unreachable
from autotune.launchers.runners.cluster.actors import living_nodes, name_of, on_node
from autotune.launchers.runners.cluster.readers import import_failure
from autotune.launchers.runners.cluster.survey import first_line
from autotune.launchers.runners.cluster.timeouts import WAITS
from autotune.launchers.runners.node.examination import Examination, NodeFacts, examine
from autotune.policies.values.value import Value


class Answer(Value, frozen=True, kw_only=True):
    """The answer of one node of the cluster."""

    node: str  # its address, with its id if several nodes share one
    gpus: int  # GPUs that Ray offers there
    facts: NodeFacts | None = None
    silence: str = ""  # why there are no facts


def examine_nodes(wanted: Examination, *, timeout_s: float) -> tuple[Answer, ...]:
    """Return the facts of every live node, the head first, within `timeout_s`.

    Needs a connection to the cluster; raises Unreachable if it is lost.
    """
    import ray

    try:
        return _examined(wanted, timeout_s=timeout_s)
    except (ray.exceptions.RayError, RuntimeError, ConnectionError) as error:
        raise Unreachable(
            f"the Ray cluster answers no more: {first_line(error)}",
            hint="look at `ray status` and at the head",
        ) from error


def _examined(wanted: Examination, *, timeout_s: float) -> tuple[Answer, ...]:
    import ray

    nodes = living_nodes()
    probe = ray.remote(num_cpus=0, max_retries=0)(examine)
    asked = [probe.options(**on_node(node)).remote(wanted) for node in nodes]
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
    answered = set(done)
    addresses = [name_of(node) for node in nodes]
    result = []
    for node, address, reference in zip(nodes, addresses, asked, strict=True):
        facts, silence = None, ""
        if reference not in answered:
            silence = f"did not answer within {timeout_s:.0f} s"
            ray.cancel(reference, force=True)
        else:
            try:
                facts = ray.get(reference, timeout=WAITS.answer)
            except ray.exceptions.RayError as error:
                silence = _reason(error)
        shared = addresses.count(address) > 1
        result.append(
            Answer(
                node=f"{address} ({node['NodeID'][:6]})" if shared else address,
                gpus=int(node["Resources"].get("GPU", 0)),
                facts=facts,
                silence=silence,
            )
        )
    return tuple(result)


def _reason(error: Exception) -> str:
    """Return in one line why a node could not be examined."""
    if why := import_failure(error):
        return f"its Ray cannot import autotune: {why}"
    cause = getattr(error, "cause", None)
    return first_line(cause if isinstance(cause, Exception) else error)
