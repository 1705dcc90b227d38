"""Who holds device memory in which phase of a job whose trainer and engines take turns on the same cards."""

from __future__ import annotations

from autotune.policies.values.failure import Phase

_TRAINING = (
    Phase.INIT,
    Phase.LOG_PROB,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.OPTIMIZER,
    Phase.COMM,
    Phase.CHECKPOINT,
    Phase.DATA,
)


def colocated(
    *, reference: bool, critic: bool, engine_sleeps: bool, trainer_sleeps: bool, trainer_first: bool
) -> dict[str, tuple[str, ...]]:
    """Return the components on the cards by phase.

    `trainer_first`: it is built before the engines start; else they start first and sleep meanwhile.
    """
    models = ("trainer", *(("ref",) if reference else ()), *(("critic",) if critic else ()))
    engine = () if engine_sleeps else ("rollout",)
    beside = () if trainer_sleeps else models
    resident: dict[str, tuple[str, ...]] = dict.fromkeys(
        (phase.value for phase in _TRAINING), models + engine
    )
    # The engine's weights are back for the sync, its pool only after it.
    resident[Phase.WEIGHT_SYNC.value] = models + engine
    resident[Phase.ROLLOUT.value] = ("rollout", *beside)
    resident[Phase.ROLLOUT_INIT.value] = ("rollout", *(models if trainer_first else beside))
    return resident
