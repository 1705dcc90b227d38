"""ms-swift: `swift rlhf --rlhf_type grpo`, under torchrun on one node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, ClassVar

import msgspec

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core.lengths import PromptKeys
from autotune.launchers.frameworks.hugging_face.adapter import HuggingFaceTrainer
from autotune.launchers.frameworks.hugging_face.settings import (
    ACCUMULATION,
    ALLOCATORS,
    ENVIRONMENT,
    EXPANDABLE,
    arguments,
)
from autotune.launchers.frameworks.ms_swift.config import LAUNCH_VARIABLES, PROCESSES, RELEASES, Config
from autotune.launchers.frameworks.ms_swift.layout import layout
from autotune.launchers.frameworks.ms_swift.rows import TABLE
from autotune.policies.values.job import Job

_MODULE = "swift.cli.rlhf"
_SWITCHES = (
    "gradient_checkpointing",
    "offload_model",
    "offload_optimizer",
    "use_liger_kernel",
    "vllm_enforce_eager",
)
_TORCHRUN = ("{python}", "-m", "torch.distributed.run")


class MsSwift(HuggingFaceTrainer[Config]):
    """ms-swift: runs the module of `swift rlhf` with its config file's settings as flags."""

    name = "ms-swift"
    settings_class = Config
    title = "ms-swift"
    reported_as = "swift"
    distribution = "ms-swift"
    releases = RELEASES
    modules = ("swift", "msgspec")  # rlhf_trainers/utils.py imports it; the package does not declare it
    table = TABLE
    layout = staticmethod(layout)
    saving: ClassVar[Mapping[str, Any]] = {**dict.fromkeys(_SWITCHES, True), ALLOCATORS[0]: EXPANDABLE}
    section = "ENV"
    factor = f"--{ACCUMULATION} up by the same factor"
    model_key = "model"
    longest_request = "vllm_max_model_len"
    own_settings = ("add_version",)
    prompt_keys = PromptKeys(files="dataset", field="messages")

    def gpus(self, job: Job) -> int:
        """Return the number of processes, each on a GPU."""
        return self.config(job).processes

    def on_gpus(self, job: Job, *, nodes: int, per_node: int) -> Job | None:
        """Return the job with a process on each of other GPUs; None on several nodes or for one process."""
        if nodes > 1 or PROCESSES not in self.config(job).env:
            return None
        return msgspec.structs.replace(job, env={**job.env, PROCESSES: str(per_node)})

    def refused(self, config: Config) -> Iterator[Problem]:
        """Yield what ms-swift refuses of command, environment variables and settings."""
        command = config.job.command
        if command and (len(command) != 2 or PurePath(command[0]).name != "swift" or command[1] != "rlhf"):
            hint = "leave it out, and write the flags under `settings:`"
            yield Problem(path=("command",), message="the command is not `swift rlhf`", hint=hint)
        if not config.env.get(PROCESSES, "1").isdigit():
            yield Problem(path=("env", PROCESSES), message="the processes of a node are a whole number")
        yield from super().refused(config)

    def launch(self, config: Config, own: Mapping[str, Any], entry: tuple[str, ...]) -> tuple[str, ...]:
        """Return the module inside the entry, under torchrun if the job sets a number of processes."""
        given = [name for name in LAUNCH_VARIABLES if name in config.env]
        torchrun = [word for name in given for word in (f"--{name.lower()}", config.env[name])]
        launcher = (*_TORCHRUN, *torchrun) if {PROCESSES, "NNODES"} & config.env.keys() else ("{python}",)
        every = {**config.written, **own}
        words = {config.named(name): value for name, value in every.items() if name not in ENVIRONMENT}
        return (*launcher, *entry, _MODULE, *arguments(words))

    def run_settings(self, config: Config, job: Job, *, run: str, resume: bool) -> dict[str, Any]:
        """Return the checkpoint settings, without the subfolder that ms-swift adds by default."""
        return {**super().run_settings(config, job, run=run, resume=resume), "add_version": False}

    def environment(self, config: Config, job: Job, run: str) -> dict[str, str]:
        """Return an attempt's variables, those of the job's file among them."""
        return {**config.env, **super().environment(config, job, run)}
