"""slime: `train.py` with Megatron-LM and SGLang, as of 0.3.1."""

from __future__ import annotations

from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.launchers.frameworks.slime.rows import TABLE


class Slime(MegatronRl):
    """Flags of slime's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "slime"
    announces_end = False
    modules = ("slime",)
    table = TABLE
    elder = ("0.1.0", "0.2.0", "0.2.1", "0.2.4", "0.3.0")
    entry = ("{python}", "train.py")  # in slime's own folder; train_async.py only where the job says so
