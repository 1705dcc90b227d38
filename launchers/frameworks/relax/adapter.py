"""Relax: services on Ray Serve around a Megatron trainer and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from autotune.launchers.base import Advice
from autotune.launchers.frameworks.core.data import rows, table
from autotune.launchers.frameworks.megatron.adapter import MegatronRl, common_advice
from autotune.launchers.frameworks.megatron.job import Dialect, dialect_of


class Relax(MegatronRl):
    """Flags of Relax's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "relax"
    saves_by_time = False
    announces_end = True
    entry = ("{python}", "-m", "relax.entrypoints.train")
    # Its health check starts everything again with the arguments that failed, up to three times.
    dropped = ("use-health-check", "max-global-restart")
    trial_off: Mapping[str, Any] = {"rotate-ckpt": False, "timeline-dump-dir": None}
    traces: tuple[str, ...] = (
        "relax/backends/",
        "relax/components/",
        "relax/core/",
        "relax/distributed/",
        "relax.entrypoints",
        "relax/utils/",
        "Actor training failed at step ",
    )

    @cached_property
    def dialect(self) -> Dialect:
        """In what it differs from slime."""
        return dialect_of(__package__, "dialect.yaml")

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What Relax's guide says beyond, or against, the supported knobs."""
        return (*common_advice(), *rows(__package__, "advice.yaml", Advice))

    @cached_property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings that the guide offers as a start, by name."""
        return table(__package__, "presets.yaml", dict[str, Any])
