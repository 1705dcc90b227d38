"""slime: `train.py` with Megatron-LM and SGLang, as of 0.3.1."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from autotune.launchers.base import Advice
from autotune.launchers.frameworks.core.data import rows, table
from autotune.launchers.frameworks.megatron.adapter import MegatronRl, common_advice
from autotune.launchers.frameworks.megatron.job import Dialect, dialect_of


class Slime(MegatronRl):
    """Flags of slime's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "slime"
    saves_by_time = False
    announces_end = False
    entry = ("{python}", "train.py")  # in slime's own folder; train_async.py only where the job says so
    trial_off: Mapping[str, Any] = {"wandb-run-id": None}
    traces: tuple[str, ...] = ("slime/backends/", "slime/ray/", "slime/rollout/", "slime/utils/", "SLIME_")

    @cached_property
    def dialect(self) -> Dialect:
        """In what it differs from Relax."""
        return dialect_of(__package__, "dialect.yaml")

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What slime's documentation says beyond, or against, the supported knobs."""
        return (*common_advice(), *rows(__package__, "advice.yaml", Advice))

    @cached_property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings that the guide offers as a start, by name."""
        return table(__package__, "presets.yaml", dict[str, Any])
