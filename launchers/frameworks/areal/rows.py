"""AReaL 1.0.4: its knobs, refusals and warnings.

What is refused for more than values of settings is in checks.py; what depends on the cluster is in adapter.py.
"""

from __future__ import annotations

from autotune.launchers.frameworks.areal import knobs
from autotune.launchers.frameworks.areal.advice import ADVICE
from autotune.launchers.frameworks.areal.config import Config
from autotune.launchers.frameworks.areal.layout import split_sizes
from autotune.launchers.frameworks.core.engine_settings import SGLANG, VLLM
from autotune.launchers.frameworks.core.rehearsals import Rehearsal
from autotune.launchers.frameworks.core.renames import Renamed
from autotune.launchers.frameworks.core.trackers import TrackerRow
from autotune.launchers.frameworks.tabular import trainer_rows
from autotune.launchers.frameworks.tabular.engine_rows import handed_on
from autotune.launchers.frameworks.tabular.table import (
    OFF,
    SAVES_FIRST,
    SWITCH,
    Refusal,
    Row,
    Table,
    Warned,
)
from autotune.policies.values.job import Tracker
from autotune.policies.values.knobs import KnobName
from autotune.policies.values.profile import Grid
from autotune.policies.values.rehearsing import LateEvent

_HEADS = "the model's heads are not known; name the model in `model:`"
_SPLIT = "its layout cannot be split otherwise"
_LAYOUT = "a recover checkpoint can only be read by the layout that wrote it"


def _rollout_devices(c: Config) -> str:
    return f"{c.rollout} has {c.engine_devices} devices"


def _whole(c: Config) -> str:
    return f"a sequence may have {c.longest} tokens ({c.bound_in_words}), and AReaL ends with `is larger than capacity` at the first above max_tokens_per_mb, whatever the context parallelism"


def _devices(c: Config) -> str:
    return f"{c.actor} has {c.trainer_devices} devices"


def _stage(c: Config) -> str:
    return f"the trainer has {c.trainer_devices} devices"


def _why_the_optimizer_stays(c: Config) -> str:
    if c.trainer == "fsdp":
        return "only the step of optimizer.type adam can be streamed"
    return f"the {c.trainer} engine keeps its optimizer with the weights"


