"""Time of an estimate on one core: `OMP_NUM_THREADS=1 python -m benchmarks.estimate_speed`."""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

from autotune.policies.estimate.peaks import estimates
from autotune.policies.values.architecture.model import Layout, model_from_config
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile
from benchmarks.architectures import ARCHITECTURES
from benchmarks.one_estimate import estimate

GIB = 1 << 30
MODEL = model_from_config(ARCHITECTURES["Qwen2.5-7B"])
CLUSTER = Cluster(
    address="local",
    nodes=1,
    gpus_per_node=8,
    gpu_memory_bytes=80 * GIB,
    host_memory_bytes=1000 * GIB,
    gpu_name="NVIDIA H100 80GB HBM3",
)
PROFILE = Profile(
    framework="verl",
    knobs=Knobs(tokens_per_microbatch=24576, memory_fraction=0.5, dynamic_batching=True),
    supported={},
    placement=Placement.COLOCATED,
    engine="vllm",
    longest_sequence=9216,
    layout=Layout(
        strategy="fsdp2",
        ranks=8,
        shards=8,
        engine_ranks=8,
        engine_sleeps=True,
        sequences=1024,
        prompt_tokens=1024,
        response_tokens=8192,
    ),
)


def candidates(count: int) -> list[Knobs]:
    """Return so many different configurations."""
    grid = itertools.product(
        range(9216, 40000, 1024),
        (0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
        (1, 2, 4, 8),
        ("off", "selective", "full"),
        (False, True),
        (False, True),
        (64, 128, 256),
    )
    return [
        Knobs(
            tokens_per_microbatch=tokens,
            memory_fraction=fraction,
            rollout_tensor_parallel=tensor,
            recompute=recompute,
            optimizer_offload=optimizer,
            activation_offload=activations,
            concurrency=concurrency,
        )
        for tokens, fraction, tensor, recompute, optimizer, activations, concurrency in itertools.islice(
            grid, count
        )
    ]


def seconds(work: Callable[[], object], *, repeats: int) -> float:
    """Return the median time of a call in seconds, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def ranked(count: int) -> list[int]:
    """Return the configurations that fit everywhere, the fastest first."""
    result = estimates(PROFILE, CLUSTER, MODEL, candidates(count))
    fits = (result.gpu <= result.gpu_capacity).all(axis=0) & (result.host <= result.host_capacity).all(axis=0)
    return [int(place) for place in result.step_s.argsort() if fits[place]]


def main() -> None:
    """Print the table."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    one = seconds(lambda: estimate(PROFILE, CLUSTER, MODEL, PROFILE.knobs), repeats=200)
    many = seconds(lambda: ranked(10_000), repeats=5)
    print(f"{platform.platform()}, Python {platform.python_version()}, numpy {version('numpy')}, one core")
    print("| what | median | goal |")
    print("|---|---|---|")
    print(f"| one configuration | {1000 * one:.2f} ms | 1 ms |")
    print(f"| 10,000 configurations built, estimated and ranked | {many:.3f} s | 2 s |")


if __name__ == "__main__":
    main()
