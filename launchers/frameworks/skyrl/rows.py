"""SkyRL 0.4.0: its knobs, refusals and warnings."""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.core import transformer
from autotune.launchers.frameworks.core.engine_settings import SIZED, VLLM
from autotune.launchers.frameworks.core.rehearsals import Rehearsal
from autotune.launchers.frameworks.core.trackers import TrackerRow
from autotune.launchers.frameworks.skyrl.advice import ADVICE
from autotune.launchers.frameworks.skyrl.config import (
    POOL,
    RECOMPUTE,
    RENAMED,
    TRAIN_SIZE,
    TRANSFORMER,
    Config,
)
from autotune.launchers.frameworks.tabular import trainer_rows
from autotune.launchers.frameworks.tabular.engine_rows import handed_on, processed_images, vllm_graphs
from autotune.launchers.frameworks.tabular.table import (
    OFF,
    PASS,
    SAVES_FIRST,
    SWITCH,
    Needs,
    Refusal,
    Row,
    Table,
    Warned,
)
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Tracker
from autotune.policies.values.knobs import KnobName, Knobs
from autotune.policies.values.profile import Grid
from autotune.policies.values.rehearsing import LateEvent

_ENTROPY = "trainer.algorithm.use_entropy_loss averages the entropy over the tokens of each pass: other passes are another loss"
_STATE = "Megatron's checkpoint holds the optimizer's state in this layout"
_OF_MEGATRON = "it is Megatron's"
_OF_FSDP = "it is FSDP's"


def _leaves_a_rest(c: Config) -> bool:
    return c.count(TRAIN_SIZE) < 1 or c.mini_batch % c.count(TRAIN_SIZE) > 0


def _divides_both(c: Config) -> str:
    return f"it divides {c.divided_in_words}"


def _recompute(c: Config, before: Knobs, after: Knobs) -> dict[str, Any]:
    """Return the settings of a mode of recomputation with Megatron; a switch turns all of it off."""
    on = after.recompute != "off"
    fields = transformer.recomputing(before.recompute, after.recompute, transformer.modules(c.field, c.shape))
    own = on and (after.recompute != "full" or c.has(RECOMPUTE))  # SkyRL's own mode is full
    return {
        "trainer.gradient_checkpointing": on,
        **({f"{TRANSFORMER}.{name}": value for name, value in fields.items()} if own else {}),
    }


