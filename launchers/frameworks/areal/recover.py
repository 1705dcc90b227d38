"""AReaL's own recovery: whether a job can continue, and the settings that let it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.launchers.frameworks.areal.config import Config, overrides
from autotune.launchers.frameworks.areal.engines import Site
from autotune.policies.values.job import SAVE_S, Job

_FREQUENCIES = ("freq_epochs", "freq_steps", "freq_secs")
_ON = ("on", "auto")


def resumable(job: Job, site: Site) -> bool:
    """Return whether an attempt can continue where the last one ended."""
    refused = overrides(job).get("recover.mode") in ("disabled", "off")
    v2 = "v2" in (site.config.text("actor._version"), site.config.text("rollout._version"))
    return not refused and not v2


def recover_root(config: Config) -> str:
    """Return the folder below which AReaL keeps what it recovers from."""
    return config.text("recover.fileroot") or config.text("cluster.fileroot")


def recover_settings(job: Job, site: Site, *, run: str) -> dict[str, Any]:
    """Return the settings that a job lacks to be continued from its own checkpoints, and from none else.

    AReaL continues whatever lies under recover.fileroot, so a run has a folder of its own there unless the
    job says that it may go on from what is already there. Its own retries restart blindly: they are off.
    """
    if not resumable(job, site):
        return {}
    config = site.config
    added: dict[str, Any] = {}
    if config.text("recover.mode") not in _ON:
        added["recover.mode"] = "on"
    if not any(config.has(f"recover.{name}") for name in _FREQUENCIES):
        every = job.recovery.save_every
        added |= {"recover.freq_steps": every} if every else {"recover.freq_secs": SAVE_S}
    for name in ("experiment_name", "trial_name"):
        if not config.has(f"recover.{name}"):
            added[f"recover.{name}"] = config.text(name)
    root = recover_root(config)
    if not job.resume:
        added["recover.fileroot"] = f"{root.rstrip('/')}/autotune/{run}"
    elif not config.has("recover.fileroot"):
        added["recover.fileroot"] = root
    added["recover.retries"] = 0
    return added


def saves(job: Job, site: Site) -> Iterator[str]:
    """Yield what the user should know about the job's checkpoints."""
    config = site.config
    if "v2" in (config.text("actor._version"), config.text("rollout._version")):
        yield "AReaL cannot recover with its v2 controllers: every attempt starts at step 0."
        return
    if not resumable(job, site):
        yield f"recover.mode={config.text('recover.mode')} is kept: every attempt starts at step 0."
        return
    if config.text("recover.mode") not in _ON:
        yield "AReaL would write no checkpoint to continue from; recover.mode=on is added."
    if not any(config.has(f"recover.{name}") for name in _FREQUENCIES):
        every = job.recovery.save_every
        when = f"recover.freq_steps={every}" if every else f"recover.freq_secs={SAVE_S}"
        yield f"The job does not say how often to write a recover checkpoint; {when} is added."
    if site.trainer == "megatron" and config.is_on("actor.use_lora"):
        yield "AReaL cannot save Megatron's adapters to recover from: a relaunch fails or starts at step 0."
    elif site.trainer == "megatron" and not config.is_on("recover.no_save_optim"):
        yield (
            "AReaL cannot save Megatron's distributed optimizer; set recover.no_save_optim, which begins "
            "each attempt with a fresh optimizer state."
        )
