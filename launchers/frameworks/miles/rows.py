"""miles: the knobs and refusals that it does not share."""

from __future__ import annotations

from autotune.launchers.frameworks.core.renames import Renamed
from autotune.launchers.frameworks.megatron import knobs
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.megatron.rows import NO_SLEEP, SHARED
from autotune.launchers.frameworks.miles.advice import ADVICE
from autotune.launchers.frameworks.tabular.table import (
    SWITCH,
    Needs,
    Reasons,
    Refusal,
    Row,
    Table,
)
from autotune.policies.values.knobs import KnobName
from autotune.policies.values.profile import Grid

_MASTERS = "the weights of a sleeping trainer are rebuilt from fp32 master weights of its own"
_AGAINST = ("keep-old-actor", "indep-dp", "overlap-param-gather", "disable-compute-advantages-and-returns")


def _can_rebuild_weights(config: Config) -> bool:
    """Return whether the optimizer's master weights can stand for the copy (miles/utils/arguments.py)."""
    return (
        (config.flag("optimizer-cpu-offload") or not config.flag("use-precision-aware-optimizer"))
        and config.colocated
        and config.sleeps("train")
        and config.text("optimizer") == "adam"
        and config.text("offload-train-target") == "cpu"
        and not any(map(config.flag, _AGAINST))
        and not any(map(config.count, ("lora-rank", "num-critic-only-steps")))
        and not config.has("lora-adapter-path")
    )


# fmt: off
ROWS: tuple[Row[Config], ...] = (
    Row(knob="cuda_graphs", key="sglang-cuda-graph-max-bs-decode", read=knobs.graphs, write=knobs.write_graphs,
        grid=Grid(values=("full", "limited", "off"))),
    Row(knob="weights_backup", key="rematerialize-param-from-master-weight", states=(True, False),
        grid=Grid(values=(True, False)),
        unless={"--rematerialize-param-from-master-weight asks for a colocated, sleeping trainer with Adam's fp32 master weights": lambda c: not _can_rebuild_weights(c)},
        needs=(Needs(value=False, other="param_offload", values=(True,), why=_MASTERS),)),
    Row(knob="weights_backup", key="rematerialize-param-from-master-weight",
        when=lambda c: c.flag("use-precision-aware-optimizer"), states=(True, False),
        needs=(Needs(value=False, other="optimizer_offload", values=(True,), why=_MASTERS),)),
    Row(knob="memory_margin", key="train-memory-margin-bytes", unless={NO_SLEEP: lambda c: not c.sleeps("train")},
        grid=Grid(minimum=0, maximum=8 << 30, multiple=64 << 20)),
    Row(knob="memory_profile", key="use-pytorch-profiler", grid=SWITCH,
        fills={"tensorboard-dir": lambda c: f"{c.root}/profiles"}),
)

ABSENT: dict[KnobName, str] = {
    "logprob_tokens": "--log-probs-max-tokens-per-gpu is parsed and never read; --max-tokens-per-gpu acts",
    "dataloader_workers": "the rollout feeds the trainer directly, there are no loader processes for --num-workers",
    "sync_mode": "files carry changes only, found with a pinned copy of all weights in host memory: nothing is freed",
    "nccl_memory_check": "there is no such check",
}

REFUSED: tuple[Refusal[Config], ...] = (
    Refusal("rematerialize-param-from-master-weight",
        lambda c: not _can_rebuild_weights(c) and c.flag("rematerialize-param-from-master-weight"),
        "only a colocated, sleeping trainer with Adam's fp32 master weights can rebuild its weights",
        "leave it out"),
    Refusal("advantage-estimator", lambda c: c.saves and c.get("advantage-estimator") == "ppo",
        "miles would start the critic of a relaunch from the actor's checkpoint",
        "`save: null` starts over instead; or drive the script with `framework: command`"),
    Refusal("fully-async",
        lambda c: any(word.endswith("train.py") for word in c.job.command) and c.flag("fully-async"),
        "train.py refuses --fully-async", "run train_async.py"),
    Refusal("fully-async", lambda c: c.flag("fully-async") and c.flag("colocate"),
        "--fully-async and --colocate exclude each other"),
)
# Flags of guides and other versions that it refuses today.
RENAMED = (
    Renamed("disable-weights-backuper", hint="removed in August 2026; --rematerialize-param-from-master-weight goes without the copy"),
    Renamed("enable-cuda-memory-check", hint="a flag of Relax"),
    Renamed("recompute-loss-function-use-reentrant", hint="a flag of Relax"),
    Renamed("profile-with-memory", hint="leave it out: --use-pytorch-profiler always records memory"),
    Renamed("megatron-config-path", hint="a flag of slime"),
    Renamed("release-train", hint="a flag of slime; use --offload-train"),
    Renamed("use-stateless-adam", hint="a flag of slime; use --stream-optimizer-state-to-disk, or leave it out"),
    Renamed("update-weight-transport", hint="a flag of slime; use --update-weight-transfer-mode"),
    Renamed("update-weight-mode", hint="a flag of slime; use --update-weight-transfer-mode"),
    Renamed("update-weight-disk-keep-files", hint="a flag of slime"),
    Renamed("rollout-data-transport", hint="a flag of slime; use --object-store-backend"),
    Renamed("custom-advantage-function-path", hint="a flag of slime"),
    Renamed("rollout-sample-hook-path", hint="a flag of slime"),
    Renamed("only-train-params-name-list", hint="a flag of slime"),
    Renamed("freeze-params-name-list", hint="a flag of slime"),
    Renamed("load-forge-rollout-data", hint="a flag of slime"),
    Renamed("ci-train-rollout-logprob-abs-diff-threshold", hint="a flag of slime"),
    Renamed("use-health-check", hint="a flag of Relax"),
    Renamed("max-staleness", hint="a flag of Relax; use --max-weight-staleness"),
    Renamed("resource", hint="a flag of Relax; use --actor-num-gpus-per-node and --rollout-num-gpus"),
)

UNLESS: dict[KnobName, Reasons[Config]] = {
    "pipeline_parallel": {
        "miles sends adapters to engines on GPUs of their own from one stage": lambda c: c.count("lora-rank") and not c.colocated,
    },
}
# fmt: on

TABLE: Table[Config] = Table(
    rows=ROWS, absent=ABSENT, unless=UNLESS, refused=REFUSED, renamed=RENAMED, advice=ADVICE
).over(SHARED)
