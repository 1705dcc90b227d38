"""Signatures of host memory, shared memory, the object store and disks."""

from __future__ import annotations

from autotune.policies.diagnosis.rules.rule import ALWAYS, NEVER, QUOTED_OOM, UNLESS_PROGRESS, Rule
from autotune.policies.values.failure import Cause, Component, Phase

HOST: tuple[Rule, ...] = (
    # An exception type that no allocator raises quotes a message; if it was raised from a memory error, that
    # error's own traceback precedes it.
    Rule(
        QUOTED_OOM,
        Cause.CODE,
        r"^(?:\w+\.)*(?:Value|Key|Type|Assertion|Index|Attribute|Lookup|Name|Import|NotImplemented|Syntax|"
        r"UnicodeDecode|JSONDecode|Validation)Error: .*(?:\b[A-Z]{2,6}(?: backend)? out of memory|"
        r"OutOfMemoryError|[Cc]an(?:no|')t allocate memory)",
        NEVER,
        "ValueError: not a verdict: the run died of torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 2.00 GiB.",
        weak=True,
    ),
    # ---- host memory
    Rule(
        "ray-memory-monitor",
        Cause.HOST_OOM,
        r"node running low on memory|killed due to (?:the )?(?:host |node )?(?:memory pressure|"
        r"running low on memory)|exceeds the memory "
        r"usage threshold|how to address the out of memory issue|ray\.exceptions\.OutOfMemoryError|"
        r"RayOutOfMemoryError|NODE_OUT_OF_MEMORY|memory usage above threshold, used: \d|"
        r"More than \d+% of the memory on node",
        ALWAYS,
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        reported=True,
    ),
    Rule(
        "kernel-oom-kill",
        Cause.HOST_OOM,
        r"oom-kill:constraint=|[Oo]ut of memory: Kill(ed)? process|Memory cgroup out of memory|"
        r"invoked oom-killer|systemd-oomd\S* ?Killed |"
        r"[Pp]rocess of this unit has been killed by the OOM killer|"
        r"^Killed \S+ due to memory pressure for |\bunable to allocate OS memory \(error|"
        r"oom_reaper: reaped process|\bTaskOOM\b|due to memory used \(\d+.* being more than|"
        r"Failed with result 'oom-kill'|"
        # earlyoom and Talos, which kill before the kernel does
        r"[Ss]ending SIG(?:TERM|KILL) to (?:process \d+ .*(?:badness|oom_score)|cgroup .*\bOOMController\b)",
        ALWAYS,
        "[856341.770960] Out of memory: Killed process 410126 (python) total-vm:79905000kB, "
        "anon-rss:22957108kB",
        reported=True,
    ),
    Rule(
        "cgroup-oom-event",
        Cause.HOST_OOM,
        r"autotune: cgroup oom_kill|memory\.events.*oom_kill [1-9]",
        ALWAYS,
        "memory.events: low 0 high 0 max 12 oom 1 oom_kill 1",
        reported=True,
    ),
    Rule(
        "slurm-oom-kill",
        Cause.HOST_OOM,
        r"[Dd]etected \d+ oom[-_]kill event|OOM Killed|tasks?\b.*: Out Of Memory|"
        # Only of a job or step, or with figures: a code judge prints the same words about its tests.
        r"[Ee]xceeded (?:job|step) memory limit|\b(?:[Jj]ob|[Ss]tep)\S*(?: [\d._]+)? exceeded memory limit|"
        r"[Ee]xceeded memory limit \(\d|[Ss]tate\W{1,4}OUT_OF_MEMORY|\bOUT_OF_ME\+",
        ALWAYS,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0. Some of the step tasks "
        "have been OOM Killed.",
        reported=True,
    ),
    Rule(
        "scheduler-memory-limit",
        Cause.HOST_OOM,
        r"TERM_MEMLIMIT: job killed|=>> PBS: job killed: v?mem\b|memory usage exceeded request_memory|"
        r"Job has gone over (?:cgroup )?memory limit|Please use an instance type with more memory|"
        r"Container killed due to memory usage|is running beyond (?:physical|virtual) memory limits",
        ALWAYS,
        "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
        reported=True,
    ),
    Rule(
        "kubernetes-oom-killed",
        Cause.HOST_OOM,
        # Not the word in a sentence, but a status field, a table's column, or the end of a container.
        r"(?i:reason|status|state)\"?\W{1,12}OOMKilled|OOMKilled\"?\s*[:=]\s*\"?[Tt]rue|\d/\d\s+OOMKilled|"
        r"(terminated|killed|failed)\W{1,4}OOMKilled|\b(was|been|got) OOMKilled|"
        r"exit ?code:? 137\W{1,3}OOMKilled|"
        r"OOMKilled\W{1,3}exit ?code|^\W*OOMKilled\W*$|\bOOMKilling\b",
        ALWAYS,
        "    reason: OOMKilled",
        reported=True,
    ),
    Rule(
        "kubernetes-evicted",
        Cause.HOST_OOM,
        r"node was low on resource: memory|[Cc]ontainer .* exceeded its local memory limit",
        ALWAYS,
        "The node was low on resource: memory. Threshold quantity: 100Mi, available: 41Mi. Container main "
        "was using 120Gi, request is 0.",
        reported=True,
    ),
    Rule(
        "sglang-host-memory",
        Cause.HOST_OOM,
        r"Not enough host memory (?:available|for [^.]{1,80}\. (?:Requesting|Need))|"
        r"requires more system memory \(",
        ALWAYS,
        "ValueError: Not enough host memory available. Requesting 40.00 GB but only have 44.87 GB free.",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
    ),
    Rule(
        "vllm-swap-space",
        Cause.HOST_OOM,
        r"Too large swap space",
        ALWAYS,
        "ValueError: Too large swap space. 128.00 GiB out of the 125.00 GiB total CPU memory is allocated "
        "for the swap space.",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
    ),
    Rule(
        "pinned-memory",
        Cause.HOST_OOM,
        r"failed to alloc \d+ bytes on host|(cudaHostAlloc|cudaMallocHost|cuMemHostAlloc|aclrtMallocHost|"
        r"hipHostMalloc|"
        r"cudaHostRegister)\b.*"
        r"(out of memory|OUT_OF_MEMORY)|could not allocate pinned host memory|"
        r"Failed to allocate (?:CPU |host )?(pinned|page-locked)|mlock failed to allocate \d|"
        r"Failed to CUDA host alloc|"
        r"out of memory \((?:cudaHostAlloc|cudaHostRegister|cudaMallocHost)",
        ALWAYS,
        "failed to alloc 8589934592 bytes on host: CUDA_ERROR_OUT_OF_MEMORY",
    ),
    Rule(
        "cpu-allocator",
        Cause.HOST_OOM,
        r"DefaultCPUAllocator: (can't allocate|not enough) memory|not enough memory: you tried to allocate|"
        r"posix_memalign.*memory",
        UNLESS_PROGRESS,
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 359661568 bytes. Error code 12 (Cannot allocate "
        "memory)",
    ),
    Rule(
        "host-memory-error",
        Cause.HOST_OOM,
        # Only as an exception: quoted or explained in a sentence it is some program's output.
        # One raised for device memory names the device.
        r"^\W{0,4}(?:\w+\.)*_?(?:Array|Arrow)?MemoryError(?:"
        r"(?::|\()(?!.*(?:CUDA|cuda[A-Z]|HIP|\bGPU ran out))|$)|"
        r"std::bad_alloc(?!: out_of_memory: )|"
        r"Errno 12\] Cannot allocate "
        r"memory|Cannot allocate memory \(12\)|os error 12\)|^memory allocation of \d+ bytes failed|"
        r"malloc of size \d+ failed|(?<! ['\"`])java\.lang\.OutOfMemoryError|[Ff]ailed to (?:m?alloc|"
        r"fork).*Cannot allocate memory|"
        r": Cannot allocate memory$|_HOST_ALLOCATION_FAILED|_OUT_OF_HOST_MEMORY\b|"
        r"JavaScript heap out of memory|^fatal error: runtime: out of memory|"
        r"^(?:\w+\.)*OutOfMemoryException: |"
        r"<jemalloc>: .*out of memory|NCCL WARN Failed to [mc]alloc \d|\bhost memory exhausted: need|"
        r"[Hh]ost memory allocation failed|[Ff]ailed to allocate [\d.,]+ ?\w{0,5} of host memory|"
        r"Os \{ code: 12, kind: OutOfMemory|paging file is too small|os error 1455|WinError 1455",
        UNLESS_PROGRESS,
        "MemoryError: Unable to allocate 3.2 GiB for an array with shape (1, 2)",
    ),
    # ---- shared memory, object store, disk
    # Ray measures /dev/shm before it starts its object store in it.
    Rule(
        "shm-refused",
        Cause.SHM,
        r"exceeds (?:the )?memory available in /dev/shm|object store size \(.{1,40}\) exceeds /dev/shm size",
        UNLESS_PROGRESS,
        "ValueError: The configured object store size (20.24 GB) exceeds /dev/shm size (10.73 GB). This will "
        "harm performance.",
        phase=Phase.INIT,
        component=Component.DRIVER,
        what="Ray cannot start: its object store does not fit into /dev/shm",
        hint="or start Ray with a smaller store (`ray start --object-store-memory=BYTES`), or let it use a "
        "disk (RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE=1)",
    ),
    # vLLM measures /dev/shm before it creates the queues to its workers.
    Rule(
        "shm-engine-refused",
        Cause.SHM,
        r"Insufficient space in /dev/shm: \d",
        UNLESS_PROGRESS,
        "RuntimeError: Insufficient space in /dev/shm: 160 MiB required, 64 MiB free. Increase /dev/shm "
        "(e.g. --shm-size or --ipc=host).",
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
        what="the engine cannot start: the queues to its workers do not fit into /dev/shm",
        hint="or start the container with --ipc=host",
    ),
    Rule(
        "shm-full",
        Cause.SHM,
        r"[Bb]us error|(No space left on device|Errno 28).*(/dev/shm|/torch_\d|/psm_\w)|(/dev/shm|"
        r"</torch_\w+>).*"
        r"No space left|failed to extend /dev/shm|(insufficient|out of) shared memory|"
        r"[Ee]rror while creating shared memory segment|shm_open.*No space left|"
        r"unable to allocate shared memory\(shm\)|size of /dev/shm is too small|"
        r"EmptyDir volume \"[^\"]*shm[^\"]*\" exceeds the limit|"
        r"not enough space for /dev/shm/|NCCL WARN .*posix_fallocate.*No space left|Signal 7 \(SIGBUS\)|"
        r"Signals\.SIGBUS|\*\*\* SIGBUS received|"
        # signal 7 is a bus error
        r"(?:exit|return) ?code ?[:=]? -7\b|proc\(s\): .{0,200}: -7\b",
        UNLESS_PROGRESS,
        "RuntimeError: DataLoader worker (pid 263230) is killed by signal: Bus error. It is "
        "possible that dataloader's workers are out of shared memory.",
    ),
    Rule(
        "object-store-full",
        Cause.OBJECT_STORE,
        r"ObjectStoreFullError|Failed to put object .* because it is full|object store is full|"
        r"PlasmaStoreFull|"
        r"does not fit in the plasma store|Not enough memory to create (?:the|requested) object",
        UNLESS_PROGRESS,
        "(remote_read pid=1225) plasma_store_provider.cc:122: Failed to put object 641e07 in "
        "object store because it is full. Object size is 219375455268 bytes.",
    ),
    Rule(
        "disk-full",
        Cause.DISK,
        r"No space left on device|Errno 28\b|Errno 122\b|Disk quota exceeded|OutOfDiskError|StorageFull|"
        r"PytorchStreamWriter failed|failed with Input/output error|enforce fail at inline_container\.cc|"
        r"Errno 5\] Input/output error|Errno 30\] Read-only file system|"
        r"low on resource: ephemeral-storage|ephemeral local storage usage exceeds|"
        r"Usage of EmptyDir volume .{1,80} exceeds the limit",
        UNLESS_PROGRESS,
        "OSError: [Errno 28] No space left on device",
    ),
    Rule(
        "disk-nearly-full",
        Cause.DISK,
        r"is over \d+% full, available space",
        NEVER,
        "/tmp/ray/session_1 is over 95% full, available space: 2.03779 GB; capacity: 69.9336 GB.",  # noqa: S108 - a text to recognise
        weak=True,
    ),
)
