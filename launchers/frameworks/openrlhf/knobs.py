"""OpenRLHF's knobs, both ways: from flags, and back as the smallest change of flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.launchers.frameworks.dialects.flags import Flags, flags_of, spelled
from autotune.launchers.frameworks.openrlhf.job import Shape, shape_of
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import KNOBS, Knobs

NO_FORM: frozenset[str] = frozenset()  # no flag has a --no- form
# Knobs that are one flag, as `settings` of the profile names them too.
FLAGS: Mapping[str, str] = {
    "memory_fraction": "vllm.gpu_memory_utilization",
    "rollout_tensor_parallel": "vllm.tensor_parallel_size",
    "cuda_graphs": "vllm.enforce_eager",
    "tokens_per_microbatch": "train.max_tokens_per_gpu",
    "logprob_tokens": "rollout.max_tokens_per_gpu",
    "microbatch_size": "train.micro_batch_size",
    "recompute": "actor.gradient_checkpointing_enable",
    "grad_offload": "ds.enable_sleep",
    "optimizer_offload": "ds.adam_offload",
    "context_parallel": "ds.ring_attn_size",
    "tensor_parallel": "ds.tensor_parallel_size",
    "fused_kernels": "ds.use_liger_kernel",
    "dataloader_workers": "data.dataloader_num_workers",
}
_IDLE = {True: ("microbatch_size",), False: ("tokens_per_microbatch", "logprob_tokens")}  # by packing


def knobs_of(flags: Flags, shape: Shape) -> Knobs:
    """Return the job's knobs, with OpenRLHF's defaults filled in (openrlhf/cli/train_ppo_ray.py)."""
    budget = flags.count("train.max_tokens_per_gpu", 16192) if shape.dynamic else None
    return Knobs(
        memory_fraction=flags.number("vllm.gpu_memory_utilization", 0.95),
        rollout_tensor_parallel=shape.engine_size,
        cuda_graphs="off" if flags.on("vllm.enforce_eager") else "full",
        tokens_per_microbatch=budget,
        logprob_tokens=(flags.count("rollout.max_tokens_per_gpu") or budget) if shape.dynamic else None,
        microbatch_size=None if shape.dynamic else flags.count("train.micro_batch_size", 1),
        dynamic_batching=shape.dynamic,
        recompute="full" if flags.on("actor.gradient_checkpointing_enable") else "off",
        grad_offload=flags.on("ds.enable_sleep"),
        optimizer_offload=flags.on("ds.adam_offload"),
        context_parallel=shape.ring,
        tensor_parallel=shape.tensor,
        fused_kernels=flags.on("ds.use_liger_kernel"),
        dataloader_workers=flags.count("data.dataloader_num_workers") or None,
    )


def settings_of(job: Job, wanted: Knobs) -> dict[str, Any]:
    """Return the smallest change of the job's flags that makes it use `wanted`."""
    result: dict[str, Any] = {}
    idle = _IDLE.get(bool(wanted.dynamic_batching), ()) if wanted.dynamic_batching is not None else ()
    for knob in KNOBS:  # one flag's default may follow another: the scoring budget the training budget
        changes = spelled(job.settings, result, negatable=NO_FORM)
        flags = flags_of({**job.settings, **changes}, negatable=NO_FORM)
        shape = shape_of(job, flags)
        value = getattr(wanted, knob)
        if knob in FLAGS and knob not in idle and value not in (None, getattr(knobs_of(flags, shape), knob)):
            result |= _written(knob, value, flags, shape)
    return spelled(job.settings, result, negatable=NO_FORM)


def _written(knob: str, value: Any, flags: Flags, shape: Shape) -> dict[str, Any]:
    flag = FLAGS[knob]
    match knob:
        case "cuda_graphs":
            return {flag: value == "off"}
        case "recompute":
            return {flag: value == "full"}
        case "rollout_tensor_parallel":  # on the same cards
            return {flag: value, "vllm.num_engines": max(1, shape.engine_gpus // value)}
        case "microbatch_size":  # scoring packs as many or fewer: its own count follows downwards only
            scored = flags.count("rollout.micro_batch_size", 1)
            return {flag: value, **({"rollout.micro_batch_size": value} if scored > value else {})}
    return {flag: value}
