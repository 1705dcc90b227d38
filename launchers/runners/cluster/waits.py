"""How long the driver waits for what in a Ray cluster: all of its patience in one place.

The graces in which processes end by themselves are those of a node, in `node.agent`.
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
    notice: float = 30.0  # of silence before the user is told: a node under memory pressure answers late
    # A supervisor whose node lives: as long as Ray Train waits for its workers' health checks, and half more.
    supervisor: float = 900.0
    # The head: Ray's processes give up after 60 s without it, a head on Kubernetes is back within minutes.
    head: float = 300.0
    answer: float = 15.0  # for one question to a node that is expected to answer
    last_words: float = 60.0  # of an attempt whose supervisor died, read by another actor on a busy node
    attach: float = 90.0  # for a supervisor that lives to say where its attempt began
    start: float = 120.0  # Ray may have to start workers on busy nodes
    placement: float = 60.0  # for the GPUs of a command that asks Ray for none
    report: float = 10.0  # for a cluster that has just started to say whether it has an autoscaler
    end: float = 30.0  # beyond the grace, for an attempt's processes to end
    # Before an actor that died is replaced once more: doubled each time, up to the second figure.
    retry: tuple[float, float] = (5.0, 300.0)
    replace: float = 5.0  # beyond the grace, before a task ends the processes where the actor does not


WAITS = Waits()
