"""Placement of trainer and engines, and which components hold GPU memory in which phase."""

from __future__ import annotations

from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.profile import Placement

Held = tuple[str, ...]  # components that hold memory of a GPU

TRAINER, REF, CRITIC, ROLLOUT = (
    each.value for each in (Component.TRAINER, Component.REF, Component.CRITIC, Component.ROLLOUT)
)
_UPDATE = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT)


def placement(*, shared: bool, ahead: bool) -> Placement:
    """Return whether trainer and engines share GPUs; if not, whether the engines generate `ahead`."""
    if shared:
        return Placement.COLOCATED
    return Placement.ASYNCHRONOUS if ahead else Placement.SEPARATE


def models(*, reference: bool = False, critic: bool = False) -> Held:
    """Return the trainer and the models on its GPUs."""
    return (TRAINER, *((REF,) if reference else ()), *((CRITIC,) if critic else ()))


def resident(
    update: Held,
    *,
    rollout: Held,
    weight_sync: Held,
    init: Held | None = None,
    log_prob: Held | None = None,
    rollout_init: Held | None = None,
    further: tuple[Phase, ...] = (),
) -> dict[str, Held]:
    """Return the components that hold GPU memory, by phase; nothing is known of a phase that is left out.

    `init` and `log_prob` default to `update`, `rollout_init` to `rollout`; `further` phases equal `update`.
    """
    result = {
        **dict.fromkeys((*_UPDATE, *further), update),
        Phase.INIT: update if init is None else init,
        Phase.LOG_PROB: update if log_prob is None else log_prob,
        Phase.WEIGHT_SYNC: weight_sync,
        Phase.ROLLOUT: rollout,
        Phase.ROLLOUT_INIT: rollout if rollout_init is None else rollout_init,
    }
    return {phase.value: held for phase, held in result.items()}


def taking_turns(
    *, reference: bool, critic: bool, engine_sleeps: bool, trainer_sleeps: bool, trainer_first: bool
) -> dict[str, Held]:
    """Return the same for a trainer and engines that take turns on shared GPUs.

    `trainer_first`: the trainer is built before the engines start; otherwise they start first and sleep.
    """
    own = models(reference=reference, critic=critic)
    training = own if engine_sleeps else (*own, ROLLOUT)
    beside = () if trainer_sleeps else own
    return resident(
        training,
        rollout=(ROLLOUT, *beside),
        rollout_init=(ROLLOUT, *(own if trainer_first else beside)),
        weight_sync=training,  # the engine restores its weights for the sync, its KV pool only afterwards
        further=(Phase.COMM, Phase.DATA),
    )
