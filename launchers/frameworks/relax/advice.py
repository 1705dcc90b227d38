"""What Relax's guide to memory failures says, as its code stands."""

from __future__ import annotations

from autotune.launchers.base import Advice
from autotune.launchers.frameworks.core.advice import advice
from autotune.launchers.frameworks.megatron.advice import ANY, IMPOSSIBLE, OBSOLETE, REPLACED, WORKS

ADVICE: tuple[Advice, ...] = (
    advice(
        "recompute",
        "forward",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        WORKS,
        "the three go together; the scoring passes keep no activations and gain nothing",
        effect="most activations",
        cost="training by 20 to 30 %",
    ),
    advice(
        "dynamic_batching",
        "forward",
        "--use-dynamic-batch-size --max-tokens-per-gpu 8192",
        WORKS,
        "the tokens of a micro-batch are bounded, except by one longer sequence",
        constraint="--max-tokens-per-gpu x context parallelism >= --rollout-max-context-len, else it is "
        "refused; not with --qkv-format bshd",
        effect="activations and logits",
        cost="nothing; it is often faster",
    ),
    advice(
        "reduce_tokens_per_mb",
        "log_prob",
        "--log-probs-max-tokens-per-gpu 8192",
        REPLACED,
        "with --colocate and --hybrid only the passes of reference and teacher read it; the actor's own "
        "scoring uses the micro-batches of training",
        instead="--max-tokens-per-gpu; its own budget with --fully-async or where the job sets it",
        effect="activations and logits of scoring",
        cost="a few per cent",
    ),
    advice(
        "loss_recompute",
        "backward",
        "--recompute-loss-function",
        WORKS,
        "the fp32 intermediates of the logits are not kept for backward",
        effect="logits kept between forward and backward",
        cost="one more pass of the loss",
    ),
    advice(
        "reduce_sync_buffer",
        "weight_sync",
        "--update-weight-buffer-size 268435456",
        WORKS,
        "up to two buckets live at once; one tensor above the limit still goes whole",
        effect="buckets of the sync",
        cost="more round trips",
    ),
    advice(
        "drop_weights_backup",
        "weight_sync",
        "--disable-weights-backuper",
        IMPOSSIBLE,
        "it frees host memory and none of the card; it is no means of recovery but the source of model "
        "switching and sync",
        instead="--update-weight-buffer-size",
    ),
    advice(
        "drop_weights_backup",
        "none",
        "--disable-weights-backuper, for host memory",
        WORKS,
        "the pinned copies of the weights go",
        constraint="no reference (--use-kl-loss, --kl-coef), teacher or --keep-old-actor",
        effect="one pinned copy of the weights per model, in host memory",
    ),
    advice(
        "adjust_memory_margin",
        "comm",
        "--train-memory-margin-bytes, larger",
        WORKS,
        "not against fragmentation: allocations of the trainer that would leave less than this free are "
        "refused, so that NCCL finds it",
        constraint="only with --offload-train",
        effect="memory for NCCL and other libraries; taken from the trainer's tensors",
    ),
    advice(
        "adjust_memory_margin",
        "backward",
        "--train-memory-margin-bytes 536870912",
        WORKS,
        "smaller, it leaves more to the trainer's tensors and less to NCCL",
        constraint="only with --offload-train",
        effect="the difference, for the trainer's tensors",
    ),
    advice(
        "capture_snapshot",
        "comm",
        "--enable-cuda-memory-check",
        WORKS,
        "a diagnosis: below 5 GiB of free memory the cache is emptied before every NCCL call",
        cost="about 20 % of training",
    ),
    advice(
        "capture_snapshot",
        ANY,
        "--profile-target train_overall --profile-with-memory --profile-step-start 2 --profile-step-end 4",
        REPLACED,
        "the profiler does not start by itself",
        instead="--use-pytorch-profiler --profile-with-memory; train_log_probs is a profiler target, not a "
        "function that a traceback shows",
        cost="the profiled steps; large files",
    ),
    advice(
        "capture_snapshot",
        ANY,
        "--use-tensorboard --tb-project-name DIR",
        OBSOLETE,
        "TensorBoard is on by default",
    ),
    advice(
        "disk_weight_sync",
        "weight_sync",
        "weights through files",
        IMPOSSIBLE,
        "there is no such transport",
        instead="--update-weight-buffer-size",
    ),
    advice(
        "sequence_parallel",
        "backward",
        "--context-parallel-size",
        WORKS,
        "before a run has a checkpoint",
        constraint="asserts --calculate-per-token-loss, which changes the loss: only where the job has it",
        effect="activations and logits of a sequence",
        cost="communication in every layer",
    ),
    advice(
        "restart",
        ANY,
        "--use-health-check --max-global-restart 3",
        IMPOSSIBLE,
        "it starts everything again with the arguments that just failed, so the same failure returns up to "
        "three times; it is left out",
        instead="the relaunch with a remedy, from the last checkpoint",
    ),
    advice(
        "reduce host data",
        "data",
        "--max-staleness, --num-data-storage-units",
        IMPOSSIBLE,
        "staleness decides which samples are trained on; the units only spread the same data over actors",
    ),
    advice(
        "reduce_workers",
        "data",
        "--mm-processor-pool-size",
        WORKS,
        "processes that prepare images and video; 0 uses threads",
        effect="host memory, in proportion",
        cost="preparing data, where it is the bottleneck",
    ),
    advice(
        "chunked logits",
        "forward",
        "--sft-chunked-logits",
        OBSOLETE,
        "for supervised fine-tuning only",
        instead="--log-probs-chunk-size",
    ),
)
