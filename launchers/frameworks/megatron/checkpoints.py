"""Where a job of slime or Relax saves, and what an attempt of it may load."""

from __future__ import annotations

from typing import Any

from autotune.launchers.frameworks.core.checkpoints import absolute
from autotune.launchers.frameworks.dialects.flags import Flags
from autotune.launchers.frameworks.megatron.job import needs_reference
from autotune.policies.values.job import SAVE_STEPS, Job

# What makes Megatron take the weights of a checkpoint and nothing else, from step 0.
_WEIGHTS_ONLY = {"finetune": True, "no-load-optim": True, "no-load-rng": True, "start-rollout-id": 0}
_START = ("finetune", "no-load-optim", "no-load-rng", "start-rollout-id", "ckpt-step")


def saves(flags: Flags) -> bool:
    """Return whether checkpoints are wanted: a null `save` in the job says no."""
    return "save" not in flags.given or bool(flags.given["save"])


def root(job: Job, flags: Flags) -> str:
    """Return the folder below which files of the job's runs go."""
    return absolute(job, flags.text("save") or "checkpoints").rstrip("/")


def checkpoint_flags(job: Job, flags: Flags, *, run: str, attempt: int, resume: bool) -> dict[str, Any]:
    """Return the flags by which an attempt continues its own run's checkpoint and no other.

    Both frameworks continue whatever lies in --load, and shipped scripts give it the folder of --save. A run
    that may not do so gets a folder of its own below it; `resume: true` in the job uses the folder as it is.
    """
    if not saves(flags):
        return {"save": None, "save-interval": None, **_start_only(flags)}
    interval = flags.count("save-interval") or job.recovery.save_every or SAVE_STEPS
    if _continues(job, flags):
        home = absolute(job, flags.text("save") or flags.text("load"))
        # Before the first attempt saved anything the job may begin elsewhere; afterwards it may not.
        load = (attempt == 1 and _start_of(flags)) or home
        return {"save": home, "save-interval": interval, "load": load}
    own = f"{root(job, flags)}/{job.name}-{run}"
    result: dict[str, Any] = {"save": own, "save-interval": interval}
    if not resume:
        return result | _start_only(flags)
    result |= {"load": own, **{name: None for name in _START if flags.has(name)}}
    start = _start_of(flags)
    if start and not needs_reference(flags):
        result["ref-load"] = start  # where the weights come from while nothing is saved
    return result


def checkpoint_warnings(job: Job, flags: Flags) -> tuple[str, ...]:
    """Return what the user should know of saving and resuming."""
    if not saves(flags):
        return ("`save` is null: without checkpoints every relaunch begins at step 0",)
    result = []
    if not _continues(job, flags):
        result.append(
            f"checkpoints go to {root(job, flags)}/{job.name}-<run>; `resume: true` uses --save itself"
        )
    if _start_of(flags) and not job.resume:
        result.append("--load is read as start weights, from step 0; `resume: true` continues it")
        other = "hf-checkpoint" if flags.text("megatron-to-hf-mode") == "bridge" else "ref-load"
        if other != "ref-load" or needs_reference(flags):
            result.append(f"until a checkpoint is saved, a relaunch takes its start weights from --{other}")
    if flags.on("async-save"):
        result.append("--async-save finishes a checkpoint at the next one: a crash loses the newest")
    if flags.on("no-save-optim"):
        result.append("--no-save-optim: a relaunch begins with a new optimizer state")
    return tuple(result)


def _continues(job: Job, flags: Flags) -> bool:
    """Return whether the job says to go on with the folder that it names."""
    return job.resume and (flags.has("save") or flags.has("load"))


def _start_of(flags: Flags) -> str:
    """Return the checkpoint that the job begins with, where it is not its own."""
    load = flags.text("load")
    return load if load and load.rstrip("/") != flags.text("save").rstrip("/") else ""


def _start_only(flags: Flags) -> dict[str, Any]:
    return dict(_WEIGHTS_ONLY) if _start_of(flags) else {"load": None}
