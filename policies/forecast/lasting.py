"""Whether growth that ended no process yet is more than a sawtooth, or a cache that fills."""

from __future__ import annotations

import numpy as np

from autotune.policies.forecast.foresee import WARM_UP
from autotune.policies.forecast.trend import WINDOW
from autotune.policies.values.events import Foreseen
from autotune.policies.values.history import Attempt, Run

SHOWN = 100  # steps of a process, or half of a shorter training, before its growth is acted on
_SEEN = 4 * WINDOW  # latest steps that are looked at
_PARTS = 4  # of them, whose least peaks rise one after the other where memory does not return
_GOES_ON = 0.5  # of the rise from the first part to the second, which the last one still shows


def lasts(run: Run, last: Attempt, ahead: Foreseen) -> bool:
    """Return whether memory that is expected to run out, and never did, grew for so long that it will.

    A sawtooth returns to where it began, and a cache fills ever more slowly: the least peaks of a stretch of
    steps then rise no more, or less than before. A forecast that was withdrawn once may be wrong again. What
    is not acted on costs one failure, and with it the steps since the last checkpoint.
    """
    of = last.progress[-1].of
    if len(last.progress) < (SHOWN if of is None else min(SHOWN, of / 2)):
        return False
    if any(ahead.memory in each.withdrawn for each in run.attempts if each.knobs == last.knobs):
        return False
    recent = last.progress[max(WARM_UP, len(last.progress) - _SEEN) :]
    used = [event.peaks[ahead.memory].used_bytes for event in recent if ahead.memory in event.peaks]
    if len(used) < _PARTS:
        return True  # of a host, whose peaks only the forecast has
    parts = np.array(used[len(used) % _PARTS :], dtype=float).reshape(_PARTS, -1)
    rises = np.diff(parts.min(axis=1))
    return bool(rises.min() > 0 and rises[-1] >= _GOES_ON * rises[0])
