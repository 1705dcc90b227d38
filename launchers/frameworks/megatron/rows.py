"""What slime, Relax and miles share: the flags behind their knobs, what they refuse and what their users should know.

What only one of them has stands in its own rows.py, whose rows come first. tests/contracts/reads holds the lines that read
the flags. What counts where a flag is absent stands in
defaults.yaml.
"""

from __future__ import annotations

from autotune.launchers.frameworks.core import transformer
from autotune.launchers.frameworks.core.engine_settings import SGLANG
from autotune.launchers.frameworks.core.rehearsals import Rehearsal
from autotune.launchers.frameworks.core.trackers import TrackerRow
from autotune.launchers.frameworks.megatron import knobs
from autotune.launchers.frameworks.megatron.advice import ADVICE
from autotune.launchers.frameworks.megatron.config import Config
from autotune.launchers.frameworks.megatron.layout import pipeline_chunks
from autotune.launchers.frameworks.tabular import trainer_rows
from autotune.launchers.frameworks.tabular.table import (
    OFF,
    PASS,
    SWITCH,
    Needs,
    Refusal,
    Row,
    Table,
    Warned,
)
from autotune.policies.values.job import Tracker
from autotune.policies.values.knobs import KnobName
from autotune.policies.values.profile import Grid
from autotune.policies.values.rehearsing import LateEvent

_NO_ENGINES = ("debug-train-only", "load-debug-rollout-data", "rollout-external-engine-addrs")
_STATE = "the checkpoint holds the optimizer's state in another layout"
NO_SLEEP = "the margin belongs to torch_memory_saver, which only --offload-train uses"
_SIZES = "the checkpoint is sharded by the parallel sizes"
_ADAM = "Megatron offloads the state of Adam only"
_HEADS = "{value} attention heads are split evenly"
_STAGE = "{value} GPUs of a stage are split evenly"


def _gpus(c: Config) -> str:
    return f"tensor x context parallelism divides the {c.trainer_gpus} GPUs of the trainer"


def budget_holds(c: Config) -> str:
    """Return why a budget of tokens has a least size."""
    return f"budget x context parallelism ({c.context}) must hold the {c.longest_in_words}: a longer one fills a micro-batch of its own"


