"""The contents of a certificate; certificate.json is this value as JSON: fields are added, never renamed."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Setting
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value

SCHEMA = 1
# Relative error of an update in fp32: sums of thousands of terms in another order differ by a few 1e-7, a
# change of what is trained by far more (1e-3 and above for a learning rate or batch that is 0.1 % off).
UPDATE_LIMIT = 1e-5


class Training(Value, frozen=True, kw_only=True):
    """What is trained, as a framework reads it from a job's settings; None if they do not say."""

    samples_per_step: int | None = None  # responses per rollout
    global_batch: int | None = None  # samples per optimizer step
    updates_per_step: int | None = None  # optimizer steps per rollout
    steps: int | None = None  # of the whole training
    epochs: int | None = None  # passes over the data
    prompt_tokens: int | None = None  # maximum
    response_tokens: int | None = None  # maximum
    learning_rate: float | None = None  # of the trained policy, as the settings give it
    seeds: dict[str, int] = {}  # by the framework's setting
    data_order: str = ""  # in words


class Change(Value, frozen=True, kw_only=True):
    """A knob that differs from the job as written."""

    knob: str  # name of the knob
    setting: str  # the framework's own name
    before: Setting  # value in the job as written; None: the framework's default
    after: Setting  # value in the stable settings; None: the framework's default
    effect: Effect


class Overlap(Value, frozen=True, kw_only=True):
    """A step that several attempts trained, with its loss in each."""

    step: int
    losses: dict[str, float]  # by the attempt's number


class Losses(Value, frozen=True, kw_only=True):
    """The losses of steps that several attempts trained, and how much they may differ."""

    overlapping: tuple[Overlap, ...] = ()
    band: float | None = None  # maximum difference; None: too few steps to estimate how much a loss varies
    pairs: int = 0  # pairs of neighbouring steps from which the band was computed
    stable: tuple[str, ...] | None = None  # the attempts with the stable settings; None: not recorded


class Replayed(StrEnum):
    """Whether a training step was compared under the settings before and after."""

    AGREED = "agreed"
    DIFFERS = "differs"
    NOT_RUN = "not_run"


class Comparison(Value, frozen=True, kw_only=True):
    """One update of the weights from the same samples, under the settings before and after, in fp32."""

    samples: int
    tokens: int
    loss_error: float  # each error is relative to the value before the changes
    gradient_error: float
    update_error: float  # of the optimizer's update of the weights
    skipped: str = ""  # why nothing was compared

    @property
    def agrees(self) -> bool:
        """Whether all errors are at most UPDATE_LIMIT; False for NaN."""
        return all(
            error <= UPDATE_LIMIT for error in (self.loss_error, self.gradient_error, self.update_error)
        )


class Stability(Value, frozen=True, kw_only=True):
    """What `stable` rests on."""

    by: str  # goal: `goal.steps` consecutive steps; search: its trials; completed: trainings; probe: no run
    steps: int  # steps that each run had to complete; of completed trainings the fewest of any
    confirmations: int  # successful runs with these settings


class Certificate(Value, frozen=True, kw_only=True):
    """The claim that a run's stable settings train what the job as written trains."""

    schema: int = SCHEMA
    run: str
    at: str  # UTC, ISO 8601: time of the newest event
    job: Job  # as written, secrets masked; its settings are `before`
    cluster: Cluster
    training: Training
    before: dict[str, Any]  # the framework's own settings
    after: dict[str, Any]
    changes: tuple[Change, ...]
    losses: Losses
    replayed: Replayed
    replay: str  # what was compared, or why nothing was
    stable: Stability
    versions: dict[str, str] = {}
