"""How tools that `launch` does not drive spell the knobs, and how their logs are recognized.

Read in Megatron-LM (arguments.py), DeepSpeed 0.18 (config JSON), transformers 5 (TrainingArguments), prime-rl
559b447, vime 0696c9bd, ROLL 8eb27cc, RLinf a3816b5, ms-swift 3602360, and in the axolotl, LLaMA-Factory, AgileRL and Unsloth of
August 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.launchers.frameworks.core.engine_settings import SGLANG, VLLM, Argument
from autotune.policies.values.failure import Cause
from autotune.policies.values.knobs import KnobName, Setting
from autotune.policies.values.value import Value


class Spelling(Value, frozen=True):
    """A knob in a tool's own syntax; `{value}` stands for the new value if it is known.

    The words of a switch set the value that saves memory; `undo` sets the other one.
    """

    knob: KnobName
    words: str
    printed: str = ""  # the name under which logs print its value
    saving: Setting = None  # the mode that a printed `true` means, if it saves the most
    undo: str = ""


class Tool(Value, frozen=True):
    """A tool, the texts that identify its logs, and its spelling of the knobs."""

    name: str
    traces: tuple[str, ...] = ()
    engine: bool = False
    sleeps: bool = False  # its engines sleep, or have other GPUs, while its trainer works
    only: bool = False  # it has no other knobs, because it runs no language model
    runs: tuple[str, ...] = ()  # driven frameworks that it is built on, whose traces its logs contain as well
    spellings: tuple[Spelling, ...] = ()


class Ceiling(Value, frozen=True):
    """Where a platform (Slurm, Kubernetes, ...) sets the memory limit that was exceeded."""

    place: str
    causes: tuple[Cause, ...]
    words: str
    traces: tuple[str, ...] = ()  # texts that identify the platform; empty: the default


def _arguments(engine: Mapping[KnobName, Argument], but: str = "") -> Iterator[Spelling]:
    """Yield the spellings of an engine's own arguments, except a knob that it now spells differently."""
    for knob, argument in engine.items():
        if knob in (but, "max_model_len"):  # which logs print where nobody set it
            continue
        flag, switch = f"--{argument.name.replace('_', '-')}", bool(argument.modes)
        saving = "off" if switch else None
        yield Spelling(knob, flag if switch else f"{flag} {{value}}", argument.name, saving=saving)


_FSDP_OFFLOAD = "FSDP(cpu_offload=CPUOffload(offload_params=True)), FSDP2: offload_policy=CPUOffloadPolicy()"