# fmt: off
ROWS: tuple[Row[Config], ...] = (
    Row(knob="concurrency", key="sglang-max-running-requests", read=knobs.requests, write=knobs.write_requests,
        grid=Grid(minimum=1),
        at_most={"no engine is given more requests of a rollout": lambda c: c.most_requests}),
    Row(knob="memory_fraction", key="sglang-mem-fraction-static", read=knobs.fraction, grid=SGLANG["memory_fraction"].grid),
    Row(knob="rollout_tensor_parallel", key="rollout-num-gpus-per-engine", read=lambda c: c.engine_size,
        divides={
            _HEADS: lambda c: c.heads,
            "{value} GPUs of all engines are split evenly": lambda c: c.engine_gpus,
        }),
    Row(knob="max_batched_tokens", key="sglang-chunked-prefill-size", read=knobs.chunk,
        grid=Grid(minimum=256, multiple=256)),
    Row(knob="tokens_per_microbatch", key="max-tokens-per-gpu",
        read=lambda c: (c.budget or None) if c.dynamic else None, write=knobs.write_tokens, grid=PASS,
        unless={"--max-tokens-per-gpu acts only with --use-dynamic-batch-size": lambda c: not c.flag("use-dynamic-batch-size")},
        at_least={budget_holds: lambda c: c.longest_per_gpu}),
    Row(knob="microbatch_size", key="micro-batch-size",
        read=lambda c: None if c.dynamic else c.count("micro-batch-size"), grid=Grid(minimum=1),
        unless={"--use-dynamic-batch-size packs by tokens and ignores --micro-batch-size": lambda c: c.flag("use-dynamic-batch-size")},
        divides={"{value} samples of a rank are split evenly": lambda c: c.samples_of_rank}),
    Row(knob="dynamic_batching", key="use-dynamic-batch-size", write=knobs.write_packing, grid=SWITCH,
        unless={"--qkv-format bshd forbids --use-dynamic-batch-size": lambda c: c.get("qkv-format") == "bshd"}),
    Row(knob="recompute", key="recompute-granularity", read=knobs.recompute, write=knobs.write_recompute,
        grid=Grid(values=("off", "selective", "full"))),
    Row(knob="activation_offload", key="fine-grained-activation-offloading", since={"slime": "0.3.1"}, default=False,
        write=knobs.write_activations, grid=SWITCH,
        unless={
            "Megatron asks for NVTE_CPU_OFFLOAD_V1=1 where its arguments are read: write it into `env:`": lambda c: str(c.job.env.get(transformer.OFFLOAD_VARIABLE)) != "1",
            "Megatron refuses it together with --cpu-offloading-num-layers": lambda c: c.count("cpu-offloading-num-layers"),
        },
        needs=(Needs(value=True, other="recompute", values=("off", "selective", "modules"), why=transformer.NOTHING_KEPT),)),
    Row(knob="param_offload", key="offload-train", since={"slime": "0.2.0"}, read=lambda c: c.sleeps("train"), grid=SWITCH,
        unless={
            "apart, nobody else could use the trainer's cards meanwhile": lambda c: not c.flag("colocate"),
            "with a critic the trainer always sleeps": lambda c: c.get("advantage-estimator") == "ppo",
        }),
    Row(knob="engine_sleep", key="offload-rollout", since={"slime": "0.2.0"}, when=lambda c: c.flag("colocate"),
        otherwise="the engines have GPUs of their own", read=lambda c: c.sleeps("rollout"), grid=SWITCH),
    Row(knob="optimizer_offload", key="optimizer-cpu-offload", grid=SWITCH, numeric="Adam steps on the CPU", fixed=_STATE,
        unless={_ADAM: lambda c: not c.trains_by_adam},
        writes={
            True: {"optimizer-cpu-offload": True, "use-precision-aware-optimizer": True},
            False: {"optimizer-cpu-offload": False, "overlap-cpu-optimizer-d2h-h2d": False},
        }),
    Row(knob="optimizer_offload_fraction", key="optimizer-offload-fraction",
        grid=Grid(minimum=0.1, maximum=1.0, multiple=0.1), numeric="a part of Adam steps on the CPU", fixed=_STATE,
        unless={_ADAM: lambda c: not c.trains_by_adam}),
    Row(knob="optimizer_offload_overlap", key="overlap-cpu-optimizer-d2h-h2d", grid=SWITCH,
        unless={_ADAM: lambda c: not c.trains_by_adam},
        needs=(Needs(value=True, other="optimizer_offload", values=(True,), why="only an offloaded optimizer has copies to overlap"),)),
    Row(knob="context_parallel", key="context-parallel-size", read=lambda c: c.context, fixed=_SIZES,
        divides={_STAGE: lambda c: c.context_devices}, divides_with_tensor={_gpus: lambda c: c.stage}),
    Row(knob="tensor_parallel", key="tensor-model-parallel-size", read=lambda c: c.tensor,
        write=knobs.write_tensor, fixed=_SIZES,
        divides={
            _HEADS: lambda c: c.heads,
            "{value} key-value heads are split evenly": lambda c: c.kv_heads,
            _STAGE: lambda c: c.tensor_devices,
        }),
    trainer_rows.experts("expert-model-parallel-size", read=lambda c: c.expert, fixed=_SIZES, stage=lambda c: c.stage,
        split=lambda c: c.count("expert-tensor-parallel-size")),
    trainer_rows.stages("pipeline-model-parallel-size", read=lambda c: c.pipeline, fixed=_SIZES, chunks=pipeline_chunks),
    Row(knob="loss_recompute", key="recompute-loss-function", since={"slime": "0.2.1"}, grid=SWITCH),
    Row(knob="logprob_chunk", key="log-probs-chunk-size", since={"slime": "0.2.2"},
        read=lambda c: max(0, c.count("log-probs-chunk-size")) or None, grid=PASS),
    Row(knob="sync_buffer", key="update-weight-buffer-size", grid=Grid(minimum=16 << 20, multiple=1 << 20),
        at_most={"a larger bucket frees nothing": lambda c: c.sync_buffer}),
    Row(knob="host_allocator", key="train-env-vars", since={"slime": "0.2.0"},
        read=knobs.host_allocator,
        write=knobs.write_preload, grid=Grid(values=("default", "jemalloc", "tcmalloc")),
        unless={"the sleeping trainer's own LD_PRELOAD (torch_memory_saver) replaces any other": lambda c: c.sleeps("train")}),
    Row(knob="allocator", key="train-env-vars", since={"slime": "0.2.0"}, read=knobs.allocator, write=knobs.write_allocator,
        grid=Grid(values=("default", "expandable")),
        unless={"expandable segments pass by torch_memory_saver, so the trainer would not sleep": lambda c: c.sleeps("train")}),
    Row(knob="async_save", key="async-save", grid=OFF),
    Row(knob="memory_snapshot", key="record-memory-history", grid=SWITCH,
        fills={"memory-snapshot-dir": lambda c: f"{c.root}/memory-snapshots"}),
    Row(knob="sync_mode", always="memory"),
    Row(knob="weights_backup", always=True),
)

