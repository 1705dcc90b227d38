"""OpenRLHF 0.11.2: its knobs, refusals and warnings.

The loss is normalized over all micro-batches, so that their sizes are exact.
"""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.core.engine_settings import VLLM
from autotune.launchers.frameworks.core.rehearsals import Rehearsal
from autotune.launchers.frameworks.core.trackers import TrackerRow
from autotune.launchers.frameworks.openrlhf.advice import ADVICE
from autotune.launchers.frameworks.openrlhf.config import SCORE_SIZE, TRAIN_SIZE, Config
from autotune.launchers.frameworks.openrlhf.renamed import RENAMED
from autotune.launchers.frameworks.tabular.engine_rows import handed_on
from autotune.launchers.frameworks.tabular.table import (
    PASS,
    SWITCH,
    Needs,
    Refusal,
    Row,
    Table,
    Warned,
)
from autotune.policies.values.job import Tracker
from autotune.policies.values.knobs import KnobName, Knobs
from autotune.policies.values.profile import Grid, Placement
from autotune.policies.values.rehearsing import LateEvent

_EXPERTS = "--actor.aux_loss_coef adds a loss of each micro-batch for itself, so another size is another loss"
_SHARDED = "the checkpoint is sharded over the ranks"
_HEADS = "{value} attention heads are split evenly"


def _whole(c: Config) -> str:
    return f"budget x ring x tensor parallelism ({c.ranks_per_sequence}) must hold the longest sequence {c.longest}"


