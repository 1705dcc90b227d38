"""Relax: the knobs and refusals that it does not share."""

from __future__ import annotations

from autotune.launchers.frameworks.core.renames import Renamed
from autotune.launchers.frameworks.megatron import knobs
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.megatron.rows import NO_SLEEP, SHARED, budget_holds
from autotune.launchers.frameworks.relax.advice import ADVICE
from autotune.launchers.frameworks.tabular.table import (
    PASS,
    SWITCH,
    Reasons,
    Refusal,
    Row,
    Table,
)
from autotune.policies.values.knobs import KnobName
from autotune.policies.values.profile import Grid, Placement

_BUDGET, _LOADERS = "log-probs-max-tokens-per-gpu", "mm-processor-pool-size"
_OTHERS = ("keep-old-actor", "opd-teacher-load", "ref-update-interval")  # weights beside the actor's


def _switches_weights(c: Config) -> bool:
    return c.reference or any(map(c.flag, _OTHERS))


# fmt: off
ROWS: tuple[Row[Config], ...] = (
    Row(knob="cuda_graphs", key="sglang-cuda-graph-max-bs", read=knobs.graphs, write=knobs.write_graphs,
        grid=Grid(values=("full", "limited", "off"))),
    Row(knob="logprob_tokens", key="log-probs-max-tokens-per-gpu",
        read=lambda c: (c.count(_BUDGET) or c.budget or None) if c.dynamic else None, grid=PASS,
        unless={
            "it acts only with --use-dynamic-batch-size": lambda c: not c.flag("use-dynamic-batch-size"),
            "here only the reference's pass reads it, and it follows --max-tokens-per-gpu, which bounds both": lambda c: c.placement is not Placement.ASYNCHRONOUS and not (c.reference and c.has(_BUDGET)),
        }, at_least={budget_holds: lambda c: c.longest_per_gpu}),
    Row(knob="weights_backup", key="disable-weights-backuper", states=(True, False),
        grid=Grid(values=(True, False)),
        unless={"the weights of another model are switched in from this copy": lambda c: _switches_weights(c)}),
    Row(knob="memory_margin", key="train-memory-margin-bytes", unless={NO_SLEEP: lambda c: not c.sleeps("train")},
        grid=Grid(minimum=0, maximum=8 << 30, multiple=64 << 20)),
    Row(knob="dataloader_workers", key="mm-processor-pool-size", read=lambda c: c.count(_LOADERS) or None,
        grid=Grid(minimum=0),
        unless={"the rollout feeds the trainer directly, there are no loader processes": lambda c: c.count(_LOADERS) == 0}),
    Row(knob="nccl_memory_check", key="enable-cuda-memory-check", grid=SWITCH),
    Row(knob="memory_profile", key="use-pytorch-profiler",
        read=lambda c: c.flag("use-pytorch-profiler") and c.flag("profile-with-memory"), grid=SWITCH,
        writes={
            True: {"use-pytorch-profiler": True, "profile-with-memory": True},
            False: {"use-pytorch-profiler": False, "profile-with-memory": False},
        }),
)

ABSENT: dict[KnobName, str] = {
    "sync_mode": "weights reach the engine through device memory only",
}

UNLESS: dict[KnobName, Reasons[Config]] = {  # of knobs whose rows are shared
    "context_parallel": {
        "it asks for --calculate-per-token-loss, another normalisation of the loss, which is the user's": lambda c: c.context == 1 and not c.flag("calculate-per-token-loss"),
    },
}

REFUSED: tuple[Refusal[Config], ...] = (
    Refusal("disable-weights-backuper",
        lambda c: _switches_weights(c) and c.flag("disable-weights-backuper"),
        "without its copy the weights of another model cannot be switched in", "leave the backuper on"),
    Refusal("max-tokens-per-gpu",
        lambda c: c.dynamic and 0 < c.budget * c.context < c.count("rollout-max-context-len"),
        lambda c: f"--max-tokens-per-gpu {c.budget} x context parallelism {c.context} is below --rollout-max-context-len {c.longest}, which Relax refuses",
        lambda c: f"at least {c.longest_per_gpu}"),
    Refusal("context-parallel-size", lambda c: c.context != 1 and not c.flag("calculate-per-token-loss"),
        "context parallelism asks for --calculate-per-token-loss"),
    Refusal("advantage-estimator", lambda c: c.get("advantage-estimator") == "ppo",
        "Relax no longer trains a critic: `ppo` is refused"),
    Refusal("fully-async", lambda c: c.flag("fully-async") and c.flag("colocate"),
        "--fully-async and --colocate exclude each other", "--hybrid is the mix"),
)
# Flags of guides and other versions that it ignores today.
RENAMED = (
    Renamed("sglang-cuda-graph-max-bs-decode", hint="its SGLang 0.5.9 says sglang-cuda-graph-max-bs"),
    Renamed("update-weight-transport", hint="a flag of slime; weights go through device memory"),
    Renamed("update-weight-disk-dir", hint="a flag of slime; weights go through device memory"),
    Renamed("release-train", hint="a flag of slime"),
    Renamed("balance-by-flops", hint="a flag of slime; use --balance-data"),
    Renamed("use-stateless-adam", hint="a flag of slime"),
)
# fmt: on

TABLE: Table[Config] = Table(
    rows=ROWS, absent=ABSENT, unless=UNLESS, refused=REFUSED, renamed=RENAMED, advice=ADVICE
).over(SHARED)
