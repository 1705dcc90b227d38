"""verl 0.9.1: its knobs, settings that it does not read, what it refuses and what its users should know.

The loss is normalised by the whole batch, so that the sizes of passes are exact. Legal values and phases that follow from
the job itself are in adapter.py, sizes that have to fit each other in checks.py. The tokens of a pass are those of all ranks
that share its sequences.
"""

from __future__ import annotations

from autotune.launchers.frameworks.core import transformer
from autotune.launchers.frameworks.core.engine_settings import SGLANG, SIZED, VLLM
from autotune.launchers.frameworks.core.rehearsals import Rehearsal
from autotune.launchers.frameworks.core.trackers import TrackerRow
from autotune.launchers.frameworks.core.versions import is_before
from autotune.launchers.frameworks.tabular import trainer_rows
from autotune.launchers.frameworks.tabular.engine_rows import handed_on, processed_images
from autotune.launchers.frameworks.tabular.table import (
    OFF,
    PASS,
    SAVES_FIRST,
    SWITCH,
    Needs,
    Refusal,
    Row,
    Table,
    Unread,
    Warned,
)
from autotune.launchers.frameworks.verl import knobs
from autotune.launchers.frameworks.verl.advice import ADVICE
from autotune.launchers.frameworks.verl.config import MEGATRON, POOL, Config
from autotune.launchers.frameworks.verl.keys import ENGINES, RELEASES
from autotune.launchers.frameworks.verl.renamed import RENAMED
from autotune.policies.values.job import Tracker
from autotune.policies.values.knobs import KnobName
from autotune.policies.values.profile import Grid
from autotune.policies.values.rehearsing import LateEvent

_OTHER_ENGINE = "the job's engine does not take it"
_APART = "the engines have GPUs of their own"
_OTHER_TRAINER = "actor_rollout_ref.actor.strategy is neither fsdp nor fsdp2"
_BY_SEQUENCES = "micro-batches are counted in sequences while actor.use_dynamic_bsz is off"
_ON_HOST = "fsdp_config.offload_policy keeps everything in host memory already"
_ADAMW = "with FSDP it would reach torch.optim.AdamW, which refuses it"
_TIMEOUT = "process groups are made with torch's own timeout"
_STATE = "a checkpoint holds the optimizer's state in this layout"
_PARALLEL = "a checkpoint is of its parallelism"


def _gpus(c: Config) -> str:
    return f"tensor x context parallelism divides the trainer's {c.world} GPUs"


def _awake_since(c: Config) -> str:
    """Return of which releases it is true that `free_cache_engine: false` keeps the engine awake."""
    return "" if c.names_release else ", from verl 0.5 on"


def _is_another_trainer(c: Config) -> bool:
    return c.text("actor_rollout_ref.actor.strategy") not in ("fsdp", "fsdp2")


def _is_another_engine(c: Config) -> bool:
    return c.engine not in ("vllm", "sglang")


