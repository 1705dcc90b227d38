"""Hints selected by the phase of a failure and the lines around it."""

from __future__ import annotations

from autotune.policies.values.failure import Phase
from autotune.policies.values.value import Value


class Hint(Value, frozen=True, kw_only=True):
    """One thing to do, as a sentence."""

    text: str
    leads: bool = False  # it precedes the remedies


_FOREACH = "_multi_tensor_|_foreach_"
_HUGGING_FACE = (
    r"transformers/|accelerate/|\btrl/|swift/|llamafactory/"  # their trainers select the optimizer by name
)
_FUSED = "use a fused optimizer, which keeps no copies of the parameters while it steps"
_GATHERED = r"nested_concat|torch_pad_and_concatenate"
# (phase, pattern of the lines around the failure, hint) for failures of GPU memory; None: in any phase.
ON_GPU: tuple[tuple[Phase | None, str, Hint], ...] = (
    (
        None,
        _GATHERED,
        Hint(
            text="keep the predictions of an evaluation in host memory (eval_accumulation_steps), or of "
            "their logits only what the metric reads (preprocess_logits_for_metrics)",
            leads=True,
        ),
    ),
    (
        None,
        rf"(?s)\A(?!.*(?:{_GATHERED})).*\bin (?:prediction_step|evaluation_loop)\b",
        Hint(text="lower the batch of evaluations (per_device_eval_batch_size)", leads=True),
    ),
    (
        None,
        r"\bin (?:merge_and_unload|get_delta_weight)\b",
        Hint(text='merge the adapter in host memory (load the model with device_map="cpu")', leads=True),
    ),
    (
        None,
        r"\bin \w*prompt_logprobs\w*",
        Hint(
            text="ask for no log-probabilities of prompts (prompt_logprobs), or prefill fewer tokens at once "
            "(--max-num-batched-tokens): each token of a prompt takes a row as wide as the vocabulary",
            leads=True,
        ),
    ),
    (
        None,
        r"allocate (?:buffer for kv cache|compute \w*\s?buffers)|llama_\w+_model: failed to init",
        Hint(
            text="serve a shorter context (--ctx-size), store the KV cache in fewer bits (--cache-type-k and "
            "--cache-type-v q8_0), or leave layers in host memory (fewer --n-gpu-layers)",
            leads=True,
        ),
    ),
    (
        None,
        r"NPUWorkspaceAllocator",
        Hint(
            text="set TASK_QUEUE_ENABLE=1: its level 2 lets operators keep workspaces of their own",
            leads=True,
        ),
    ),
    (
        None,
        r"maxPrefillTokens",
        Hint(
            text="lower maxPrefillTokens in config.json of mindie-service, which its warm-up fills",
            leads=True,
        ),
    ),
    (
        None,
        r"torch/cuda/__init__\.py\S*, line \d+, in (?:set_device|_lazy_init)\b",
        Hint(
            text="see which processes hold this GPU (`nvidia-smi`, `rocm-smi`): this one had asked for "
            "nothing yet",
            leads=True,
        ),
    ),
    (
        Phase.COMM,
        r"symmetric heap|nvshmem setup heap",
        Hint(text="lower NVSHMEM_SYMMETRIC_SIZE, the heap that each process reserves", leads=True),
    ),
    (
        Phase.OPTIMIZER,
        rf"(?s)(?:{_HUGGING_FACE}).*(?:{_FOREACH})",
        Hint(text=f"{_FUSED} (optim=adamw_torch_fused)", leads=True),
    ),
    (
        Phase.OPTIMIZER,
        rf"(?s)\A(?!.*(?:{_HUGGING_FACE})).*(?:{_FOREACH})",
        Hint(text=f"{_FUSED} (fused=True of torch.optim.AdamW)"),
    ),
    (
        Phase.CHECKPOINT,
        r"async_(?:save|utils)|AsyncRequest|async-save",
        Hint(text="save synchronously: an asynchronous save keeps a copy of what it writes", leads=True),
    ),
    (
        Phase.CHECKPOINT,
        r"gather_object|broadcast_object",
        Hint(text="gather the plan of the checkpoint with gloo: NCCL puts it on the GPUs first", leads=True),
    ),
    (
        Phase.CHECKPOINT,
        r"\bin _?load_(?:checkpoint|state_dict|optimizer\w*)\b|torch\.load\(|oading distributed checkpoint",
        Hint(
            text='load the checkpoint into host memory first (torch.load with map_location="cpu")', leads=True
        ),
    ),
    (
        Phase.COMM,
        r"HCCL|hccl",
        Hint(
            text="lower HCCL_BUFFSIZE (megabytes; 200 unless set): each communicator keeps two such buffers",
            leads=True,
        ),
    ),
    (
        Phase.CHECKPOINT,
        r"full_state_dict|FULL_STATE_DICT|consolidat|16bit_model|gather(?!_object)",
        Hint(
            text="save shards instead of a state dict that is gathered on one rank, or move it to the host",
            leads=True,
        ),
    ),
)
# The same for failures of host memory; None: in any phase.
ON_HOST: tuple[tuple[Phase | None, str, Hint], ...] = (
    (
        Phase.CHECKPOINT,
        r"full_state_dict|FULL_STATE_DICT|consolidat|16bit_model|gather|hf_model",
        Hint(text="save shards alone: a whole model is gathered in the host memory of one rank", leads=True),
    ),
    (
        Phase.CHECKPOINT,
        r"dist_checkpointing|filesystem_async|preload_tensors|torch_dist",
        Hint(
            text="let every data-parallel rank save a part (Megatron: --ckpt-fully-parallel-save), or use "
            "nodes with more memory: each rank stages all that it saves before it writes",
            leads=True,
        ),
    ),
    (
        None,
        r"routed_experts|rout(?:ing|er)_replay|fill_rout",
        Hint(
            text="use more nodes, or nodes with more memory: router replay keeps the experts of every token "
            "and layer in the driver, the object store and the trainers; without it training is another",
            leads=True,
        ),
    ),
    (
        None,
        r"(?i)in_?flight|(?:replay|data|rollout)_?(?:buffer|queue)|buffer\.(?:py|append)|buffer_size",
        Hint(
            text="lower how many samples are in flight or wait in a buffer (max_inflight, a buffer size): "
            "they stay in host memory until they are trained; your choice: fewer are of newer weights too",
            leads=True,
        ),
    ),
    (
        None,
        r"kv_offload|lmcache|LMCache|memory_pool_host|hierarchical KV cache",
        Hint(
            text="keep a smaller KV cache in host memory (vLLM: cpu_bytes_to_use, SGLang: --hicache-size or "
            "--hicache-ratio, LMCache: max_local_cpu_size), of each process on the node",
            leads=True,
        ),
    ),
    (
        None,
        r"unable to mmap \d+ bytes from file",
        Hint(
            text="let the program map the whole file: raise `ulimit -v` and the container's memory limit, or "
            "set vm.overcommit_memory=1",
            leads=True,
        ),
    ),
    (
        None,
        r"ArrowMemoryError|pyarrow",
        Hint(text="read the data in smaller batches, or stream it (streaming=True)", leads=True),
    ),
    (
        None,
        r"CachingHostAllocator|cudaHostAlloc|cudaHostRegister|pin_memory|(?<!un)pinned",
        Hint(
            text="stop the rounding of page-locked blocks to powers of two: "
            "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64 of the trainer alone, if its PyTorch has it"
        ),
    ),
)


# Hints for engines that request too much host memory at start-up, by the rule that matched.
OF_ENGINES = {
    "sglang-host-memory": "lower what the engine keeps in host memory (SGLang: --hicache-size or "
    "--hicache-ratio, of each of its processes), or serve a smaller model",
    "vllm-swap-space": "lower --swap-space, the host memory of each GPU for requests that wait",
}
