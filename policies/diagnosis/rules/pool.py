"""Signatures of the engines' memory pools, and harmless lines that resemble failures."""

from __future__ import annotations

from autotune.policies.diagnosis.log_prefixes import SAMPLED
from autotune.policies.diagnosis.rules.rule import ALWAYS, NEVER, UNLESS_PROGRESS, Rule
from autotune.policies.values.failure import Cause, Component, Phase

HARMLESS: tuple[Rule, ...] = (
    Rule(
        "retraction",
        None,
        r"#retracted_reqs|is preempted by PreemptionMode|"
        r"Decode out of memory happened",
        NEVER,
        "[TP7] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.45 -> 0.47",
        harmless=True,
    ),
    Rule(
        "sampled-text",
        None,
        SAMPLED
        + r".*(?:[Oo]ut of [Mm]emory|OutOfMemory|MemoryError|OOM|[Kk]illed|No space left|annot allocate)",
        NEVER,
        "First rollout sample: ['<|im_start|>user\\nWhat does torch.OutOfMemoryError: CUDA out of memory. "
        "Tried to allocate 20.00 GiB mean?<|im_end|>'], reward: 0.5",
        harmless=True,
    ),
    Rule(
        "memory-saver-notice",
        None,
        r"may not be an issue|malloc return OOM since",
        NEVER,
        "[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. "
        "torch retries)",
        harmless=True,
    ),
    Rule(
        "graph-capture-advice",
        None,
        r"[Ii]f out-of-memory error occurs during cudagraph|^(?!.*(?:Tried to allocate|Error: )).*"
        r"[Ii]f you (?:see|hit|get|run into|encounter) .{0,40}(?:OOM|out[- ]of[- ]memory)",
        NEVER,
        "INFO [model_runner.py:1442] Capturing cudagraphs for decoding. If out-of-memory error "
        "occurs during cudagraph capture, consider decreasing `gpu_memory_utilization` or "
        "switching to eager mode.",
        harmless=True,
    ),
    # A compiler that benchmarks kernels reports and drops those that exceed the GPU's resources.
    Rule(
        "autotune-choice",
        None,
        r"^(?:\[\w+/\w+\] )?No valid triton configs|Ignoring this choice|for benchmark choice",
        NEVER,
        "No valid triton configs. OutOfMemoryError: out of resource: triton_mm Required: 196608 Hardware "
        "limit: 163840 Reducing block sizes or `num_stages` may help.",
        harmless=True,
    ),
)

POOL: tuple[Rule, ...] = (
    Rule(
        "sglang-pool-too-small",
        Cause.POOL_TOO_SMALL,
        r"Not enough memory\. Please try (?:to increase|increasing) (?:the )?[`'\"]?-{0,2}mem[-_]fraction|"
        r"leave no GPU memory for the KV cache|larger than the profiled value -\d|"
        r"leaves no room for the full KV pool|cannot fit ONE worst-case request|"
        r"Not enough GPU memory for hybrid|state cache is too small to serve any|"
        r"Error: Memory pool size is too small",
        ALWAYS,
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
    ),
    Rule(
        "vllm-pool-too-small",
        Cause.POOL_TOO_SMALL,
        r"No available memory for the cache blocks|larger than the maximum number of tokens that "
        r"can be stored in (the )?KV cache|larger than the available KV cache memory|"
        r"exceeds available Mamba cache blocks",
        ALWAYS,
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine.",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
    ),
    Rule(
        "engine-pool-too-small",
        Cause.POOL_TOO_SMALL,
        r"maxTokensInPagedKvCache \(\d+\) must be large enough|No enough gpu memory for kv cache|"
        r"exceeds the KV cache manager's maximum supported length|Insufficient memory to allocate KV-caches|"
        r"[Nn]ot enough (?:GPU )?memory (?:to allocate|for) (?:the )?(?:\w+ )?(?:KV|kv) ?cache",
        ALWAYS,
        "[TensorRT-LLM][ERROR] Assertion failed: maxTokensInPagedKvCache (2048) must be large enough to "
        "process at least 1 sequence to completion",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
    ),
    Rule(
        "sglang-request-slots",
        Cause.POOL_TOO_SMALL,
        r"alloc_req_slots runs out of memory|Out of memory\. Please set a smaller number for",
        ALWAYS,
        "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for "
        "`--max-running-requests`.",
        phase=Phase.ROLLOUT,
        component=Component.ROLLOUT,
    ),
    Rule(
        "kv-pool-dry",
        Cause.KV_POOL,
        r"(?i:out of memory)\. Try to lower your batch size|Error: KV cache is full! Bug in memory|"
        r"Error: (?:Can ?not alloc|Not enough space for) mamba|Cannot get \d+ free blocks from the pool|"
        r"Error: No free blocks are available|No free blocks (?:left|remain)|list has no GPU blocks|"
        r"Out of available cache blocks: asked|failed to decode the batch: KV cache is full|"
        r"Aborted due to the lack of CPU swap space|Not enough free blocks in the KV-cache|"
        r"failed to find a memory slot for batch of size",
        ALWAYS,
        "Decode out of memory. Try to lower your batch size.",
        phase=Phase.ROLLOUT,
        component=Component.ROLLOUT,
    ),
    # SGLang aborts a request that exceeds the whole pool, and continues to serve the others.
    Rule(
        "sglang-request-aborted",
        Cause.KV_POOL,
        r"Out of memory even after retracting|aborted last request .{1,80} due to OOM",
        UNLESS_PROGRESS,
        "Out of memory even after retracting all other requests in the decode batch. "
        "Aborting the last request.",
        phase=Phase.ROLLOUT,
        component=Component.ROLLOUT,
    ),
    # ---- refused before a pool exists: the GPU is too full, a smaller pool would fit
    Rule(
        "vllm-startup-memory",
        Cause.GPU_OOM,
        r"Free memory on device .*less than desired GPU memory utilization|"
        r"Executor creation failed due to insufficient GPU memory|"
        r"Failed to load model - not enough GPU memory",
        ALWAYS,
        "ValueError: Free memory on device (11.5/79.15 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 71.24 GiB). Decrease GPU memory utilization or reduce GPU memory used by other "
        "processes.",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
    ),
    Rule(
        "vllm-sampler-warmup",
        Cause.GPU_OOM,
        r"out of memory occurred when warming up (?:sampler|pooler)|"
        r"Not enough memory to handle \d+ prefill tokens|"
        r"No enough gpu memory for runtime|Insufficient GPU memory error: ",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please "
        "try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
    ),
)
