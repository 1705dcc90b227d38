"""Healthy and noisy logs, made from a seed: what a failure is buried in, and what must raise no alarm."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

PREFIXES = (
    "bare", "ray", "ray-colour", "torchrun", "slurm", "kubectl", "logger", "journald", "json", "box",
    "wrapped", "carriage-return", "repeated", "two-ranks",
)  # fmt: skip
_ACTORS = {
    "trainer": ("WorkerDict", "MegatronTrainRayActor", "ActorModelRayActor"),
    "rollout": ("SGLangEngine", "vLLMHttpServer", "LLMRayActor"),
    "ref": ("ReferenceModelRayActor",),
    "critic": ("CriticModelRayActor",),
}
# Each has words of failures and is printed by runs that go on.
TEMPTING = (
    "Out of memory even after retracting all other requests in the decode batch. Aborting the last request.",
    (
        "[{clock}] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 812, "
        "#new_token_ratio: 0.4533 -> 0.4767"
    ),
    "[{clock} TP7] Decode out of memory happened. #retracted_reqs: 1, #new_token_ratio: 0.1474 -> 0.1845",
    "[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. torch retries)",
    (
        "[torch_memory_saver.cpp] TorchMemorySaver::malloc return OOM since memory_margin_bytes=1073741824 "
        "(alloc)size=65867350016 free_bytes=28822863872"
    ),
    (
        "INFO 04-19 15:32:42 [model_runner.py:1442] Capturing cudagraphs for decoding. If out-of-memory "
        "error "
        "occurs during cudagraph capture, consider decreasing `gpu_memory_utilization` or switching to eager "
        "mode."
    ),
    "INFO [gpu_worker.py:115] Sleep mode freed 9.19 GiB memory, 7.66 GiB memory is still in use.",
    "WARNING: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid out of memory errors",
    "Note: a smaller --mem-fraction-static lowers the risk of CUDA out-of-memory during prefill",
    "Set the environment variable RAY_memory_monitor_refresh_ms to zero to disable worker killing",
    "tcmalloc: large alloc 4294967296 bytes == 0x55d1 @ 0x7f10 0x7f11",
    "oom_count=0 killed_workers=0 error_rate: 0.0 no_error=True preempted=0 exit_code: 0",
    "INFO: memory.events low 0 high 0 max 0 oom 0 oom_kill 0 oom_group_kill 0",
    (
        "WARNING [scheduler.py:1754] Sequence group 5 is preempted by PreemptionMode.RECOMPUTE mode because "
        "there "
        "is not enough KV cache space. This can affect the end-to-end performance. Increase "
        "gpu_memory_utilization or tensor_parallel_size to provide more KV cache memory."
    ),
    (
        "[Rank 0] (after 10 iterations) memory (MB) | allocated: 1401.1 | max allocated: 5623.0 |"
        " reserved: 7114.0"
    ),
    "NCCL INFO Connected all rings; timeout 600 s, 0 errors, watchdog enabled",
    "test_oom_recovery PASSED  test_out_of_memory_message PASSED",
    "handling of torch.OutOfMemoryError is enabled: the batch would be split once",
    "model config: {{'error_handling': 'raise', 'on_oom': 'skip', 'failed_requests': 0, 'signal': 'Killed'}}",
    "reward example: 'The program failed: MemoryError' score=0.0",
    "checkpoint saved; disk /dev/shm 12% full, no space problem",
    "retry policy: on exit code 137 or OOMKilled relaunch with a smaller batch",
    "UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
    "DeprecationWarning: an exception will be raised in the next version",
    'INFO:     10.0.0.7:52944 - "POST /generate HTTP/1.1" 200 OK',
    "Timeout=1800000ms; ncclCommInitRank done; ActorDiedError is not retried (max_restarts=0)",
)
_CONSEQUENCES = (
    (
        "[rank{rank}]:[E ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation "
        "timeout: "
        "WorkNCCL(SeqNum=17284, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 "
        "milliseconds before timing out."
    ),
    (
        "[rank{rank}]:[E ProcessGroupNCCL.cpp:1834] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process "
        "group "
        "watchdog thread terminated with exception: [Rank {rank}] Watchdog caught collective operation "
        "timeout"
    ),
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    (
        "(raylet, ip=10.0.0.{rank}) A worker died or was killed while executing a task by an unexpected "
        "system "
        "error. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
        "connection "
        "error code 2. End of file. Some common causes include: (1) the process was killed by the OOM "
        "killer due "
        "to high memory usage, (2) ray stop --force was called, (3) the worker crashed unexpectedly."
    ),
    (
        "host{rank}:1001:1101 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote "
        "peer "
        "10.0.0.3<50012>"
    ),
    "torch.distributed.DistBackendError: NCCL communicator was aborted on rank {rank}.",
    "Received sigquit from a child process. It usually means the child failed.",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "Error executing job with overrides: ['trainer.n_gpus_per_node=8']",
    "slurmstepd: error: *** STEP 4410.0 ON node{rank} CANCELLED AT 2026-03-24T23:54:53 ***",
    "srun: error: node{rank}: task 3: Exited with exit code 1",
)


def healthy(seed: int, *, lines: int) -> Iterator[str]:
    """Yield the lines of a multi-rank run that goes well and says every tempting word."""
    chance = random.Random(seed)
    step = 0
    for number in range(lines):
        rank = chance.randrange(8)
        clock = f"2026-03-24 23:{number // 60 % 60:02d}:{number % 60:02d}"
        who = chance.choice(
            ("", f"(WorkerDict pid={1000 + rank}, ip=10.0.0.{rank}) ", f"[rank{rank}]: ", f"{rank}: ",
             f"\x1b[36m(SGLangEngine pid={2000 + rank})\x1b[0m ", (f"{clock.replace(' ', 'T')}.123456789Z "
             f"stdout F "))
        )  # fmt: skip
        kind = chance.random()
        if kind < 0.06:
            yield who + chance.choice(TEMPTING).format(clock=clock)
        elif kind < 0.12:
            done = chance.randrange(100)
            yield who + "\r".join(
                f"Training: {at}%|{'#' * (at // 10)}| {at}/100" for at in range(done, done + 5)
            )
        elif kind < 0.17:
            yield (
                who
                + f"[{clock} TP{rank}] Decode batch, #running-req: {rank}, token usage: 0.98, gen throughput"
            )
        elif kind < 0.2:
            yield who + json.dumps({"level": "info", "ts": clock, "msg": "saved", "errors": 0, "oom": False})
        elif kind < 0.22:
            yield who + "╭──────────────── Metrics ────────────────╮\n" + who + "│ loss 0.12 │ failed 0 │"
        else:
            step += 1
            yield who + (
                f"step:{step} - actor/loss:{chance.random():.4f} - perf/max_memory_allocated_gb:"
                f"{chance.random() * 80:.2f} - timing_s/update_actor:{chance.random() * 9:.2f}"
            )


def buried(text: str, *, seed: int, style: str, component: str = "unknown", lines: int = 400) -> bytes:
    """Return a failure's text inside a long noisy log, shown the way `style` says."""
    chance = random.Random(f"{seed}-{style}")
    before = list(healthy(seed, lines=lines))
    after = list(healthy(seed + 1, lines=30))
    ranks = [rank for rank in range(8) if rank != 3]
    for template in chance.sample(_CONSEQUENCES, 6):
        after.insert(chance.randrange(len(after)), template.format(rank=chance.choice(ranks)))
    mixed = _SHOWN.get(style, _bare)(text, chance, component)
    log = "\n".join((*before, mixed, *after, "")).encode()
    return log.replace(b"Metrics", b"M\xe9\xff\xfetrics")


