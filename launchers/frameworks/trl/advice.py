"""Remedies in TRL's guide and issues on out-of-memory errors, checked against its code in 1.16.0."""

from autotune.launchers.base import Advice, Status

# fmt: off
ADVICE = (
    Advice("automatic batch size", "backward", "auto_find_batch_size: true", Status.IMPOSSIBLE,
        "GRPOTrainer refuses it, because a smaller batch would break the groups of samples of a prompt",
        instead="per_device_train_batch_size down, gradient_accumulation_steps up by the same factor"),
    Advice("reduce_mem_fraction", "rollout_init", "vllm_gpu_memory_utilization: 0.3", Status.WORKS,
        "vLLM's share of the card, weights and token pool together; only with use_vllm in the trainer's process",
        effect="vLLM's token pool, GPU", cost="generation throughput when fewer requests fit"),
    Advice("tensor_parallel", "rollout_init", "vllm_tensor_parallel_size: 2", Status.WORKS,
        "every engine is spread over that many processes",
        constraint="the size divides the number of processes and the model's heads",
        effect="weights and token pool of a card, GPU", cost="generation throughput"),
    Advice("max_model_len", "rollout_init", "vllm_max_model_length: 4096", Status.WORKS,
        "the pool must hold one sequence of that length; TRL's default is the model's own",
        constraint="at least the longest prompt and max_completion_length together, or prompts are refused",
        effect="least token pool, GPU", cost="nothing"),
    Advice("engine_sleep", "backward", "vllm_enable_sleep_mode: true", Status.WORKS,
        "vLLM gives its memory back while the trainer works, and weights are sent anew when it wakes",
        effect="vLLM's weights and token pool, GPU", cost="seconds of every step"),
    Advice("offload_optimizer", "optimizer", "offload_optimizer_device", Status.WORKS,
        "a flag of accelerate launch; with a DeepSpeed configuration the state stays in host memory",
        constraint="DeepSpeed only; results differ by rounding", effect="optimizer state, GPU; more host memory",
        cost="the optimizer's step"),
    Advice("offload_params", "init", "offload_param_device", Status.WORKS,
        "a flag of accelerate launch; with DeepSpeed's stage 3 weights stay in host memory between layers",
        constraint="DeepSpeed stage 3; with FSDP fsdp_offload_params", effect="weights, GPU; more host memory",
        cost="every pass"),
    Advice("fused_kernels", "forward", "use_liger_kernel: true", Status.IMPOSSIBLE,
        "before 1.15 its loss has another normaliser and no dapo; since then the trainer has a fused head of its own"),
    Advice("empty the cache", "any", "torch_empty_cache_steps: 1", Status.WORKS,
        "the cached blocks of one phase do not stand in the way of the next",
        effect="fragments, GPU", cost="about a tenth of a step"),
    Advice("shorter answers", "any", "max_completion_length: 256", Status.IMPOSSIBLE,
        "it changes what is trained"),
    Advice("fewer generations", "any", "num_generations: 4", Status.IMPOSSIBLE,
        "it changes what is trained"),
)
# fmt: on
