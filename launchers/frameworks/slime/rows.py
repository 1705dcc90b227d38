"""slime 0.3.1: the knobs that only it has, or has under names of its own, and what it refuses."""

from __future__ import annotations

from autotune.launchers.frameworks.core.renames import Renamed
from autotune.launchers.frameworks.megatron import knobs
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.megatron.rows import SHARED
from autotune.launchers.frameworks.slime.advice import ADVICE
from autotune.launchers.frameworks.tabular.table import (
    SWITCH,
    Refusal,
    Row,
    Table,
)
from autotune.policies.values.knobs import KnobName
from autotune.policies.values.profile import Grid

# fmt: off
ROWS: tuple[Row[Config], ...] = (
    Row(knob="cuda_graphs", key="sglang-cuda-graph-max-bs-decode", read=knobs.graphs, write=knobs.write_graphs,
        grid=Grid(values=("full", "limited", "off"))),
    Row(knob="sync_mode", key="update-weight-transport", modes={"memory": "nccl", "disk": "disk"},
        fills={"update-weight-disk-dir": lambda c: f"{c.root}/weight-sync"}),
    Row(knob="memory_profile", key="use-pytorch-profiler", grid=SWITCH,
        fills={"tensorboard-dir": lambda c: f"{c.root}/profiles"}),
)

ABSENT: dict[KnobName, str] = {
    "logprob_tokens": "--log-probs-max-tokens-per-gpu is parsed and never read; --max-tokens-per-gpu acts",
    "dataloader_workers": "the rollout feeds the trainer directly, there are no loader processes for --num-workers",
    "weights_backup": "--disable-weights-backuper is gone; the copy feeds the weight sync",
    "memory_margin": "--train-memory-margin-bytes is gone",
    "nccl_memory_check": "the check is always on, below 3 GiB of free memory",
}

REFUSED: tuple[Refusal[Config], ...] = (
    Refusal("fully-async", lambda c: c.flag("fully-async") and c.flag("colocate"),
        "--fully-async and --colocate exclude each other"),
)
# Flags of guides and other versions that it ignores today.
RENAMED = (
    Renamed("train-memory-margin-bytes", hint="removed in August 2026; leave it out"),
    Renamed("disable-weights-backuper", hint="removed in May 2026; leave it out"),
    Renamed("enable-cuda-memory-check", hint="leave it out: the check is always on, below 3 GiB of free memory"),
    Renamed("profile-with-memory", hint="leave it out: --use-pytorch-profiler always records memory"),
    Renamed("megatron-to-hf-mode", hint="no longer a flag; leave it out"),
    Renamed("qkv-format", hint="no longer a flag; samples are always packed"),
    Renamed("use-health-check", hint="a flag of Relax"),
    Renamed("max-global-restart", hint="a flag of Relax"),
    Renamed("rollout-health-check-max-consecutive-failures", hint="a flag of Relax"),
    Renamed("rotate-ckpt", hint="a flag of Relax"),
    Renamed("recompute-loss-function-use-reentrant", hint="a flag of Relax"),
    Renamed("max-staleness", hint="a flag of Relax"),
    Renamed("resource", hint="a flag of Relax; use --actor-num-gpus-per-node and --rollout-num-gpus"),
)
# fmt: on

TABLE: Table[Config] = Table(rows=ROWS, absent=ABSENT, refused=REFUSED, renamed=RENAMED, advice=ADVICE).over(
    SHARED
)
