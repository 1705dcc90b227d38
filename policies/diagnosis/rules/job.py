"""Signatures of the cluster, the job's settings and code, and what follows from other failures."""

from __future__ import annotations

from autotune.policies.diagnosis.rules.rule import ALWAYS, NEVER, UNLESS_PROGRESS, Rule, row
from autotune.policies.values.failure import Cause

JOB: tuple[Rule, ...] = (
    # ---- on-chip memory is a kernel's own affair
    row(
        "triton-resources",
        Cause.CODE,
        r"OutOfResources|out of resource: shared memory",
        UNLESS_PROGRESS,
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 66560, "
        "Hardware limit: 65536.",
        "OutOfResources",
        "out of resource",
    ),
    # ---- the cluster
    row(
        "node-lost",
        Cause.INFRASTRUCTURE,
        # By its address, id or name: a tree and a linked list have nodes too.
        r"has been marked dead because|NodeDiedError|because its node has died|"
        r"\b[Nn]ode (?:with \w+ )?(?:\d+(?:\.\d+){3}|[0-9a-f]{8,}|[a-z][\w.\-]*\d[\w.\-]*) (?:has )?"
        r"(?:died|was lost)\b|"
        r"DUE TO (NODE FAIL|PREEMPTION|TIME LIMIT|JOB REQUEUE)|lost connection to (the )?(GCS|raylet)|"
        r"Failed to connect to GCS|The [Rr]aylet (?:has )?crashed|preempt(?:ed|ion notice) by|"
        r"spot instance interruption|[Ii]nstance was preempted|instances\.preempted|imminent node shutdown|"
        r"\bPreempted by\b|The current node timed out during startup",
        ALWAYS,
        "The node with node id: 9f and address: 10.0.0.2 has been marked dead because the "
        "detector has missed too many heartbeats from it.",
        "marked dead",
        "NodeDiedError",
        " died",
        "was lost",
        "DUE TO ",
        "lost connection to",
        "connect to GCS",
        "aylet crashed",
        "aylet has crashed",
        "reempted by",
        "preemption notice",
        "spot instance",
        "was preempted",
        "instances.preempted",
        "imminent node",
        "node timed out",
    ),
    # An actor whose process has ended is dead, not unavailable: nobody takes connections where it ran.
    row(
        "actor-unreachable",
        Cause.INFRASTRUCTURE,
        r"ActorUnavailableError: .{0,300}failed to connect to all addresses",
        UNLESS_PROGRESS,
        "ray.exceptions.ActorUnavailableError: The actor 38ab is unavailable: The actor is temporarily "
        "unavailable: RpcError: RPC error: failed to connect to all addresses rpc_code: 14.",
        "ActorUnavailableError",
    ),
    row(
        "hardware-fault",
        Cause.INFRASTRUCTURE,
        r"uncorrectable ECC|uncorrectable NVLink|NVRM: Xid|GPU has fallen off the bus|"
        r"peer GPU memory over nvlink|"
        r"hardware error|hardware stack error|GPU is lost",
        ALWAYS,
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "uncorrectable ECC",
        "uncorrectable NVLink",
        "NVRM: Xid",
        "off the bus",
        "peer GPU memory over",
        "hardware error",
        "hardware stack error",
        "GPU is lost",
    ),
    # An engine that measures cards while others use them: nothing of the job would change that.
    row(
        "gpu-occupied",
        Cause.INFRASTRUCTURE,
        r"memory capacity is unbalanced|"
        r"Error in memory profiling\. (?:Initial free memory|This happens when)",
        UNLESS_PROGRESS,
        "AssertionError: Error in memory profiling. Initial free memory 58.23 GiB, current free memory "
        "59.34 GiB. This happens when other processes sharing the same container release GPU memory while "
        "vLLM is profiling during initialization.",
        "memory capacity is",
        "in memory profiling",
    ),
    row(
        "gpu-unavailable",
        Cause.INFRASTRUCTURE,
        r"CUDA-capable device is detected|device\(s\) is/are busy or unavailable|No CUDA GPUs are available|"
        r"CUDA error: (?:initialization error|system not yet initialized|unknown error)|"
        r"Found no NVIDIA driver|NVIDIA driver on your system is too old|Driver/library version mismatch|"
        r"Unexpected error from cudaGetDeviceCount|"
        r"less than total desired GPUs",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
        "CUDA-capable device",
        "device(s) is/are",
        "No CUDA GPUs",
        "CUDA error: ",
        "no NVIDIA driver",
        "NVIDIA driver on your",
        "Driver/library version",
        "cudaGetDeviceCount",
        "total desired GPUs",
    ),
    row(
        "port-in-use",
        Cause.INFRASTRUCTURE,
        r"EADDRINUSE|[Aa]ddress already in use",
        NEVER,
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. code: -98, name: EADDRINUSE, message: address already in use",
        "ddress already in use",
        "EADDRINUSE",
        weak=True,
    ),
    # A fabric or a service that does not answer; a peer that died of something else looks the same.
    row(
        "network-fault",
        Cause.INFRASTRUCTURE,
        r"NCCL WARN .*(?:Got (?:async event|completion) .*(?:error|fatal)|ibv_\w+ failed)|"
        r"(?:[Ee]rror|failed|Errno \d+\]?):? .{0,80}(?:Network is unreachable|No route to host|"
        r"Temporary failure in name resolution)|"
        r"\b(?:429|50[0-4]) (?:Client|Server) Error: .* for url: |We couldn't connect to 'http|"
        r"Connection broken: IncompleteRead",
        NEVER,
        "node1:1004:1104 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer "
        "10.0.0.2<45782> with error 12, opcode 0, len 0, vendor err 129 (Recv)",
        "NCCL WARN",
        "Network is unreachable",
        "No route to host",
        "failure in name",
        "Client Error: ",
        "Server Error: ",
        "We couldn't connect",
        "Connection broken",
        weak=True,
    ),
    # The launcher was told to stop: by a scheduler, or because another node has failed.
    row(
        "told-to-stop",
        Cause.INFRASTRUCTURE,
        r"Received (?:15|1|Signals\.SIG(?:TERM|HUP)) death signal|"
        r"SignalException: Process \d+ got signal: (?:15|1)\b",
        NEVER,
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 811 got signal: 15",
        "death signal",
        "SignalException",
        weak=True,
    ),
    # ---- the job's own settings
    row(
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
        "max_token_len must be",
        "larger than capacity",
        "Could not override",
        "is not in struct",
        "unrecognized arguments",
        "ConfigAttributeError",
        "Error parsing override",
        "error: argument --",
        "MissingMandatoryValue",
        "Missing mandatory value",
        "ConfigKeyError",
        "AllocationValidationError",
        "Unknown scheduler",
        "set at least one of",
    ),
    row(
        "config-model",
        Cause.CONFIG,
        r"trying to access a gated repo|GatedRepoError|RepositoryNotFoundError|"
        r"is not a local folder and is not a valid "
        r"model identifier|must be divisible by (?:the )?(?:tensor|pipeline|number|world|sequence|data)|"
        r"is greater than the derived max_model_len|must be between 0 and 1|"
        r"CUDA error: invalid device ordinal",
        UNLESS_PROGRESS,
        "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8).",
        "a gated repo",
        "GatedRepoError",
        "RepositoryNotFoundError",
        "is not a local folder",
        "must be divisible by",
        "derived max_model_len",
        "must be between 0 and 1",
        "CUDA error: ",
    ),
    # ---- the job's own code
    row(
        "device-assert",
        Cause.CODE,
        r"device-side assert|illegal memory access|srcIndex < srcSelectDimSize|CheckpointError|"
        r"CUDA error: (?:misaligned address|an illegal instruction|unspecified launch failure|"
        r"invalid argument|"
        r"invalid configuration)",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "device-side assert",
        "illegal memory access",
        "srcSelectDimSize",
        "CheckpointError",
        "CUDA error: ",
    ),
    # ---- a collective or an answer that never came: what a rank prints whose peer died, or a hang
    row(
        "collective-timeout",
        Cause.HANG,
        r"[Ww]atchdog caught collective operation timeout|Timed out waiting \d+ ?ms for (?:recv|send|all)|"
        r"GetTimeoutError|NCCL operations have failed or timed out|wait timeout after \d+ms|"
        r"Watchdog timeout \(self\.|RPC call to \S+ timed out",
        UNLESS_PROGRESS,
        "[rank3]:[E ProcessGroupNCCL.cpp:607] [Rank 3] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=17284, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds",
        "atchdog caught",
        "Timed out waiting",
        "GetTimeoutError",
        "NCCL operations have",
        "wait timeout after",
        "Watchdog timeout",
        "RPC call to",
        weak=True,
    ),
    # ---- consequences
    row(
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
        "atchdog caught",
        "atchdog thread",
        "ProcessGroupNCCL",
        "ncclUnhandledCudaError",
        "ncclSystemError",
        "ncclRemoteError",
        "ncclInternalError",
        "entire process down",
        "NCCL WARN",
        "communicator was",
        "DistBackendError",
    ),
    row(
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
        "DiedError",
        "RayActorError",
        "ActorUnavailableError",
        "WorkerCrashedError",
        "worker died",
        "process has died",
        "Worker exit type",
        "EngineDeadError",
        "core initialization",
        "process terminated",
        "Engine loop",
        "output_handler failed",
        "scheduler is dead",
        "Raylet is terminated",
        "EOFError",
        "ChildFailedError",
        "edException",
    ),
    row(
        "ray-task-error",
        None,
        r"RayTaskError\(|RayTaskError:",
        NEVER,
        "ray.exceptions.RayTaskError(RuntimeError): ray::MegatronTrainRayActor.train() (pid=1001)",
        "RayTaskError",
    ),
    row(
        "sigquit",
        None,
        r"[Rr]eceived (?:sigquit|SIGQUIT)|(?:sigquit|SIGQUIT) [Rr]eceived|"
        r"Subprocess \S+ .*crashed with exit code",
        ALWAYS,
        "Received sigquit from a child process. It usually means the child failed.",
        "sigquit",
        "SIGQUIT",
        "crashed with exit",
    ),
    row(
        "killed",
        None,
        r"return code = ?-?9\b|return code -9\b|exitcode: -9\b|exit(ed with)? code 137|killed by "
        r"signal: Killed|^Killed$|: line \d+: +\d+ Killed\b|sigkill_handler|Signal 9 \(SIGKILL\)|"
        r"CANCELLED AT|[Ee]xit code: -9\b",
        NEVER,
        "[ERROR] failed (exitcode: -9) local_rank: 0 (pid: 438)",
        "return code =",
        "return code -9",
        "exitcode: -9",
        "code 137",
        "Killed",
        "sigkill_handler",
        "SIGKILL",
        "xit code: -9",
        "CANCELLED AT",
    ),
    row(
        "connection-closed",
        None,
        r"Connection (closed by|reset by) (remote )?peer|Socket recv failed|Broken pipe|"
        r"ConnectionResetError|ConnectionRefusedError",
        NEVER,
        "node1:1001:1101 [0] misc/socket.cc:49 NCCL WARN Connection closed by remote peer node2",
        "Connection closed by",
        "Connection reset by",
        "Socket recv",
        "Broken pipe",
        "ConnectionResetError",
        "ConnectionRefusedError",
    ),
    row(
        "python-error",
        Cause.CODE,
        r"^(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception)|Exception)(?:: .*|:)?$|"
        r"^(?:[a-z_]\w*\.)*[a-z_]\w*\.(?:lib|_?errors|_?exceptions)\.[A-Z]\w*: ",
        NEVER,
        "ValueError: num_samples should be a positive integer value, but got num_samples=0",
        "Error",
        "Exception",
        ".lib.",
        "errors.",
        "exceptions.",
        weak=True,
    ),
)
