"""Relax: services on Ray Serve around a Megatron trainer and SGLang."""

from __future__ import annotations

from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.launchers.frameworks.relax.rows import TABLE


class Relax(MegatronRl):
    """Flags of Relax's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "relax"
    announces_end = True
    modules = ("relax",)
    table = TABLE
    entry = ("{python}", "-m", "relax.entrypoints.train")
    # Its health check would restart everything with the failed arguments, up to three times.
    dropped = ("use-health-check", "max-global-restart")