# fmt: off
ROWS: tuple[Row[Config], ...] = (
    # Of the engine alone: rollout.max_concurrent_rollouts also bounds how stale the samples of an asynchronous job are.
    *(Row(knob="concurrency", key=key, read=knobs.requests, when=when, grid=Grid(minimum=1, multiple=1),
        at_most={"no engine is given more requests at once": lambda c: c.most_requests})
        for key, when in (
            ("sglang.max_running_requests", lambda c: c.engine != "vllm"),
            ("vllm.max_num_seqs", lambda c: c.engine == "vllm"),
        )),
    handed_on(SGLANG, "memory_fraction", "sglang.", when=lambda c: c.engine != "vllm"),
    handed_on(VLLM, "memory_fraction", "vllm.", when=lambda c: c.engine == "vllm"),
    Row(knob="rollout_tensor_parallel", key="rollout.backend", read=knobs.size("rollout", "tensor"),
        write=knobs.write_rollout_backend,
        unless={
            _HEADS: lambda c: c.job.shape is None,
            _SPLIT: lambda c: not split_sizes(c, "rollout", "tensor"),
        }, divides={_rollout_devices: lambda c: c.engine_devices}, read_at="areal/api/alloc_mode.py:275"),
    Row(knob="cuda_graphs", key="sglang.disable_cuda_graph, sglang.cuda_graph_max_bs",
        when=lambda c: c.engine != "vllm", read=knobs.graphs, write=knobs.write_graphs,
        grid=Grid(values=("full", "limited", "off"))),
    handed_on(VLLM, "cuda_graphs", "vllm.", when=lambda c: c.engine == "vllm"),
    Row(knob="max_batched_tokens", key="sglang.max_prefill_tokens", when=lambda c: c.engine != "vllm",
        otherwise="AReaL passes vLLM no such limit", grid=Grid(minimum=512, multiple=512),
        at_least={"an interrupted sequence is prefilled in one piece, as chunked prefill is off": lambda c: c.longest}),
    Row(knob="tokens_per_microbatch", key="actor.mb_spec.max_tokens_per_mb", read=lambda c: c.actor_budget,
        write=knobs.write_tokens, grid=Grid(minimum=128, multiple=128), at_least={_whole: lambda c: c.longest},
        read_at="areal/utils/data.py:463"),
    Row(knob="logprob_tokens", key="ref.mb_spec.max_tokens_per_mb", when=lambda c: c.reference_budget_is_apart,
        otherwise="the actor scores within its training budget; ref and critic follow tokens_per_microbatch",
        read=lambda c: c.budget("ref"), grid=Grid(minimum=128, multiple=128),
        at_least={_whole: lambda c: c.longest}, read_at="areal/utils/data.py:463"),
    Row(knob="recompute", key="actor.gradient_checkpointing", when=lambda c: c.trainer == "fsdp",
        read=knobs.recompute, write=knobs.write_recompute, grid=Grid(values=("off", "full")),
        read_at="areal/engine/fsdp_engine.py:1076"),
    Row(knob="recompute", key="actor.gradient_checkpointing", when=lambda c: c.trainer != "fsdp",
        read=knobs.recompute, write=knobs.write_recompute, grid=Grid(values=("off", "selective", "full")),
        read_at="areal/engine/fsdp_engine.py:1076"),
    Row(knob="param_offload", key="actor.fsdp.offload_params", when=lambda c: c.trainer == "fsdp",
        otherwise="AReaL's Megatron engine keeps the weights on its devices", read=knobs.params,
        write=knobs.write_offload, grid=SWITCH, numeric="the optimizer steps on the CPU, beside the weights",
        read_at="areal/engine/fsdp_engine.py:406"),
    Row(knob="param_offload", key="actor.archon.offload_params",
        when=lambda c: c.trainer != "fsdp" and c.trainer != "megatron", read=knobs.params,
        write=knobs.write_offload, grid=SWITCH, numeric="the optimizer steps on the CPU, beside the weights"),
    Row(knob="optimizer_offload", key="actor.fsdp.per_layer_optim_step",
        when=lambda c: c.trainer == "fsdp" and c.streams_adam,
        otherwise=_why_the_optimizer_stays, read=knobs.optimizer,
        write=knobs.write_offload, grid=SWITCH, numeric="the step is taken layer by layer",
        read_at="areal/engine/fsdp_engine.py:472"),
    trainer_rows.resharding("actor.archon.reshard_after_forward_policy", when=lambda c: c.trainer == "archon",
        otherwise="AReaL's other engines always free gathered weights", read=lambda c: c.reshards,
        writes={True: {"actor.archon.reshard_after_forward_policy": "always"}},
        read_at="areal/experimental/engine/archon_engine.py:920"),
    Row(knob="memory_efficient_load", key="actor.fsdp.memory_efficient_load",
        when=lambda c: c.trainer == "fsdp", otherwise=lambda c: f"the {c.trainer} engine loads each device's part only",
        grid=SWITCH,
        unless={"AReaL refuses it together with init_from_scratch": lambda c: any(c.flag(f"{role}.init_from_scratch") for role in ("actor", "critic", "ref"))},
        also={
            "critic.fsdp.memory_efficient_load": lambda c: c.critic is not None and c.engine_of("critic") == "fsdp",
            "ref.fsdp.memory_efficient_load": lambda c: c.scores_reference,
        }, read_at="areal/engine/fsdp_engine.py:994"),
    Row(knob="tensor_parallel", key="actor.backend", read=knobs.size("actor", "tensor"),
        write=knobs.write_actor_backend, fixed=_LAYOUT,
        unless={
            _HEADS: lambda c: c.job.shape is None,
            _SPLIT: lambda c: not split_sizes(c, "actor", "tensor"),
        }, divides={_devices: lambda c: c.trainer_devices}, read_at="areal/api/alloc_mode.py:275"),
    Row(knob="sequence_parallel", key="actor.backend", when=lambda c: c.trainer == "fsdp",
        otherwise=lambda c: f"`c` of {c.trainer} is context parallel", read=knobs.size("actor", "context"),
        write=knobs.write_actor_backend, fixed=_LAYOUT,
        unless={
            _HEADS: lambda c: c.job.shape is None,
            _SPLIT: lambda c: not split_sizes(c, "actor", "context"),
        }, divides={_devices: lambda c: c.trainer_devices},
        divides_with_tensor={_stage: lambda c: c.stage_devices}, read_at="areal/api/alloc_mode.py:275"),
    Row(knob="context_parallel", key="actor.backend", when=lambda c: c.trainer != "fsdp",
        otherwise="`c` of fsdp is sequence parallel", read=knobs.size("actor", "context"),
        write=knobs.write_actor_backend, fixed=_LAYOUT,
        unless={
            _HEADS: lambda c: c.job.shape is None,
            _SPLIT: lambda c: not split_sizes(c, "actor", "context"),
        }, divides={_devices: lambda c: c.trainer_devices},
        divides_with_tensor={_stage: lambda c: c.stage_devices}, read_at="areal/api/alloc_mode.py:275"),
    Row(knob="sync_mode", key="actor.weight_update_mode", modes={"memory": "xccl", "disk": "disk"},
        unless={
            "the v2 controllers send weights in their own way": lambda c: c.get("actor._version") == "v2",
            "engines on the same devices take weights from files only": lambda c: c.colocated,
        }, read_at="areal/trainer/rl_trainer.py:338"),
    Row(knob="allocator", key="actor.scheduling_spec[].env_vars.PYTORCH_CUDA_ALLOC_CONF", read=knobs.allocator,
        write=knobs.write_environment, grid=Grid(values=("default", "expandable")),
        unless={"torch_memory_saver, which enable_offload loads, needs fixed segments": lambda c: c.flag("enable_offload")}),
    Row(knob="host_allocator", key="actor.scheduling_spec[].env_vars.LD_PRELOAD", read=knobs.host_allocator,
        write=knobs.write_environment, grid=Grid(values=("default", "jemalloc", "tcmalloc")),
        unless={"enable_offload loads torch_memory_saver with LD_PRELOAD itself": lambda c: c.flag("enable_offload")}),
    Row(knob="dataloader_workers", key="train_dataset.num_workers", grid=Grid(minimum=0, multiple=1),
        read_at="areal/trainer/rl_trainer.py:229"),
    Row(knob="async_save", key="actor.megatron.async_save", when=lambda c: c.trainer == "megatron",
        otherwise=SAVES_FIRST, grid=OFF,
        read_at="areal/engine/megatron_engine.py:1398"),
    Row(knob="memory_profile", key="memory_profiler.profile_steps", read=lambda c: c.has("memory_profiler"),
        write=knobs.write_memory_profiler,
        grid=SWITCH, read_at="areal/trainer/rl_trainer.py:710"),
    Row(knob="dynamic_batching", always=True, stays="passes are always packed by tokens"),
    Row(knob="logprob_chunk", always=1024, stays="1024 tokens, fixed in the code"),
    Row(knob="entropy_chunking", always=True, stays="the entropy is always computed in pieces of 1024 tokens"),
    Row(knob="loss_recompute", always=False,
        stays="the loss is computed in pieces of 1024 tokens, there is no setting for it"),
    Row(knob="sync_buffer", always=1 << 30,
        stays="weight_chunked_mem_mb is no setting: PPOTrainer never passes it on"),
)