# fmt: off
TOOLS = (
    Tool("sglang", traces=("sglang", "--mem-fraction-static", "sgl_", "#running-req"), engine=True, spellings=(
        # Every release on record accepts it; its newer name exists from 0.5.16 on.
        Spelling("cuda_graphs", "--disable-cuda-graph", "disable_cuda_graph", saving="off"),
        Spelling("cuda_graphs", "--disable-cuda-graph", "disable_decode_cuda_graph", saving="off"),
        *_arguments(SGLANG, but="cuda_graphs"),
    )),
    Tool("vllm", traces=("vllm", "EngineCore", "gpu_memory_utilization", "cumem_allocator"), engine=True, spellings=(
        *_arguments(VLLM),
        Spelling("weights_backup", "", undo="sleep(level=2)   (the weights are sent or loaded anew at wake-up)"),
    )),
    Tool("tgi", traces=("text_generation_server", "text_generation_launcher", "text-generation-inference"), engine=True, spellings=(
        Spelling("memory_fraction", "--cuda-memory-fraction {value}", "cuda_memory_fraction"),
        Spelling("concurrency", "--max-batch-size {value}", "max_batch_size"),
        Spelling("max_batched_tokens", "--max-batch-prefill-tokens {value}", "max_batch_prefill_tokens"),
        Spelling("cuda_graphs", "--cuda-graphs 0"),
        Spelling("rollout_tensor_parallel", "--num-shard {value}", "num_shard"),
    )),
    Tool("llama.cpp", traces=("ggml_", "llama_model_load", "llama_context: "), engine=True, spellings=(
        Spelling("concurrency", "--parallel {value}", "n_parallel"),
        Spelling("max_batched_tokens", "--ubatch-size {value}", "n_ubatch"),
    )),
    Tool("tensorrt-llm", traces=("tensorrt_llm/", "[TRT-LLM]", "[TensorRT-LLM]"), engine=True, spellings=(
        Spelling("memory_fraction", "--kv_cache_free_gpu_memory_fraction {value}", "free_gpu_memory_fraction"),
        Spelling("concurrency", "--max_batch_size {value}", "max_batch_size"),
        Spelling("max_batched_tokens", "--max_num_tokens {value}", "max_num_tokens"),
        Spelling("rollout_tensor_parallel", "--tp_size {value}", "tp_size"),
    )),
    # The trainers of slime and its derivatives, in a log without their own modules; SGLang generates for them.
    Tool("slime or miles", traces=("TrainRayActor",), sleeps=True, spellings=(
        Spelling("memory_fraction", "--sglang-mem-fraction-static {value}", "sglang_mem_fraction_static"),
        Spelling("concurrency", "--sglang-max-running-requests {value}", "sglang_max_running_requests"),
        Spelling("sync_buffer", "--update-weight-buffer-size {value}", "update_weight_buffer_size"),
        Spelling("tokens_per_microbatch", "--max-tokens-per-gpu {value}", "max_tokens_per_gpu"),
        Spelling("logprob_chunk", "--log-probs-chunk-size {value}", "log_probs_chunk_size"),
    )),
    Tool("megatron", traces=("megatron/", "megatron.core", "Megatron"), spellings=(
        Spelling("microbatch_size", "--micro-batch-size {value}", "micro_batch_size"),
        Spelling("recompute", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "recompute_granularity"),
        Spelling("optimizer_offload", "--optimizer-cpu-offload --use-precision-aware-optimizer", "optimizer_cpu_offload", saving=True, undo="without --optimizer-cpu-offload"),
        Spelling("fused_kernels", "--cross-entropy-loss-fusion", "cross_entropy_loss_fusion", saving=True),
        Spelling("context_parallel", "--context-parallel-size {value}", "context_parallel_size"),
        Spelling("tensor_parallel", "--tensor-model-parallel-size {value}", "tensor_model_parallel_size"),
        Spelling("dataloader_workers", "--num-workers {value}", "num_workers"),
    )),
    Tool("deepspeed", traces=("deepspeed", "DeepSpeed", "zero_optimization"), spellings=(
        Spelling("microbatch_size", '"train_micro_batch_size_per_gpu": {value}', "train_micro_batch_size_per_gpu"),
        Spelling("optimizer_offload", '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}', undo='"zero_optimization": {"offload_optimizer": {"device": "none"}}'),
        Spelling("param_offload", '"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}'),
        Spelling("activation_offload", '"activation_checkpointing": {"cpu_checkpointing": true}'),
        Spelling("recompute", "model.gradient_checkpointing_enable()", "gradient_checkpointing", saving="full"),
    )),
    Tool("transformers", traces=("transformers/", "transformers.", "trl/", "accelerate/", "TrainingArguments"), spellings=(
        Spelling("microbatch_size", "per_device_train_batch_size={value}, gradient_accumulation_steps up by the same factor", "per_device_train_batch_size"),
        Spelling("recompute", "gradient_checkpointing=True", "gradient_checkpointing", saving="full"),
        Spelling("fused_kernels", "use_liger_kernel=True", "use_liger_kernel", saving=True),
        Spelling("param_offload", 'fsdp="full_shard auto_wrap offload"', "fsdp_offload_params", saving=True),
        Spelling("optimizer_offload", 'fsdp="full_shard auto_wrap offload"', "fsdp_offload_params", saving=True, undo='fsdp="full_shard auto_wrap"'),
        Spelling("dataloader_workers", "dataloader_num_workers={value}", "dataloader_num_workers"),
    )),
    Tool("fsdp", traces=("torch/distributed/fsdp", "fully_sharded_data_parallel", "FullyShardedDataParallel"), spellings=(
        Spelling("param_offload", _FSDP_OFFLOAD, "offload_params", saving=True),
        Spelling("optimizer_offload", _FSDP_OFFLOAD, "offload_params", saving=True),
        Spelling("recompute", "apply_activation_checkpointing(model)"),
    )),
)
# RL frameworks that `explain` recognizes and `launch` does not drive. Only the first one with a trace in the log
# answers, because its users cannot set the libraries below it directly; so a wrapper precedes what it wraps.
OTHER_FRAMEWORKS = (
    # Generators of images and videos, and their trainers.
    Tool("diffusers' training scripts", traces=("train_dreambooth", "train_text_to_image", "train_controlnet"), only=True, runs=("trl",), spellings=(
        Spelling("microbatch_size", "--train_batch_size {value}, --gradient_accumulation_steps up by the same factor"),
        Spelling("recompute", "--gradient_checkpointing", "gradient_checkpointing", saving="full"),
    )),
    Tool("diffusion training", traces=("flow_grpo", "ai-toolkit", "sd-scripts", "SimpleTuner", "finetrainers", "diffsynth/", "ddpo_trainer"), only=True, runs=("trl",), spellings=(
        Spelling("microbatch_size", ""),
        Spelling("recompute", ""),
    )),
    Tool("diffusion", traces=("diffusers/", "ComfyUI", "/comfy/", "invokeai/", "multimodal_gen", "vllm_omni/diffusion"), engine=True, only=True),
    # Engines in Rust.
    Tool("candle", traces=("candle_core::", "candle_nn::"), engine=True, only=True),
    Tool("prime-rl", traces=("prime_rl", "prime-rl", "    INFO Starting inference"), sleeps=True, spellings=(
        Spelling("recompute", "--trainer.model.ac.mode full"),
        Spelling("activation_offload", "--trainer.model.ac-offloading.max-inflight-activations 5"),
        Spelling("param_offload", "--trainer.model.fsdp-cpu-offload", undo="--no-trainer.model.fsdp-cpu-offload"),
        Spelling("reshard_after_forward", "--trainer.model.reshard-after-forward"),
        Spelling("logprob_chunk", "--trainer.model.fused-lm-head-token-chunk-size 1024"),
        Spelling("context_parallel", "--trainer.model.cp {value}"),
        Spelling("memory_fraction", "--inference.vllm.gpu-memory-utilization {value}"),
        Spelling("concurrency", "--orchestrator.concurrency.max-inflight {value}"),
        Spelling("cuda_graphs", "--inference.vllm.enforce-eager"),
        Spelling("rollout_tensor_parallel", "--inference.vllm.tensor-parallel-size {value}"),
    )),
    Tool("vime", traces=("vime/backends/", "vime/ray/", "vime/rollout/", "vime/utils/"), sleeps=True, spellings=(
        Spelling("tokens_per_microbatch", "--max-tokens-per-gpu {value}   (with --use-dynamic-batch-size)", "max_tokens_per_gpu"),
        Spelling("recompute", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "recompute_granularity"),
        Spelling("optimizer_offload", "--optimizer-cpu-offload --use-precision-aware-optimizer", "optimizer_cpu_offload", saving=True, undo="without --optimizer-cpu-offload"),
        Spelling("tensor_parallel", "--tensor-model-parallel-size {value}", "tensor_model_parallel_size"),
        Spelling("context_parallel", "--context-parallel-size {value}", "context_parallel_size"),
        Spelling("memory_fraction", "--vllm-gpu-memory-utilization {value}", "vllm_gpu_memory_utilization"),
        Spelling("concurrency", "--vllm-max-num-seqs {value}", "vllm_max_num_seqs"),
        Spelling("max_batched_tokens", "--vllm-max-num-batched-tokens {value}", "vllm_max_num_batched_tokens"),
        Spelling("cuda_graphs", "--vllm-enforce-eager"),
        Spelling("rollout_tensor_parallel", "--rollout-num-gpus-per-engine {value}", "rollout_num_gpus_per_engine"),
    )),
    Tool("roll", traces=("roll/pipeline", "roll/distributed", "roll.pipeline", "start_rlvr_pipeline", "start_agentic_pipeline"), sleeps=True, spellings=(
        Spelling("tokens_per_microbatch", "actor_train: {max_tokens_per_microbatch_in_train: {value}}   (with use_dynamic_batching_in_train)", "max_tokens_per_microbatch_in_train"),
        Spelling("logprob_tokens", "actor_train: {max_tokens_per_microbatch_in_infer: {value}}   (with use_dynamic_batching_in_infer)", "max_tokens_per_microbatch_in_infer"),
        Spelling("microbatch_size", "actor_train: {training_args: {per_device_train_batch_size: {value}}}, gradient_accumulation_steps up by the same factor", "per_device_train_batch_size"),
        Spelling("recompute", "actor_train: {strategy_args: {strategy_config: {recompute_granularity: full}}}", "recompute_granularity"),
        Spelling("memory_fraction", "actor_infer: {strategy_args: {strategy_config: {gpu_memory_utilization: {value}}}}   (SGLang, mem_fraction_static)", "gpu_memory_utilization"),
        Spelling("concurrency", "max_running_requests: {value}", "max_running_requests"),
        Spelling("param_offload", "actor_train: {strategy_args: {strategy_config: ${deepspeed_zero3_cpuoffload}}}   (with deepspeed_train)"),
        Spelling("optimizer_offload", "actor_train: {strategy_args: {strategy_config: ${deepspeed_zero3_cpuoffload}}}   (with deepspeed_train)"),
        Spelling("tensor_parallel", "actor_train: {strategy_args: {strategy_config: {tensor_model_parallel_size: {value}}}}"),
    )),
    Tool("rlinf", traces=("rlinf/", "rlinf.", "RLinf"), sleeps=True, spellings=(
        Spelling("tokens_per_microbatch", "runner.enable_dynamic_batch_size=True runner.max_tokens_per_mbs={value}", "max_tokens_per_mbs"),
        Spelling("microbatch_size", "algorithm.training_batch_size_per_gpu={value}", "training_batch_size_per_gpu"),
        Spelling("logprob_tokens", "algorithm.logprob_forward_micro_batch_size=1"),
        Spelling("param_offload", "actor.enable_offload=True", undo="actor.enable_offload=False"),
        Spelling("optimizer_offload", "actor.enable_offload=True", undo="actor.enable_offload=False"),
        Spelling("memory_fraction", "rollout.gpu_memory_utilization={value}", "gpu_memory_utilization"),
        Spelling("concurrency", "rollout.max_running_requests={value}", "max_running_requests"),
        Spelling("cuda_graphs", "rollout.cuda_graph_max_bs=16"),
    )),
    Tool("megatron-swift", traces=("swift/megatron", "swift/ray/megatron", "swift/cli/_megatron", "megatron rlhf"), runs=("trl", "ms-swift"), spellings=(
        Spelling("microbatch_size", "--micro_batch_size {value}", "micro_batch_size"),
        Spelling("recompute", "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1", "recompute_granularity"),
        Spelling("optimizer_offload", "--optimizer_cpu_offload true --use_precision_aware_optimizer true", "optimizer_cpu_offload", saving=True, undo="--optimizer_cpu_offload false"),
        Spelling("param_offload", "--offload_model true   (of GRPO, while it generates; --offload_optimizer true)", "offload_model", saving=True, undo="--offload_model false"),
        Spelling("tensor_parallel", "--tensor_model_parallel_size {value}", "tensor_model_parallel_size"),
        Spelling("context_parallel", "--context_parallel_size {value}", "context_parallel_size"),
        Spelling("memory_fraction", "--vllm_gpu_memory_utilization {value}", "vllm_gpu_memory_utilization"),
        Spelling("concurrency", "--vllm_max_num_seqs {value}", "vllm_max_num_seqs"),
        Spelling("cuda_graphs", "--vllm_enforce_eager true"),
        Spelling("rollout_tensor_parallel", "--vllm_tensor_parallel_size {value}"),
    )),
    Tool("llama-factory", traces=("llamafactory", "LLaMA-Factory", "llama_factory"), runs=("trl",), spellings=(
        Spelling("microbatch_size", "per_device_train_batch_size: {value}, gradient_accumulation_steps up by the same factor", "per_device_train_batch_size"),
        Spelling("fused_kernels", "enable_liger_kernel: true", "enable_liger_kernel", saving=True),
        Spelling("recompute", "disable_gradient_checkpointing: false"),
        Spelling("sharding", "deepspeed: examples/deepspeed/ds_z3_config.json"),
        Spelling("param_offload", "deepspeed: examples/deepspeed/ds_z3_offload_config.json"),
        Spelling("optimizer_offload", "deepspeed: examples/deepspeed/ds_z2_offload_config.json"),
    )),
    Tool("axolotl", traces=("axolotl", "memory/max_active (GiB)", "memory/device_reserved (GiB)", "memory/device_mem_reserved(gib)"), runs=("trl",), spellings=(
        Spelling("microbatch_size", "micro_batch_size: {value}, gradient_accumulation_steps up by the same factor", "micro_batch_size"),
        Spelling("recompute", "gradient_checkpointing: true", "gradient_checkpointing", saving="full"),
        Spelling("fused_kernels", "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]"),
        Spelling("sharding", "deepspeed: deepspeed_configs/zero3_bf16.json"),
        Spelling("param_offload", "fsdp_config: {offload_params: true}"),
    )),
    Tool("agilerl", traces=("agilerl/", "agilerl.", "AgileRL"), spellings=(
        Spelling("microbatch_size", "micro_batch_size_per_gpu={value}", "micro_batch_size_per_gpu"),
        Spelling("recompute", "gradient_checkpointing=True", "gradient_checkpointing", saving="full"),
        Spelling("fused_kernels", "use_liger_loss=True", "use_liger_loss", saving=True),
        Spelling("memory_fraction", "VLLMConfig(gpu_memory_utilization={value})", "gpu_memory_utilization"),
        Spelling("concurrency", "VLLMConfig(max_num_seqs={value})", "max_num_seqs"),
        Spelling("max_batched_tokens", "VLLMConfig(max_num_batched_tokens={value})", "max_num_batched_tokens"),
        Spelling("cuda_graphs", "VLLMConfig(enforce_eager=True)"),
        Spelling("rollout_tensor_parallel", "VLLMConfig(tensor_parallel_size={value})", "tensor_parallel_size"),
    )),
    Tool("unsloth", traces=("==((====))==", "Unsloth: ", "unsloth_compiled_cache", "unsloth_zoo", "unsloth/models/", "unsloth/kernels/", "unsloth/trainer"), runs=("trl",), spellings=(
        Spelling("microbatch_size", "per_device_train_batch_size={value}, gradient_accumulation_steps up by the same factor", "per_device_train_batch_size"),
        Spelling("recompute", 'use_gradient_checkpointing="unsloth"'),
        Spelling("memory_fraction", "gpu_memory_utilization={value}   (of FastLanguageModel.from_pretrained)", "gpu_memory_utilization"),
    )),
)
# Settings of the process rather than of a tool.
PROCESS = Tool("environment", spellings=(
    Spelling("allocator", "PYTORCH_ALLOC_CONF=expandable_segments:True   (before torch 2.9: PYTORCH_CUDA_ALLOC_CONF)"),
    Spelling("host_allocator", "LD_PRELOAD=libjemalloc.so.2"),
    Spelling("dataloader_workers", "DataLoader(num_workers={value})"),
))
# PyTorch's allocator on other devices, by the device's name in out-of-memory messages.
ALLOCATORS: Mapping[str, str] = {
    "HIP": "PYTORCH_HIP_ALLOC_CONF=expandable_segments:True   (ROCm builds of PyTorch before March 2026 ignore it)",
    "NPU": "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
    "XPU": "PYTORCH_ALLOC_CONF=expandable_segments:True   (before torch 2.10 it has no effect on XPU)",
}
# The command that lists the processes on a device, by the same name.
PROCESS_LISTS: Mapping[str, str] = {
    "": "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv",
    "HIP": "rocm-smi --showpids",
    "NPU": "npu-smi info",
    "XPU": "xpu-smi ps",
}
CEILINGS = (
    Ceiling("slurm", (Cause.HOST_OOM,), "#SBATCH --mem=...   (0: the whole node)", traces=("slurmstepd", "srun:", "SLURM_")),
    Ceiling("kubernetes", (Cause.HOST_OOM,), "resources.limits.memory", traces=("OOMKilled", "kubelet", "kubepods", "low on resource: memory")),
    Ceiling("docker", (Cause.HOST_OOM,), "docker run --memory=...", traces=("/docker-", "/docker/")),
    Ceiling("PBS", (Cause.HOST_OOM,), "#PBS -l select=1:mem=...", traces=("=>> PBS: ",)),
    Ceiling("LSF", (Cause.HOST_OOM,), "#BSUB -M ... and -R 'rusage[mem=...]'", traces=("TERM_MEMLIMIT",)),
    Ceiling("container", (Cause.HOST_OOM,), "resources.limits.memory, docker run --memory=..., or --mem of Slurm", traces=("memory.events", "cgroup oom_kill", "Memory cgroup out of memory")),
    Ceiling("systemd", (Cause.HOST_OOM,), "ManagedOOMMemoryPressureLimit= of the unit, or systemd-run --scope -p MemoryMax=...", traces=("systemd-oomd",)),
    Ceiling("ray", (Cause.OBJECT_STORE,), "ray start --object-store-memory=BYTES"),
    Ceiling("docker", (Cause.SHM,), "docker run --shm-size=64g; in Kubernetes an emptyDir of medium Memory at /dev/shm"),
)
# fmt: on
