"""A rehearsal: a few steps before a training that test what otherwise fails late."""

from __future__ import annotations

from enum import StrEnum

from autotune.policies.values.value import Value


class Part(StrEnum):
    """The starts of a rehearsal, in their order."""

    WORST = "worst"  # longest sequences, second optimizer step, checkpoint, validation
    RELOAD = "reload"  # goes on from that checkpoint


STEPS = {Part.WORST: 3, Part.RELOAD: 4}  # the last step of each start
SAVED_AT = 2  # the step of the first that saves and, in the same step, validates


class LateEvent(StrEnum):
    """What fails late in a training and early in a rehearsal."""

    LENGTH = "length"  # every answer as long as the job allows
    OPTIMIZER = "optimizer"  # a second optimizer step, whose state is there already
    SAVE = "save"
    VALIDATION = "validation"  # in the same step as a save
    RELOAD = "reload"
    WAKE_UP = "wake_up"  # the engine's, after the checkpoint was loaded and a step trained


class Met(Value, frozen=True, kw_only=True):
    """Whether a rehearsal of a job covers an event."""

    event: LateEvent
    met: bool
    reason: str = ""  # why not, or how far


class Rehearsal(Value, frozen=True, kw_only=True):
    """The rehearsal that a run starts with."""

    forces: bool  # every answer can be made as long as the job allows, and is not so by itself
    reloads: bool  # a checkpoint is written that a second start can go on from
    steps: int  # of the training that follows, for which a failure is likely or not
    only: bool = False  # no training follows
