"""miles: `train.py` with Megatron-LM and SGLang, as of August 2026."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.launchers.frameworks.megatron.adapter import MegatronRl


class Miles(MegatronRl):
    """Flags of miles's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "miles"
    saves_by_time = False
    announces_end = False
    modules = ("miles",)
    entry = ("{python}", "train.py")  # in miles's own folder
    async_entry = ("{python}", "train_async.py")
    trial_off: Mapping[str, Any] = {
        "wandb-run-id": None,
        "use-mlflow": False,
        "use-prometheus": False,
        "use-miles-dashboard": False,
        "save-trigger-sentinel": None,
        "save-debug-event-data": None,
        "save-debug-trajectory-data": None,
    }
    traces: tuple[str, ...] = (
        "miles/backends",
        "miles/ray/",
        "miles/rollout/",
        "miles/utils",
        "miles.utils",
        "MILES_",
    )