# fmt: off
ROWS: tuple[Row[Config], ...] = (
    handed_on(VLLM, "memory_fraction", "generator.inference_engine.",
        unless={SIZED.format(key=POOL): lambda c: c.count(POOL)},
        read_at="skyrl/backends/skyrl_train/inference_servers/utils.py:196"),
    handed_on(VLLM, "concurrency", "generator.inference_engine.",
        read_at="skyrl/backends/skyrl_train/inference_servers/utils.py:201"),
    handed_on(VLLM, "max_batched_tokens", "generator.inference_engine.",
        at_least={"vLLM takes at least one token of each of its max_num_seqs requests": lambda c: c.count("generator.inference_engine.max_num_seqs")},
        read_at="skyrl/backends/skyrl_train/inference_servers/utils.py:199"),
    vllm_graphs("generator.inference_engine.enforce_eager",
        "generator.inference_engine.engine_init_kwargs.cudagraph_capture_sizes",
        unless={"SkyRL switches graphs on by itself where adapters are trained": lambda c: c.lora_rank},
        read_at="skyrl/backends/skyrl_train/inference_servers/utils.py:198"),
    handed_on(VLLM, "rollout_tensor_parallel", "generator.inference_engine.",
        divides={"it divides the engines' GPUs": lambda c: c.engine_world},
        read_at="skyrl/backends/skyrl_train/inference_servers/utils.py:191"),
    Row(knob="tokens_per_microbatch", key="trainer.max_tokens_per_microbatch", grid=PASS, when=lambda c: c.packs_by_tokens,
        otherwise="micro-batches are counted in sequences while trainer.max_tokens_per_microbatch is not positive",
        unless={
            _ENTROPY: lambda c: c.flag("trainer.algorithm.use_entropy_loss"),
            "with Megatron trainer.algorithm.use_kl_loss is averaged over passes of unlike sizes: other passes are another loss": lambda c: c.megatron and c.packs_by_tokens and c.flag("trainer.algorithm.use_kl_loss"),
        },
        at_least={"{value} tokens are the longest sequence, and none is split over passes": lambda c: c.longest},
        read_at="skyrl/backends/skyrl_train/workers/worker.py:1055"),
    Row(knob="microbatch_size", key="trainer.micro_train_batch_size_per_gpu", when=lambda c: not c.packs_by_tokens,
        otherwise="trainer.max_tokens_per_microbatch fills micro-batches up to a number of tokens",
        unless={
            "the mini-batch does not divide evenly over the trainer's ranks": lambda c: not c.mini_batch,
            _ENTROPY: lambda c: c.flag("trainer.algorithm.use_entropy_loss"),
        }, divides={_divides_both: lambda c: c.mini_batch},
        read_at="skyrl/backends/skyrl_train/workers/worker.py:1013"),
    Row(knob="recompute", key="trainer.gradient_checkpointing", modes={"off": False, "full": True}, when=lambda c: not c.megatron,
        read_at="skyrl/backends/skyrl_train/workers/fsdp/fsdp_worker.py:90"),
    Row(knob="recompute", key=RECOMPUTE, when=lambda c: c.megatron, read=lambda c: transformer.recompute(c.field, c.shape), write=_recompute,
        unless={"the Megatron of this release computes no layer of a model with state spaces again": lambda c: c.keeps_hybrids},
        read_at="skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py:245"),
    Row(knob="param_offload", key="trainer.policy.fsdp_config.cpu_offload", grid=SWITCH, numeric="the optimizer steps on the CPU, beside the weights",
        unless={"with Megatron colocated weights are offloaded outside their phases by themselves": lambda c: c.megatron},
        read_at="skyrl/backends/skyrl_train/distributed/fsdp_strategy.py:215"),
    Row(knob="optimizer_offload", key="trainer.policy.optimizer_config.offload_after_step", grid=SWITCH,
        phases=(Phase.ROLLOUT_INIT, Phase.ROLLOUT, Phase.WEIGHT_SYNC, Phase.NONE),
        unless={
            "the optimizer's state is offloaded only where trainer and engines share their GPUs": lambda c: not c.colocated,
            "fsdp_config.cpu_offload keeps everything in host memory already": lambda c: c.flag("trainer.policy.fsdp_config.cpu_offload"),
        }, read_at="skyrl/backends/skyrl_train/distributed/fsdp_strategy.py:89"),
    Row(knob="optimizer_offload_fraction",
        key="trainer.policy.megatron_config.optimizer_config_kwargs.optimizer_offload_fraction",
        grid=Grid(values=(0.0, 0.25, 0.5, 0.75, 1.0)), numeric="a part of Adam steps on the CPU", fixed=_STATE,
        unless={_OF_MEGATRON: lambda c: not c.megatron},
        read_at="skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py:913"),
    Row(knob="optimizer_offload_overlap",
        key="trainer.policy.megatron_config.optimizer_config_kwargs.overlap_cpu_optimizer_d2h_h2d", grid=SWITCH, unless={_OF_MEGATRON: lambda c: not c.megatron},
        needs=(Needs(value=True, other="optimizer_offload_fraction", values=(1.0, 0.75, 0.5, 0.25), why="its copies overlap only where a part of the optimizer is on the CPU"),),
        read_at="skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py:913"),
    Row(knob="sequence_parallel", key="trainer.policy.sequence_parallel_size",
        unless={
            "Ulysses is FSDP's: context_parallel": lambda c: c.megatron,
            "Ulysses needs trainer.remove_microbatch_padding": lambda c: not c.flag("trainer.remove_microbatch_padding"),
        }, divides={"it divides the trainer's GPUs": lambda c: c.world},
        read_at="skyrl/backends/skyrl_train/workers/fsdp/fsdp_worker.py:80"),
    Row(knob="sequence_parallel", key="trainer.ref.sequence_parallel_size", when=lambda c: c.reference,
        read_at="skyrl/backends/skyrl_train/workers/fsdp/fsdp_worker.py:345"),
    trainer_rows.shard_group("trainer.policy.fsdp_config.fsdp_size", when=lambda c: not c.megatron, otherwise=_OF_FSDP,
        read_at="skyrl/backends/skyrl_train/distributed/fsdp_strategy.py:114"),
    trainer_rows.resharding("trainer.policy.fsdp_config.reshard_after_forward", when=lambda c: not c.megatron, otherwise=_OF_FSDP,
        read=lambda c: c.get("trainer.policy.fsdp_config.reshard_after_forward") is not False,
        read_at="skyrl/backends/skyrl_train/distributed/fsdp_strategy.py:221"),
    Row(knob="tensor_parallel", key="trainer.policy.megatron_config.tensor_model_parallel_size", fixed=_STATE,
        unless={"FSDP shards parameters; tensor parallelism is Megatron's": lambda c: not c.megatron},
        read_at="skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py:307"),
    Row(knob="tensor_parallel", key="trainer.ref.megatron_config.tensor_model_parallel_size",
        when=lambda c: c.reference,
        read_at="skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py:307"),
    trainer_rows.experts("trainer.policy.megatron_config.expert_model_parallel_size", when=lambda c: c.megatron,
        otherwise=_OF_MEGATRON, fixed=_STATE, stage=lambda c: c.stage, split=lambda c: c.splits_experts,
        also={"trainer.ref.megatron_config.expert_model_parallel_size": lambda c: c.reference},
        read_at="skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py:311"),
    trainer_rows.stages("trainer.policy.megatron_config.pipeline_model_parallel_size", when=lambda c: c.megatron,
        otherwise=_OF_MEGATRON, fixed=_STATE,
        unless={"SkyRL refuses it where layers of multi-token prediction are trained": lambda c: c.count("trainer.policy.megatron_config.mtp_num_layers")},
        also={"trainer.ref.megatron_config.pipeline_model_parallel_size": lambda c: c.reference},
        read_at="skyrl/backends/skyrl_train/workers/megatron/megatron_worker.py:308"),
    Row(knob="context_parallel", key="trainer.policy.megatron_config.context_parallel_size", fixed=_STATE,
        unless={
            "with FSDP Ulysses splits the sequence: sequence_parallel": lambda c: not c.megatron,
            "context parallelism needs trainer.remove_microbatch_padding": lambda c: not c.flag("trainer.remove_microbatch_padding"),
        }, read_at="skyrl/backends/skyrl_train/distributed/megatron/megatron_strategy.py:239"),
    Row(knob="context_parallel", key="trainer.ref.megatron_config.context_parallel_size",
        when=lambda c: c.reference,
        read_at="skyrl/backends/skyrl_train/distributed/megatron/megatron_strategy.py:239"),
    Row(knob="fused_kernels", key="trainer.fused_lm_head_logprob", grid=SWITCH, numeric="a fused kernel rounds otherwise",
        unless={"trainer.fused_lm_head_logprob is Megatron's": lambda c: not c.megatron},
        read_at="skyrl/backends/skyrl_train/workers/megatron/megatron_model_wrapper.py:221"),
    Row(knob="logprob_chunk", key="trainer.logprobs_chunk_size", grid=PASS,
        read_at="skyrl/backends/skyrl_train/workers/fsdp/fsdp_worker.py:86"),
    Row(knob="sync_buffer", key="generator.inference_engine.weight_transfer_threshold_cuda_ipc_GB",
        unit=1 << 30, grid=Grid(minimum=64 << 20, multiple=64 << 20),
        read_at="skyrl/backends/skyrl_train/weight_sync/weight_senders.py:309"),
    Row(knob="allocator", key="trainer.use_expandable_segments", modes={"default": False, "expandable": True},
        read_at="skyrl/backends/skyrl_train/workers/worker.py:324"),
    Row(knob="dataloader_workers", key="data.dataloader.num_workers", grid=Grid(minimum=0, multiple=1),
        fixed="the data loader's saved state is of its number of workers",
        read_at="skyrl/train/utils/trainer_utils.py:911"),
    Row(knob="async_save", key="trainer.policy.megatron_config.async_dist_ckpt_save", when=lambda c: c.megatron,
        otherwise=SAVES_FIRST, grid=OFF,
        read_at="skyrl/backends/skyrl_train/distributed/megatron/megatron_strategy.py:371"),
    processed_images("generator.inference_engine.engine_init_kwargs.",
        read_at="skyrl/backends/skyrl_train/inference_servers/utils.py:282"),
)

