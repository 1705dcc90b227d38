"""Which nodes a job needs: what another one lacks is a warning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from autotune.orchestrator.doctor.check import Check, Status

_OF_JOB = frozenset({"workdir", "framework", "model", "data", "checkpoints"})


class NodeChecks(NamedTuple):
    """What was found of a node that offers `gpus` to Ray."""

    gpus: int
    checks: tuple[Check, ...]


def weighed(nodes: Sequence[NodeChecks], *, needed: int, supervisor: int | None) -> Iterator[Check]:
    """Yield all checks, a failed one of the job's as a warning on a node that the job can do without.

    `supervisor` is the place of the node where the job's command starts, which alone needs `workdir`; None:
    any node with GPUs may be it. The nodes that train are those with GPUs, or all where none has any; once
    `needed` of them pass, the others are spare.
    """
    workers = {place for place, node in enumerate(nodes) if node.gpus} or set(range(len(nodes)))
    passed = sum(all(check.status is not Status.FAILED for check in nodes[place].checks) for place in workers)
    for place, node in enumerate(nodes):
        spare = place not in workers or passed >= needed
        for check in node.checks:
            elsewhere = check.name == "workdir" and supervisor is not None
            failed = check.status is Status.FAILED and check.name in _OF_JOB
            if failed and place != supervisor and (spare or elsewhere):
                yield msgspec.structs.replace(check, status=Status.WARNING)
            else:
                yield check
