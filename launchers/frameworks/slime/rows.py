"""slime 0.3.1: the knobs and refusals that it does not share."""

from __future__ import annotations

from autotune.launchers.frameworks.core.renames import Renamed
from autotune.launchers.frameworks.megatron import knobs
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.megatron.rows import SHARED
from autotune.launchers.frameworks.slime.advice import ADVICE
from autotune.launchers.frameworks.tabular.table import (
    SWITCH,
    Reason,
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
        unless={"the disk carries differences of weights only": Reason(until={"slime": "0.3.1"})},
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
_CRITIC = "no longer a flag; the file of --megatron-config-path may say it of the critic"
_CRITIC_GPUS = "no longer a flag: the critic takes the GPUs of the actor"
# Flags of guides and other versions that it ignores today. The releases are those of its tags.
RENAMED = (
    Renamed("train-memory-margin-bytes", since="0.3.1", hint="removed in 0.3.1; leave it out"),
    Renamed("disable-weights-backuper", since="0.3.0", hint="removed in 0.3.0; leave it out"),
    Renamed("enable-cuda-memory-check", hint="leave it out: the check is always on, below 3 GiB of free memory"),
    Renamed("profile-with-memory", hint="leave it out: --use-pytorch-profiler always records memory"),
    Renamed("megatron-to-hf-mode", since="0.3.1", hint="no longer a flag; leave it out"),
    Renamed("qkv-format", since="0.3.1", hint="no longer a flag; samples are always packed"),
    Renamed("update-weight-delta-dir", "update-weight-disk-dir", since="0.3.1", hint="write --update-weight-disk-dir"),
    Renamed("update-weight-encoding", "update-weight-delta-encoding", since="0.3.1", hint="write --update-weight-delta-encoding"),
    Renamed("use-slime-router", since="0.3.1", hint="no longer a flag; leave it out"),
    Renamed("critic-num-nodes", since="0.3.0", hint=_CRITIC_GPUS),
    Renamed("critic-num-gpus-per-node", since="0.3.0", hint=_CRITIC_GPUS),
    Renamed("critic-lr", since="0.3.0", hint=_CRITIC),
    Renamed("critic-lr-warmup-iters", since="0.3.0", hint=_CRITIC),
    Renamed("critic-load", since="0.3.0", hint=_CRITIC),
    Renamed("critic-save", since="0.3.0", hint=_CRITIC),
    Renamed("use-dynamic-global-batch-size", since="0.3.0", hint="no longer a flag; leave it out"),
    Renamed("use-http2", since="0.2.0", hint="no longer a flag; leave it out"),
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
