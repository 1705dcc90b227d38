"""Signatures of memory: the built-in job's record, harmless wordings, pools, host and device memory."""

from __future__ import annotations

from policies.rule import ALWAYS, BUILTIN_FAILURE, NEVER, UNLESS_PROGRESS, Rule, row
from policies.types import Cause, Component, Phase

MEMORY: tuple[Rule, ...] = (
    # ---- the built-in job; the record carries its own cause
    row(
        BUILTIN_FAILURE,
        None,
        r"builtin: failure \{",
        ALWAYS,
        'builtin: failure {"schema":1,"cause":"gpu-oom","device":"cpu-budget","phase":"backward",'
        '"component":"trainer","rank":0,"step":3,"requested_bytes":1048576,"used_bytes":75000000,'
        '"budget_bytes":75497472,"message":"not enough memory","exception":"RuntimeError"}',
        "builtin: failure",
    ),
    row(
        "builtin-config-error",
        Cause.CONFIG,
        r"builtin: config error",
        ALWAYS,
        "builtin: config error: tokens_per_microbatch: must be at least 23; raise it",
        "builtin: config error",
    ),
    # ---- harmless lines with tempting words
    row(
        "retraction",
        None,
        r"#retracted_reqs|Out of memory even after retracting",
        NEVER,
        "[TP7] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.45 -> 0.47",
        "retract",
        harmless=True,
    ),
    row(
        "memory-saver-notice",
        None,
        r"may not be an issue|malloc return OOM since memory_margin_bytes",
        NEVER,
        "[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. "
        "torch retries)",
        "may not be an issue",
        "malloc return OOM",
        harmless=True,
    ),
    row(
        "graph-capture-advice",
        None,
        r"[Ii]f out-of-memory error occurs during cudagraph",
        NEVER,
        "INFO [model_runner.py:1442] Capturing cudagraphs for decoding. If out-of-memory error "
        "occurs during cudagraph capture, consider decreasing `gpu_memory_utilization` or "
        "switching to eager mode.",
        "ut-of-memory error occurs",
        harmless=True,
    ),
    # ---- the engine's pool
    row(
        "sglang-pool-too-small",
        Cause.POOL_TOO_SMALL,
        r"Not enough memory\. Please try to increase --mem-fraction|leave no GPU memory for the "
        r"KV cache",
        ALWAYS,
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "Not enough memory",
        "leave no GPU memory",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
    ),
    row(
        "vllm-pool-too-small",
        Cause.POOL_TOO_SMALL,
        r"No available memory for the cache blocks|larger than the maximum number of tokens that "
        r"can be stored in (the )?KV cache|larger than the available KV cache memory",
        ALWAYS,
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine.",
        "emory",
        "larger than",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
    ),
    row(
        "sglang-request-slots",
        Cause.POOL_TOO_SMALL,
        r"alloc_req_slots runs out of memory",
        ALWAYS,
        "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for "
        "`--max-running-requests`.",
        "emory",
        phase=Phase.ROLLOUT,
        component=Component.ROLLOUT,
    ),
    row(
        "kv-pool-dry",
        Cause.KV_POOL,
        r"(Decode|Prefill) out of memory\. Try to lower your batch size",
        ALWAYS,
        "Decode out of memory. Try to lower your batch size.",
        "out of memory",
        phase=Phase.ROLLOUT,
        component=Component.ROLLOUT,
    ),
    # ---- host memory
    row(
        "ray-memory-monitor",
        Cause.HOST_OOM,
        r"node running low on memory|killed due to (host )?memory pressure|exceeds the memory "
        r"usage threshold|how to address the out of memory issue|ray\.exceptions\.OutOfMemoryError",
        ALWAYS,
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "emory",
    ),
    row(
        "kernel-oom-kill",
        Cause.HOST_OOM,
        r"oom-kill:constraint=|[Oo]ut of memory: Kill(ed)? process|Memory cgroup out of memory|"
        r"invoked oom-killer",
        ALWAYS,
        "[856341.770960] Out of memory: Killed process 410126 (python) total-vm:79905000kB, "
        "anon-rss:22957108kB",
        "oom-kill",
        "ut of memory",
    ),
    row(
        "cgroup-oom-event",
        Cause.HOST_OOM,
        r"autotune: cgroup oom_kill|memory\.events.*oom_kill [1-9]",
        ALWAYS,
        "memory.events: low 0 high 0 max 12 oom 1 oom_kill 1",
        "oom_kill",
    ),
    row(
        "slurm-oom-kill",
        Cause.HOST_OOM,
        r"[Dd]etected \d+ oom[-_]kill event|OOM Killed|tasks?\b.*: Out Of Memory",
        ALWAYS,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step tasks "
        "have been OOM Killed.",
        "oom_kill",
        "oom-kill",
        "OOM Killed",
        "Out Of Memory",
    ),
    row(
        "kubernetes-oom-killed",
        Cause.HOST_OOM,
        r"\bOOMKilled\b",
        ALWAYS,
        "    reason: OOMKilled",
        "OOMKilled",
    ),
    row(
        "sglang-host-memory",
        Cause.HOST_OOM,
        r"Not enough host memory available",
        ALWAYS,
        "ValueError: Not enough host memory available. Requesting 40.00 GB but only have 44.87 GB free.",
        "Not enough host memory",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
    ),
    row(
        "pinned-memory",
        Cause.HOST_OOM,
        r"failed to alloc \d+ bytes on host|cudaHostAlloc.*out of memory",
        ALWAYS,
        "failed to alloc 8589934592 bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
        "bytes on host",
        "emory",
    ),
    row(
        "cpu-allocator",
        Cause.HOST_OOM,
        r"DefaultCPUAllocator: (can't allocate|not enough) memory",
        UNLESS_PROGRESS,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 359661568 bytes. Error code 12 (Cannot allocate "
        "memory)",
        "emory",
    ),
    row(
        "host-memory-error",
        Cause.HOST_OOM,
        r"(^|\s|\.|\()_?(Array)?MemoryError\b(?!')|std::bad_alloc|Errno 12\] Cannot allocate "
        r"memory",
        UNLESS_PROGRESS,
        "MemoryError: Unable to allocate 3.2 GiB for an array with shape (1, 2)",
        "emory",
        "MemoryError",
        "bad_alloc",
    ),
    # ---- device memory
    row(
        "fsdp-clone-oom",
        Cause.GPU_OOM,
        r"state_dict.*Error: \w+ out of memory",
        UNLESS_PROGRESS,
        "UserWarning: Failed to clone() tensor with name lm_head.weight. This may mean that this "
        "state_dict entry could point to invalid memory regions. Error: CUDA out of memory. "
        "Tried to allocate 502.00 MiB",
        "emory",
        phase=Phase.CHECKPOINT,
        component=Component.TRAINER,
    ),
    row(
        "nccl-oom",
        Cause.GPU_OOM,
        r"Cuda failure (2 )?'out of memory'|Failed to CUDA calloc|NCCL.*out of memory",
        UNLESS_PROGRESS,
        "node1:1004:1104 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
        "emory",
        "CUDA calloc",
        phase=Phase.COMM,
    ),
    row(
        "memory-saver-oom",
        Cause.GPU_OOM,
        r"torch_memory_saver.*(error: 2 \(out of memory\)|result=2\b)|cudaError error: 2 \(out of "
        r"memory\)",
        UNLESS_PROGRESS,
        "[torch_memory_saver.cpp] CUresult error: 2 (out of memory) file=csrc/utils.h "
        "func=cu_mem_create line=187",
        "emory",
        "rror",
    ),
    row(
        "sleep-mode-oom",
        Cause.GPU_OOM,
        r"CUDA Error: out of memory at .*cumem",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        "emory",
        phase=Phase.WEIGHT_SYNC,
        component=Component.ROLLOUT,
    ),
    row(
        "ray-task-oom",
        Cause.GPU_OOM,
        r"RayTaskError\(OutOfMemoryError\)",
        UNLESS_PROGRESS,
        "ray.exceptions.RayTaskError(OutOfMemoryError): "
        "ray::WorkerDict.actor_rollout_update_actor() (pid=16438)",
        "rror",
    ),
    row(
        "torch-cuda-oom",
        Cause.GPU_OOM,
        r"\b(CUDA|HIP|NPU|XPU|MLU|MUSA)\b (backend )?out of memory|MPS backend out of memory|"
        r"torch\.(cuda\.)?OutOfMemoryError|\bOutOfMemoryError[:(]",
        UNLESS_PROGRESS,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.91 GiB. GPU 0 has a "
        "total capacity of 79.11 GiB of which 8.85 GiB is free.",
        "emory",
    ),
    row(
        "cuda-driver-oom",
        Cause.GPU_OOM,
        r"(CUDA|HIP) [Ee]rror: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|"
        r"AcceleratorError: .*out of memory",
        UNLESS_PROGRESS,
        "torch.AcceleratorError: CUDA error: out of memory",
        "emory",
        "MemoryAllocation",
        "OUT_OF_MEMORY",
    ),
    row(
        "cublas-alloc",
        Cause.GPU_OOM,
        r"CU\w+_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublasCreate",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "_STATUS_",
    ),
)
