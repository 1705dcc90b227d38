"""A job as its flags describe it: devices, placement, models and lengths."""

from __future__ import annotations

from math import ceil
from typing import Literal

import msgspec

from autotune.launchers.frameworks.core.data import Words, document, table
from autotune.launchers.frameworks.dialects.flags import Flags
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Placement
from autotune.policies.values.value import Value


class Dialect(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In what slime, Relax and miles, which share a trainer and an engine, differ."""

    name: str
    engine_version: str
    names: Words  # flags of the trainer and of Megatron
    engine_names: Words = Words()  # arguments of SGLang behind --sglang-
    prefixes: tuple[str, ...] = ()  # of arguments of SGLang besides --sglang-
    strict: bool = False  # refuses a flag that it does not know; the others ignore it without a word
    negatable: frozenset[str]  # flags with a --no- form
    removed: dict[
        str, str
    ]  # flags of guides and older versions that are ignored today -> what became of them
    graph_limit: str  # flag of the largest captured batch
    expandable: dict[str, str]  # environment of the trainer that makes segments expandable
    profile_flags: tuple[str, ...]
    profile_folder: str  # flag of the profiler's folder; "" where it has one of its own
    worker_pool: str  # flag of the processes that prepare data; "" where there are none
    logprob_budget: bool  # --log-probs-max-tokens-per-gpu is read
    memory_margin: bool
    weights_backup: str  # flag that goes without the host's copy of the weights; "" where there is none
    rebuilds_weights: bool = False  # ... which takes them from the optimizer's master weights instead
    inverse: dict[str, str] = {}  # printed arguments that are false -> the flags that were given
    nccl_check: Literal["flag", "always", "never"]  # of free memory before NCCL's calls
    disk_sync: Literal["flag", "delta", "never"]  # of weights through files: all of them, or what changed
    resumes_critic: bool = True
    per_token_context: bool  # context parallelism asks for --calculate-per-token-loss
    trainer_first: bool  # the trainer is built before the engines start


def dialect_of(package: str, file: str) -> Dialect:
    """Return the dialect of a data file, with the flags that both frameworks know and those of its engine."""
    own = document(package, file, Dialect)
    common = table(__package__, "flags.yaml", Words)
    engine = table(__package__, "sglang_flags.yaml", Words)
    return msgspec.structs.replace(
        own,
        names=Words(own.names.union(*common.values())),
        engine_names=Words(engine["every"] | engine[own.engine_version]),
    )


class Shape(Value, frozen=True, kw_only=True):
    """Sizes of a job, with the framework's defaults where it is silent."""

    trainer_gpus: int
    engine_gpus: int  # of all engines together
    engine_size: int  # devices of one engine
    tensor: int
    pipeline: int
    context: int
    expert: int
    heads: int = 0  # 0: unknown
    kv_heads: int = 0
    layers: int = 0
    placement: Placement
    offload_train: bool  # the trainer's memory sleeps while the engine works
    offload_rollout: bool
    reference: bool
    critic: bool
    dynamic: bool  # micro-batches are packed to a number of tokens
    longest: int | None = None  # tokens of the longest sequence, where the job bounds it
    prompt: int = 0
    response: int = 0
    batch: int = 0  # prompts of a rollout
    prompts: int = 0  # asked for at once
    samples: int = 1  # per prompt

    @property
    def data_parallel(self) -> int:
        """Return the copies of the model that share the batch."""
        return max(1, self.trainer_gpus // max(1, self.tensor * self.pipeline * self.context))

    @property
    def floor(self) -> int:
        """Return the tokens per card below which a budget frees nothing."""
        return ceil((self.longest or self.response or 1) / self.context)

    @property
    def engines(self) -> int:
        """Return the number of engines."""
        return max(1, self.engine_gpus // max(1, self.engine_size))


def shape_of(job: Job, flags: Flags, dialect: Dialect) -> Shape:
    """Return the sizes that a job's flags give."""
    trainer, engines = _devices(flags)
    placement = placement_of(job, flags)
    colocated = placement is Placement.COLOCATED
    if colocated and not flags.has("resource"):
        engines = flags.count("rollout-num-gpus") or trainer
    critic = flags.text("advantage-estimator") == "ppo"
    response = flags.count("rollout-max-response-len")
    prompt = flags.count("rollout-max-prompt-len")
    context = flags.count("rollout-max-context-len")
    samples = max(1, flags.count("n-samples-per-prompt", 1))
    batch = flags.count("rollout-batch-size") or flags.count("global-batch-size") // samples
    heads = job.shape.heads if job.shape else flags.count("num-attention-heads")
    kv_heads = job.shape.kv_heads if job.shape else flags.count("num-query-groups", heads)
    return Shape(
        trainer_gpus=trainer,
        engine_gpus=engines,
        engine_size=max(1, flags.count("rollout-num-gpus-per-engine", 1)),
        tensor=max(1, flags.count("tensor-model-parallel-size", 1)),
        pipeline=max(1, flags.count("pipeline-model-parallel-size", 1)),
        context=max(1, flags.count("context-parallel-size", 1)),
        expert=max(1, flags.count("expert-model-parallel-size", 1)),
        heads=heads,
        kv_heads=kv_heads,
        layers=job.shape.layers if job.shape else flags.count("num-layers"),
        placement=placement,
        offload_train=_sleeps(flags, "offload-train", colocated=colocated)
        or critic
        or flags.on("release-train"),
        offload_rollout=_sleeps(flags, "offload-rollout", colocated=colocated),
        reference=needs_reference(flags),
        critic=critic,
        dynamic=flags.on("use-dynamic-batch-size"),
        longest=context or (prompt + response if prompt and response else None),
        prompt=prompt or max(0, context - response),
        response=response,
        batch=batch,
        prompts=max(batch, flags.count("over-sampling-batch-size")),
        samples=samples,
    )


def placement_of(job: Job, flags: Flags) -> Placement:
    """Return whether training and generation share the cards, and whether they run at once."""
    if flags.on("colocate"):
        return Placement.COLOCATED
    if flags.on("fully-async") or any("train_async" in word for word in job.command):
        return Placement.ASYNCHRONOUS
    return Placement.SEPARATE


def needs_reference(flags: Flags) -> bool:
    """Return whether a frozen copy of the weights is scored."""
    return flags.on("use-kl-loss") or flags.number("kl-coef") != 0


def needs_weights_backup(flags: Flags) -> bool:
    """Return whether another set of weights is switched in from host memory."""
    others = ("keep-old-actor", "opd-teacher-load", "ref-update-interval")
    return needs_reference(flags) or any(flags.on(name) for name in others)


def can_rebuild_weights(flags: Flags, shape: Shape) -> bool:
    """Return whether the optimizer's master weights can stand for the copy (miles/utils/arguments.py)."""
    kept = flags.on("optimizer-cpu-offload") or not flags.on("use-precision-aware-optimizer")
    against = ("keep-old-actor", "indep-dp", "overlap-param-gather", "disable-compute-advantages-and-returns")
    counts = ("lora-rank", "num-critic-only-steps")
    return (
        kept
        and shape.placement is Placement.COLOCATED
        and shape.offload_train
        and flags.text("optimizer", "adam") == "adam"
        and flags.text("offload-train-target", "cpu") == "cpu"
        and not any(flags.on(name) for name in against)
        and not any(flags.count(name) for name in counts)
        and not flags.has("lora-adapter-path")
    )


def roles_of(flags: Flags) -> dict[str, int]:
    """Return the cards of each role in Relax's --resource; empty where the job has none."""
    return {
        role: int(size[1])
        for role, size in flags.document("resource").items()
        if isinstance(size, list | tuple) and len(size) == 2 and isinstance(size[1], int)
    }


def _devices(flags: Flags) -> tuple[int, int]:
    """Return the cards of trainer and engines; Relax's --resource speaks before the single counts."""
    sizes = roles_of(flags)
    if sizes:
        return max(1, sizes.get("actor", 1)), sizes.get("rollout", 0)
    trainer = flags.count("actor-num-nodes", 1) * flags.count("actor-num-gpus-per-node", 8)
    return max(1, trainer), flags.count("rollout-num-gpus")


def _sleeps(flags: Flags, name: str, *, colocated: bool) -> bool:
    return flags.on(name, default=colocated or flags.on("offload"))
