"""An OpenRLHF job as its flags describe it: devices, placement, models and lengths."""

from __future__ import annotations

from math import ceil

from autotune.launchers.frameworks.dialects.flags import Flags
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Placement
from autotune.policies.values.value import Value


class Shape(Value, frozen=True, kw_only=True):
    """Sizes of a job, with OpenRLHF's defaults where it is silent."""

    actors: int  # devices of the trainer
    engine_gpus: int  # of all engines together
    engine_size: int
    ring: int
    tensor: int
    stage: int  # of ZeRO
    heads: int = 0  # 0: unknown
    placement: Placement
    sleeps: bool  # the engine, while the trainer works
    reference: bool
    critic: bool
    dynamic: bool  # micro-batches are packed to a number of tokens
    packed: bool  # samples lie behind one another, without padding
    longest: int
    response: int
    batch: int  # samples of a rollout
    update: int  # samples of one update of the weights

    @property
    def data_parallel(self) -> int:
        """Return the copies of the model that share the batch."""
        return max(1, self.actors // max(1, self.ring * self.tensor))

    @property
    def floor(self) -> int:
        """Return the tokens per card below which a budget frees nothing."""
        return ceil(self.longest / (self.ring * self.tensor))


def shape_of(job: Job, flags: Flags) -> Shape:
    """Return the sizes that a job's flags give."""
    actors = max(1, flags.count("actor.num_nodes", 1) * flags.count("actor.num_gpus_per_node", 8))
    asynchronous = flags.on("train.async_enable")
    together = flags.on("train.colocate_all")
    size = max(1, flags.count("vllm.tensor_parallel_size", 1))
    longest = flags.count("data.max_len", 2048)
    dynamic = flags.on("train.dynamic_batch_enable")
    ring = max(1, flags.count("ds.ring_attn_size", 1))
    samples = max(1, flags.count("rollout.n_samples_per_prompt", 1))
    return Shape(
        actors=actors,
        engine_gpus=flags.count("vllm.num_engines") * size,
        engine_size=size,
        ring=ring,
        tensor=max(1, flags.count("ds.tensor_parallel_size", 1)),
        stage=flags.count("ds.zero_stage", 2),
        heads=job.shape.heads if job.shape else 0,
        placement=Placement.ASYNCHRONOUS
        if asynchronous
        else Placement.COLOCATED
        if together
        else Placement.SEPARATE,
        sleeps=together and not asynchronous and flags.on("vllm.enable_sleep"),
        reference=flags.number("algo.kl.init_coef", 0.01) > 0,
        critic=flags.text("algo.advantage.estimator", "gae") == "gae",
        dynamic=dynamic,
        packed=dynamic or ring > 1 or flags.on("ds.packing_samples"),
        longest=longest,
        response=min(longest, flags.count("rollout.max_new_tokens") or longest),
        batch=flags.count("rollout.batch_size", 1024) * samples,
        update=flags.count("train.batch_size", 128),
    )