ABSENT: dict[KnobName, str] = {
    "max_model_len": "the context is passed by generator.inference_engine.engine_init_kwargs, which is the job's own",
    "dynamic_batching": "trainer.max_tokens_per_microbatch is switch and limit at once",
    "logprob_tokens": "trainer.max_tokens_per_microbatch packs scoring passes too: tokens_per_microbatch",
    "activation_offload": "SkyRL keeps activations on the device or recomputes them",
    "grad_offload": "gradients follow the weights: param_offload moves both",
    "sharding": "the trainer is FSDP2 or Megatron and part of every checkpoint",
    "loss_recompute": "there is no setting for it; the loss is computed in chunks of logprobs_chunk_size",
    "memory_efficient_load": "rank 0 loads on the host and sends each device its part",
    "entropy_chunking": "the entropy is always computed in chunks",
    "sync_mode": "trainer and engines share weights by NCCL or CUDA IPC; the way through files is another installation's",
    "host_allocator": "SkyRL hands its workers no LD_PRELOAD",
    "weights_backup": "it keeps none: sleeping engines drop their weights and get them from the trainer",
    "memory_snapshot": "policy.record_memory writes after a pass that succeeded, so a failing one leaves none",
    "nccl_memory_check": "there is no such check; NCCL_DEBUG in `env:` prints NCCL's own allocations",
    "memory_profile": "torch_profiler_config profiles time, and is refused with colocated FSDP",
}

