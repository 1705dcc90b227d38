"""The faults, a module per part of the world that fails."""

from __future__ import annotations

from tests.faults.scenario import Scenario
from tests.faults.scenarios import cards, disk, drivers, job, nodes, signals

EVERY: tuple[Scenario, ...] = (
    *nodes.SCENARIOS,
    *drivers.SCENARIOS,
    *signals.SCENARIOS,
    *disk.SCENARIOS,
    *cards.SCENARIOS,
    *job.SCENARIOS,
)
