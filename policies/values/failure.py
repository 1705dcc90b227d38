"""Why a job failed, in which phase and in which component."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """Why a run ended; causes are kept apart because their cures are opposite."""

    GPU_OOM = "gpu-oom"
    HOST_OOM = "host-oom"
    KV_POOL = "kv-pool"  # an engine's KV pool ran out, and the job crashed
    POOL_TOO_SMALL = "pool-too-small"  # the engine refused to start: the pool must grow
    SHM = "shm"
    OBJECT_STORE = "object-store"
    DISK = "disk"
    HANG = "hang"
    INFRASTRUCTURE = "infrastructure"
    CONFIG = "config"
    CODE = "code"
    UNKNOWN = "unknown"

    @property
    def is_memory(self) -> bool:
        """Whether some memory was too small for the configuration."""
        return self in _RESOURCES

    @property
    def is_oom(self) -> bool:
        """Whether memory was exhausted at run time."""
        return self.is_memory and self is not Cause.POOL_TOO_SMALL

    @property
    def resource(self) -> str:
        """The memory that was too small: gpu, host, gpu_pool, shm, object_store or none."""
        return _RESOURCES.get(self, "none")


_RESOURCES = {
    Cause.GPU_OOM: "gpu",
    Cause.HOST_OOM: "host",
    Cause.KV_POOL: "gpu_pool",
    Cause.POOL_TOO_SMALL: "gpu_pool",
    Cause.SHM: "shm",
    Cause.OBJECT_STORE: "object_store",
}

# Share of a node's memory at which Ray kills processes.
HOST_LIMIT = 0.95


class Phase(StrEnum):
    """What the job was doing; validation is `rollout`, wake-up of an engine is `weight_sync`."""

    INIT = "init"
    RESUME = "resume"  # a checkpoint is loaded; only attempts that resume fail here
    ROLLOUT_INIT = "rollout_init"
    ROLLOUT = "rollout"
    LOG_PROB = "log_prob"  # also values of the critic, log-probs of the reference, scores
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    WEIGHT_SYNC = "weight_sync"
    COMM = "comm"
    CHECKPOINT = "checkpoint"
    DATA = "data"
    NONE = "none"

    @property
    def is_engine(self) -> bool:
        """Whether only an engine works."""
        return self in ENGINE_PHASES

    @property
    def is_start(self) -> bool:
        """Whether a process is starting, before its first rollout or step."""
        return self in (Phase.INIT, Phase.RESUME, Phase.ROLLOUT_INIT)

    @property
    def is_pass(self) -> bool:
        """Whether a trainer runs micro-batches, which hold activations or logits."""
        return self in (Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD)


ENGINE_PHASES = (Phase.ROLLOUT, Phase.ROLLOUT_INIT)  # only an engine works
# Only a trainer works, and an engine on the same device may sleep.
TRAINER_PHASES = (Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class Component(StrEnum):
    """Which part of the job failed."""

    TRAINER = "trainer"
    REF = "ref"
    CRITIC = "critic"
    REWARD = "reward"
    ROLLOUT = "rollout"
    DRIVER = "driver"
    DATA = "data"
    UNKNOWN = "unknown"
