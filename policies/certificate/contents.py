"""What a certificate holds; certificate.json is this value as JSON, fields are added and never renamed."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Setting
from autotune.policies.values.remedy import Effect
from autotune.policies.values.value import Value

SCHEMA = 1
# Of an update in fp32: sums of thousands of terms in another order differ by a few 1e-7, a change of what is
# trained by far more (1e-3 and above for a learning rate or batch that is 0.1 % off).
UPDATE_LIMIT = 1e-5


class Training(Value, frozen=True, kw_only=True):
    """What is trained, as a framework reads it from a job's settings; None if they do not say."""

    samples_per_step: int | None = None  # answers of one rollout
    global_batch: int | None = None  # samples of one update of the weights
    updates_per_step: int | None = None  # optimizer steps after one rollout
    steps: int | None = None
    epochs: int | None = None
    prompt_tokens: int | None = None  # longest
    response_tokens: int | None = None  # longest
    learning_rate: float | None = None
    seeds: dict[str, int] = {}  # by the framework's own setting
    data_order: str = ""  # in words


class Change(Value, frozen=True, kw_only=True):
    """A knob that differs from the job as written."""

    knob: str
    setting: str  # the framework's own name
    before: Setting
    after: Setting
    effect: Effect


class Overlap(Value, frozen=True, kw_only=True):
    """A step that several attempts trained: its loss in each."""

    step: int
    losses: dict[str, float]  # by attempt


class Losses(Value, frozen=True, kw_only=True):
    """The losses of the steps that attempts have in common, and how far apart they may be."""

    overlapping: tuple[Overlap, ...] = ()
    band: float | None = None  # largest difference; None: too few steps tell how much a loss varies
    pairs: int = 0  # neighbouring steps from which the band was taken


class Replayed(StrEnum):
    """Whether a training step was compared under the settings before and after."""

    AGREED = "agreed"
    DIFFERS = "differs"
    NOT_RUN = "not_run"


class Comparison(Value, frozen=True, kw_only=True):
    """One update of the weights from the same samples, under the settings before and after, in fp32."""

    samples: int
    tokens: int
    loss_error: float  # each relative to the value before
    gradient_error: float
    update_error: float  # of what the optimizer does to the weights
    skipped: str = ""  # why nothing was compared

    @property
    def agrees(self) -> bool:
        """Whether all errors are within UPDATE_LIMIT; NaN is not."""
        return all(
            error <= UPDATE_LIMIT for error in (self.loss_error, self.gradient_error, self.update_error)
        )


class Stability(Value, frozen=True, kw_only=True):
    """What `stable` rests on."""

    by: str  # goal: `goal.steps` consecutive steps; search: its runs; completed: trainings to their end
    steps: int  # that each run had to complete; of completed trainings the fewest that one made
    confirmations: int  # runs with these settings that held


class Certificate(Value, frozen=True, kw_only=True):
    """The claim that a run's stable settings train what the job as written trains."""

    schema: int = SCHEMA
    run: str
    at: str  # UTC, ISO 8601: of the newest event that it rests on
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
