"""miles: `train.py` with Megatron-LM and SGLang, as of August 2026."""

from __future__ import annotations

from collections.abc import Callable

from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.megatron.knobs import WHEN

_AGAINST = ("keep-old-actor", "indep-dp", "overlap-param-gather", "disable-compute-advantages-and-returns")


def _can_rebuild_weights(config: Config) -> bool:
    """Return whether the optimizer's master weights can stand for the copy (miles/utils/arguments.py)."""
    return (
        (config.flag("optimizer-cpu-offload") or not config.flag("use-precision-aware-optimizer"))
        and config.colocated
        and config.sleeps("train")
        and config.text("optimizer") == "adam"
        and config.text("offload-train-target") == "cpu"
        and not any(map(config.flag, _AGAINST))
        and not any(map(config.count, ("lora-rank", "num-critic-only-steps")))
        and not config.has("lora-adapter-path")
    )


# The predicates that miles's own rows name.
OWN_WHEN: dict[str, Callable[[Config], bool]] = {
    "can_rebuild_weights": _can_rebuild_weights,
    "runs_train": lambda config: any(word.endswith("train.py") for word in config.job.command),
}


class Miles(MegatronRl):
    """Flags of miles's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "miles"
    announces_end = False
    modules = ("miles",)
    when = {**WHEN, **OWN_WHEN}
    entry = ("{python}", "train.py")  # in miles's own folder
    async_entry = ("{python}", "train_async.py")
