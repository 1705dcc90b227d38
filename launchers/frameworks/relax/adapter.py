"""Relax: services on Ray Serve around a Megatron trainer and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from autotune.launchers.base import Advice
from autotune.launchers.frameworks.core.data import rows, table
from autotune.launchers.frameworks.megatron.adapter import MegatronRl, common_advice
from autotune.launchers.frameworks.megatron.flag_names import RELAX, SGLANG, SGLANG_0_5_9, TRAINER
from autotune.launchers.frameworks.megatron.job import Dialect
from autotune.launchers.frameworks.megatron.names import MEGATRON

_DIALECT = Dialect(
    name="relax",
    engine_version="0.5.9",
    names=MEGATRON | TRAINER | RELAX,
    engine_names=SGLANG | SGLANG_0_5_9,
    negatable=frozenset(
        {
            "offload-train",
            "offload-rollout",
            "normalize-bbox",
            "recompute-loss-function-use-reentrant",
            "sft-chunked-logits",
            "use-metrics-service",
            "use-tensorboard",
        }
    ),
    removed={
        "sglang-cuda-graph-max-bs-decode": "its SGLang 0.5.9 says sglang-cuda-graph-max-bs",
        "update-weight-transport": "a flag of slime; weights go through device memory",
        "update-weight-disk-dir": "a flag of slime; weights go through device memory",
        "release-train": "a flag of slime",
        "balance-by-flops": "a flag of slime; use --balance-data",
        "use-stateless-adam": "a flag of slime",
    },
    graph_limit="sglang-cuda-graph-max-bs",
    expandable={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    profile_flags=("use-pytorch-profiler", "profile-with-memory"),
    profile_folder="",  # traces/<tb-experiment-name>
    worker_pool="mm-processor-pool-size",
    logprob_budget=True,
    memory_margin=True,
    weights_backup=True,
    nccl_check=True,
    disk_sync=False,
    per_token_context=True,
    trainer_first=True,
)


class Relax(MegatronRl):
    """Flags of Relax's own parser, of Megatron's and, behind --sglang-, of SGLang's."""

    name = "relax"
    saves_by_time = False
    announces_end = True
    dialect = _DIALECT
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
    def advice(self) -> tuple[Advice, ...]:
        """What Relax's guide says beyond, or against, the supported knobs."""
        return (*common_advice(), *rows(__package__, "advice.yaml", Advice))

    @cached_property
    def presets(self) -> Mapping[str, Mapping[str, Any]]:
        """Settings that the guide offers as a start, by name."""
        return table(__package__, "presets.yaml", dict[str, Any])
