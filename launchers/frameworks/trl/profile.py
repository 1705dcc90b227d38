"""Profile of a TRL job: its knobs with TRL's names and grids, what limits them, and how it is spread."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from autotune.launchers.frameworks.core import host_allocators
from autotune.launchers.frameworks.core.data import unsupported_always
from autotune.launchers.frameworks.core.lengths import with_lengths
from autotune.launchers.frameworks.core.optimizer_state import torch_state_bytes
from autotune.launchers.frameworks.trl.config import (
    FUSED_HEAD,
    RELEASE,
    Config,
    is_known_release,
    release_of,
    unknown,
)
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import (
    Constraint,
    Divides,
    FixedDuringRun,
    Grid,
    Placement,
    Profile,
    Requires,
    Support,
)
from autotune.policies.values.remedy import Effect

EXPANDABLE = "expandable_segments:True"
_TILE = 4096, 32768  # tokens and words of the vocabulary at once, trl/kernels/chunked_logprob.py
_NO_ENGINE = "only with use_vllm and vllm_mode colocate; a server is started with its own flags"
_NO_DEEPSPEED = "only with a DeepSpeed configuration of accelerate"


def settings_of(config: Config) -> dict[str, str]:
    """Return the setting behind every knob that some job offers."""
    fsdp = config.sharding.startswith("fsdp")
    return {
        "microbatch_size": "per_device_train_batch_size",
        "recompute": config.recompute,
        "dataloader_workers": "dataloader_num_workers",
        "memory_fraction": "vllm_gpu_memory_utilization",
        "rollout_tensor_parallel": "vllm_tensor_parallel_size",
        "optimizer_offload": "offload_optimizer_device",
        "param_offload": "fsdp_offload_params" if fsdp else "offload_param_device",
        # torch from 2.9 on reads the new name first.
        "allocator": f"PYTORCH_{'' if config.variable('PYTORCH_ALLOC_CONF') else 'CUDA_'}ALLOC_CONF",
        "host_allocator": "LD_PRELOAD",
    }


def knobs_of(config: Config) -> Knobs:
    """Return the job's knobs with TRL's defaults filled in."""
    fsdp = config.sharding.startswith("fsdp")
    options = (*map(config.variable, ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")),)
    return Knobs(
        microbatch_size=config.micro,
        recompute="full" if config.on(config.recompute) else "off",
        dataloader_workers=config.count("dataloader_num_workers"),
        fused_kernels=config.on("use_liger_kernel"),
        memory_fraction=float(config.get("vllm_gpu_memory_utilization")) if config.engine else None,
        rollout_tensor_parallel=config.count("vllm_tensor_parallel_size") if config.engine else None,
        optimizer_offload=config.get("offload_optimizer_device") == "cpu",
        param_offload=config.on("fsdp_offload_params")
        if fsdp
        else config.get("offload_param_device") == "cpu",
        allocator="expandable" if any(EXPANDABLE in text for text in options) else "default",
        host_allocator=host_allocators.preloaded(config.variable("LD_PRELOAD")),
    )


def _has_head(job: Job) -> bool:
    """Return whether the trainer has the fused head, which writes no logits but of a tile."""
    return not job.framework_version or release_of(job) >= FUSED_HEAD


def _tiled(knobs: Knobs, job: Job) -> Knobs:
    """Return the knobs with what the fused head does in their words: chunks, and again in backward."""
    if not _has_head(job):
        return knobs
    tokens, words = _TILE
    chunk = tokens * words // max(words, job.shape.vocab if job.shape is not None else 0)
    return replace(knobs, logprob_chunk=chunk, loss_recompute=True)


def setting_value(knob: str, value: Any, setting: str, config: Config) -> Any:
    """Return what a setting is for a knob's value; of a variable the job's other parts stay."""
    if knob == "recompute":
        return value == "full"
    if setting.startswith("offload_"):
        return "cpu" if value else "none"
    if knob == "allocator":
        parts = [part for part in config.variable(setting).split(",") if part]
        kept = [part for part in parts if not part.strip().startswith(EXPANDABLE.partition(":")[0])]
        return ",".join([*kept, EXPANDABLE] if value == "expandable" else kept) or None
    if knob == "host_allocator":
        libraries = re.split(r"[:\s]+", config.variable(setting))  # the loader takes both
        kept = [name for name in libraries if name and host_allocators.preloaded(name) == "default"]
        return ":".join([*kept, *filter(None, [host_allocators.SONAMES.get(value)])]) or None
    return value


def profile_of(job: Job, cluster: Cluster, *, name: str) -> Profile:
    """Return what the policies need to know of a TRL job."""
    config = Config(job, cards=cluster.gpus_per_node)
    offered, unsupported = _support(config, job)
    names = settings_of(config)
    supported = {
        knob: Support(setting=names[knob], grid=grid, effect=effect)
        for knob, (grid, effect) in offered.items()
    }
    apart = config.on("use_vllm") and not config.engine
    return Profile(
        framework=name,
        knobs=_tiled(knobs_of(config), job),
        supported=supported,
        unsupported=unsupported,
        constraints=tuple(_constraints(config, job, supported)),
        placement=Placement.SEPARATE if apart else Placement.COLOCATED,
        engine="vllm" if config.on("use_vllm") else "none",
        resumable=config.get("save_strategy") != "no" and not config.on("save_only_model"),
        layout=with_lengths(_layout(config, fused=_has_head(job)), job),
        warnings=tuple(_warnings(config, job, cluster)),
    )


def _support(config: Config, job: Job) -> tuple[dict[str, tuple[Grid, Effect]], dict[str, str]]:
    two, exact, numeric = Grid(values=(False, True)), Effect.EXACT, Effect.NUMERIC
    offered = {
        "recompute": (Grid(values=("off", "full")), exact),
        "dataloader_workers": (Grid(minimum=0, multiple=1), exact),
        "host_allocator": (Grid(values=("default", *host_allocators.SONAMES)), exact),
    }
    unsupported = unsupported_always(__package__)
    sharding, reason = config.sharding, config.inexact(job)
    if reason:
        unsupported["microbatch_size"] = reason
    else:
        offered["microbatch_size"] = (Grid(values=config.micro_sizes()), exact)
    if config.engine:
        offered["memory_fraction"] = (Grid(minimum=0.05, maximum=0.95, multiple=0.01), exact)
        sizes = tuple(2**n for n in range(8) if config.processes % 2**n == 0)
        offered["rollout_tensor_parallel"] = (Grid(values=sizes), numeric)
    else:
        unsupported |= dict.fromkeys(("memory_fraction", "rollout_tensor_parallel"), _NO_ENGINE)
    if config.on("vllm_enable_sleep_mode"):
        unsupported["allocator"] = "vLLM's pool, which sleep mode pauses, needs fixed segments before 0.20.1"
    else:
        offered["allocator"] = (Grid(values=("default", "expandable")), exact)
    if sharding.startswith("zero"):
        offered["optimizer_offload"] = (two, numeric)
    else:
        unsupported["optimizer_offload"] = _NO_DEEPSPEED
    if sharding.startswith("fsdp") or sharding == "zero3":
        offered["param_offload"] = (two, numeric)
    else:
        unsupported["param_offload"] = "only with FSDP or DeepSpeed's stage 3"
    return offered, unsupported


def _constraints(config: Config, job: Job, supported: dict[str, Support]) -> Iterator[Constraint]:
    if "rollout_tensor_parallel" in supported and job.shape is not None:
        why = f"the model has {job.shape.heads} heads"
        yield Divides(knob="rollout_tensor_parallel", of=job.shape.heads, why=why)
    for knob in ("optimizer_offload", "param_offload"):
        if knob in supported:
            why = "a checkpoint is only known to be read by the optimizer that wrote it"
            yield FixedDuringRun(knob=knob, why=why)
    if {"optimizer_offload", "param_offload"} <= supported.keys():
        why = "DeepSpeed offloads weights beside an offloaded optimizer"
        yield Requires(knob="param_offload", value=True, other="optimizer_offload", values=(True,), why=why)


def _layout(config: Config, *, fused: bool) -> Layout:
    ranks, sharding = config.processes, config.sharding
    sharded = sharding.startswith("fsdp") or sharding == "zero3"
    width = 2 if "16" in str(config.get("dtype")) else 4
    half = width == 2 or not config.on("use_cpu")
    batch = config.micro * ranks
    step = batch * config.passes
    return Layout(
        strategy="none" if ranks == 1 else "fsdp2" if sharded else "ddp",
        ranks=ranks,
        shards=ranks if sharded else 1,
        engine_ranks=ranks if config.engine else 0,
        parameter_bytes=width,
        compute_bytes=2 if half else 4,
        gradient_bytes=width,
        optimizer_bytes=torch_state_bytes(str(config.get("optim")), parameter_bytes=width),
        reference=bool(config.get("beta")) and not config.on("use_peft"),
        reference_bytes=width,
        lora_rank=config.count("lora_r") if config.on("use_peft") else 0,
        entropy=not fused,  # it comes out of the same tiles
        engine_sleeps=config.on("vllm_enable_sleep_mode"),
        engine_weights_on_host=False,  # they are sent anew when it wakes
        padded=True,
        chunked_head=fused,
        per_tensor_optimizer="fused" in str(config.get("optim")),
        sync_buckets=0,
        sequences=step,
        mini_batch=0 if batch * config.accumulation == step else batch * config.accumulation,
        response_tokens=config.count("max_completion_length"),
    )


def _warnings(config: Config, job: Job, cluster: Cluster) -> Iterator[str]:
    if config.get("save_strategy") == "no" or config.on("save_only_model"):
        yield "The job writes no checkpoint that training can continue: every attempt starts at step 0."
    if not is_known_release(job):
        yield from (
            f"`{name}` is no setting of TRL {RELEASE}, which is known here; it is passed on."
            for _, name in unknown(job)
        )
    if max(cluster.nodes, job.cluster.nodes) > 1 and config.count("num_machines") < 2:
        yield "TRL runs on one node: the others stay idle."
    if job.command and not any("trl" in word for word in job.command[:2]):
        yield "The script must give its command line to GRPOConfig, as TrlParser does: settings are flags."
