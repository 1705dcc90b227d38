"""miles: `train.py` with Megatron-LM and SGLang, as of August 2026."""

from __future__ import annotations

from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.launchers.frameworks.miles.rows import TABLE


class Miles(MegatronRl):
    """Flags of miles's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "miles"
    announces_end = False
    modules = ("miles",)
    table = TABLE
    entry = ("{python}", "train.py")  # in miles's own folder
    async_entry = ("{python}", "train_async.py")