# fmt: off
ROWS: tuple[Row[Config], ...] = (
    handed_on(VLLM, "memory_fraction", "actor_rollout_ref.rollout.",
        unless={SIZED.format(key=POOL): lambda c: c.count(POOL)},
        read_at="verl/workers/rollout/vllm_rollout/vllm_async_server.py:340"),
    Row(knob="concurrency", key="actor_rollout_ref.rollout.max_num_seqs", read=knobs.concurrency,
        read_at="verl/workers/rollout/vllm_rollout/vllm_async_server.py:333"),
    Row(knob="rollout_tensor_parallel", key="actor_rollout_ref.rollout.tensor_model_parallel_size",
        divides={
            "actor_rollout_ref.rollout.tensor_model_parallel_size divides the engines' GPUs": lambda c: c.rollout_world,
            "it divides the attention heads": lambda c: c.heads,
        }, read_at="verl/workers/rollout/vllm_rollout/vllm_async_server.py:342"),
    Row(knob="cuda_graphs", key="actor_rollout_ref.rollout.enforce_eager", read=knobs.cuda_graphs,
        write=knobs.write_cuda_graphs, grid=Grid(values=("full", "limited", "off")),
        unless={_OTHER_ENGINE: _is_another_engine},
        read_at="verl/workers/rollout/vllm_rollout/vllm_async_server.py:339"),
    handed_on(VLLM, "max_batched_tokens", "actor_rollout_ref.rollout.",
        when=lambda c: c.engine == "vllm",
        unless={
            _OTHER_ENGINE: _is_another_engine,
            "without chunked prefill verl raises it to the longest sequence": lambda c: not c.flag("actor_rollout_ref.rollout.enable_chunked_prefill"),
        },
        at_least={"vLLM takes at least one token of each of its max_num_seqs requests": lambda c: c.most_requests},
        read_at="verl/workers/rollout/vllm_rollout/vllm_async_server.py:335"),
    handed_on(SGLANG, "max_batched_tokens", "actor_rollout_ref.rollout.engine_kwargs.sglang.",
        when=lambda c: c.engine != "vllm", grid=Grid(minimum=256, maximum=8192, multiple=64),
        unless={_OTHER_ENGINE: _is_another_engine},
        read_at="verl/workers/rollout/sglang_rollout/async_sglang_server.py:276"),
    handed_on(VLLM, "max_model_len", "actor_rollout_ref.rollout.",
        unless={"verl passes it to vLLM only, and SGLang does not plan its pool by it": lambda c: c.engine != "vllm"},
        at_least={"the engine takes the longest sequence: data.max_prompt_length + data.max_response_length = {value}": lambda c: c.longest},
        read_at="verl/workers/rollout/vllm_rollout/vllm_async_server.py:332"),
    Row(knob="engine_sleep", key="actor_rollout_ref.rollout.free_cache_engine", when=lambda c: c.colocated,
        otherwise=_APART, read=lambda c: c.sleeps, write=knobs.write_engine_sleep, grid=SWITCH,
        unless={
            _OTHER_ENGINE: _is_another_engine,
            "the vLLM of the job's verl sleeps whatever the setting says": lambda c: c.always_sleeps,
        }, read_at="verl/workers/engine_workers.py:818"),
    Row(knob="tokens_per_microbatch", key="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        when=lambda c: c.dynamic, otherwise=_BY_SEQUENCES, read=lambda c: c.count("actor_rollout_ref.actor.ppo_max_token_len_per_gpu") * c.parallel,
        write=knobs.write_passes, grid=PASS,
        at_least={"a micro-batch holds the longest sequence: data.max_prompt_length + data.max_response_length = {value}": lambda c: c.longest},
        read_at="verl/workers/engine_workers.py:626"),
    Row(knob="logprob_tokens", key="actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
        when=lambda c: c.dynamic, otherwise=_BY_SEQUENCES,
        read=lambda c: c.count("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu") * c.parallel, write=knobs.write_passes, grid=PASS,
        at_least={"a scoring pass holds the longest sequence: data.max_prompt_length + data.max_response_length = {value}": lambda c: c.longest},
        read_at="verl/workers/engine_workers.py:621"),
    Row(knob="microbatch_size", key="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        when=lambda c: not c.dynamic,
        otherwise="actor.use_dynamic_bsz fills micro-batches up to a number of tokens",
        write=knobs.write_passes,
        unless={"the job names none": lambda c: not c.count("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu")},
        divides={"it divides the {value} sequences of a mini-batch on one rank": lambda c: c.mini_batch},
        read_at="verl/workers/engine_workers.py:628"),
    Row(knob="dynamic_batching", key="actor_rollout_ref.actor.use_dynamic_bsz", write=knobs.write_passes,
        read_at="verl/workers/engine_workers.py:619"),
    Row(knob="sequence_parallel", key="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        when=lambda c: not c.megatron,
        otherwise="Ulysses is FSDP's; with Megatron context parallelism splits the sequence",
        read=lambda c: c.parallel, write=knobs.write_passes,
        unless={"Ulysses needs model.use_remove_padding": lambda c: not c.flag("actor_rollout_ref.model.use_remove_padding")},
        divides={
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size divides the trainer's GPUs": lambda c: c.world,
            "Ulysses divides the model's {value} attention heads": lambda c: c.heads,
        }, read_at="verl/workers/engine/fsdp/transformer_impl.py:244"),
    Row(knob="context_parallel", key="actor_rollout_ref.actor.megatron.context_parallel_size",
        when=lambda c: c.megatron, otherwise="with FSDP Ulysses splits the sequence: sequence_parallel",
        read=lambda c: c.parallel, write=knobs.write_passes, fixed=_PARALLEL,
        divides={"actor_rollout_ref.actor.megatron.context_parallel_size divides the trainer's GPUs": lambda c: c.stage},
        divides_with_tensor={_gpus: lambda c: c.stage},
        read_at="verl/workers/engine/megatron/transformer_impl.py:276"),
    Row(knob="recompute", key="actor_rollout_ref.model.enable_gradient_checkpointing",
        when=lambda c: not c.megatron, modes={"off": False, "full": True},
        also={"critic.model.enable_gradient_checkpointing": lambda c: c.critic},
        read_at="verl/workers/engine/fsdp/transformer_impl.py:335"),
    Row(knob="recompute",
        key="actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity",
        when=lambda c: c.megatron, read=knobs.recompute, write=knobs.write_recompute,
        grid=Grid(values=("off", "selective", "full")),
        read_at="verl/workers/engine/megatron/transformer_impl.py:295"),
    Row(knob="activation_offload", key="actor_rollout_ref.model.enable_activation_offload",
        when=lambda c: not c.megatron, grid=SWITCH,
        unless={_OTHER_TRAINER: _is_another_trainer},
        also={"critic.model.enable_activation_offload": lambda c: c.critic},
        read_at="verl/workers/engine/fsdp/transformer_impl.py:477"),
    Row(knob="activation_offload",
        key="actor_rollout_ref.actor.megatron.override_transformer_config.fine_grained_activation_offloading",
        when=lambda c: c.megatron, default=False, write=knobs.write_activations, grid=SWITCH,
        unless={
            "not every Megatron-Core has it: name fine_grained_activation_offloading below override_transformer_config, with false, where the job's has": lambda c: c.field("fine_grained_activation_offloading") is None,
            "fused kernels replace the forward that it begins in": lambda c: c.flag("actor_rollout_ref.model.use_fused_kernels"),
        },
        needs=(Needs(value=True, other="recompute", values=("off", "selective", "modules"), why=transformer.NOTHING_KEPT),),
        read_at="verl/workers/engine/megatron/transformer_impl.py:295"),
    Row(knob="fused_kernels", key="actor_rollout_ref.model.use_fused_kernels", grid=SWITCH,
        numeric="a fused kernel rounds otherwise",
        unless={
            "fused kernels need model.use_remove_padding": lambda c: not c.flag("actor_rollout_ref.model.use_remove_padding"),
            "actor.calculate_sum_pi_squared needs the full logits": lambda c: c.flag("actor_rollout_ref.actor.calculate_sum_pi_squared"),
        }, read_at="verl/workers/engine/fsdp/transformer_impl.py:323"),
    Row(knob="entropy_chunking", key="actor_rollout_ref.actor.entropy_from_logits_with_chunking", default=False,
        grid=SWITCH,
        unless={
            "fused kernels never hold the full logits": lambda c: c.flag("actor_rollout_ref.model.use_fused_kernels"),
            "with FSDP entropies of padded batches are never chunked: model.use_remove_padding": lambda c: not c.megatron and not c.flag("actor_rollout_ref.model.use_remove_padding"),
        },
        read_at="verl/workers/engine/fsdp/transformer_impl.py:1399"),
    Row(knob="entropy_recompute", key="actor_rollout_ref.actor.entropy_checkpointing",
        when=lambda c: not c.megatron, otherwise="actor.entropy_checkpointing exists with FSDP only",
        default=False, grid=SWITCH, unless={"the update computes no entropy": lambda c: not c.entropy},
        read_at="verl/workers/engine/fsdp/transformer_impl.py:1490"),
    Row(knob="param_offload", key="actor_rollout_ref.actor.fsdp_config.param_offload",
        when=lambda c: not c.megatron, grid=SWITCH,
        unless={_ON_HOST: lambda c: c.flag("actor_rollout_ref.actor.fsdp_config.offload_policy")},
        also={"critic.fsdp.param_offload": lambda c: c.critic},
        read_at="verl/workers/engine/fsdp/transformer_impl.py:160"),
    Row(knob="param_offload", key="actor_rollout_ref.actor.megatron.param_offload", when=lambda c: c.megatron,
        grid=SWITCH, also={"critic.megatron.param_offload": lambda c: c.critic},
        read_at="verl/workers/engine/megatron/transformer_impl.py:197"),
    Row(knob="grad_offload", key="actor_rollout_ref.actor.fsdp_config.offload_policy",
        when=lambda c: not c.megatron,
        otherwise="megatron.grad_offload was removed: param_offload frees the gradient buffers too",
        grid=SWITCH, numeric="the optimizer steps on the CPU, beside the gradients",
        unless={_OTHER_TRAINER: _is_another_trainer},
        also={"critic.fsdp.offload_policy": lambda c: c.critic},
        needs=(Needs(value=True, other="sharding", values=("fsdp2",), why="fsdp_config.offload_policy is FSDP2's"),),
        read_at="verl/workers/engine/fsdp/transformer_impl.py:459"),
    Row(knob="optimizer_offload", key="actor_rollout_ref.actor.fsdp_config.optimizer_offload",
        when=lambda c: not c.megatron, grid=SWITCH,
        unless={_ON_HOST: lambda c: c.flag("actor_rollout_ref.actor.fsdp_config.offload_policy")},
        also={"critic.fsdp.optimizer_offload": lambda c: c.critic},
        read_at="verl/workers/engine/fsdp/transformer_impl.py:161"),
    Row(knob="optimizer_offload", when=lambda c: c.swaps_optimizer, always=True,
        stays="MindSpeed's swap_optimizer keeps it in host memory, but for the slice that is updated"),
    Row(knob="optimizer_offload", key="actor_rollout_ref.actor.megatron.optimizer_offload",
        when=lambda c: c.megatron and not c.swaps_optimizer, grid=SWITCH, also={"critic.megatron.optimizer_offload": lambda c: c.critic},
        read_at="verl/workers/engine/megatron/transformer_impl.py:198"),
    Row(knob="optimizer_offload_fraction",
        key="actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction",
        when=lambda c: c.megatron, otherwise=_ADAMW, write=knobs.write_cpu_adam, default=0.0,
        grid=Grid(values=(0.0, 0.25, 0.5, 0.75, 1.0)), numeric="a part of Adam steps on the CPU", fixed=_STATE,
        read_at="verl/utils/megatron/optimizer.py:210"),
    Row(knob="optimizer_offload_overlap",
        key="actor_rollout_ref.actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d",
        when=lambda c: c.megatron, otherwise=_ADAMW, write=knobs.write_cpu_adam, default=False, grid=SWITCH, fixed=_STATE,
        needs=(Needs(value=True, other="optimizer_offload_fraction", values=(1.0, 0.75, 0.5, 0.25), why="its copies overlap only where a part of the optimizer is on the CPU"),),
        read_at="verl/utils/megatron/optimizer.py:210"),
    Row(knob="tensor_parallel", key="actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        when=lambda c: c.megatron, otherwise="FSDP shards parameters; tensor parallelism is Megatron's",
        fixed=_PARALLEL, also={"critic.megatron.tensor_model_parallel_size": lambda c: c.critic},
        read_at="verl/workers/engine/megatron/transformer_impl.py:272"),
    trainer_rows.experts("actor_rollout_ref.actor.megatron.expert_model_parallel_size", when=lambda c: c.megatron,
        otherwise="expert parallelism is Megatron's", fixed=_PARALLEL, stage=lambda c: c.stage, split=lambda c: c.splits_experts,
        also={"critic.megatron.expert_model_parallel_size": lambda c: c.critic},
        read_at="verl/workers/engine/megatron/transformer_impl.py:277"),
    trainer_rows.stages("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size", when=lambda c: c.megatron,
        otherwise="pipeline parallelism is Megatron's", fixed=_PARALLEL,
        chunks=lambda c: c.ranks(MEGATRON, "virtual_pipeline_model"),
        also={"critic.megatron.pipeline_model_parallel_size": lambda c: c.critic},
        read_at="verl/workers/engine/megatron/transformer_impl.py:273"),
    Row(knob="sharding", key="actor_rollout_ref.actor.strategy", when=lambda c: not c.megatron,
        otherwise="Megatron shards by itself", modes={"fsdp": "fsdp", "fsdp2": "fsdp2"},
        fixed="FSDP1 and FSDP2 write different checkpoints",
        unless={_OTHER_TRAINER: _is_another_trainer},
        read_at="verl/workers/engine/fsdp/transformer_impl.py:423"),
    trainer_rows.shard_group("actor_rollout_ref.actor.fsdp_config.fsdp_size", when=lambda c: not c.megatron,
        otherwise=_OTHER_TRAINER, unless={_OTHER_TRAINER: _is_another_trainer},
        also={"critic.fsdp.fsdp_size": lambda c: c.critic},
        read_at="verl/workers/engine/fsdp/transformer_impl.py:239"),
    trainer_rows.resharding("actor_rollout_ref.actor.fsdp_config.reshard_after_forward", when=lambda c: not c.megatron,
        otherwise=_OTHER_TRAINER, unless={_OTHER_TRAINER: _is_another_trainer},
        also={"critic.fsdp.reshard_after_forward": lambda c: c.critic},
        read_at="verl/workers/engine/fsdp/transformer_impl.py:420"),
    Row(knob="sharding", key="critic.strategy", when=lambda c: c.critic and not c.megatron,
        modes={"fsdp": "fsdp", "fsdp2": "fsdp2"}, read_at="verl/workers/engine/fsdp/transformer_impl.py:423"),
    Row(knob="sync_buffer", key="actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
        read=knobs.sync_buffer, default=0, unit=1 << 20,
        grid=Grid(minimum=64 << 20, multiple=1 << 20),
        unless={"verl 0.7.0 sends weights in buckets to SGLang only": knobs.sends_single_tensors},
        read_at="verl/workers/rollout/vllm_rollout/vllm_rollout.py:235"),
    Row(knob="host_allocator", key="ray_kwargs.ray_init.runtime_env.env_vars.LD_PRELOAD",
        read=knobs.host_allocator, write=knobs.write_host_allocator,
        grid=Grid(values=("default", "jemalloc", "tcmalloc"))),
    Row(knob="dataloader_workers", key="data.dataloader_num_workers",
        grid=Grid(minimum=0, maximum=64, multiple=1),
        fixed="the data loader's saved state is of its number of workers and refuses another",
        read_at="verl/trainer/ppo/v1/trainer_base.py:746"),
    Row(knob="layered_sync", key="actor_rollout_ref.rollout.layered_summon",
        when=lambda c: c.adapters and c.text("actor_rollout_ref.actor.strategy") == "fsdp",
        otherwise="only FSDP1 gathers the whole model, and only to read adapters",
        writes={
            True: {"actor_rollout_ref.rollout.layered_summon": True, "actor_rollout_ref.rollout.load_format": "safetensors"},
            False: {"actor_rollout_ref.rollout.layered_summon": False},
        },
        grid=SWITCH,
        unless={"merged weights are sent one by one": lambda c: c.flag("actor_rollout_ref.model.lora.merge")},
        read_at="verl/workers/engine_workers.py:674"),
    Row(knob="async_save", key="actor_rollout_ref.actor.checkpoint.async_save", when=lambda c: c.megatron,
        otherwise=SAVES_FIRST, grid=OFF,
        also={"critic.checkpoint.async_save": lambda c: c.critic},
        read_at="verl/utils/checkpoint/megatron_checkpoint_manager.py:1075"),
    processed_images("actor_rollout_ref.rollout.engine_kwargs.vllm.", when=lambda c: c.engine == "vllm",
        otherwise=_OTHER_ENGINE, read_at="verl/workers/rollout/vllm_rollout/vllm_async_server.py:1132"),
    Row(knob="memory_snapshot", key="global_profiler.tool", read=knobs.snapshot, write=knobs.write_snapshot,
        grid=SWITCH, read_at="verl/workers/engine_workers.py:488"),
)

