"""slime: `train.py` with Megatron-LM and SGLang, as of 0.3.1."""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.megatron.knobs import WRITERS
from autotune.launchers.frameworks.tabular.lines import lines
from autotune.policies.values.knobs import Knobs


def _write_sync_mode(config: Config, _: Knobs, after: Knobs) -> dict[str, Any]:
    if after.sync_mode != "disk":
        return {"update-weight-transport": "nccl"}
    folder = config.text("update-weight-disk-dir") or f"{config.root}/weight-sync"
    return {"update-weight-transport": "disk", "update-weight-disk-dir": folder}


class Slime(MegatronRl):
    """Flags of slime's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "slime"
    saves_by_time = False
    announces_end = False
    modules = ("slime",)
    writers = {**WRITERS, "sync_mode": _write_sync_mode}
    entry = ("{python}", "train.py")  # in slime's own folder; train_async.py only where the job says so
    traces: tuple[str, ...] = lines(__package__).traces