REFUSED: tuple[Refusal[Config], ...] = (
    Refusal("trainer.strategy", lambda c: c.text("trainer.strategy") not in ("fsdp", "fsdp2", "megatron"),
        lambda c: f"there is no trainer {c.get('trainer.strategy')}", "fsdp or megatron"),
    Refusal("trainer.resume_mode", lambda c: c.get("trainer.resume_mode") == "from_path",
        "an attempt continues the checkpoints of its own run",
        "name the folder of the others in trainer.ckpt_path and write `resume: true`"),
    Refusal("trainer.ckpt_path", lambda c: c.text("trainer.ckpt_path").startswith("~"),
        "SkyRL does not expand `~`", "write the whole path"),
    Refusal("trainer.placement.policy_num_gpus_per_node", lambda c: c.world % c.ranks_per_sequence > 0,
        lambda c: f"{c.world} GPUs cannot be split by {c.ranks_per_sequence}"),
    Refusal("generator.inference_engine.num_engines", lambda c: c.colocated and c.engine_world != c.world,
        lambda c: f"the engines take {c.engine_world} GPUs, the trainer {c.world}",
        "trainer.placement.colocate_all: num_engines x tensor_parallel_size = the trainer's GPUs"),
    Refusal("trainer.micro_train_batch_size_per_gpu",
        lambda c: c.mini_batch and not c.packs_by_tokens and _leaves_a_rest(c),
        lambda c: f"{c.get('trainer.micro_train_batch_size_per_gpu')} does not divide {c.mini_batch}: {c.divided_in_words}"),
)

WARNED: tuple[Warned[Config], ...] = (
    Warned(lambda c: not c.resumes,
        "every relaunch begins at step 0: trainer.resume_mode is from_path or trainer.ckpt_interval not positive; SkyRL's own default is latest, and 10"),
    Warned(lambda c: 0 < c.count("trainer.max_tokens_per_microbatch") < c.longest,
        lambda c: f"trainer.max_tokens_per_microbatch is below the longest sequence of {c.longest} tokens, which is then a pass of its own and needs more memory"),
)
# Where trackers keep the run (skyrl_train/utils/tracking.py). W&B (but for its project) and SwanLab print it themselves.
TRACKERS = (
    TrackerRow(Tracker.MLFLOW, named_in="trainer.logger", place={"experiment": "{trainer.project_name}", "name": "{trainer.run_name}"}),
    TrackerRow(Tracker.TENSORBOARD, named_in="trainer.logger", lines=("Saving tensorboard log to {folder}.",)),
    TrackerRow(Tracker.WANDB, named_in="trainer.logger", place={"project": "{trainer.project_name}"}),
)
REHEARSAL = Rehearsal(
    saves={"trainer.ckpt_interval": 2},
    validates={"trainer.eval_interval": 2},
    validating=("trainer.eval_interval", "data.val_data"),
    left=("trainer.resume_mode",),
    unmet={
        LateEvent.LENGTH: "with several turns, responses keep their natural length",
        LateEvent.SAVE: "trainer.ckpt_interval says that the job writes no checkpoint",
        LateEvent.RELOAD: "trainer.ckpt_interval says that the job writes no checkpoint",
        LateEvent.VALIDATION: "trainer.eval_interval or data.val_data says that the job does not validate",
    },
    remarks={
        LateEvent.LENGTH: "responses only; prompts keep the lengths of the data",
    },
)
# fmt: on

TABLE: Table[Config] = Table(
    rows=ROWS,
    renamed=RENAMED,
    rehearsal=REHEARSAL,
    absent=ABSENT,
    refused=REFUSED,
    warned=WARNED,
    advice=ADVICE,
    scoring={"microbatch_size": "trainer.micro_forward_batch_size_per_gpu"},
    trackers=TRACKERS,
)
