"""Makes the built-in job leak: with this folder in its PYTHONPATH, ranks keep memory at every step for good.

The memory is real and counts against the rank's budget, so that a pass fails if nobody stops the job.
"""

from __future__ import annotations

import sys
import time

_KEPT_BYTES = 8 << 20  # by every step
# How many are kept when a step takes longer than the driver takes to look at the job twice.
_SLOW = (13, 14)
_SLOW_S = 3.0

if "autotune.launchers.builtin" in sys.orig_argv:  # the job's program, which sends the class to its ranks
    import torch
    from ray import cloudpickle

    from autotune.launchers.builtin.trainer import rank

    class Leaking(rank.TrainerRank):
        """A rank that forgets to free something."""

        def optimize(self, step: int) -> rank.Report:
            """Update the weights, and keep some memory."""
            kept = self.__dict__.setdefault("_kept", [])
            kept.append(torch.ones(_KEPT_BYTES, dtype=torch.uint8))
            if len(kept) in _SLOW:
                time.sleep(_SLOW_S)
            return super().optimize(step)

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    rank.TrainerRank = Leaking
