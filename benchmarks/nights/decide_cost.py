"""What a decision costs after a thousand steps and after two hundred thousand, in function calls."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Iterator
from itertools import chain

from autotune.policies.recovery.decide import decide_on
from autotune.policies.values.diagnosis import Facts
from autotune.policies.values.events import Diagnosed, Ended, Event, Progressed, Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import Folding
from autotune.policies.values.observation import Crashed, Peak
from benchmarks.nights.night import Kind, drawn
from benchmarks.simulation.world import GIB

STEPS = (1_000, 200_000)


def calls(steps: int, *, seed: int) -> int:
    """Return the function calls of the decision after a failure of a process that made so many steps."""
    accepted = drawn(Kind.DEVICE, seed=seed).world.accepted
    capacity = accepted.cluster.gpu_memory_bytes
    facts = Facts(requested_bytes=2 * GIB, free_bytes=GIB, capacity_bytes=capacity)
    failed = Diagnosed(attempt=1, cause=Cause.GPU_OOM, phase=Phase.BACKWARD, step=steps + 1, facts=facts)

    def rows() -> Iterator[Event]:
        yield Started(attempt=1, knobs=accepted.profile.knobs)
        for step in range(1, steps + 1):
            used = Peak(used_bytes=capacity // 2 + step % 7 * (1 << 20), capacity_bytes=capacity)
            yield Progressed(
                attempt=1, step=step, of=10**7, seconds=90.0 + step % 7, after_s=90.0,
                peaks={Phase.BACKWARD.value: used}, saved=step // 100 * 100 or None,
            )  # fmt: skip
        yield Ended(attempt=1, outcome=Crashed(exit_code=1), step=steps)
        yield failed

    folding = Folding()
    for event in chain((accepted,), rows()):
        folding.take(event)
    folding.run()  # what the driver holds already
    with cProfile.Profile() as profile:
        decide_on(folding)
    return int(pstats.Stats(profile).total_calls)


def line(*, seed: int) -> str:
    """Return what a decision costs after few and after many steps, and the ratio."""
    few, many = (calls(steps, seed=seed) for steps in STEPS)
    return (
        f"decide: {few:,} function calls after {STEPS[0]:,} steps, {many:,} after {STEPS[1]:,}: "
        f"{many / few:.2f} times"
    )
