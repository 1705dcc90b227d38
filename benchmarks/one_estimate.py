"""The estimate of one configuration as a value by phase, as benchmarks and tests read it."""

from __future__ import annotations

import numpy as np

from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.peaks import PHASES, estimates
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Profile
from autotune.policies.values.value import Value


class Parts(Value, frozen=True, kw_only=True):
    """Bytes of one memory at the largest instant of a phase."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0  # and entropy
    kv_pool: float = 0.0
    buffers: float = 0.0
    graphs: float = 0.0
    residue: float = 0.0  # of a sleeping engine
    outside: float = 0.0  # of PyTorch's tensors: contexts, NCCL, what the allocator strands; host: processes

    @property
    def total(self) -> float:
        """Bytes of all parts."""
        return float(sum(getattr(self, name) for name in PARTS))


class PhaseEstimate(Value, frozen=True, kw_only=True):
    """The peak of one phase on its device and on one node's host."""

    gpu: Parts
    host: Parts
    component: Component  # whose device it is
    error: float  # share of the device's total that one standard deviation is thought to be
    gpu_capacity_bytes: int  # 0: unknown or unlimited
    host_capacity_bytes: int
    seconds: float

    @property
    def gpu_missing_bytes(self) -> float:
        """By how much the device is too small; negative is free."""
        return self.gpu.total - self.gpu_capacity_bytes if self.gpu_capacity_bytes else 0.0


class Estimate(Value, frozen=True, kw_only=True):
    """What one configuration needs in every phase, and how long a step takes relative to others."""

    phases: dict[Phase, PhaseEstimate]
    step_s: float
    pool_tokens: float  # an engine's pool must hold at least one sequence


def estimate(profile: Profile, cluster: Cluster, model: Model, knobs: Knobs) -> Estimate:
    """Return what one configuration needs."""
    result, column = estimates(profile, cluster, model, (knobs,)), 0
    gpu, host = result.gpu_parts[:, :, column].tolist(), result.host_parts[:, :, column].tolist()
    host_capacity = 0 if result.host_capacity == np.inf else int(result.host_capacity)
    phases = {}
    for row, phase in enumerate(PHASES):
        capacity = result.gpu_capacity[row, column]
        phases[phase] = PhaseEstimate(
            gpu=Parts(**dict(zip(PARTS, gpu[row], strict=True))),
            host=Parts(**dict(zip(PARTS, host[row], strict=True))),
            component=Component.ROLLOUT if result.on_engine[row, column] else Component.TRAINER,
            error=float(result.error[row, column]),
            gpu_capacity_bytes=0 if capacity == np.inf else int(capacity),
            host_capacity_bytes=host_capacity,
            seconds=float(result.seconds[row, column]),
        )
    return Estimate(
        phases=phases,
        step_s=float(result.step_s[column]),
        pool_tokens=float(result.pool_tokens[column]),
    )