ABSENT: dict[KnobName, str] = {
    "max_model_len": "--sglang-context-length sizes no memory, and lengths are the user's",
    "grad_offload": "gradients move with the whole trainer: --offload-train",
    "sequence_parallel": "--sequence-parallel is a switch that goes with --tensor-model-parallel-size",
    "sharding": "the trainer is Megatron with its distributed optimizer, which is always on",
    "fused_kernels": "--cross-entropy-loss-fusion serves fine-tuning only, not the policy loss",
    "entropy_chunking": "--log-probs-chunk-size cuts the entropy as well",
    "entropy_recompute": "--recompute-loss-function covers the entropy as well",
    "memory_efficient_load": "every rank builds and loads its own part of the model",
}

REFUSED: tuple[Refusal[Config], ...] = (
    Refusal("recompute-granularity",
        lambda c: not (c.has("recompute-method") and c.has("recompute-num-layers")) and c.get("recompute-granularity") == "full",
        "full recomputation needs --recompute-method and --recompute-num-layers", "uniform and 1 keep least"),
    Refusal("recompute-method",
        lambda c: c.has("recompute-method") and c.get("recompute-granularity") == "selective",
        "selective recomputation must not have --recompute-method", "leave it out"),
    Refusal("optimizer-cpu-offload",
        lambda c: c.flag("optimizer-cpu-offload") and not c.flag("use-precision-aware-optimizer"),
        "Megatron asserts that --optimizer-cpu-offload comes with --use-precision-aware-optimizer",
        "add use-precision-aware-optimizer: true"),
    Refusal("overlap-cpu-optimizer-d2h-h2d",
        lambda c: c.flag("overlap-cpu-optimizer-d2h-h2d") and not c.flag("optimizer-cpu-offload"),
        "it overlaps nothing without --optimizer-cpu-offload"),
    Refusal("use-dynamic-batch-size", lambda c: c.dynamic and not c.budget,
        "dynamic batching needs --max-tokens-per-gpu"),
    Refusal("qkv-format", lambda c: c.flag("use-dynamic-batch-size") and c.get("qkv-format") == "bshd",
        "--qkv-format bshd forbids --use-dynamic-batch-size"),
    Refusal("tensor-model-parallel-size", lambda c: c.trainer_gpus % c.ranks_per_sequence != 0,
        lambda c: f"tensor x pipeline x context parallelism = {c.ranks_per_sequence} does not divide {c.trainer_gpus} GPUs"),
    Refusal("tensor-model-parallel-size", lambda c: c.heads % c.tensor != 0,
        lambda c: f"tensor parallelism {c.tensor} does not divide {c.heads} attention heads"),
    Refusal("tensor-model-parallel-size", lambda c: c.kv_heads % c.tensor != 0,
        lambda c: f"tensor parallelism {c.tensor} does not divide {c.kv_heads} key-value heads"),
    Refusal("rollout-num-gpus-per-engine", lambda c: c.engine_gpus % c.engine_size != 0,
        lambda c: f"engines of {c.engine_size} GPUs do not fill {c.engine_gpus} GPUs"),
    Refusal("rollout-num-gpus", lambda c: not c.engine_gpus and not any(map(c.flag, _NO_ENGINES)),
        "no GPUs are left for the engines",
        "share the trainer's cards with --colocate, or give the engines --rollout-num-gpus"),
    Refusal("resource", lambda c: c.has("resource") and c.wanted > (c.offered or c.wanted),
        lambda c: f"the job wants {c.wanted} GPUs, `cluster` has {c.offered}"),
    Refusal("actor-num-gpus-per-node",
        lambda c: c.wanted > (c.offered or c.wanted) and not c.has("resource"),
        lambda c: f"the job wants {c.wanted} GPUs, `cluster` has {c.offered}"),
    Refusal("num-rollout", lambda c: not c.has("num-rollout") and not c.has("num-epoch"),
        "neither --num-rollout nor --num-epoch says how long to train"),
    Refusal("kl-coef", lambda c: c.share("kl-coef") and c.share("kl-loss-coef"),
        "only one of --kl-coef and --kl-loss-coef can be set"),
    Refusal("update-weight-transport",
        lambda c: c.get("update-weight-transport") == "disk" and not c.has("update-weight-disk-dir"),
        "disk transport needs --update-weight-disk-dir"),
    Refusal("memory-recorder",
        lambda c: c.get("memory-recorder") == "memray" and not c.has("memory-snapshot-num-steps"),
        "memray needs --memory-snapshot-num-steps"),
    Refusal("update-weight-transfer-mode",
        lambda c: c.text("update-weight-transfer-mode") != "broadcast" and c.flag("colocate"),
        "colocated weights need no transfer: --colocate refuses it"),
    Refusal("colocate", lambda c: c.runs("train_async") and c.flag("colocate"),
        "train_async.py refuses --colocate"),
)

