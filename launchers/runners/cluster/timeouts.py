"""All timeouts of the driver in a Ray cluster.

Grace periods for processes to end are in `node.agent`.
"""

from __future__ import annotations

from autotune.policies.values.value import Value


class Waits(Value, frozen=True, kw_only=True):
    """Seconds. Ray itself counts a node as dead once 5 health checks of 10 s each have failed."""

    round: float = 2.0  # for all nodes together in one poll
    others: float = 1.0  # in it, for the other nodes once the supervisor has answered
    survey: tuple[float, float] = (1.0, 5.0)  # between looks at Ray's tables: before the job is known, after
    connect: float = 5.0  # for the head to take a connection; Ray itself would try for 40 s
    # Before this process leaves a cluster whose head takes none: a restarted one is back by then.
    leave: float = 20.0
    knock: float = 2.0  # for the health service of Ray's process on a silent node
    notice: float = 30.0  # before the user is notified: a node under memory pressure answers late
    # For a supervisor on a live node: 1.5 times Ray Train's timeout of worker health checks.
    supervisor: float = 900.0
    # For the head: Ray's processes give up after 60 s without it, a head on Kubernetes is back within
    # minutes.
    head: float = 300.0
    answer: float = 15.0  # for one question to a node that is expected to answer
    last_words: float = 60.0  # for another actor to read the last output after the supervisor died
    attach: float = 90.0  # for a live supervisor to report where its attempt began
    start: float = 120.0  # Ray may have to start workers on busy nodes
    placement: float = 60.0  # for the GPUs of a command that asks Ray for none
    report: float = 10.0  # for a cluster that has just started to say whether it has an autoscaler
    end: float = 30.0  # beyond the grace period, for an attempt's processes to end
    # Before a dead actor is replaced again: doubled each time, up to the second figure.
    retry: tuple[float, float] = (5.0, 300.0)
    replace: float = 5.0  # beyond the grace period, before a task kills processes instead of the actor


WAITS = Waits()
