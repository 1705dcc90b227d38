"""RULES: one row per failure signature, each with an example line."""

from __future__ import annotations

from policies.rule import ALWAYS, NEVER, UNLESS_PROGRESS, Rule, row
from policies.rules_memory import MEMORY
from policies.rules_own import OWN
from policies.types import Cause

# The first row that matches a line wins: harmless and special wordings stand before general ones.
RULES: tuple[Rule, ...] = (
    *OWN,
    *MEMORY,
    # ---- on-chip memory is a kernel's own affair
    row(
        "triton-resources",
        Cause.CODE,
        r"OutOfResources|out of resource: shared memory",
        UNLESS_PROGRESS,
        "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 66560, "
        "Hardware limit: 65536.",
        "out of resource",
        "OutOfResources",
    ),
    # ---- shared memory, object store, disk
    row(
        "shm-full",
        Cause.SHM,
        r"[Bb]us error|No space left on device.*/dev/shm|/dev/shm.*No space left|failed to extend "
        r"/dev/shm|(insufficient|out of) shared memory",
        UNLESS_PROGRESS,
        "RuntimeError: DataLoader worker (pid 263230) is killed by signal: Bus error. It is "
        "possible that dataloader's workers are out of shared memory.",
        "us error",
        "No space left",
        "/dev/shm",  # noqa: S108 - a text to recognise
        "shared memory",
    ),
    row(
        "object-store-full",
        Cause.OBJECT_STORE,
        r"ObjectStoreFullError|Failed to put object .* because it is full|object store is full",
        UNLESS_PROGRESS,
        "(remote_read pid=1225) plasma_store_provider.cc:122: Failed to put object 641e07 in "
        "object store because it is full. Object size is 219375455268 bytes.",
        "rror",
        "is full",
    ),
    row(
        "disk-full",
        Cause.DISK,
        r"No space left on device|Errno 28\b|Disk quota exceeded|OutOfDiskError|"
        r"PytorchStreamWriter failed|failed with Input/output error",
        UNLESS_PROGRESS,
        "OSError: [Errno 28] No space left on device",
        "No space left",
        "rror",
        "quota exceeded",
        "PytorchStreamWriter",
    ),
    row(
        "disk-nearly-full",
        Cause.DISK,
        r"is over \d+% full, available space",
        NEVER,
        "/tmp/ray/session_1 is over 95% full, available space: 2.03779 GB; capacity: 69.9336 GB.",  # noqa: S108 - a text to recognise
        "% full",
        weak=True,
    ),
    # ---- the cluster
    row(
        "node-lost",
        Cause.INFRASTRUCTURE,
        r"has been marked dead because|NodeDiedError|node .* (died|was lost)|DUE TO (NODE FAIL|"
        r"PREEMPTION|TIME LIMIT)|lost connection to (the )?(GCS|raylet)|Failed to connect to GCS",
        ALWAYS,
        "The node with node id: 9f and address: 10.0.0.2 has been marked dead because the "
        "detector has missed too many heartbeats from it.",
        "marked dead",
        "rror",
        " died",
        "was lost",
        "DUE TO",
        "onnection to",
        "connect to GCS",
    ),
    row(
        "hardware-fault",
        Cause.INFRASTRUCTURE,
        r"uncorrectable ECC|NVRM: Xid|GPU has fallen off the bus",
        ALWAYS,
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "uncorrectable ECC",
        "NVRM: Xid",
        "off the bus",
    ),
    row(
        "port-in-use",
        Cause.INFRASTRUCTURE,
        r"EADDRINUSE|[Aa]ddress already in use",
        NEVER,
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. code: -98, name: EADDRINUSE, message: address already in use",
        "ddress already in use",
        weak=True,
    ),
    # ---- the job's own settings
    row(
        "config-error",
        Cause.CONFIG,
        r"max_token_len must be greater than the sequence length|is larger than capacity|Could "
        r"not override|is not in struct|unrecognized arguments|ConfigAttributeError|less than "
        r"total desired GPUs|Error parsing override",
        UNLESS_PROGRESS,
        "AssertionError: max_token_len must be greater than the sequence length. Got "
        "max_token_len=1024 and max_seq_len=4096",
        "rror",
        "larger than",
        "Could not override",
        "not in struct",
        "total desired GPUs",
    ),
    # ---- the job's own code
    row(
        "device-assert",
        Cause.CODE,
        r"device-side assert|illegal memory access|srcIndex < srcSelectDimSize|CheckpointError",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "device-side assert",
        "illegal memory",
        "srcSelectDimSize",
        "rror",
    ),
    # ---- consequences
    row(
        "nccl-watchdog",
        None,
        r"[Ww]atchdog (caught|thread)|ProcessGroupNCCL.*(timeout|Timeout|terminated|failed or "
        r"timed out)|ncclUnhandledCudaError|ncclSystemError|ncclRemoteError|taking the entire "
        r"process down|NCCL WARN (Cuda failure|socketProgress)",
        UNLESS_PROGRESS,
        "[rank3]:[E ProcessGroupNCCL.cpp:1414] [PG 0 Rank 3] Process group watchdog thread "
        "terminated with exception: [Rank 3] Watchdog caught collective operation timeout",
        "atchdog",
        "NCCL",
        "rror",
    ),
    row(
        "actor-died",
        None,
        r"ActorDiedError|RayActorError|ActorUnavailableError|WorkerCrashedError|A worker died or "
        r"was killed|worker process has died|Worker exit type|EngineDeadError|Engine core "
        r"initialization failed|Server process terminated unexpectedly",
        UNLESS_PROGRESS,
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "rror",
        "worker died",
        "worker process",
        "Worker exit",
        "Engine core",
        "Server process",
    ),
    row(
        "ray-task-error",
        None,
        r"RayTaskError\(|RayTaskError:",
        NEVER,
        "ray.exceptions.RayTaskError(RuntimeError): ray::MegatronTrainRayActor.train() (pid=1001)",
        "rror",
    ),
    row(
        "sigquit",
        None,
        r"(?i:received sigquit|sigquit received)|Subprocess \S+ .*crashed with exit code",
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
        r"signal: Killed|^Killed$|sigkill_handler",
        NEVER,
        "[ERROR] failed (exitcode: -9) local_rank: 0 (pid: 438)",
        "return code",
        "exitcode",
        "code 137",
        "signal: Killed",
        "Killed",
        "sigkill_handler",
    ),
    row(
        "connection-closed",
        None,
        r"Connection (closed by|reset by) (remote )?peer|Socket recv failed|Broken pipe|"
        r"ConnectionResetError|ConnectionRefusedError",
        NEVER,
        "node1:1001:1101 [0] misc/socket.cc:49 NCCL WARN Connection closed by remote peer node2",
        "onnection",
        "Socket recv",
        "Broken pipe",
    ),
    row(
        "python-error",
        Cause.CODE,
        r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: .*|:)?$",
        NEVER,
        "ValueError: num_samples should be a positive integer value, but got num_samples=0",
        "rror",
        "xception",
        weak=True,
    ),
)

BY_NAME = {rule.name: rule for rule in RULES}


def matching(line: str) -> Rule | None:
    """Return the first rule that a line, without its prefixes, shows."""
    for rule in RULES:
        if rule.matches(line):
            return rule
    return None
