"""SGLang's platform class for an engine without a GPU; imported by SGLang alone."""

import os
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuBudgetPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
    """Runs every operator in plain torch, within the budget of the actor.

    SGLang's own CPU platform needs kernels that are not on PyPI; one from out of tree takes its native path.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_default_attention_backend(self) -> str:
        """Return the attention that needs no kernels."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Return the suffix of the forward methods that operators take."""
        return "native"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Return the budget, or the machine's memory where there is none."""
        budget = os.environ.get("AUTOTUNE_ENGINE_BUDGET_BYTES")
        return int(budget) if budget else int(super().get_device_total_memory(device_id))

    def get_device(self, device_id: int = 0) -> Any:
        """Return the one CPU device."""
        return torch.device("cpu")