def _bare(text: str, _chance: random.Random, _component: str) -> str:
    return text


def _prefixed(text: str, prefix: str) -> str:
    return "\n".join(prefix + line for line in text.split("\n"))


def _actor(chance: random.Random, component: str) -> str:
    return chance.choice(_ACTORS.get(component, ("Worker",)))


def _ray(text: str, chance: random.Random, component: str) -> str:
    if " pid=" in text:
        return text
    return _prefixed(text, f"({_actor(chance, component)} pid={chance.randrange(9999)}, ip=10.0.0.3) ")


def _ray_colour(text: str, chance: random.Random, component: str) -> str:
    if " pid=" in text:
        return text
    return _prefixed(text, f"\x1b[36m({_actor(chance, component)} pid={chance.randrange(9999)})\x1b[0m ")


def _torchrun(text: str, _chance: random.Random, _component: str) -> str:
    return text if "[rank" in text or " pid=" in text else _prefixed(text, "[rank3]: ")


def _slurm(text: str, _chance: random.Random, _component: str) -> str:
    return _prefixed(text, "3: ")


def _kubectl(text: str, _chance: random.Random, _component: str) -> str:
    return _prefixed(text, "2026-03-24T23:54:53.123456789Z ")


def _journald(text: str, _chance: random.Random, _component: str) -> str:
    return _prefixed(text, "Mar 24 23:54:53 node3 train[4410]: ")


