"""Signatures of nodes, GPUs, drivers and networks that fail under a job."""

from __future__ import annotations

from autotune.policies.diagnosis.rules.rule import ALWAYS, NEVER, UNLESS_PROGRESS, Rule
from autotune.policies.values.failure import Cause

CLUSTER: tuple[Rule, ...] = (
    Rule(
        "node-lost",
        Cause.INFRASTRUCTURE,
        # Only with an address, id or name: trees and linked lists have nodes too.
        r"has been marked dead because|NodeDiedError|because its node has died|"
        r"\b[Nn]ode (?:with \w+ )?(?:\d+(?:\.\d+){3}|[0-9a-f]{8,}|[a-z][\w.\-]*\d[\w.\-]*) (?:has )?"
        r"(?:died|was lost)\b|"
        r"DUE TO (NODE FAIL|PREEMPTION|JOB REQUEUE)|lost connection to (the )?(GCS|raylet)|"
        r"Failed to connect to GCS|The [Rr]aylet (?:has )?crashed|preempt(?:ed|ion notice) by|"
        r"spot instance interruption|[Ii]nstance was preempted|instances\.preempted|imminent node shutdown|"
        r"\bPreempted by\b|The current node timed out during startup",
        ALWAYS,
        "The node with node id: 9f and address: 10.0.0.2 has been marked dead because the "
        "detector has missed too many heartbeats from it.",
    ),
    Rule(
        "time-limit",
        Cause.INFRASTRUCTURE,
        r"DUE TO TIME LIMIT|TERM_RUNLIMIT: job killed|=>> PBS: job killed: walltime|"
        r"[Jj]ob .{0,40}exceeded .{0,20}walltime",
        ALWAYS,
        "slurmstepd: error: *** JOB 991 ON node3 CANCELLED AT 2026-11-21T03:04:05 DUE TO TIME LIMIT ***",
        what="the scheduler ended the job at its time limit",
        hint="start it again from its last checkpoint, with a longer limit (Slurm: --time) if the queue has "
        "one; no memory setting fixes this",
    ),
    # An actor whose process ended is dead; an unavailable one is on a node that accepts no connections.
    Rule(
        "actor-unreachable",
        Cause.INFRASTRUCTURE,
        r"ActorUnavailableError: .{0,300}failed to connect to all addresses",
        UNLESS_PROGRESS,
        "ray.exceptions.ActorUnavailableError: The actor 38ab is unavailable: The actor is temporarily "
        "unavailable: RpcError: RPC error: failed to connect to all addresses rpc_code: 14.",
    ),
    Rule(
        "hardware-fault",
        Cause.INFRASTRUCTURE,
        # An Xid with a channel, an MMU fault or an exception reports a failed kernel, not a failed GPU.
        r"uncorrectable ECC|uncorrectable NVLink|GPU has fallen off the bus|"
        r"NVRM: Xid(?!.*(?:MMU Fault|Exception|, Ch [0-9a-f]{4}))|"
        r"peer GPU memory over nvlink|"
        r"hardware error|hardware stack error|GPU is lost",
        ALWAYS,
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        what="a GPU failed",
        hint="take the node out and start on another one; no memory setting fixes this",
    ),
    Rule(
        "device-lost",
        Cause.INFRASTRUCTURE,
        r"_ERROR_DEVICE_LOST\b|VK_ERROR_DEVICE_LOST",
        UNLESS_PROGRESS,
        "RuntimeError: level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        what="the driver lost the device",
        hint="read the node's kernel log (`dmesg`) for a reset or a hang of the device, then reset it or "
        "restart the node; where it comes back at the same place, use another release of the driver",
    ),
    # An engine that measures GPUs while other processes use them: no setting of the job changes that.
    Rule(
        "gpu-occupied",
        Cause.INFRASTRUCTURE,
        r"memory capacity is unbalanced|"
        r"Error in memory profiling\. (?:Initial free memory|This happens when)",
        UNLESS_PROGRESS,
        "AssertionError: Error in memory profiling. Initial free memory 58.23 GiB, current free memory "
        "59.34 GiB. This happens when other processes sharing the same container release GPU memory while "
        "vLLM is profiling during initialization.",
        what="others used the GPU while the engine measured its memory",
        hint="start the engines one after another, and nothing else on their GPUs meanwhile",
    ),
    # The program's libraries and the node's driver do not match, which fails at every start.
    Rule(
        "driver-mismatch",
        Cause.INFRASTRUCTURE,
        r"unsupported display driver|"
        r"forward compatibility was attempted on non supported|"
        r"driver version is insufficient for CUDA runtime|Driver/library version mismatch|"
        r"NVIDIA driver on your system is too old|compiled with an unsupported toolchain",
        UNLESS_PROGRESS,
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display "
        "driver / cuda driver combination",
        what="the node's GPU driver does not fit the program's CUDA libraries",
        hint="a restart does not cure this: remove the image's compat libcuda (/usr/local/cuda/compat) from "
        "LD_LIBRARY_PATH, or install a driver as new as the image's CUDA; `nvidia-smi` prints both versions",
    ),
    Rule(
        "gpu-unavailable",
        Cause.INFRASTRUCTURE,
        r"CUDA-capable device is detected|(?:device\(s\) is/are|devices are) busy or unavailable|"
        r"No CUDA GPUs are available|"
        r"CUDA error: (?:initialization error|system not yet initialized|unknown error)|"
        r"Found no NVIDIA driver|"
        r"Unexpected error from cudaGetDeviceCount|"
        r"less than total desired GPUs",
        UNLESS_PROGRESS,
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
        what="the program cannot use a GPU",
        hint="compare what the program sees with the node (`nvidia-smi`, CUDA_VISIBLE_DEVICES, the GPUs that "
        "the job requests); no memory setting fixes this",
    ),
    Rule(
        "port-in-use",
        Cause.INFRASTRUCTURE,
        r"EADDRINUSE|[Aa]ddress already in use",
        NEVER,
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
        "network address. code: -98, name: EADDRINUSE, message: address already in use",
        weak=True,
        what="a port is in use",
        hint="end what an earlier start left on this node, or choose another port",
    ),
    # A network or a service that does not answer; a peer that died of another cause looks the same.
    Rule(
        "network-fault",
        Cause.INFRASTRUCTURE,
        r"NCCL WARN .*(?:Got (?:async event|completion) .*(?:error|fatal)|"
        r"ibv_\w+ failed(?!.*Cannot allocate memory))|"
        r"(?:[Ee]rror|failed|Errno \d+\]?):? .{0,80}(?:Network is unreachable|No route to host|"
        r"Temporary failure in name resolution)|"
        r"\b(?:429|50[0-4]) (?:Client|Server) Error: .* for url: |We couldn't connect to 'http|"
        r"Connection broken: IncompleteRead",
        NEVER,
        "node1:1004:1104 [3] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer "
        "10.0.0.2<45782> with error 12, opcode 0, len 0, vendor err 129 (Recv)",
        weak=True,
    ),
    # The launcher was told to stop: by a scheduler, or because another node has failed.
    Rule(
        "told-to-stop",
        Cause.INFRASTRUCTURE,
        r"Received (?:15|1|Signals\.SIG(?:TERM|HUP)) death signal|"
        r"SignalException: Process \d+ got signal: (?:15|1)\b",
        NEVER,
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 811 got signal: 15",
        weak=True,
    ),
)