ABSENT: dict[KnobName, str] = {
    "max_model_len": "vllm.max_model_len and sglang.context_length must hold what a workflow asks for, which only the workflow knows",
    "microbatch_size": "passes are packed by tokens; mb_spec.n_mbs is only a least number of passes",
    "expert_parallel": "it is part of actor.backend, which gives experts sizes of their own",
    "pipeline_parallel": "it is part of actor.backend, beside the other sizes",
    "activation_offload": "AReaL keeps activations on the device or recomputes them",
    "grad_offload": "gradients follow the weights: fsdp.offload_params moves both",
    "optimizer_offload_fraction": "the optimizer state is offloaded whole",
    "optimizer_offload_overlap": "the streamed step always overlaps its transfers",
    "sharding": "the trainer is part of actor.backend and of every checkpoint",
    "fused_kernels": "log-probabilities are computed in pieces of 1024 tokens; use_kernels leaves that alone",
    "weights_backup": "AReaL always keeps one while memory is offloaded",
    "memory_snapshot": "its profiler writes after a step that succeeded, so a failing step leaves none",
    "nccl_memory_check": "there is no setting for it; NCCL_DEBUG in `env:` prints NCCL's own allocations",
}

REFUSED: tuple[Refusal[Config], ...] = (
    Refusal("scheduler.type", lambda c: c.get("scheduler.type") == "slurm",
        "AReaL's Slurm scheduler starts workers outside the Ray cluster that autotune watches",
        "use scheduler.type=ray on that cluster"),
    Refusal("actor.weight_update_mode", lambda c: c.colocated and c.text("actor.weight_update_mode") != "disk",
        "engines on the same devices need actor.weight_update_mode=disk"),
    Refusal("actor.offload", lambda c: c.flag("actor.offload") and not c.flag("enable_offload"),
        "`actor.offload` needs enable_offload=true"),
    Refusal("ref.offload", lambda c: c.flag("ref.offload") and not c.flag("enable_offload"),
        "`ref.offload` needs enable_offload=true"),
    Refusal("critic.offload", lambda c: c.flag("critic.offload") and not c.flag("enable_offload"),
        "`critic.offload` needs enable_offload=true"),
    Refusal("actor.megatron.ddp.use_distributed_optimizer",
        lambda c: c.trainer == "megatron" and not c.flag("actor.use_lora") and not c.flag("actor.megatron.ddp.use_distributed_optimizer"),
        "AReaL's Megatron trainer asserts that it is on",
        "leave out `actor.megatron.ddp.use_distributed_optimizer`"),
)

