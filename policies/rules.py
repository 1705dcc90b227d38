"""RULES: one row per failure signature, each with an example line."""

from __future__ import annotations

import re

from policies.types import Cause, Component, Phase, Value

ALWAYS, UNLESS_PROGRESS, NEVER = "always", "unless_progress", "never"


class Rule(Value, frozen=True, kw_only=True):
    """A signature; `needles` are literals of which one is in every line that the pattern matches."""

    name: str
    cause: Cause | None  # None: a consequence of something else, or harmless
    pattern: re.Pattern[str]
    fatal: str
    example: str
    needles: tuple[str, ...]
    phase: Phase = Phase.NONE  # where the signature itself says it
    component: Component = Component.UNKNOWN
    weak: bool = False  # says less than any other cause: a symptom that others may explain

    def matches(self, line: str) -> bool:
        """Return whether the line shows this signature."""
        return any(needle in line for needle in self.needles) and self.pattern.search(line) is not None


BUILTIN_FAILURE = "builtin-failure"


def _rule(
    name: str,
    cause: Cause | None,
    pattern: str,
    fatal: str,
    example: str,
    *needles: str,
    phase: Phase = Phase.NONE,
    component: Component = Component.UNKNOWN,
    weak: bool = False,
) -> Rule:
    return Rule(
        name=name,
        cause=cause,
        pattern=re.compile(pattern),
        fatal=fatal,
        example=example,
        needles=needles,
        phase=phase,
        component=component,
        weak=weak,
    )


_INIT, _ENGINE = Phase.ROLLOUT_INIT, Component.ROLLOUT

