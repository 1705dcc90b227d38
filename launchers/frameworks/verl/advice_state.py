"""What verl's guide says of the trainer's state, of host memory and of tools, as verl 0.9.1 stands."""

from __future__ import annotations

from autotune.launchers.base import Advice, Status
from autotune.launchers.frameworks.core.advice import advice
from autotune.launchers.frameworks.verl.config import ACTOR, ENV_VARS, REF, ROLLOUT

_WORKS, _REPLACED = Status.WORKS, Status.REPLACED
_IMPOSSIBLE = Status.IMPOSSIBLE
_ADAM = f"{ACTOR}.optim.override_optimizer_config"
_FSDP = f"{ACTOR}.fsdp_config"


_DEVICE: tuple[Advice, ...] = (
    advice(
        "offload_params",
        "rollout",
        "megatron.param_offload: true",
        _WORKS,
        "weights and gradient buffers wait in host memory while the engine works",
        constraint="model_engine: megatron; critic.megatron has its own",
        effect="the trainer's weights and gradients, in generation and weight sync",
        cost="every phase, by transfers",
    ),
    advice(
        "offload_grads",
        "rollout",
        "megatron.grad_offload: true",
        _REPLACED,
        "the setting was removed; param_offload frees the gradient buffers too",
        instead=f"{ACTOR}.megatron.param_offload",
    ),
    advice(
        "offload_optimizer",
        "rollout",
        "megatron.optimizer_offload: true",
        _WORKS,
        "the state is loaded back whole for the update: update and optimizer step are not cured by it",
        constraint="model_engine: megatron; with FSDP fsdp_config.optimizer_offload",
        effect="the optimizer's state, in generation, scoring and weight sync",
        cost="every update, by transfers",
    ),
    advice(
        "offload_params",
        "log_prob",
        f"{REF}.megatron.param_offload: true",
        _WORKS,
        "it follows the actor's by default; FSDP's reference is always offloaded",
        effect="the reference's weights",
    ),
    advice(
        "offload_params",
        "rollout",
        f"{_FSDP}.cpu_offload: true",
        _REPLACED,
        "there is no such field: the start fails; FSDP1's own offload is forced off for trained models, "
        "whose accumulated gradients it loses",
        instead=f"{_FSDP}.param_offload and {_FSDP}.optimizer_offload; critic.fsdp has its own",
        effect="weights and optimizer state outside the update",
        cost="every phase, by transfers",
    ),
    advice(
        "offload_grads",
        "optimizer",
        f"{_FSDP}.offload_params: true",
        _REPLACED,
        "there is no such field: the start fails",
        instead=f"{_FSDP}.offload_policy with strategy fsdp2: weights, gradients and optimizer state stay in "
        "host memory through the update, and Adam runs on the CPU",
        constraint="not in the middle of a run where it means a change of strategy",
        effect="all state of the trainer",
        cost="the optimizer's step, much",
    ),
    advice(
        "offload_optimizer",
        "optimizer",
        f"{_ADAM}.{{optimizer_cpu_offload, optimizer_offload_fraction: 1.0, use_precision_aware_optimizer, "
        "overlap_cpu_optimizer_d2h_h2d}",
        _WORKS,
        "Megatron steps that share of the optimizer on the CPU; Hydra takes the keys only with `++`",
        constraint="model_engine: megatron, the settings together, from the first attempt on: a checkpoint "
        "holds the state in this layout",
        effect="the optimizer's state, in the update too",
        cost="the optimizer's step",
    ),
    advice(
        "FSDP2",
        "any",
        f"{ACTOR}.strategy: fsdp2",
        _WORKS,
        "about 7 % less memory by verl's own measurement; critic.strategy is set apart",
        constraint="never in the middle of a run: FSDP1 and FSDP2 write different checkpoints",
        effect="about 7 %",
        cost="nothing",
    ),
    advice(
        "reduce_sync_buffer",
        "weight_sync",
        f"{ROLLOUT}.update_weights_bucket_megabytes",
        _REPLACED,
        "it moved",
        instead=f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
        effect="one staging buffer per rank; the default is 2048 MiB",
        cost="weight sync, slightly",
    ),
    advice(
        "disk_weight_sync",
        "weight_sync",
        "weight sync through files",
        _IMPOSSIBLE,
        "trainer and engine share weights by CUDA IPC; there is no mode through files",
        instead=f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes",
    ),
    advice(
        "expandable_segments",
        "any",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        _IMPOSSIBLE,
        "verl switches it on by itself after each weight sync and off before; exported, it reaches the "
        "engine, whose sleep mode refuses it",
        instead="nothing: it is on in every pass of the trainer",
    ),
)

_HOST: tuple[Advice, ...] = (
    advice(
        "host_allocator",
        "any",
        "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4",
        _WORKS,
        "an exported variable reaches Ray's workers only if Ray itself was started with it",
        instead=f"++{ENV_VARS}.LD_PRELOAD: libtcmalloc.so.4",
        constraint="gperftools on every node; the loader finds it by name and goes on where it is missing",
        effect="host memory that is freed but not returned",
    ),
    advice(
        "host_allocator",
        "any",
        "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libjemalloc.so.2, on ARM "
        "/usr/lib/aarch64-linux-gnu/libjemalloc.so.2",
        _WORKS,
        "the name alone is found on either machine",
        instead=f"++{ENV_VARS}.LD_PRELOAD: libjemalloc.so.2",
        constraint="libjemalloc2 on every node",
        effect="host memory that is freed but not returned",
    ),
    advice(
        "reduce_host_offload",
        "any",
        "use cpu_offload judiciously",
        _WORKS,
        "offloaded state and activations fill host memory; a host that runs out takes them back",
        effect="host memory; takes device memory",
    ),
    advice(
        "reduce_workers",
        "data",
        "data.dataloader_num_workers: 2",
        _WORKS,
        "the default is 8",
        constraint="only before the first checkpoint: the data loader's saved state refuses another number",
        effect="host and shared memory",
        cost="data loading, where it is the bottleneck",
    ),
)

_TOOLS: tuple[Advice, ...] = (
    advice(
        "capture_snapshot",
        "any",
        "global_profiler.enabled: true",
        _REPLACED,
        "there is no such field",
        instead=f"global_profiler.tool: torch_memory with {ACTOR}.profiler.enable and all_ranks: the next "
        "failure is recorded",
        cost="every allocation, slightly",
    ),
    advice(
        "capture_snapshot",
        "any",
        "global_profiler.global_tool_config.torch_memory.{trace_alloc_max_entries, stack_depth}",
        _WORKS,
        "100000 entries and 32 frames are the defaults",
    ),
    advice(
        "memory logging",
        "any",
        "verl.utils.device.log_gpu_memory_usage",
        _REPLACED,
        "it is in verl.utils.profiler.performance now",
        instead="VERL_LOGGING_LEVEL=DEBUG in the workers' environment prints its lines",
    ),
    advice(
        "illegal memory access",
        "any",
        "check the vLLM version",
        _WORKS,
        "it is a failure of code, not of memory: no remedy is spent on it",
    ),
)

STATE: tuple[Advice, ...] = (*_DEVICE, *_HOST, *_TOOLS)
