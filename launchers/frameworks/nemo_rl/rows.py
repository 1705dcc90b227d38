"""NeMo-RL 0.7.0: its knobs, refusals and warnings.

Losses are sums over the tokens or sequences of the whole global batch (algorithms/loss/loss_functions.py), so that
micro-batch sizes are exact.
"""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.core import transformer
from autotune.launchers.frameworks.core.engine_settings import SGLANG, SIZED, VLLM
from autotune.launchers.frameworks.core.rehearsals import Rehearsal
from autotune.launchers.frameworks.core.trackers import TrackerRow
from autotune.launchers.frameworks.nemo_rl import config as key
from autotune.launchers.frameworks.nemo_rl.advice import ADVICE
from autotune.launchers.frameworks.nemo_rl.config import POOL, Config
from autotune.launchers.frameworks.tabular import trainer_rows
from autotune.launchers.frameworks.tabular.engine_rows import handed_on, processed_images, vllm_graphs
from autotune.launchers.frameworks.tabular.table import (
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

_STAYS = "NeMo-RL's plans, paddings and conversions of weights are made for the job's parallel sizes"
_LAYOUT = "Megatron's checkpoint holds the optimizer's state in this layout"
_EXPERTS = "moe_router_load_balancing_type balances the experts of each pass: other passes are another loss"
_ALLOCATORS = {"default": "", "expandable": "expandable_segments:True"}
_ALLOCATOR = "the job names a PYTORCH_CUDA_ALLOC_CONF of its own"
_WHOLE = "a pass holds whole sequences, and {value} tokens are the longest"


def _leaves_a_rest(c: Config) -> bool:
    return c.count(key.TRAIN_SIZE) < 1 or c.mini_batch % c.count(key.TRAIN_SIZE) > 0


def _has_one_trainer(c: Config) -> bool:
    return c.flag(f"{key.DTENSOR}.enabled") != c.megatron


def _recompute(c: Config, before: Knobs, after: Knobs) -> dict[str, Any]:
    """Return the settings of a mode of recomputation with Megatron; full recomputation is NeMo-RL's default."""
    fields = transformer.recomputing(before.recompute, after.recompute, transformer.modules(c.field, c.shape))
    chosen = {
        name: fields[name] for name in ("recompute_granularity", "recompute_modules") if fields.get(name)
    }
    if fields["recompute_granularity"] == "full" and not c.has(f"{key.MEGATRON}.recompute_granularity"):
        chosen = {}
    on = after.recompute != "off"
    return {
        f"{key.MEGATRON}.{name}": value for name, value in {"activation_checkpointing": on, **chosen}.items()
    }


# fmt: off
ROWS: tuple[Row[Config], ...] = (
    handed_on(VLLM, "memory_fraction", "policy.generation.vllm_cfg.",
        when=lambda c: c.engine == "vllm",
        otherwise="policy.generation.backend has sizes of its own, which stay the job's",
        unless={SIZED.format(key=POOL): lambda c: c.count(POOL)},
        read_at="nemo_rl/models/generation/vllm/vllm_worker.py:223"),
    handed_on(SGLANG, "memory_fraction", "policy.generation.sglang_cfg.",
        when=lambda c: c.engine == "sglang",
        read_at="nemo_rl/models/generation/sglang/sglang_worker.py:414"),
    handed_on(VLLM, "concurrency", "policy.generation.vllm_kwargs.", when=lambda c: c.engine == "vllm",
        otherwise="policy.generation.backend has sizes of its own, which stay the job's",
        unless={"vLLM chooses by the card while policy.generation.vllm_kwargs.max_num_seqs is not set": lambda c: not c.count("policy.generation.vllm_kwargs.max_num_seqs")}, read_at="nemo_rl/models/generation/vllm/vllm_worker.py:271"),
    handed_on(SGLANG, "concurrency", "policy.generation.sglang_cfg.",
        when=lambda c: c.engine == "sglang",
        unless={"SGLang chooses by its pool while policy.generation.sglang_cfg.max_running_requests is not set": lambda c: not c.count("policy.generation.sglang_cfg.max_running_requests")}, read_at="nemo_rl/models/generation/sglang/sglang_worker.py:407"),
    handed_on(VLLM, "max_batched_tokens", "policy.generation.vllm_kwargs.",
        when=lambda c: c.engine == "vllm", otherwise="it is vLLM's",
        unless={"vLLM chooses while policy.generation.vllm_kwargs.max_num_batched_tokens is not set": lambda c: not c.count("policy.generation.vllm_kwargs.max_num_batched_tokens")},
        read_at="nemo_rl/models/generation/vllm/vllm_worker.py:271"),
    vllm_graphs("policy.generation.vllm_cfg.enforce_eager",
        "policy.generation.vllm_kwargs.compilation_config.cudagraph_capture_sizes",
        when=lambda c: c.engine == "vllm",
        otherwise="policy.generation.backend has settings of its own, which stay the job's",
        read_at="nemo_rl/models/generation/vllm/vllm_worker.py:448"),
    handed_on(SGLANG, "cuda_graphs", "policy.generation.sglang_cfg.",
        when=lambda c: c.engine == "sglang",
        read_at="nemo_rl/models/generation/sglang/sglang_worker.py:417"),
    handed_on(VLLM, "rollout_tensor_parallel", "policy.generation.vllm_cfg.",
        when=lambda c: c.engine == "vllm",
        otherwise="with other engines than vLLM several settings have to agree with it",
        read_at="nemo_rl/models/generation/vllm/vllm_worker.py:219"),
    Row(knob="tokens_per_microbatch", key="policy.sequence_packing.train_mb_tokens",
        when=lambda c: c.packed == key.PACKING, grid=PASS,
        otherwise="micro-batches are counted in sequences while neither sequence_packing nor dynamic_batching is enabled",
        unless={_EXPERTS: lambda c: c.balances_experts}, at_least={_WHOLE: lambda c: c.longest}, read_at="nemo_rl/models/policy/lm_policy.py:485"),
    Row(knob="tokens_per_microbatch", key="policy.dynamic_batching.train_mb_tokens",
        when=lambda c: c.packed == key.DYNAMIC, grid=PASS,
        unless={_EXPERTS: lambda c: c.balances_experts}, at_least={_WHOLE: lambda c: c.longest}, read_at="nemo_rl/models/policy/lm_policy.py:476"),
    trainer_rows.experts("policy.megatron_cfg.expert_model_parallel_size", when=lambda c: c.megatron,
        otherwise="expert parallelism is Megatron's", fixed=_LAYOUT,
        stage=lambda c: c.world // c.ranks("pipeline"), split=lambda c: c.splits_experts,
        read_at="nemo_rl/models/megatron/setup.py:648"),
    trainer_rows.stages("policy.megatron_cfg.pipeline_model_parallel_size", when=lambda c: c.megatron,
        otherwise="pipeline parallelism is Megatron's", fixed=_LAYOUT,
        unless={
            "policy.dynamic_batching is for one stage alone": lambda c: c.packed == key.DYNAMIC,
            "NeMo-RL refuses it beside a KV cache in fp8": lambda c: c.text("policy.generation.vllm_cfg.kv_cache_dtype").startswith("fp8"),
        },
        read_at="nemo_rl/models/megatron/setup.py:617"),
    Row(knob="logprob_tokens", key="policy.sequence_packing.logprob_mb_tokens",
        when=lambda c: c.packed == key.PACKING, grid=PASS,
        otherwise="scoring passes are counted in sequences: policy.logprob_batch_size follows microbatch_size",
        at_least={_WHOLE: lambda c: c.longest}, read_at="nemo_rl/models/policy/lm_policy.py:444"),
    Row(knob="logprob_tokens", key="policy.dynamic_batching.logprob_mb_tokens",
        when=lambda c: c.packed == key.DYNAMIC, grid=PASS,
        at_least={_WHOLE: lambda c: c.longest}, read_at="nemo_rl/models/policy/lm_policy.py:435"),
    Row(knob="microbatch_size", key="policy.train_micro_batch_size", when=lambda c: not c.packed,
        otherwise="sequence_packing or dynamic_batching fills micro-batches up to a number of tokens",
        unless={
            "policy.train_global_batch_size does not divide evenly over the trainer's ranks": lambda c: not c.mini_batch,
            _EXPERTS: lambda c: c.balances_experts,
        }, divides={"it divides a rank's sequences of policy.train_global_batch_size": lambda c: c.mini_batch},
        read_at="nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py:402"),
    Row(knob="recompute", key="policy.dtensor_cfg.activation_checkpointing", when=lambda c: not c.megatron,
        modes={"off": False, "full": True},
        read_at="nemo_rl/models/automodel/setup.py:716"),
    Row(knob="recompute", key="policy.megatron_cfg.activation_checkpointing", when=lambda c: c.megatron,
        read=lambda c: transformer.recompute(c.field, c.shape), write=_recompute, grid=Grid(values=("off", "selective", "full")),
        read_at="nemo_rl/models/megatron/setup.py:793"),
    Row(knob="param_offload", key="policy.dtensor_cfg.cpu_offload", grid=SWITCH, numeric="the optimizer steps on the CPU, beside the weights",
        unless={"with Megatron colocated weights are offloaded outside their phases by themselves": lambda c: c.megatron},
        read_at="nemo_rl/models/automodel/setup.py:452"),
    Row(knob="optimizer_offload", key="policy.generation.colocated.enabled", when=lambda c: c.colocated,
        stays="where trainer and engines share their GPUs the optimizer's state is offloaded by itself",
        read_at="nemo_rl/algorithms/grpo.py:454"),
    Row(knob="optimizer_offload", key="policy.offload_optimizer_for_logprob", when=lambda c: not c.colocated,
        grid=SWITCH, phases=(Phase.LOG_PROB,), read_at="nemo_rl/models/automodel/setup.py:293"),
    Row(knob="optimizer_offload_fraction", key="policy.megatron_cfg.optimizer.optimizer_offload_fraction",
        grid=Grid(values=(0.0, 1.0)), numeric="a part of Adam steps on the CPU",
        fixed=_LAYOUT,
        unless={"it is Megatron's": lambda c: not c.megatron}, read_at="nemo_rl/models/megatron/setup.py:884"),
    # Its example has no such key; the whole section is handed on to Megatron's OptimizerConfig.
    Row(knob="optimizer_offload_overlap", key="policy.megatron_cfg.optimizer.overlap_cpu_optimizer_d2h_h2d",
        default=False, grid=SWITCH, unless={"it is Megatron's": lambda c: not c.megatron},
        needs=(Needs(value=True, other="optimizer_offload_fraction", values=(1.0,), why="its copies overlap only where the optimizer is on the CPU"),),
        read_at="nemo_rl/models/megatron/setup.py:1002"),
    Row(knob="tensor_parallel", key="policy.dtensor_cfg.tensor_parallel_size", when=lambda c: not c.megatron,
        stays=_STAYS, read_at="nemo_rl/models/automodel/setup.py:379"),
    Row(knob="tensor_parallel", key="policy.megatron_cfg.tensor_model_parallel_size", when=lambda c: c.megatron,
        fixed=_LAYOUT,
        unless={
            "sequences are padded to policy.make_sequence_length_divisible_by, made for the job's tensor parallelism": lambda c: c.flag("policy.megatron_cfg.sequence_parallel") and c.packed != key.PACKING,
        }, read_at="nemo_rl/models/megatron/setup.py:615"),
    Row(knob="context_parallel", key="policy.dtensor_cfg.context_parallel_size", when=lambda c: not c.megatron,
        stays=_STAYS, read_at="nemo_rl/models/automodel/setup.py:380"),
    Row(knob="context_parallel", key="policy.megatron_cfg.context_parallel_size", when=lambda c: c.megatron,
        stays=_STAYS, read_at="nemo_rl/models/megatron/setup.py:627"),
    Row(knob="logprob_chunk", key="policy.logprob_chunk_size", grid=PASS, phases=(Phase.LOG_PROB,),
        when=lambda c: not c.megatron, otherwise="",
        read_at="nemo_rl/models/automodel/train.py:808"),
    Row(knob="logprob_chunk", key="policy.logprob_chunk_size", grid=PASS, when=lambda c: c.megatron,
        unless={"Megatron takes policy.logprob_chunk_size only with defer_fp32_logits": lambda c: not c.flag("policy.megatron_cfg.defer_fp32_logits")},
        read_at="nemo_rl/models/megatron/train.py:417"),
    Row(knob="sync_buffer", key="policy.refit_buffer_size_gb", unit=1 << 30,
        grid=Grid(minimum=1 << 30, multiple=1 << 30),
        unless={"the buffer is of CUDA IPC, between trainer and engines on the same GPUs": lambda c: not c.colocated},
        read_at="nemo_rl/algorithms/grpo.py:2187"),
    Row(knob="allocator", key="policy.dtensor_cfg.env_vars.PYTORCH_CUDA_ALLOC_CONF",
        when=lambda c: not c.megatron, modes=_ALLOCATORS,
        unless={_ALLOCATOR: lambda c: c.text("policy.dtensor_cfg.env_vars.PYTORCH_CUDA_ALLOC_CONF") not in _ALLOCATORS.values()},
        read_at="nemo_rl/models/policy/lm_policy.py:165"),
    Row(knob="allocator", key="policy.megatron_cfg.env_vars.PYTORCH_CUDA_ALLOC_CONF", when=lambda c: c.megatron,
        modes=_ALLOCATORS,
        unless={_ALLOCATOR: lambda c: c.text("policy.megatron_cfg.env_vars.PYTORCH_CUDA_ALLOC_CONF") not in _ALLOCATORS.values()},
        read_at="nemo_rl/models/policy/lm_policy.py:119"),
    Row(knob="dataloader_workers", key="data.num_workers", grid=Grid(minimum=0, multiple=1),
        fixed="the data loader's saved state is of its number of workers",
        read_at="nemo_rl/algorithms/grpo.py:364"),
    processed_images("policy.generation.vllm_kwargs.", when=lambda c: c.engine == "vllm",
        otherwise="it is vLLM's", read_at="nemo_rl/models/generation/vllm/vllm_worker.py:271"),
)

ABSENT: dict[KnobName, str] = {
    "max_model_len": "max_model_len follows policy.max_total_sequence_length, which is part of what is trained",
    "dynamic_batching": "policy.sequence_packing and policy.dynamic_batching need other attention kernels and are the job's own",
    "activation_offload": "NeMo-RL hands Megatron no fine_grained_activation_offloading",
    "grad_offload": "gradients follow the weights: param_offload moves both",
    "sequence_parallel": "policy.*.sequence_parallel is a switch that goes with tensor parallelism, not a size",
    "sharding": "the trainer is DTensor or Megatron and part of every checkpoint",
    "fused_kernels": "use_linear_ce_fusion_loss is for supervised training in 0.7.0",
    "memory_efficient_load": "rank 0 loads on the host and the others get their shards",
    "entropy_chunking": "the loss has no entropy of all logits",
    "entropy_recompute": "the loss has no entropy of all logits",
    "sync_mode": "trainer and engines share weights by CUDA IPC or NCCL",
    "host_allocator": "NeMo-RL hands its workers no LD_PRELOAD",
    "async_save": SAVES_FIRST,
    "weights_backup": "sleeping engines drop their weights and get them from the trainer",
    "nccl_memory_check": "there is no such check; NCCL_DEBUG in `env:` prints NCCL's own allocations",
    "memory_profile": "NRL_NSYS_PROFILE_STEP_RANGE profiles time, not memory",
}

REFUSED: tuple[Refusal[Config], ...] = (
    Refusal("policy.megatron_cfg.enabled",
        lambda c: c.megatron and c.flag("policy.dtensor_cfg.enabled"),
        "DTensor or Megatron trains the policy; both are enabled"),
    Refusal("policy.megatron_cfg.enabled",
        lambda c: not c.megatron and not c.flag("policy.dtensor_cfg.enabled"),
        "DTensor or Megatron trains the policy; none is enabled"),
    Refusal("policy.dynamic_batching.enabled",
        lambda c: _has_one_trainer(c) and c.flag("policy.sequence_packing.enabled") and c.flag("policy.dynamic_batching.enabled"),
        "dynamic batching excludes sequence packing"),
    Refusal("policy.megatron_cfg.tensor_model_parallel_size",
        lambda c: _has_one_trainer(c) and c.megatron and c.world % c.ranks_per_sequence > 0,
        lambda c: f"{c.world} GPUs cannot be split by {c.ranks_per_sequence}"),
    Refusal("policy.dtensor_cfg.tensor_parallel_size",
        lambda c: _has_one_trainer(c) and not c.megatron and c.world % c.ranks_per_sequence > 0,
        lambda c: f"{c.world} GPUs cannot be split by {c.ranks_per_sequence}"),
    Refusal("policy.generation.vllm_cfg.tensor_parallel_size",
        lambda c: _has_one_trainer(c) and c.engine == "vllm" and c.engine_world % max(1, c.count("policy.generation.vllm_cfg.tensor_parallel_size")) > 0,
        lambda c: f"{c.engine_world} GPUs of engines cannot be split by {c.get('policy.generation.vllm_cfg.tensor_parallel_size')}"),
    Refusal("policy.train_micro_batch_size",
        lambda c: _has_one_trainer(c) and c.mini_batch and not c.packed and _leaves_a_rest(c),
        lambda c: f"{c.get('policy.train_micro_batch_size')} does not divide {c.mini_batch}: a rank's sequences of policy.train_global_batch_size"),
)

WARNED: tuple[Warned[Config], ...] = (
    Warned(lambda c: not c.resumes,
        "every relaunch begins at step 0: checkpointing.enabled is false or checkpointing.save_period not positive"),
    Warned(lambda c: c.cuts("train_mb_tokens"),
        lambda c: f"{c.packed}.train_mb_tokens cannot hold the longest sequence of {c.longest} tokens: NeMo-RL stops there"),
    Warned(lambda c: c.cuts("logprob_mb_tokens"),
        lambda c: f"{c.packed}.logprob_mb_tokens cannot hold the longest sequence of {c.longest} tokens: NeMo-RL stops there"),
    Warned(lambda c: c.text("checkpointing.checkpoint_must_save_by"),
        "an end by checkpointing.checkpoint_must_save_by is taken for the end of the training"),
    Warned(lambda c: c.knows_release and c.gym_nodes,
        lambda c: f"NeMo Gym needs {c.gym_nodes} nodes beside those of cluster.num_nodes (env.nemo_gym.num_gpu_nodes)"),
    Warned(lambda c: c.flag("env.should_use_nemo_gym"),
        "with NeMo Gym the log has no line that numbers a step, so none is counted"),
)
# Where trackers keep the run (nemo_rl/utils/logger.py). W&B and SwanLab print it themselves.
TRACKERS = (
    TrackerRow(Tracker.MLFLOW, on="logger.mlflow_enabled", place={"uri": "{logger.mlflow.tracking_uri}", "experiment": "{logger.mlflow.experiment_name}", "name": "{logger.mlflow.run_name}"}),
    TrackerRow(Tracker.TENSORBOARD, on="logger.tensorboard_enabled", lines=("Initialized TensorboardLogger at {folder}",)),
)
# NeMo-RL also saves at its last step, so the second start resumes from step 3.
REHEARSAL = Rehearsal(
    saves={"checkpointing.enabled": True, "checkpointing.save_period": 2},
    validates={"grpo.val_period": 2},
    validating=("grpo.val_period",),
    unmet={
        LateEvent.LENGTH: "no setting of its file makes the engine generate past the end of a response, so responses keep their natural length",
        LateEvent.SAVE: "checkpointing.enabled is false or checkpointing.save_period not positive, so the job writes no checkpoint",
        LateEvent.RELOAD: "checkpointing.enabled is false or checkpointing.save_period not positive, so the job writes no checkpoint",
        LateEvent.VALIDATION: "grpo.val_period says that the job does not validate",
    },
)
# fmt: on

TABLE: Table[Config] = Table(
    rows=ROWS,
    rehearsal=REHEARSAL,
    absent=ABSENT,
    refused=REFUSED,
    warned=WARNED,
    advice=ADVICE,
    trackers=TRACKERS,
)