def _logger(text: str, _chance: random.Random, _component: str) -> str:
    return _prefixed(text, "2026-03-24 23:54:53,123 - train - ERROR - ")


def _json(text: str, _chance: random.Random, _component: str) -> str:
    return json.dumps(
        {"level": "error", "ts": "2026-03-24T23:54:53Z", "message": "job failed", "exception": text}
    )


def _box(text: str, _chance: random.Random, _component: str) -> str:
    width = max(len(line) for line in text.split("\n"))
    rows = (f"│ {line.ljust(width)} │" for line in text.split("\n"))
    return "\n".join(("╭" + "─" * (width + 2) + "╮", *rows, "╰" + "─" * (width + 2) + "╯"))


def _wrapped(text: str, _chance: random.Random, _component: str) -> str:
    """Break long message lines at words, as a terminal of 100 columns does."""
    rows: list[str] = []
    for line in text.split("\n"):
        row = ""
        for word in line.split(" ") if len(line) > 100 else (line,):
            if row and len(row) + len(word) >= 100:
                rows.append(row)
                row = word
            else:
                row = f"{row} {word}" if row else word
        rows.append(row)
    return "\n".join(rows)


def _carriage_return(text: str, _chance: random.Random, _component: str) -> str:
    return "\n".join(f"Training:  3%|3| 3/100\rTraining:  4%|4| 4/100\r{line}" for line in text.split("\n"))


def _repeated(text: str, chance: random.Random, component: str) -> str:
    lines = _ray(text, chance, component)
    return "\n".join(f"{line} [repeated 7x across cluster]" for line in lines.split("\n"))


def _two_ranks(text: str, _chance: random.Random, _component: str) -> str:
    """Interleave the failure of one rank with a traceback of another that lost its peer."""
    other = (
        "Traceback (most recent call last):",
        '  File "train.py", line 12, in main',
        '  File "torch/distributed/distributed_c10d.py", line 2501, in all_reduce',
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 5.",
    )
    rows = text.split("\n")
    own = "" if " pid=" in text or "[rank" in text else "[rank3]: "
    merged: list[str] = []
    for index in range(max(len(rows), len(other))):
        merged.extend(own + row for row in rows[index : index + 1])
        merged.extend("[rank5]: " + row for row in other[index : index + 1])
    return "\n".join(merged)


_SHOWN: dict[str, Callable[[str, random.Random, str], str]] = {
    "ray": _ray,
    "ray-colour": _ray_colour,
    "torchrun": _torchrun,
    "slurm": _slurm,
    "kubectl": _kubectl,
    "logger": _logger,
    "journald": _journald,
    "json": _json,
    "box": _box,
    "wrapped": _wrapped,
    "carriage-return": _carriage_return,
    "repeated": _repeated,
    "two-ranks": _two_ranks,
}