ABSENT: dict[KnobName, str] = {
    "loss_recompute": "verl has no such setting; full recomputation is on by default",
    "logprob_chunk": "log-probabilities are computed from the logits of a whole micro-batch: its tokens, or fused kernels, are the setting",
    "memory_efficient_load": "verl always loads on the host, or a part of the model on each device",
    "sync_mode": "trainer and engine share weights by CUDA IPC; there is no mode through files",
    "weights_backup": "it keeps none: a sleeping engine drops its weights and gets them from the trainer",
    "allocator": "verl switches expandable segments on by itself after every weight sync, and off before it, because weights are shared by CUDA IPC",
    "nccl_memory_check": "there is no such check; what NCCL holds is outside PyTorch in the message",
    "memory_profile": "memory is profiled by the allocator's snapshots: memory_snapshot",
}

REFUSED: tuple[Refusal[Config], ...] = (
    Refusal("model_engine", lambda c: c.model_engine not in (*ENGINES, "veomni", "torchtitan"),
        lambda c: f"there is no model engine {c.get('model_engine')}", "dp (FSDP) or megatron"),
    Refusal("actor_rollout_ref.rollout.name", lambda c: c.engine not in ("vllm", "sglang", "trtllm"),
        lambda c: f"autotune does not know the inference engine `{c.engine}`" if c.engine else "verl needs an inference engine",
        "vllm, sglang or trtllm"),
    Refusal("actor_rollout_ref.rollout.gpu_memory_utilization",
        lambda c: not 0 < c.share("actor_rollout_ref.rollout.gpu_memory_utilization") <= 1, "must be a share of the card",
        "such as 0.5"),
    Refusal("trainer.resume_mode", lambda c: c.get("trainer.resume_mode") == "resume_path",
        "an attempt continues the checkpoints of its own run",
        "to go on from others name their folder in trainer.default_local_dir and write `resume: true`"),
    Refusal("trainer.resume_mode",
        lambda c: c.text("trainer.resume_mode") not in ("auto", "disable", "resume_path"),
        lambda c: f"there is no mode {c.get('trainer.resume_mode')}", "auto or disable"),
    Refusal("trainer.default_local_dir", lambda c: c.text("trainer.default_local_dir").startswith("~"),
        "verl does not expand `~`", "write the whole path"),
)

