"""A rehearsal: a few steps before the training that provoke failures which otherwise happen late."""

from __future__ import annotations

from enum import StrEnum

from autotune.policies.values.value import Value


class Part(StrEnum):
    """The starts of a rehearsal, in their order."""

    WORST = "worst"  # longest sequences, second optimizer step, checkpoint, validation
    RELOAD = "reload"  # continues from that checkpoint


STEPS = {Part.WORST: 3, Part.RELOAD: 4}  # the last step of each start
SAVED_AT = 2  # the step of `WORST` that saves and validates


class LateEvent(StrEnum):
    """What fails late in a training and early in a rehearsal."""

    LENGTH = "length"  # every response as long as the job allows
    OPTIMIZER = "optimizer"  # a second optimizer step, when the optimizer state already exists
    SAVE = "save"
    VALIDATION = "validation"  # in the same step as a save
    RELOAD = "reload"
    WAKE_UP = "wake_up"  # of the engine, after the checkpoint was loaded and a step trained


class Met(Value, frozen=True, kw_only=True):
    """Whether a rehearsal of a job covers an event."""

    event: LateEvent
    met: bool  # the rehearsal provokes the event
    reason: str = ""  # why not, or to what extent


class Rehearsal(Value, frozen=True, kw_only=True):
    """The rehearsal that a run starts with."""

    forces: bool  # responses can be forced to the job's longest length, and do not have it anyway
    reloads: bool  # the first start writes a checkpoint from which a second can resume
    steps: int  # of the training that follows, over which the chance of a failure is computed
    only: bool = False  # no training follows