# The first row that matches a line wins: harmless and special wordings stand before general ones.
RULES: tuple[Rule, ...] = (
    # ---- the built-in job; the record carries its own cause
    _rule(BUILTIN_FAILURE, None, r"builtin: failure \{", ALWAYS,
          'builtin: failure {"schema":1,"cause":"gpu-oom","device":"cpu-budget","phase":"backward",'
          '"component":"trainer","rank":0,"step":3,"requested_bytes":1048576,"used_bytes":75000000,'
          '"budget_bytes":75497472,"message":"not enough memory","exception":"RuntimeError"}',
          "builtin: failure"),
    _rule("builtin-config-error", Cause.CONFIG, r"builtin: config error", ALWAYS,
          "builtin: config error: tokens_per_microbatch: must be at least 23; raise it", "builtin: config error"),
    # ---- harmless lines with tempting words
    _rule("retraction", None, r"#retracted_reqs|Out of memory even after retracting", NEVER,
          "[TP7] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.45 -> 0.47",
          "retract"),
    _rule("memory-saver-notice", None, r"may not be an issue|malloc return OOM since memory_margin_bytes", NEVER,
          "[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. torch retries)",
          "may not be an issue", "malloc return OOM"),
    _rule("graph-capture-advice", None, r"[Ii]f out-of-memory error occurs during cudagraph", NEVER,
          "INFO [model_runner.py:1442] Capturing cudagraphs for decoding. If out-of-memory error occurs during "
          "cudagraph capture, consider decreasing `gpu_memory_utilization` or switching to eager mode.",
          "ut-of-memory error occurs"),
    # ---- the engine's pool
    _rule("sglang-pool-too-small", Cause.POOL_TOO_SMALL,
          r"Not enough memory\. Please try to increase --mem-fraction|leave no GPU memory for the KV cache", ALWAYS,
          "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
          "Not enough memory", "leave no GPU memory", phase=_INIT, component=_ENGINE),
    _rule("vllm-pool-too-small", Cause.POOL_TOO_SMALL,
          r"No available memory for the cache blocks|larger than the maximum number of tokens that can be stored "
          r"in (the )?KV cache|larger than the available KV cache memory", ALWAYS,
          "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
          "initializing the engine.",
          "cache blocks", "KV cache", phase=_INIT, component=_ENGINE),
    _rule("sglang-request-slots", Cause.POOL_TOO_SMALL, r"alloc_req_slots runs out of memory", ALWAYS,
          "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for "
          "`--max-running-requests`.", "alloc_req_slots", phase=Phase.ROLLOUT, component=_ENGINE),
    _rule("kv-pool-dry", Cause.KV_POOL, r"(Decode|Prefill) out of memory\. Try to lower your batch size", ALWAYS,
          "Decode out of memory. Try to lower your batch size.", "out of memory",
          phase=Phase.ROLLOUT, component=_ENGINE),
    # ---- host memory
    _rule("ray-memory-monitor", Cause.HOST_OOM,
          r"node running low on memory|killed due to (host )?memory pressure|exceeds the memory usage threshold|"
          r"how to address the out of memory issue|ray\.exceptions\.OutOfMemoryError", ALWAYS,
          "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "emory"),
    _rule("kernel-oom-kill", Cause.HOST_OOM,
          r"oom-kill:constraint=|[Oo]ut of memory: Kill(ed)? process|Memory cgroup out of memory|"
          r"invoked oom-killer", ALWAYS,
          "[856341.770960] Out of memory: Killed process 410126 (python) total-vm:79905000kB, "
          "anon-rss:22957108kB", "oom-kill", "ut of memory"),
    _rule("cgroup-oom-event", Cause.HOST_OOM, r"autotune: cgroup oom_kill|memory\.events.*oom_kill [1-9]", ALWAYS,
          "memory.events: low 0 high 0 max 12 oom 1 oom_kill 1", "oom_kill"),
    _rule("slurm-oom-kill", Cause.HOST_OOM,
          r"[Dd]etected \d+ oom[-_]kill event|OOM Killed|tasks?\b.*: Out Of Memory", ALWAYS,
          "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step tasks have been OOM "
          "Killed.", "oom", "OOM Killed", "Out Of Memory"),
    _rule("kubernetes-oom-killed", Cause.HOST_OOM, r"\bOOMKilled\b", ALWAYS,
          "    reason: OOMKilled", "OOMKilled"),
    _rule("sglang-host-memory", Cause.HOST_OOM, r"Not enough host memory available", ALWAYS,
          "ValueError: Not enough host memory available. Requesting 40.00 GB but only have 44.87 GB free.",
          "Not enough host memory", phase=_INIT, component=_ENGINE),
    _rule("pinned-memory", Cause.HOST_OOM, r"failed to alloc \d+ bytes on host|cudaHostAlloc.*out of memory", ALWAYS,
          "failed to alloc 8589934592 bytes on host: CUDA_ERROR_OUT_OF_MEMORY", "bytes on host", "cudaHostAlloc"),
    _rule("cpu-allocator", Cause.HOST_OOM,
          r"DefaultCPUAllocator: (can't allocate|not enough) memory", UNLESS_PROGRESS,
          "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: "
          "you tried to allocate 359661568 bytes. Error code 12 (Cannot allocate memory)", "DefaultCPUAllocator"),
    _rule("host-memory-error", Cause.HOST_OOM,
          r"(^|\s|\.|\()_?(Array)?MemoryError\b(?!')|std::bad_alloc|Errno 12\] Cannot allocate memory",
          UNLESS_PROGRESS, "MemoryError: Unable to allocate 3.2 GiB for an array with shape (1, 2)",
          "MemoryError", "bad_alloc", "Cannot allocate memory"),
    # ---- device memory
    _rule("fsdp-clone-oom", Cause.GPU_OOM, r"state_dict.*Error: \w+ out of memory", UNLESS_PROGRESS,
          "UserWarning: Failed to clone() tensor with name lm_head.weight. This may mean that this state_dict entry "
          "could point to invalid memory regions. Error: CUDA out of memory. Tried to allocate 502.00 MiB",
          "state_dict", phase=Phase.CHECKPOINT, component=Component.TRAINER),
    _rule("nccl-oom", Cause.GPU_OOM,
          r"Cuda failure (2 )?'out of memory'|Failed to CUDA calloc|NCCL.*out of memory", UNLESS_PROGRESS,
          "node1:1004:1104 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
          "Cuda failure", "CUDA calloc", "NCCL", phase=Phase.COMM),
    _rule("memory-saver-oom", Cause.GPU_OOM,
          r"torch_memory_saver.*(error: 2 \(out of memory\)|result=2\b)|cudaError error: 2 \(out of memory\)",
          UNLESS_PROGRESS,
          "[torch_memory_saver.cpp] CUresult error: 2 (out of memory) file=csrc/utils.h func=cu_mem_create line=187",
          "torch_memory_saver", "cudaError error"),
    _rule("sleep-mode-oom", Cause.GPU_OOM, r"CUDA Error: out of memory at .*cumem", UNLESS_PROGRESS,
          "RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "cumem",
          phase=Phase.WEIGHT_SYNC, component=_ENGINE),
    _rule("ray-task-oom", Cause.GPU_OOM, r"RayTaskError\(OutOfMemoryError\)", UNLESS_PROGRESS,
          "ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.actor_rollout_update_actor() (pid=16438)",
          "RayTaskError(OutOfMemoryError)"),
    _rule("torch-cuda-oom", Cause.GPU_OOM,
          r"\b(CUDA|HIP|NPU|XPU|MLU|MUSA)\b (backend )?out of memory|MPS backend out of memory|"
          r"torch\.(cuda\.)?OutOfMemoryError|\bOutOfMemoryError[:(]", UNLESS_PROGRESS,
          "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.91 GiB. GPU 0 has a total capacity of "
          "79.11 GiB of which 8.85 GiB is free.", "out of memory", "OutOfMemoryError"),
    _rule("cuda-driver-oom", Cause.GPU_OOM,
          r"(CUDA|HIP) [Ee]rror: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|"
          r"AcceleratorError: .*out of memory", UNLESS_PROGRESS,
          "torch.AcceleratorError: CUDA error: out of memory", "rror: out of memory", "cudaErrorMemoryAllocation",
          "CUDA_ERROR_OUT_OF_MEMORY"),
    _rule("cublas-alloc", Cause.GPU_OOM,
          r"CU\w+_STATUS_ALLOC_FAILED|CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublasCreate", UNLESS_PROGRESS,
          "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
          "STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED"),
    # ---- on-chip memory is a kernel's own affair
    _rule("triton-resources", Cause.CODE, r"OutOfResources|out of resource: shared memory", UNLESS_PROGRESS,
          "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 66560, Hardware limit: "
          "65536.", "out of resource", "OutOfResources"),
    # ---- shared memory, object store, disk
    _rule("shm-full", Cause.SHM,
          r"[Bb]us error|No space left on device.*/dev/shm|/dev/shm.*No space left|failed to extend /dev/shm|"
          r"(insufficient|out of) shared memory", UNLESS_PROGRESS,
          "RuntimeError: DataLoader worker (pid 263230) is killed by signal: Bus error. It is possible that "
          "dataloader's workers are out of shared memory.", "us error", "/dev/shm", "shared memory"),  # noqa: S108
    _rule("object-store-full", Cause.OBJECT_STORE,
          r"ObjectStoreFullError|Failed to put object .* because it is full|object store is full", UNLESS_PROGRESS,
          "(remote_read pid=1225) plasma_store_provider.cc:122: Failed to put object 641e07 in object store because "
          "it is full. Object size is 219375455268 bytes.", "ObjectStoreFull", "is full"),
    _rule("disk-full", Cause.DISK,
          r"No space left on device|Errno 28\b|Disk quota exceeded|OutOfDiskError|PytorchStreamWriter failed|"
          r"failed with Input/output error", UNLESS_PROGRESS,
          "OSError: [Errno 28] No space left on device", "No space left", "Errno 28", "quota exceeded",
          "OutOfDiskError", "PytorchStreamWriter", "Input/output error"),
    _rule("disk-nearly-full", Cause.DISK, r"is over \d+% full, available space", UNLESS_PROGRESS,
          "/tmp/ray/session_1 is over 95% full, available space: 2.03779 GB; capacity: 69.9336 GB.",  # noqa: S108
          "% full", weak=True),
    # ---- the cluster
    _rule("node-lost", Cause.INFRASTRUCTURE,
          r"has been marked dead because|NodeDiedError|node .* (died|was lost)|DUE TO (NODE FAIL|PREEMPTION|TIME "
          r"LIMIT)|lost connection to (the )?(GCS|raylet)|Failed to connect to GCS", ALWAYS,
          "The node with node id: 9f and address: 10.0.0.2 has been marked dead because the detector has missed too "
          "many heartbeats from it.", "marked dead", "NodeDied", "node", "DUE TO", "GCS", "raylet"),
    _rule("hardware-fault", Cause.INFRASTRUCTURE, r"uncorrectable ECC|NVRM: Xid|GPU has fallen off the bus", ALWAYS,
          "RuntimeError: CUDA error: uncorrectable ECC error encountered", "ECC", "Xid", "off the bus"),
    _rule("port-in-use", Cause.INFRASTRUCTURE, r"EADDRINUSE|[Aa]ddress already in use", UNLESS_PROGRESS,
          "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
          "code: -98, name: EADDRINUSE, message: address already in use", "EADDRINUSE", "ddress already in use"),
    # ---- the job's own settings
    _rule("config-error", Cause.CONFIG,
          r"max_token_len must be greater than the sequence length|is larger than capacity|Could not override|"
          r"is not in struct|unrecognized arguments|ConfigAttributeError|less than total desired GPUs|"
          r"Error parsing override", UNLESS_PROGRESS,
          "AssertionError: max_token_len must be greater than the sequence length. Got max_token_len=1024 and "
          "max_seq_len=4096", "max_token_len", "larger than capacity", "Could not override", "not in struct",
          "unrecognized arguments", "ConfigAttributeError", "total desired GPUs", "parsing override"),
    # ---- the job's own code
    _rule("device-assert", Cause.CODE,
          r"device-side assert|illegal memory access|srcIndex < srcSelectDimSize|CheckpointError", UNLESS_PROGRESS,
          "RuntimeError: CUDA error: an illegal memory access was encountered", "device-side assert",
          "illegal memory access", "srcSelectDimSize", "CheckpointError"),
    # ---- consequences
    _rule("nccl-watchdog", None,
          r"[Ww]atchdog (caught|thread)|ProcessGroupNCCL.*(timeout|Timeout|terminated|failed or timed out)|"
          r"ncclUnhandledCudaError|ncclSystemError|ncclRemoteError|taking the entire process down|"
          r"NCCL WARN (Cuda failure|socketProgress)", UNLESS_PROGRESS,
          "[rank3]:[E ProcessGroupNCCL.cpp:1414] [PG 0 Rank 3] Process group watchdog thread terminated with "
          "exception: [Rank 3] Watchdog caught collective operation timeout", "atchdog", "NCCL", "nccl",
          "process down"),
    _rule("actor-died", None,
          r"ActorDiedError|RayActorError|ActorUnavailableError|WorkerCrashedError|A worker died or was killed|"
          r"worker process has died|Worker exit type|EngineDeadError|Engine core initialization failed|"
          r"Server process terminated unexpectedly", UNLESS_PROGRESS,
          "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
          "ActorDiedError", "RayActorError", "ActorUnavailable", "WorkerCrashed", "worker died", "worker process",
          "Worker exit", "EngineDeadError", "Engine core", "Server process"),
    _rule("ray-task-error", None, r"RayTaskError\(|RayTaskError:", UNLESS_PROGRESS,
          "ray.exceptions.RayTaskError(RuntimeError): ray::MegatronTrainRayActor.train() (pid=1001)", "RayTaskError"),
    _rule("sigquit", None, r"(?i:received sigquit|sigquit received)|Subprocess \S+ .*crashed with exit code",
          ALWAYS, "Received sigquit from a child process. It usually means the child failed.",
          "sigquit", "SIGQUIT", "crashed with exit"),
    _rule("killed", None,
          r"return code = ?-?9\b|return code -9\b|exitcode: -9\b|exit(ed with)? code 137|"
          r"killed by signal: Killed|^Killed$|sigkill_handler", UNLESS_PROGRESS,
          "[ERROR] failed (exitcode: -9) local_rank: 0 (pid: 438)", "-9", "137", "Killed", "sigkill_handler"),
    _rule("connection-closed", None,
          r"Connection (closed by|reset by) (remote )?peer|Socket recv failed|Broken pipe|ConnectionResetError|"
          r"ConnectionRefusedError", UNLESS_PROGRESS,
          "node1:1001:1101 [0] misc/socket.cc:49 NCCL WARN Connection closed by remote peer node2",
          "onnection", "Socket recv", "Broken pipe"),
    _rule("python-error", Cause.CODE,
          r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: .*|:)?$", UNLESS_PROGRESS,
          "ValueError: num_samples should be a positive integer value, but got num_samples=0", "Error", "Exception",
          weak=True),
)  # fmt: skip

BY_NAME = {rule.name: rule for rule in RULES}


def matching(line: str) -> Rule | None:
    """Return the first rule that a line, without its prefixes, shows."""
    for rule in RULES:
        if rule.matches(line):
            return rule
    return None