WARNED: tuple[Warned[Config], ...] = (
    Warned(lambda c: not c.saves, "`save` is null: without checkpoints every relaunch begins at step 0"),
    Warned(lambda c: c.saves and not c.continues,
        lambda c: f"checkpoints go to {c.root}/{c.job.name}-<run>; `resume: true` uses --save itself"),
    Warned(lambda c: c.starts_over,
        "--load is read as start weights, from step 0; `resume: true` continues it"),
    Warned(lambda c: c.starts_over and c.get("megatron-to-hf-mode") == "bridge",
        "until a checkpoint is saved, a relaunch takes its start weights from --hf-checkpoint"),
    Warned(lambda c: c.starts_over and c.reference and c.text("megatron-to-hf-mode") != "bridge",
        "until a checkpoint is saved, a relaunch takes its start weights from --ref-load"),
    Warned(lambda c: c.saves and c.flag("async-save"),
        "--async-save finishes a checkpoint at the next one: a crash loses the newest"),
    Warned(lambda c: c.saves and c.flag("no-save-optim"),
        "--no-save-optim: a relaunch begins with a new optimizer state"),
    Warned(lambda c: c.flag("balance-by-flops"),
        "--balance-by-flops may put more tokens into a micro-batch than --max-tokens-per-gpu"),
    Warned(lambda c: not c.sleeps("rollout") and c.flag("colocate"),
        "--no-offload-rollout leaves the engine's pool on the card while training runs"),
    Warned(lambda c: not c.longest,
        "--rollout-max-context-len or --rollout-max-prompt-len and --rollout-max-response-len would bound the longest sequence; without them a token budget may fall below it"),
)
# Where trackers keep the run (utils/tensorboard_utils.py, miles's utils/mlflow_utils.py). W&B (but for its project)
# and SwanLab print it themselves.
TRACKERS = (
    TrackerRow(Tracker.TENSORBOARD, lines=("Saving tensorboard log to {folder}.",)),
    TrackerRow(Tracker.MLFLOW, on="use-mlflow", place={"uri": "{mlflow-tracking-uri}", "id": "{mlflow-run-id}", "experiment": "{mlflow-experiment-name}", "name": "{mlflow-run-name}"}),
    TrackerRow(Tracker.WANDB, on="use-wandb", place={"entity": "{wandb-team}", "project": "{wandb-project}"}),
)
# The folder of its checkpoints is the adapter's to say.
REHEARSAL = Rehearsal(
    saves={"save-interval": 2},
    validates={"eval-interval": 2},
    validating=("eval-interval",),
    left_validating=("eval-function-path", "eval-num-gpus", "eval-num-gpus-per-engine", "eval-hf-dir"),
    unmet={
        LateEvent.LENGTH: "no flag makes the engine generate past the end of a response, so responses keep their natural length",
        LateEvent.SAVE: "--save is null, so the job writes no checkpoint",
        LateEvent.RELOAD: "--save is null, so the job writes no checkpoint",
        LateEvent.VALIDATION: "without --eval-interval the job does not validate",
    },
)
# fmt: on

SHARED: Table[Config] = Table(
    rows=ROWS,
    rehearsal=REHEARSAL,
    absent=ABSENT,
    refused=REFUSED,
    warned=WARNED,
    advice=ADVICE,
    trackers=TRACKERS,
)
