"""Who works where, and who holds device memory in which phase of a job."""

from __future__ import annotations

from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.profile import Placement

Held = tuple[str, ...]  # the components on a card

TRAINER, REF, CRITIC, ROLLOUT = (
    each.value for each in (Component.TRAINER, Component.REF, Component.CRITIC, Component.ROLLOUT)
)
_UPDATE = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT)


def placement(*, shared: bool, ahead: bool) -> Placement:
    """Return whether trainer and engines share their cards; if not, whether engines generate `ahead`."""
    if shared:
        return Placement.COLOCATED
    return Placement.ASYNCHRONOUS if ahead else Placement.SEPARATE


def models(*, reference: bool = False, critic: bool = False) -> Held:
    """Return the trainer with the models that are on its cards."""
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
    """Return the components on a card by phase; of a phase that is left out nothing is known.

    `init` and `log_prob` are as an `update` where they are not given, `rollout_init` is as a `rollout`, and
    `further` phases are as an update.
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
    """Return the same of a trainer and engines that take turns on the same cards.

    `trainer_first`: it is built before the engines start; else they start first and sleep meanwhile.
    """
    own = models(reference=reference, critic=critic)
    training = own if engine_sleeps else (*own, ROLLOUT)
    beside = () if trainer_sleeps else own
    return resident(
        training,
        rollout=(ROLLOUT, *beside),
        rollout_init=(ROLLOUT, *(own if trainer_first else beside)),
        weight_sync=training,  # the engine's weights are back for the sync, its pool only after it
        further=(Phase.COMM, Phase.DATA),
    )