WARNED: tuple[Warned[Config], ...] = (
    Warned(lambda c: c.lacks("trainer.resume_mode"), "the job's own verl resumes no checkpoint: every relaunch begins at step 0"),
    Warned(lambda c: not c.resumes and not c.lacks("trainer.resume_mode"),
        "the job cannot be resumed: trainer.save_freq is not positive or trainer.resume_mode is disable, so every relaunch begins at step 0"),
    Warned(lambda c: c.get("trainer.max_actor_ckpt_to_keep") == 1,
        "trainer.max_actor_ckpt_to_keep: 1 deletes a checkpoint before the next is complete; keep 2"),
    Warned(lambda c: c.flag("actor_rollout_ref.actor.checkpoint.async_save"),
        "with checkpoint.async_save verl does not record the checkpoint that a resume would read"),
    Warned(lambda c: c.engine == "vllm" and c.get("actor_rollout_ref.rollout.max_model_len") is None and not is_before(c.version, RELEASES[0]),
        lambda c: f"actor_rollout_ref.rollout.max_model_len is unset: vLLM plans for the model's longest context and may refuse to start; this job needs {c.longest}"),
    Warned(lambda c: c.engine == "sglang" and any("expandable_segments" in value for value in c.env.values()),
        "expandable_segments in the environment reaches SGLang, whose memory saver needs fixed segments; verl switches it on for the trainer by itself"),
    Warned(lambda c: c.summons_whole and c.world > 1,
        "every weight sync gathers the whole model on every card to read its adapters; actor_rollout_ref.rollout.layered_summon: true (with actor_rollout_ref.rollout.load_format: safetensors) does it layer by layer"),
    Warned(lambda c: c.colocated and not c.sleeps and c.engine,
        lambda c: f"the engine never sleeps{_awake_since(c)}: its weights and pool stay on the card while training runs"),
    Warned(lambda c: c.flag("reward.reward_model.enable") and not c.flag("reward.reward_model.enable_resource_pool"),
        lambda c: f"the reward model's engine takes {c.share('reward.reward_model.rollout.gpu_memory_utilization'):.0%} of the same GPUs (reward.reward_model.rollout.gpu_memory_utilization) while it scores, which no phase of the estimate has; reward.reward_model.enable_resource_pool gives it GPUs of its own"),
)

