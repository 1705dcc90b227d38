"""Lines that autotune writes into run.log about failures that the job itself does not report."""

from __future__ import annotations

from autotune.policies.diagnosis.rules.rule import ALWAYS, Rule
from autotune.policies.values.failure import Cause

_PREFIX = "autotune: "


def restarted(*, step: int, saved: int) -> str:
    """Return the line about an attempt that began at `step` although a checkpoint of step `saved` existed."""
    return f"{_PREFIX}restarted at step {step} although a checkpoint of step {saved} existed"


def stalled(reason: str) -> str:
    """Return the line about an attempt that hangs."""
    return f"{_PREFIX}the attempt hangs: {reason}"


OWN: tuple[Rule, ...] = (
    Rule(
        "autotune-restarted",
        Cause.CONFIG,
        r"autotune: restarted at step \d+ although a checkpoint of step \d+ existed",
        ALWAYS,
        restarted(step=1, saved=20),
    ),
    Rule(
        "autotune-hang",
        Cause.HANG,
        r"autotune: the attempt hangs: ",
        ALWAYS,
        stalled("no training step for 3600 s"),
        weak=True,
    ),
)
