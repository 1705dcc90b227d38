"""Signatures of device memory failures, of every allocator that a job may use."""

from __future__ import annotations

from autotune.policies.diagnosis.rules.rule import UNLESS_PROGRESS, Rule
from autotune.policies.values.failure import Cause, Component, Phase

_DEVICES = r"(?:CUDA|HIP|NPU|XPU|MLU|MUSA|HPU|GCU|MPS backend)"
# The words in an exception or at the start of a message, not in a sentence about them or in source code.
_TORCH = (
    r"\b[A-Z]{2,6}(?: backend)? out of memory(?:[.,] Tried to allocate|\. Allocation| \(MPS)|"
    rf"(?:[:=>]|\(?['\"]|\d\))\s*(?:(?:\w+\.)*\w*(?:Error|Exception)[:(]\s*['\"]?)?{_DEVICES} out of memory|"
    rf"^\W{{0,4}}{_DEVICES} out of memory|"
    r"(?<!except )(?<!raise )(?<![\w.(])(?:\w+\.)*(?<!lang\.)OutOfMemoryError"
    r"(?::(?! Task was killed| out of resource|\s*$)|\((?=['\"])|$)|"
    r"\bOutOfMemoryError\(['\"]|^(?:\w+\.)*MemoryError: (?:\w+: )?Your GPU ran out of memory"
)