UNREAD: tuple[Unread[Config], ...] = (
    Unread("critic.ppo_max_token_len_per_gpu",
        "the trainer reads ++critic.ppo_infer_max_token_len_per_gpu for both values and update",
        lambda c: c.flag("trainer.use_v1")),
    Unread("critic.ulysses_sequence_parallel_size",
        "the engine reads critic.fsdp.ulysses_sequence_parallel_size"),
    Unread("critic.ppo_micro_batch_size_per_gpu",
        "the critic always fills micro-batches by tokens: ++critic.ppo_infer_max_token_len_per_gpu",
        lambda c: c.critic and c.dynamic),
    Unread("actor_rollout_ref.ref.entropy_from_logits_with_chunking",
        "only the actor's scoring computes entropy: actor_rollout_ref.actor.entropy_from_logits_with_chunking"),
    Unread("actor_rollout_ref.ref.fsdp_config.param_offload",
        "the reference is always in host memory outside its own pass", lambda c: not c.megatron),
    Unread("actor_rollout_ref.model.tiled_mlp.enabled", "nothing passes it on"),
    Unread("actor_rollout_ref.nccl_timeout", _TIMEOUT),
    Unread("critic.nccl_timeout", _TIMEOUT),
)
# Where trackers keep the run (verl/utils/tracking.py). W&B (but for its project), SwanLab and Trackio print it themselves.
TRACKERS = (
    TrackerRow(Tracker.MLFLOW, named_in="trainer.logger", place={"default_uri": "sqlite:////tmp/mlruns.db", "experiment": "{trainer.project_name}", "name": "{trainer.experiment_name}"}),
    TrackerRow(Tracker.TENSORBOARD, named_in="trainer.logger", lines=("Saving tensorboard log to {folder}.",)),
    TrackerRow(Tracker.WANDB, named_in="trainer.logger", place={"project": "{trainer.project_name}"}),
)
# verl saves and validates at its last step too, so the second start goes on from step 3.
REHEARSAL = Rehearsal(
    saves={"trainer.save_freq": 2},
    validates={"trainer.test_freq": 2},
    validating=("trainer.test_freq",),
    left=("trainer.resume_mode",),
    unmet={
        LateEvent.LENGTH: "verl passes `ignore_eos` to vLLM alone, so responses keep their natural length",
        LateEvent.SAVE: "trainer.save_freq says that the job writes no checkpoint",
        LateEvent.RELOAD: "trainer.save_freq or trainer.resume_mode says that the job continues from no checkpoint",
        LateEvent.VALIDATION: "trainer.test_freq says that the job does not validate while it trains",
    },
    remarks={
        LateEvent.LENGTH: "responses only; prompts keep the lengths of the data",
    },
)
# fmt: on

TABLE: Table[Config] = Table(
    rows=ROWS,
    rehearsal=REHEARSAL,
    absent=ABSENT,
    refused=REFUSED,
    warned=WARNED,
    unread=UNREAD,
    renamed=RENAMED,
    advice=ADVICE,
    scoring={"microbatch_size": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"},
    trackers=TRACKERS,
)
