"""The least time that a night can take for one who knows from the start what goes wrong."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from benchmarks.nights.night import HOUR_S, LEAKS, STEPS, TRAINER, Kind, Night, host_limit
from benchmarks.simulation.cluster import run
from benchmarks.simulation.columns import columns
from benchmarks.simulation.oracle import configurations
from benchmarks.simulation.speed import step_seconds
from benchmarks.simulation.truth import device_peaks, host_bytes, late_bytes


class Least(NamedTuple):
    """What the oracle makes of a night."""

    seconds: float
    step_s: float
    restarts: int


def oracle(night: Night) -> Least:
    """Return the least seconds of a night, those of a step, and the restarts.

    Of a leak or a checkpoint that is too big: over the grid of settings, each with as few restarts as it
    needs. Of anything else: of the written settings, restarted at once when that helps, with a checkpoint
    after every step. `Kind.SERVICE` has none of its own: what the policy makes of the same night without it.
    """
    world = night.world
    step_s = run(world, world.accepted.profile.knobs).step_s
    whole_s = STEPS * step_s + world.startup_s
    match night.kind:
        case Kind.FRAGMENTATION:  # the allocator, from the start
            return Least(whole_s, step_s, 0)
        case Kind.INTRUDER:
            return Least(whole_s + world.startup_s + HOUR_S, step_s, 1)
        case Kind.PREEMPTIONS:
            lost = int(np.searchsorted(np.cumsum(night.gaps), STEPS))
            return Least(whole_s + lost * (world.startup_s + 0.5 * step_s), step_s, lost)
        case _:
            return _over_grid(night, step_s)


def _over_grid(night: Night, written_s: float) -> Least:
    world = night.world
    capacity, limit = world.accepted.cluster.gpu_memory_bytes, host_limit(world)
    grid = [world.accepted.profile.knobs, *configurations(world)]
    best = Least(math.inf, math.inf, 0)
    for start in range(0, len(grid), 4096):
        c = columns(world, grid[start : start + 4096])
        used = {  # with what an allocator holds beside it, as of the third step in `play`
            phase: long + short + late_bytes(world, c, phase, 3, short=short)
            for phase, (long, short) in device_peaks(world, c).items()
        }
        fits = np.all([size <= capacity for size in used.values()], axis=0)
        host_room = limit - host_bytes(world, c) - (night.more if night.kind is Kind.CHECKPOINT else 0.0)
        room = capacity - np.maximum(*(used[phase] for phase in TRAINER))
        lasts = np.full_like(room, STEPS)
        if night.kind in LEAKS:
            lasts = (room if night.kind is Kind.DEVICE else host_room) / night.grows
        fits &= (host_room >= 0) & (lasts >= 1)
        restarts = np.ceil(STEPS / np.maximum(1, np.floor(lasts))) - 1
        # A job that could be faster as written loses nothing by what goes wrong.
        seconds = np.maximum(step_seconds(world, c), written_s)
        total = np.where(fits, STEPS * seconds + (restarts + 1) * world.startup_s, np.inf)
        place = int(total.argmin())
        best = min(best, Least(float(total[place]), float(seconds[place]), int(restarts[place])))
    return best