WARNED: tuple[Warned[Config], ...] = (
    Warned(lambda c: c.is_v2, "AReaL cannot recover with its v2 controllers: every attempt starts at step 0."),
    Warned(lambda c: c.refuses_to_recover and not c.is_v2,
        lambda c: f"recover.mode={c.recover_mode} is kept: every attempt starts at step 0."),
    Warned(lambda c: c.resumes and not c.recovers,
        lambda c: f"AReaL would write no checkpoint to continue from; recover.mode={'auto' if c.is_of_earlier else 'on'} is added."),
    Warned(lambda c: c.resumes and not c.says_when_to_save,
        lambda c: f"The job does not say how often to write a recover checkpoint; {c.interval_text} is added."),
    Warned(lambda c: c.resumes and c.trainer == "megatron" and c.flag("actor.use_lora"),
        "AReaL cannot save Megatron's adapters to recover from: a relaunch fails or starts at step 0."),
    Warned(lambda c: c.resumes and c.trainer == "megatron" and not c.flag("actor.use_lora") and not c.flag("recover.no_save_optim"),
        "AReaL cannot save Megatron's distributed optimizer; set recover.no_save_optim, which begins each attempt with a fresh optimizer state."),
    Warned(lambda c: not c.lengths_known,
        lambda c: f"The longest sequence is not known, so the engine's {c.longest} tokens count; a smaller gconfig.max_tokens or a train_dataset.max_length lets max_tokens_per_mb go lower."),
    Warned(lambda c: c.actor_budget < c.longest,
        lambda c: f"A sequence may have {c.longest} tokens, and AReaL ends at the first with more than actor.mb_spec.max_tokens_per_mb = {c.actor_budget}."),
    Warned(lambda c: c.text("allocation_mode") and not c.is_of_earlier,
        lambda c: f"allocation_mode is deprecated and read by AReaL's old launchers only; it stands for rollout.backend={c.rollout} and actor.backend={c.actor}."),
    Warned(lambda c: not c.launcher and not c.has("scheduler.type"),
        "scheduler.type is not set, which AReaL refuses; scheduler.type=ray is added."),
    Warned(lambda c: c.count("cluster.n_nodes") > 1 and c.text("cluster.name_resolve.type") == "nfs" and c.text("cluster.name_resolve.nfs_record_root").startswith("/tmp"),  # noqa: S108
        "cluster.name_resolve.nfs_record_root lies in /tmp; with several nodes it must be shared."),
)
# Keys of guides and of earlier releases, by the last part of their names.
RENAMED = (
    Renamed("max_concurrent_rollouts", "rollout.max_concurrent_rollouts"),
    Renamed("weight_update_mode", "actor.weight_update_mode"),
    Renamed("mb_spec", "actor.mb_spec"),
    Renamed("async_training", "rollout.max_head_offpolicyness"),
    Renamed("mem_fraction_static", "sglang.mem_fraction_static"),
    Renamed("behav_imp_weight_cap", "actor.rejection_sampling"),
    Renamed("behave_imp_weight_cap", "actor.rejection_sampling"),
    Renamed("behave_imp_weight_mode", "actor.rejection_sampling"),
    Renamed("weight_chunked_mem_mb", hint="it is no setting; actor.weight_update_mode=disk needs no such buffer"),
)
# Where trackers keep the run (areal/utils/stats_logger.py). W&B (but for its project), SwanLab and, without a space,
# Trackio print it themselves.
TRACKERS = (
    TrackerRow(Tracker.TENSORBOARD, on="stats_logger.tensorboard.path", place={"folder": "{stats_logger.tensorboard.path}"}),
    TrackerRow(Tracker.TRACKIO, on="stats_logger.trackio.mode", place={"space": "{stats_logger.trackio.space_id}"}),
    TrackerRow(Tracker.WANDB, on="stats_logger.wandb.mode", place={"entity": "{stats_logger.wandb.entity}", "project": "{stats_logger.wandb.project}"}),
)
# Of the checkpoints it is the one for recovery that is written; `saver` exports weights and stays off.
REHEARSAL = Rehearsal(
    saves={"recover.mode": "on", "recover.freq_steps": 2, "recover.freq_epochs": None, "recover.freq_secs": None},
    validates={"evaluator.freq_steps": 2},
    unmet={
        LateEvent.LENGTH: "the job does not say how long answers are, so they keep their natural length",
        LateEvent.SAVE: "recover.mode or a v2 controller says that the job continues from no checkpoint",
        LateEvent.RELOAD: "recover.mode or a v2 controller says that the job continues from no checkpoint",
        LateEvent.VALIDATION: "none of evaluator.freq_epochs, freq_steps and freq_secs says when the job validates",
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
    renamed=RENAMED,
    advice=ADVICE,
    trackers=TRACKERS,
)