def _write_engine_size(config: Config, before: Knobs, after: Knobs) -> dict[str, Any]:
    """Return the flags of engines of another size on the same GPUs."""
    size = after.rollout_tensor_parallel or 1
    return {"vllm.tensor_parallel_size": size, "vllm.num_engines": max(1, config.engine_gpus // size)}


def _write_microbatch_size(config: Config, before: Knobs, after: Knobs) -> dict[str, Any]:
    """Return micro-batch sizes; the log-prob size is reduced in proportion but never raised."""
    size, scored = after.microbatch_size or 1, config.count(SCORE_SIZE)
    along = max(1, scored * size // max(1, config.count(TRAIN_SIZE)))
    return {TRAIN_SIZE: size, SCORE_SIZE: min(scored, along)}


# fmt: off
ROWS: tuple[Row[Config], ...] = (
    handed_on(VLLM, "memory_fraction", "vllm.",
        grid=Grid(minimum=0.1, maximum=0.98, multiple=0.01), read_at="openrlhf/cli/train_ppo_ray.py:76"),
    handed_on(VLLM, "rollout_tensor_parallel", "vllm.", write=_write_engine_size,
        divides={
            _HEADS: lambda c: c.heads,
            "{value} GPUs of all engines are split evenly": lambda c: c.engine_gpus,
        }, read_at="openrlhf/trainer/ray/ppo_actor.py:124"),
    handed_on(VLLM, "cuda_graphs", "vllm.", read_at="openrlhf/cli/train_ppo_ray.py:73"),
    Row(knob="engine_sleep", key="vllm.enable_sleep", when=lambda c: c.colocated,
        otherwise="--vllm.enable_sleep acts only with --train.colocate_all", read=lambda c: c.sleeps, grid=SWITCH,
        read_at="openrlhf/trainer/ppo_trainer.py:311"),
    Row(knob="tokens_per_microbatch", key="train.max_tokens_per_gpu",
        read=lambda c: c.count("train.max_tokens_per_gpu") if c.dynamic else None, grid=PASS,
        unless={
            "--train.max_tokens_per_gpu acts only with --train.dynamic_batch_enable": lambda c: not c.dynamic,
            _EXPERTS: lambda c: c.share("actor.aux_loss_coef") > 0,
        }, at_least={_whole: lambda c: c.longest_per_gpu}, read_at="openrlhf/trainer/ppo_utils/replay_buffer.py:123"),
    Row(knob="microbatch_size", key=TRAIN_SIZE,
        read=lambda c: None if c.dynamic else c.count(TRAIN_SIZE), write=_write_microbatch_size,
        grid=Grid(minimum=1),
        unless={
            "--train.dynamic_batch_enable packs by tokens and ignores --train.micro_batch_size": lambda c: c.dynamic,
            _EXPERTS: lambda c: c.share("actor.aux_loss_coef") > 0,
        }, divides={"{value} samples of a rank are split evenly": lambda c: c.update_of_a_rank},
        read_at="openrlhf/trainer/ray/ppo_actor.py:591"),
    Row(knob="dynamic_batching", key="train.dynamic_batch_enable",
        stays="--train.dynamic_batch_enable orders the samples otherwise, which is the user's choice",
        read_at="openrlhf/trainer/ray/ppo_actor.py:155"),
    Row(knob="recompute", key="actor.gradient_checkpointing_enable", modes={"off": False, "full": True},
        read_at="openrlhf/trainer/ray/ppo_actor.py:549"),
    Row(knob="grad_offload", key="ds.enable_sleep", grid=SWITCH,
        unless={
            "apart, nobody else could use the trainer's cards meanwhile": lambda c: not c.colocated,
            "with --ds.adam_offload there is nothing left to move": lambda c: c.flag("ds.adam_offload"),
        },
        needs=(Needs(value=True, other="optimizer_offload", values=(False,), why="an optimizer on the host leaves nothing to move"),),
        read_at="openrlhf/trainer/ray/ppo_actor.py:581"),
    Row(knob="optimizer_offload", key="ds.adam_offload", grid=SWITCH, numeric="Adam steps on the CPU",
        fixed="the checkpoint holds the other optimizer's state",
        unless={"the CPU's optimizer is Adam": lambda c: c.text("actor.optim") != "adam"},
        read_at="openrlhf/utils/deepspeed/deepspeed.py:66"),
    Row(knob="context_parallel", key="ds.ring_attn_size", fixed=_SHARDED,
        unless={"--ds.ring_attn_size above 1 needs the package ring-flash-attn and packed samples, which is the user's choice": lambda c: c.ring == 1},
        divides_with_tensor={"ring x tensor parallelism divides the {value} GPUs of the trainer": lambda c: c.actors},
        read_at="openrlhf/utils/deepspeed/deepspeed.py:73"),
    Row(knob="tensor_parallel", key="ds.tensor_parallel_size", fixed=_SHARDED,
        unless={"DeepSpeed's tensor parallelism does not go with ZeRO-3": lambda c: c.get("ds.zero_stage") == 3},
        divides={_HEADS: lambda c: c.heads}, read_at="openrlhf/utils/deepspeed/deepspeed.py:72"),
    Row(knob="fused_kernels", key="ds.use_liger_kernel", grid=SWITCH, numeric="a fused kernel rounds otherwise",
        read_at="openrlhf/trainer/ray/ppo_actor.py:526"),
    Row(knob="logprob_tokens", key="rollout.max_tokens_per_gpu",
        read=lambda c: c.count("rollout.max_tokens_per_gpu") if c.dynamic else None, grid=PASS,
        unless={"--rollout.max_tokens_per_gpu acts only with --train.dynamic_batch_enable": lambda c: not c.dynamic},
        at_least={_whole: lambda c: c.longest_per_gpu}, read_at="openrlhf/trainer/ppo_utils/experience_maker.py:59"),
    Row(knob="dataloader_workers", key="data.dataloader_num_workers", grid=Grid(minimum=0),
        unless={"prompts are read in the trainer's own process, there are no loader processes": lambda c: c.count("data.dataloader_num_workers") == 0},
        read_at="openrlhf/trainer/ppo_trainer.py:48"),
)

ABSENT: dict[KnobName, str] = {
    "concurrency": "no flag reaches vLLM's max_num_seqs",
    "max_batched_tokens": "no flag reaches vLLM's max_num_batched_tokens",
    "max_model_len": "the engine's length is --data.max_len, which is the user's",
    "param_offload": "weights stay on the card: --ds.enable_sleep moves gradients and optimizer, --ref.offload the reference",
    "optimizer_offload_fraction": "the optimizer's state moves whole",
    "optimizer_offload_overlap": "DeepSpeed overlaps its copies by itself",
    "sequence_parallel": "ring attention splits a sequence: --ds.ring_attn_size",
    "sharding": "ZeRO's stages write different checkpoints; --ds.zero_stage 3 is the user's choice",
    "memory_efficient_load": "ZeRO-3 loads every rank's part by itself, the other stages load on the host",
    "logprob_chunk": "log-probabilities are taken from the logits of a whole micro-batch",
    "sync_mode": "weights reach the engines through device memory only",
    "sync_buffer": "weights are sent one tensor at a time",
    "host_allocator": "Ray's workers inherit the cluster's environment, not the job's",
    "weights_backup": "the sleeping engine's weights lie on the host, there is no other copy",
    "allocator": "Ray's workers inherit the cluster's environment, not the job's",
}

REFUSED: tuple[Refusal[Config], ...] = (
    Refusal("vllm.num_engines", lambda c: not c.engine_gpus, "without --vllm.num_engines nothing generates"),
    Refusal("vllm.num_engines", lambda c: c.colocated and c.engine_gpus not in (0, c.actors),
        lambda c: f"{c.actors} GPUs of the actor and {c.engine_gpus} of the engines: --train.colocate_all wants as many"),
    Refusal("vllm.enable_sleep",
        lambda c: c.placement is Placement.ASYNCHRONOUS and c.flag("vllm.enable_sleep"),
        "--train.async_enable refuses it: the engines never pause", "leave it out"),
    Refusal("ds.ring_attn_size", lambda c: c.actors % c.ranks_per_sequence > 0,
        lambda c: f"ring x tensor parallelism does not divide {c.actors} GPUs"),
    Refusal(SCORE_SIZE, lambda c: c.batch // max(1, c.count(SCORE_SIZE)) < c.data_parallel,
        "fewer scoring batches than ranks of the actor", "lower it"),
    Refusal("train.partial_rollout_enable",
        lambda c: c.flag("train.partial_rollout_enable") and c.placement is not Placement.ASYNCHRONOUS,
        "it needs --train.async_enable"),
)

WARNED: tuple[Warned[Config], ...] = (
    Warned(lambda c: not c.resumes, "without DeepSpeed's checkpoints every relaunch begins at step 0"),
    Warned(lambda c: c.resumes and not c.continues_its_folder,
        lambda c: f"checkpoints go to {c.root}/{c.job.name}-<run>; `resume: true` uses --ckpt.path itself"),
    Warned(lambda c: c.resumes,
        "a crash inside the very first save leaves `_actor` without its file `latest`: relaunches then end in KeyError 'episode' until you remove that folder"),
    Warned(lambda c: c.colocated and not c.sleeps,
        "without --vllm.enable_sleep the engine's pool stays on the card while training runs"),
    Warned(lambda c: c.colocated and c.has("reward.model_name_or_path"),
        "no estimate holds the reward model on the cards; --reward.offload keeps it on the host"),
)
# Where trackers keep the run (openrlhf/utils/logging_utils.py). W&B prints it itself. Without a name the folder of the
# run is named by the time.
TRACKERS = (
    TrackerRow(Tracker.TENSORBOARD, on="logger.tensorboard_dir", place={"folder": "{logger.tensorboard_dir}/*"}),
)
REHEARSAL = Rehearsal(
    saves={"ckpt.path": "{folder}/checkpoints", "ckpt.save_steps": 2},
    validates={"eval.steps": 2},
    validating=("eval.dataset", "eval.steps"),
    left_validating=("eval.dataset",),
    unmet={
        LateEvent.LENGTH: "no flag makes vLLM generate past the end of a response, so responses keep their natural length",
        LateEvent.SAVE: "ckpt.path is null or ckpt.disable_ds is on, so the job writes no checkpoint to continue from",
        LateEvent.RELOAD: "ckpt.path is null or ckpt.disable_ds is on, so the job writes no checkpoint to continue from",
        LateEvent.VALIDATION: "eval.dataset and eval.steps do not say that the job validates",
    },
)
# fmt: on

TABLE: Table[Config] = Table(
    rows=ROWS,
    rehearsal=REHEARSAL,
    absent=ABSENT,
    refused=REFUSED,
    warned=WARNED,
    renamed=RENAMED,
    advice=ADVICE,
    scoring={"microbatch_size": "rollout.micro_batch_size"},
    trackers=TRACKERS,
)