DEVICE: tuple[Rule, ...] = (
    # A size larger than any GPU's memory is corrupt: the cause is the code that corrupted it.
    Rule(
        "impossible-size",
        Cause.CODE,
        r"Tried to allocate (?:more than 1EB memory|-\d|\d{9,}(?:\.\d+)? [GT]iB)",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA out of memory. Tried to allocate more than 1EB memory.",
        what="a tensor of a size that no GPU has was asked for",
        hint="the card is not full: a size was computed from wrong values, such as an overflow or memory "
        "that a kernel overwrote; print the shapes before this call, and try a newer release of the kernels",
    ),
    Rule(
        "fsdp-clone-oom",
        Cause.GPU_OOM,
        r"state_dict.*Error: \w+ out of memory",
        UNLESS_PROGRESS,
        "UserWarning: Failed to clone() tensor with name lm_head.weight. This may mean that this "
        "state_dict entry could point to invalid memory regions. Error: CUDA out of memory. "
        "Tried to allocate 502.00 MiB",
        phase=Phase.CHECKPOINT,
        component=Component.TRAINER,
    ),
    Rule(
        "nccl-oom",
        Cause.GPU_OOM,
        r"(?i:cuda) failure (2 )?'out of memory'|Failed to CUDA calloc|"
        r"NCCL(?! INFO\b|_[A-Z]).*(?<!may be )\bout of memory|NCCL symmetric memory allocation failed|"
        r"Failed to (?:cuMemCreate|CUDA malloc|allocate \S+ of device memory).*NCCL|"
        r"Unable to allocate \d+ bytes on symmetric heap|nvshmem setup heap failed",
        UNLESS_PROGRESS,
        "node1:1004:1104 [3] include/alloc.h:185 NCCL WARN Failed to CUDA calloc 6291456 bytes",
        phase=Phase.COMM,
    ),
    Rule(
        "allocator-warning",
        Cause.GPU_OOM,
        r"memory allocation failed with OOM on device \d",
        UNLESS_PROGRESS,
        "[W814 16:06:55.441 CUDACachingAllocator.cpp:3933] memory allocation failed with OOM on device 3 "
        "while trying to allocate 3177185280 bytes (free: 1243414528, total: 85094825984).",
        weak=True,
        warning=True,
    ),
    Rule(
        "memory-saver-oom",
        Cause.GPU_OOM,
        r"torch_memory_saver.*(error: 2 \(out of memory\)|result=2\b)|(cudaError|"
        r"CUresult) error:? +2? ?\(out of "
        r"memory\)",
        UNLESS_PROGRESS,
        "[torch_memory_saver.cpp] CUresult error: 2 (out of memory) file=csrc/utils.h "
        "func=cu_mem_create line=187",
    ),
    Rule(
        "memory-saver-call",
        Cause.CODE,
        r"torch_memory_saver\S*\] (?:cudaError|CUresult) error:? +(?:result=)?(?!2\b)\d",
        UNLESS_PROGRESS,
        "[torch_memory_saver.cpp] CUresult error  result=1 file=csrc/core.cpp func=resume line=214",
        what="torch_memory_saver could not pause or resume what it keeps",
        hint="memory is not short: something was allocated or freed that it does not know, or while it was "
        "paused; a newer release of torch_memory_saver, the engine or the framework may not have it",
    ),
    Rule(
        "sleep-mode-call",
        Cause.CODE,
        r"CUDA Error: (?!out of memory)[\w ]{1,80} at \S*cumem_allocator",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:119",
        what="the allocator of the engine's sleep mode made a call that the driver refused",
        hint="the line names no shortage of memory: a newer release of vLLM may not make that call, or read "
        "what precedes it, since a call that found no memory leaves later ones with wrong arguments",
    ),
    Rule(
        "sleep-mode-oom",
        Cause.GPU_OOM,
        r"(?:CUDA Error: out of memory|aclError:207001) at .*(?:cu|ca)mem|"
        r"wake_up method failed: CUDA Error: out of memory",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        phase=Phase.WEIGHT_SYNC,
        component=Component.ROLLOUT,
    ),
    Rule(
        "ray-task-oom-alone",  # printed without the remote traceback; torch's error is the usual one
        Cause.GPU_OOM,
        r"RayTaskError\(OutOfMemoryError\)\s*$",
        UNLESS_PROGRESS,
        "ray.exceptions.RayTaskError(OutOfMemoryError)",
        weak=True,
    ),
    Rule(
        "ray-task-oom",  # torch's OutOfMemoryError or Ray's: the last line of the traceback says which
        None,
        r"RayTaskError\(OutOfMemoryError\)",
        UNLESS_PROGRESS,
        "ray.exceptions.RayTaskError(OutOfMemoryError): "
        "ray::WorkerDict.actor_rollout_update_actor() (pid=16438)",
        header=True,
    ),
    Rule(
        "xla-oom",
        Cause.GPU_OOM,
        r"Ran out of memory in memory space|"
        r"RESOURCE_EXHAUSTED: .*(?:[Oo]ut of memory|\b(?:[Aa]ttempting|trying|[Ff]ailed) to (?:allocate|"
        r"reserve))|OOM when allocating tensor|ResourceExhaustedError: .*failed to allocate memory|"
        r"\bAllocator \(\w+\) ran out of memory trying to allocate(?!.*not a failure)|"
        r"^(?:\w+\.)*OutOfMemoryError: Out of memory allocating|"
        # PaddlePaddle, MindSpore, MLX, ONNX Runtime and AWS Neuron
        r"\[metal::malloc\] (?:Attempt|Unable)|Failed to allocate memory for requested buffer of size \d|"
        r"Available memory of \d+ is smaller than requested|Failed to alloc DEVICE memory: \d|"
        r"Out of memory error on \w+ \d+\. Cannot allocate|Memory not enough: current free memory size\[",
        UNLESS_PROGRESS,
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
        "4294967296 bytes.",
    ),
    Rule(
        "torch-cuda-oom",
        Cause.GPU_OOM,
        _TORCH,
        UNLESS_PROGRESS,
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 13.91 GiB. GPU 0 has a "
        "total capacity of 79.11 GiB of which 8.85 GiB is free.",
    ),
    Rule(
        "tensorrt-oom",
        Cause.GPU_OOM,
        r"Error Code \d+: (?:C[Uu][Dd][Aa] [Rr]untime \(out of memory\)|OutOfMemory\b)|"
        r"[Rr]equested amount of GPU memory \(\d+ bytes\) could not be allocated|"
        r"\bWarm-?up failed\b.{0,80}\bout of memory\b",  # MindIE
        UNLESS_PROGRESS,
        "[TensorRT-LLM][ERROR] [defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime "
        "(out of memory)",
        component=Component.ROLLOUT,
    ),
    Rule(
        "cuda-driver-oom",
        Cause.GPU_OOM,
        r"(CUDA|HIP|NPU) (driver |runtime )?[Ee]rror:? (\(2\) ?:? ?)?out of memory|(?:cuda|"
        r"hip)ErrorMemoryAllocation|"
        r"CUDA runtime error in .{1,300}: out of memory|failed with error:? out of memory|NV_ERR_NO_MEMORY|"
        r"[Ff]ailed to allocate [\d.,]+ ?\w{1,5} (?:of \w+ memory )?on (?:device|GPU|"
        r"CUDA).{0,40}out of memory|"
        r"[Uu]nable to allocate (?:cuda|CUDA|GPU|device|HIP) memory|"
        r"kIOGPUCommandBufferCallbackErrorOutOfMemory|ACL_ERROR_RT_MEMORY_ALLOCATION|"
        r"hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY|AcceleratorError: .*out of memory|"
        r"cuda runtime error \(2\) ?: ?out of memory|\berror=2 : out of memory|"
        r"Triton Error \[\w+\]: out of memory|"
        r"(?i:cuMemCreate|cuMemAlloc|cudaMalloc|hipMalloc)\w*\b.{0,160}out(?: of |_of_)memory|"
        r"rtMalloc.*failed.*memory|HIP_ERROR_OutOfMemory|"
        r"status: 2 cuMem\w+ failed|allocate_physical_memory_to_heap failed|"
        # CANN: its code, its resource and the number that the operators return
        r"\bEL0004: |\bEI0007: |Failed to allocate resource\[\w*(?:Memory|Buffer)\]|"
        r"failed, error code is 207001\b|"
        r"failed to allocate (?:CUDA|ROCm|HIP|Vulkan|SYCL|CANN|MUSA|MTL|Metal)\w* buffer of size \d|"
        r"Memory_Allocation_Failure|^Error out of memory at line \d+ in file|"
        # libraries that name the call, the file or the number of the error before its text
        r"\b(?i:cuda|hip) (?i:error|failure|exception)\b[^\"]{0,160}(?:: ?|['\"])out of memory\b|"
        r"\bGPUassert: out of memory|^(?:\w+\.)*\w*(?:Error|"
        r"Exception): [Oo]ut of memory(?:: failed to alloc|$)|"
        r"(?:Error|Exception): .*\b(?:[Nn]ot enough (?:GPU|device) memory to|GPU memory is not enough to)|"
        # the pools of RAPIDS, the drivers of Ascend and Gaudi
        r"\brmm::out_of_memory|out_of_memory: RMM failure|halMemAlloc failed|Allocation failed for size::\d",
        UNLESS_PROGRESS,
        "torch.AcceleratorError: CUDA error: out of memory",
        driver=True,
    ),
    Rule(
        "cublas-alloc",
        Cause.GPU_OOM,
        r"(?:CU|HIP|ROC)\w+_ALLOC_FAILED|_DEVICE_ALLOCATION_FAILED|"
        # Runtimes of other vendors: HSA, Level Zero, Vulkan and SYCL, Gaudi
        r"ErrorOutOfDeviceMemory|Device memory allocation of size \d+ failed|"
        r"HSA_STATUS_ERROR_OUT_OF_RESOURCES|_OUT_OF_DEVICE_MEMORY\b|\b(?:UR_RESULT|"
        r"PI)_ERROR_OUT_OF_RESOURCES|"
        r"PT_DEVMEM Allocation failed|\bDevice out of memory\b|"
        r"_STATUS_INSUFFICIENT_RESOURCES|CUDA error: insufficient resources when calling|"
        r"CUBLAS_STATUS_NOT_INITIALIZED when calling .?cublasCreate",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    # The rest of PyTorch's message where a log, or what was copied of it, begins in its middle.
    Rule(
        "torch-oom-rest",
        Cause.GPU_OOM,
        r"this process has [\d.]{1,12} [KMG]iB memory in use\. Of the allocated "
        r"memory [\d.]{1,12} [KMG]iB is",
        UNLESS_PROGRESS,
        "... of which 12.00 MiB is free. Including non-PyTorch memory, this process has 79.00 GiB memory in "
        "use. Of the allocated memory 77.40 GiB is allocated by PyTorch",
        weak=True,
    ),
)
