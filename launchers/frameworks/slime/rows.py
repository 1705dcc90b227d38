"""slime 0.3.1: the knobs that only it has, or has under names of its own, and what it refuses."""

from __future__ import annotations

from autotune.launchers.frameworks.megatron import knobs
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.megatron.rows import SHARED
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
# fmt: on

TABLE: Table[Config] = Table(rows=ROWS, absent=ABSENT, refused=REFUSED).over(SHARED)
