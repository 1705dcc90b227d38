"""Signatures of failures of the job's settings and code, and of consequences of other failures."""

from __future__ import annotations

from autotune.policies.diagnosis.rules.rule import ALWAYS, NEVER, UNLESS_PROGRESS, Rule
from autotune.policies.values.failure import Cause, Component, Phase

JOB: tuple[Rule, ...] = (
    # ---- on-chip memory, which only the kernel's code determines
    Rule(
        "triton-resources",
        Cause.CODE,
        r"OutOfResources|out of resource: shared memory",
        UNLESS_PROGRESS,
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 66560, "
        "Hardware limit: 65536.",
        what="a kernel asks for more on-chip memory than the GPU has",
        hint="the memory of the card is not full: use another kernel or attention backend, or a release of "
        "it that knows this GPU",
    ),
    # ---- the job's own settings
    # The allocators of sleeping engines replace PyTorch's, and refuse its expandable segments.
    Rule(
        "expandable-refused",
        Cause.CONFIG,
        r"[Ee]xpandable segments are not compatible with|expandable_segments is not supported yet",
        UNLESS_PROGRESS,
        "AssertionError: Expandable segments are not compatible with memory pool. Please track "
        "https://github.com/pytorch/pytorch/issues/147851 for the latest updates.",
        what="an engine that sleeps refuses expandable segments",
        hint="take `expandable_segments:True` out of PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF where "
        "the engine runs; a trainer in processes of its own may keep it",
    ),
    Rule(
        "ipc-refused",
        Cause.CONFIG,
        r"\bpidfd_(?:open|getfd)\b",
        UNLESS_PROGRESS,
        "RuntimeError: pidfd_getfd: Operation not permitted",
        what="the container or the kernel does not let processes share GPU memory in expandable segments",
        hint="start the container with `--cap-add=SYS_PTRACE`, or set expandable_segments:False where "
        "tensors are shared with other processes",
    ),
    Rule(
        "config-error",
        Cause.CONFIG,
        r"max_token_len must be greater than the sequence length|is larger than capacity|Could "
        r"not override|is not in struct|unrecognized arguments|ConfigAttributeError|"
        r"Error parsing override|: error: argument --|MissingMandatoryValue|"
        r"Missing mandatory value|"
        r"ConfigKeyError|AllocationValidationError|Unknown scheduler type|Please set at least one of",
        UNLESS_PROGRESS,
        "AssertionError: max_token_len must be greater than the sequence length. Got "
        "max_token_len=1024 and max_seq_len=4096",
    ),
    Rule(
        "config-model",
        Cause.CONFIG,
        r"trying to access a gated repo|GatedRepoError|RepositoryNotFoundError|"
        r"is not a local folder and is not a valid "
        r"model identifier|must be divisible by (?:the )?(?:tensor|pipeline|number|world|sequence|data)|"
        r"is greater than the derived max_model_len|must be between 0 and 1|"
        r"CUDA error: invalid device ordinal",
        UNLESS_PROGRESS,
        "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).",
    ),
    Rule(
        "object-store-refused",
        Cause.CONFIG,
        r"to cap object store memory usage at \d+ bytes, but",
        UNLESS_PROGRESS,
        "ValueError: Attempting to cap object store memory usage at 62914560 bytes, but the minimum "
        "allowed is 78643200 bytes.",
        what="Ray cannot start: its object store is set too small",
        hint="raise object_store_memory (`ray start --object-store-memory=BYTES`) to what is allowed, "
        "or leave it out; a container then needs as much /dev/shm (--shm-size)",
    ),
    Rule(
        "process-limit",
        Cause.CONFIG,
        r"can't start new thread|pthread_create failed|RLIMIT_NPROC|"
        r"(?:BlockingIOError: \[Errno \d\d\]|fork(?: failed)?:(?: retry:)?) Resource temporarily unavailable",
        UNLESS_PROGRESS,
        "RuntimeError: can't start new thread",
        weak=True,
        what="no more threads or processes are allowed",
        hint="raise the limit (`ulimit -u`; of a container, its limit of pids), or start fewer: data loader "
        "workers, OMP_NUM_THREADS, concurrent environments and rewards",
    ),
    Rule(
        "open-files",
        Cause.CONFIG,
        r"Too many open files|received \d+ items of ancdata",
        UNLESS_PROGRESS,
        "OSError: [Errno 24] Too many open files",
        weak=True,
        what="no more open files are allowed",
        hint="raise the limit (`ulimit -n 1048576`); of data loaders, also "
        'torch.multiprocessing.set_sharing_strategy("file_system")',
    ),
    Rule(
        "locked-memory",
        Cause.CONFIG,
        r"\bibv_(?:reg_mr|create_cq|create_qp|alloc_pd)\w*\b.{0,120}Cannot allocate memory|"
        r"set max locked memory \(ulimit -l\)",
        UNLESS_PROGRESS,
        "misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        what="too little memory may be locked for InfiniBand",
        hint="raise the limit of locked memory (`ulimit -l unlimited`; docker run --ulimit memlock=-1; "
        "LimitMEMLOCK=infinity of the service that starts the job, such as slurmd)",
    ),
    Rule(
        "engine-workspace",
        Cause.CONFIG,
        r"Failed to allocate memory for \w+ with size \d+ and alignment \d+ in AlignedAllocator",
        UNLESS_PROGRESS,
        "RuntimeError: Failed to allocate memory for batch_prefill_tmp_v with size 435814400 and alignment "
        "16 in AlignedAllocator",
        what="the workspace of the engine's attention kernels is too small",
        hint="raise it, in bytes (SGLang: SGLANG_FLASHINFER_WORKSPACE_SIZE, in older releases "
        "FLASHINFER_WORKSPACE_SIZE; vLLM: VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE), or prefill fewer tokens at "
        "once",
    ),
    # CANN reports missing streams and queues of a captured graph in the same words as missing memory.
    Rule(
        "acl-graph-resources",
        Cause.CONFIG,
        r"AclmdlRICapture\w+\(.{0,80}error code is 20700[3-5]\b",
        UNLESS_PROGRESS,
        "RuntimeError: NPU function error: c10_npu::acl::AclmdlRICaptureBegin(stream, capture_mode), "
        "error code is 207005",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
        what="the NPU has no streams or models left for another captured graph",
        hint="capture fewer graphs (cudagraph_capture_sizes of --compilation-config), or none "
        "(--enforce-eager), and end other engines on this NPU",
    ),
    # ---- the job's own code
    Rule(
        "device-assert",
        Cause.CODE,
        r"device-side assert|illegal memory access|srcIndex < srcSelectDimSize|NVRM: Xid|"
        r"\b(?:aicore|aivec(?:tor)?(?: core)?|vector core) (?:error|exception)|error code is 5070[13]5\b|"
        r"(?:CUDA|HIP) error(?: \([^)]{1,300}\))?: (?:misaligned address|an illegal instruction|"
        r"unspecified launch failure|invalid argument|invalid configuration|too many resources requested)",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        what="a GPU kernel failed",
        hint="run once with CUDA_LAUNCH_BLOCKING=1 (HIP_LAUNCH_BLOCKING, ASCEND_LAUNCH_BLOCKING): the "
        "traceback then ends at the kernel; the library that it belongs to may have a newer release "
        "without it",
    ),
    Rule(
        "graph-capture",
        Cause.CODE,
        r"operation not permitted when stream is capturing|due to a previous error during capture|"
        r"must be captured on a non-default stream",
        UNLESS_PROGRESS,
        "torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing",
        weak=True,
        what="a call that no captured graph may contain",
        hint="capture no graphs once (vLLM: --enforce-eager, SGLang: --disable-cuda-graph): the call then "
        "shows its own error; a newer release of the kernel or engine may not make it",
    ),
    Rule(
        "torch-assert",
        Cause.CODE,
        r"INTERNAL ASSERT FAILED",
        UNLESS_PROGRESS,
        'RuntimeError: captures_underway.empty() INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":2967, '
        "please report a bug to PyTorch.",
        weak=True,
        what="a check within PyTorch failed",
        hint="a newer release of PyTorch, or of what replaces its allocator (a memory saver, an engine's "
        "sleep mode), may not have it; else run without that, or without captured graphs",
    ),
    Rule(
        "recompute-mismatch",
        Cause.CODE,
        r"CheckpointError",
        UNLESS_PROGRESS,
        "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of tensors was "
        "saved during the original forward and recomputation.",
        what="an activation was not the same when it was computed again",
    ),
    # ---- a collective or response that timed out: a peer of this rank died, or the job hangs
    Rule(
        "collective-timeout",
        Cause.HANG,
        r"[Ww]atchdog caught collective operation timeout|Timed out waiting \d+ ?ms for (?:recv|send|all)|"
        r"GetTimeoutError|NCCL operations have failed or timed out|wait timeout after \d+ms|"
        r"Watchdog timeout \(self\.|RPC call to \S+ timed out",
        UNLESS_PROGRESS,
        "[rank3]:[E ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=17284, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds",
        weak=True,
    ),
    Rule(
        "rendezvous-timeout",
        Cause.HANG,
        r"DistStoreError: Timed out|\d+/\d+ clients joined|Rendezvous(?:Timeout|Closed)Error",
        UNLESS_PROGRESS,
        "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 7/8 clients "
        "joined.",
        weak=True,
        what="not all processes joined in time",
        hint="read the log of the node or rank that did not join; where it ran, check that it reaches the "
        "address and port of the first one",
    ),
    Rule(
        "nccl-unexplained",
        Cause.CODE,
        r"NCCL error: unhandled (?:cuda|system) error",
        NEVER,
        "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        weak=True,
        what="a call within NCCL failed, and the log does not show which",
        hint="run once with NCCL_DEBUG=WARN: NCCL then prints the call and its error, a full memory included",
    ),
    Rule(
        "nccl-call",
        Cause.CODE,
        r"(?i:cuda) failure(?: \d{1,4})? '(?!out of memory)",
        NEVER,
        "Cuda failure 1 'invalid argument'",
        weak=True,
        what="the driver refused a call of NCCL",
        hint="the line names no shortage of memory: run once with NCCL_DEBUG=INFO, which prints the call; "
        "where it maps memory, NCCL_CUMEM_ENABLE=0 or a newer NCCL may do without it, and `nvidia-smi` "
        "shows whether the driver is as new as NCCL's CUDA",
    ),
    # ---- consequences
    Rule(
        "nccl-watchdog",
        None,
        r"[Ww]atchdog (caught|thread)|ProcessGroupNCCL.*(timeout|Timeout|terminated|failed or "
        r"timed out)|ncclUnhandledCudaError|ncclSystemError|ncclRemoteError|ncclInternalError|"
        r"taking the entire "
        r"process down|NCCL WARN (Cuda failure|socketProgress)|NCCL communicator was aborted|"
        r"DistBackendError",
        UNLESS_PROGRESS,
        "[rank6]:[E ProcessGroupNCCL.cpp:698] [Rank 6] To avoid data inconsistency, we are taking the "
        "entire process down.",
    ),
    Rule(
        "actor-died",
        None,
        r"ActorDiedError|RayActorError|ActorUnavailableError|WorkerCrashedError|OwnerDiedError|"
        r"A worker died or "
        r"was killed|worker process has died|worker died unexpectedly|Worker exit type|EngineDeadError|"
        r"Engine core "
        r"initialization failed|Server process terminated unexpectedly|Engine loop (?:is not running|"
        r"has died)|"
        r"MQEngineDeadError|output_handler failed|scheduler is dead\b|Raylet is terminated\b|^EOFError$|"
        r"ChildFailedError|Process(?:Exited|Raised)Exception",
        UNLESS_PROGRESS,
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    ),
    Rule(
        "ray-task-error",
        None,
        r"RayTaskError\(|RayTaskError:",
        NEVER,
        "ray.exceptions.RayTaskError(RuntimeError): ray::MegatronTrainRayActor.train() (pid=1001)",
    ),
    Rule(
        "sigquit",
        None,
        r"[Rr]eceived (?:sigquit|SIGQUIT)|(?:sigquit|SIGQUIT) [Rr]eceived|"
        r"Subprocess \S+ .*crashed with exit code",
        ALWAYS,
        "Received sigquit from a child process. It usually means the child failed.",
    ),
    Rule(
        "killed",
        None,
        r"return code = ?-?9\b|return code -9\b|exitcode: -9\b|exit(ed with)? code 137|killed by "
        r"signal: Killed|^Killed$|: line \d+: +\d+ Killed\b|sigkill_handler|Signal 9 \(SIGKILL\)|"
        r"<Signals\.SIGKILL: 9>|CANCELLED AT|[Ee]xit code: -9\b|subprocesses has abruptly died|"
        r"process pool was terminated abruptly",
        NEVER,
        "[ERROR] failed (exitcode: -9) local_rank: 0 (pid: 438)",
    ),
    Rule(
        "connection-closed",
        None,
        r"Connection (closed by|reset by) (remote )?peer|Socket recv failed|Broken pipe|"
        r"ConnectionResetError|ConnectionRefusedError",
        NEVER,
        "node1:1001:1101 [0] misc/socket.cc:49 NCCL WARN Connection closed by remote peer node2",
    ),
    Rule(
        "python-error",
        Cause.CODE,
        r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception)|Exception)(?:: .*|:)?$|"
        r"^(?:[a-z_]\w*\.)*[a-z_]\w*\.(?:lib|_?errors|_?exceptions)\.[A-Z]\w*: ",
        NEVER,
        "ValueError: num_samples should be a positive integer value, but got num_samples=0",
        weak=True,
    ),
)
