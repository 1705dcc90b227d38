"""slime: `train.py` with Megatron-LM and SGLang, as of 0.3.1."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from autotune.launchers.base import Advice
from autotune.launchers.frameworks.core.data import rows, table
from autotune.launchers.frameworks.megatron.adapter import MegatronRl, common_advice
from autotune.launchers.frameworks.megatron.flag_names import SGLANG, SGLANG_0_5_15, SLIME, TRAINER
from autotune.launchers.frameworks.megatron.job import Dialect
from autotune.launchers.frameworks.megatron.names import MEGATRON

_DIALECT = Dialect(
    name="slime",
    engine_version="0.5.15.post1",
    names=MEGATRON | TRAINER | SLIME,
    engine_names=SGLANG | SGLANG_0_5_15,
    negatable=frozenset({"offload-train", "offload-rollout"}),
    removed={
        "train-memory-margin-bytes": "removed in August 2026; leave it out",
        "disable-weights-backuper": "removed in May 2026; leave it out",
        "enable-cuda-memory-check": "leave it out: the check is always on, below 3 GiB of free memory",
        "profile-with-memory": "leave it out: --use-pytorch-profiler always records memory",
        "megatron-to-hf-mode": "no longer a flag; leave it out",
        "qkv-format": "no longer a flag; samples are always packed",
        "use-health-check": "a flag of Relax",
        "max-global-restart": "a flag of Relax",
        "rollout-health-check-max-consecutive-failures": "a flag of Relax",
        "rotate-ckpt": "a flag of Relax",
        "recompute-loss-function-use-reentrant": "a flag of Relax",
        "max-staleness": "a flag of Relax",
        "resource": "a flag of Relax; use --actor-num-gpus-per-node and --rollout-num-gpus",
    },
    graph_limit="sglang-cuda-graph-max-bs-decode",
    expandable={"SLIME_ENABLE_EXPANDABLE_SEGMENTS": "1"},
    profile_flags=("use-pytorch-profiler",),
    profile_folder="tensorboard-dir",
    worker_pool="",
    logprob_budget=False,
    memory_margin=False,
    weights_backup=False,
    nccl_check=False,
    disk_sync=True,
    per_token_context=False,
    trainer_first=False,
)


class Slime(MegatronRl):
    """Flags of slime's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "slime"
    saves_by_time = False
    announces_end = False
    dialect = _DIALECT
    entry = ("{python}", "train.py")  # in slime's own folder; train_async.py only where the job says so
    trial_off: Mapping[str, Any] = {"wandb-run-id": None}
    traces: tuple[str, ...] = ("slime/backends/", "slime/ray/", "slime/rollout/", "slime/utils/", "SLIME_")

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What slime's documentation says beyond, or against, the supported knobs."""
        return (*common_advice(), *rows(__package__, "advice.yaml", Advice))

    @cached_property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings that the guide offers as a start, by name."""
        return table(__package__, "presets.yaml", dict[str, Any])
