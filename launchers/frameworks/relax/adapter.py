"""Relax: services on Ray Serve around a Megatron trainer and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.launchers.frameworks.megatron.adapter import MegatronRl


class Relax(MegatronRl):
    """Flags of Relax's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "relax"
    saves_by_time = False
    announces_end = True
    modules = ("relax",)
    entry = ("{python}", "-m", "relax.entrypoints.train")
    # Its health check starts everything again with the arguments that failed, up to three times.
    dropped = ("use-health-check", "max-global-restart")
    trial_off: Mapping[str, Any] = {
        "use-clearml": False,
        "notify-urls": None,
        "rotate-ckpt": False,
        "timeline-dump-dir": None,
    }
    traces: tuple[str, ...] = (
        "relax/backends/",
        "relax/components/",
        "relax/core/",
        "relax/distributed/",
        "relax.entrypoints",
        "relax/utils/",
        "Actor training failed at step ",
    )
