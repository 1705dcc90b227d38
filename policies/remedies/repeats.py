"""Whether a configuration asks for no less of a memory than one that already failed on it."""

from __future__ import annotations

from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.knob_table import ROWS
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Profile


def repeats(profile: Profile, failed: Knobs, diagnosis: Diagnosis, proposed: Knobs) -> bool:
    """Return whether `proposed` would fail as `failed` did, because nothing that matters asks for less.

    True also for the same knobs again. False as soon as one knob asks for less of the memory, or moves
    it in a way that is not known.
    """
    return all(
        row.asks_no_less(diagnosis.cause, getattr(failed, row.name), getattr(proposed, row.name))
        for row in ROWS
        if row.acts(diagnosis.cause, diagnosis.phase, profile.placement)
    )
