"""Relax: services on Ray Serve around a Megatron trainer and SGLang."""

from __future__ import annotations

from collections.abc import Callable

from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.megatron.knobs import READERS, WHEN
from autotune.policies.values.profile import Placement

_BUDGET, _LOADERS = "log-probs-max-tokens-per-gpu", "mm-processor-pool-size"
_OTHERS = ("keep-old-actor", "opd-teacher-load", "ref-update-interval")  # weights beside the actor's


# The predicates that Relax's own rows name.
OWN_WHEN: dict[str, Callable[[Config], bool]] = {
    "scores_within_the_training_budget": lambda config: (
        config.placement is not Placement.ASYNCHRONOUS and not (config.reference and config.has(_BUDGET))
    ),
    "has_no_loader": lambda config: config.count(_LOADERS) == 0,
    "needs_the_backup": lambda config: config.reference or any(map(config.flag, _OTHERS)),
    "keeps_sequences_whole": lambda config: config.context == 1,
    "budget_is_below_the_context": lambda config: (
        config.dynamic and 0 < config.budget * config.context < config.count("rollout-max-context-len")
    ),
}


class Relax(MegatronRl):
    """Flags of Relax's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "relax"
    announces_end = True
    modules = ("relax",)
    when = {**WHEN, **OWN_WHEN}
    readers = {
        **READERS,
        "scoring_budget": lambda config: (
            (config.count(_BUDGET) or config.budget or None) if config.dynamic else None
        ),
        "loaders": lambda config: config.count(_LOADERS) or None,
        "profiles": lambda config: config.flag("use-pytorch-profiler") and config.flag("profile-with-memory"),
    }
    entry = ("{python}", "-m", "relax.entrypoints.train")
    # Its health check starts everything again with the arguments that failed, up to three times.
    dropped = ("use-health-check", "max-global-restart")
