"""Detect configurations that need no less of a memory than one that already ran out of it."""

from __future__ import annotations

from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.knob_table import ROWS
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Profile


def repeats(profile: Profile, failed: Knobs, diagnosis: Diagnosis, proposed: Knobs) -> bool:
    """Return whether `proposed` would fail as `failed` did, because no relevant knob needs less memory.

    True for equal knobs. False if any knob needs less of the memory, or changes its use in an unknown way.
    """
    return all(
        row.asks_no_less(diagnosis.cause, getattr(failed, row.name), getattr(proposed, row.name))
        for row in ROWS
        if row.acts(diagnosis.cause, diagnosis.phase, profile.placement)
    )
