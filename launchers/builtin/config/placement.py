"""What the settings mean on the cards that a cluster has."""

from autotune.launchers.builtin.config.settings import Settings, not_colocated


def colocated(settings: Settings, *, cards: int) -> bool:
    """Return whether trainer and engine take turns on one card.

    By default they do where there is one card and one of each, without a budget that would divide it.
    """
    if settings.placement != "auto":
        return settings.placement == "colocated"
    budgets = (*settings.trainer_budget, settings.engine_budget)
    return cards == 1 and not any(budgets) and not not_colocated(settings)


def half_precision(settings: Settings, *, on_gpu: bool) -> bool:
    """Return whether the trainer's passes are in bf16; weights, gradients and moments are fp32 always."""
    return settings.dtype == "bfloat16" or (settings.dtype == "auto" and on_gpu)
