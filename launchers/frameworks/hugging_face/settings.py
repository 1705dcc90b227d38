"""The resolved settings of a TRL or ms-swift job and the batch sizes that follow from them."""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from autotune.launchers.frameworks.core import host_allocators, residency
from autotune.launchers.frameworks.dialects.flags import parsed_value
from autotune.launchers.frameworks.dialects.settings import Settings
from autotune.launchers.frameworks.tabular.declared import DeclaredSettings, facts
from autotune.launchers.frameworks.tabular.table import Row, Table
from autotune.policies.values.job import Job
from autotune.policies.values.profile import Placement
from autotune.policies.values.provenance import Origin

MICRO, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
SPREAD, WHOLE = "steps_per_generation", "generation_batch_size"
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PRELOAD = "LD_PRELOAD"
ENVIRONMENT = (*ALLOCATORS, PRELOAD)  # settings that are environment variables
EXPANDABLE = "expandable_segments:True"
ALLOCATOR_MODES = {"default": "default", "expandable": "expandable"}
HOST_ALLOCATOR: Row[Any] = Row(
    knob="host_allocator",
    key=PRELOAD,
    modes={"default": "default", "jemalloc": "jemalloc", "tcmalloc": "tcmalloc"},
)


class TrainerSettings(DeclaredSettings):
    """A job's settings over those of its config file over the defaults.

    The environment variables in ENVIRONMENT are settings too; their value is the mode of their knob.
    """

    router_by_default: ClassVar[bool] = False  # whether the loss includes the router's term by default

    def __init__(self, job: Job, package: str, releases: tuple[str, ...]) -> None:
        self.job, self.code = job, job.own_code
        self.takes_images = bool(job.shape and job.shape.tower)
        self.given, spelled = dict(job.settings), {**job.document, **job.settings}
        self.spelled = frozenset(spelled)
        self.release = self.release_of(job, spelled, releases)
        self.facts = facts(package, self.release.version)
        newer = {old: new for new, old in self.older_names.items()}
        self.written = {newer.get(name, name): value for name, value in spelled.items()}  # by today's names
        self.is_own = True
        self.keys = frozenset(self.facts.types)
        Settings.__init__(self, self.written, self.facts.defaults)

    def get(self, key: str) -> Any:
        """Return a setting's value, the default if the job leaves it out or sets null."""
        if key in ALLOCATORS:
            return (
                "expandable" if any(EXPANDABLE in self.variable(each) for each in ALLOCATORS) else "default"
            )
        if key == PRELOAD:
            return host_allocators.preloaded(self.variable(key))
        value = self.written.get(key)
        if key == "vllm_mode" and self.job.server:
            return value or "server"
        if isinstance(value, str):
            value = parsed_value(value.capitalize() if value in ("true", "false") else value)
        return self.facts.defaults.get(self.named(key)) if value is None else value

    def has(self, key: str) -> bool:
        """Return whether the job or its config file sets a key under any of its names."""
        return key in self.written

    def on(self, name: str) -> bool:
        """Return whether a switch is on."""
        return str(self.get(name)).lower() in ("true", "1")

    def kind(self, name: str) -> str:
        """Return the type of a setting, such as `int?`; empty if any value may be valid."""
        return self.facts.types.get(self.named(name), "")

    def variable(self, name: str) -> str:
        """Return an environment variable from the settings or `env:`."""
        return str(self.written.get(name) or self.job.env.get(name, ""))

    def with_mode(self, name: str, mode: str) -> str | None:
        """Return a variable changed to a mode, keeping its other parts; None if it becomes empty."""
        if name in ALLOCATORS:
            parts = [part for part in self.variable(name).split(",") if part]
            kept = [part for part in parts if not part.strip().startswith(EXPANDABLE.partition(":")[0])]
            return ",".join([*kept, EXPANDABLE] if mode == "expandable" else kept) or None
        libraries = re.split(r"[:\s]+", self.variable(name))  # the loader takes both
        kept = [each for each in libraries if each and host_allocators.preloaded(each) == "default"]
        return ":".join([*kept, *filter(None, [host_allocators.SONAMES.get(mode)])]) or None

    @property
    def has_script(self) -> bool:
        """Whether the job names a script of its own."""
        return any(word.endswith(".py") for word in self.job.command)

    @property
    def leaves_layout_open(self) -> bool:
        """Whether the job does not determine how its processes shard the model."""
        return False

    def guesses(self) -> Iterator[tuple[str, str]]:
        """Yield assumptions about what the job leaves to its script or launcher."""
        if self.has_script:
            yield "the script of the job changes no setting", ""
        if self.leaves_layout_open:
            yield "the model is not sharded: nothing says how the job is launched", "set accelerate_config"

    @property
    def knows_release(self) -> bool:
        """Whether the facts are those of the release that the job runs, patch releases included."""
        return self.knows_all

    @property
    def knows_all(self) -> bool:
        """Whether the facts are those of the release that the job runs, patch releases included."""
        own = (self.job.framework_version or "").startswith(self.release.version.rpartition(".")[0] + ".")
        origin = Origin.EXACT if own and self.release.version not in self.older else Origin.ASSUMED
        return not origin.is_assumed

    @property
    def heads(self) -> int:
        """Attention heads of the model; 0 if its shape is unknown."""
        return self.job.shape.heads if self.job.shape else 0

    @property
    @abstractmethod
    def processes(self) -> int:
        """The trainer's processes."""

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Whether a process holds only a shard of the weights."""

    @property
    @abstractmethod
    def is_fsdp(self) -> bool:
        """Whether the trainer shards by FSDP."""

    @property
    def colocated(self) -> bool:
        """Whether vLLM generates in the trainer's processes.

        `vllm_device` of old releases gives it a GPU of its own (TRL 0.16, grpo_config.py).
        """
        has_own_card = self.written.get("vllm_device") is not None
        return self.on("use_vllm") and self.get("vllm_mode") == "colocate" and not has_own_card

    @property
    def balances_experts(self) -> bool:
        """Whether the loss includes the router's auxiliary term, also by default."""
        shape, factor = self.job.shape, self.get("router_aux_loss_coef")
        return (
            shape is not None
            and bool(shape.experts)
            and bool(self.router_by_default if factor is None else factor)
        )

    @property
    def placement(self) -> Placement:
        """Whether vLLM shares the trainer's GPUs; without vLLM the trainer generates itself."""
        shared = not self.on("use_vllm") or self.colocated
        return residency.placement(shared=shared, ahead=self.on("async_generate"))

    @property
    def resumes(self) -> bool:
        """Whether the job writes checkpoints from which training can resume."""
        return self.saves and not self.on("save_only_model")

    @property
    def saves(self) -> bool:
        """Whether the job writes checkpoints."""
        return str(self.get("save_strategy")) not in ("no", "False")

    @property
    def engine(self) -> str:
        """The inference engine."""
        return "vllm" if self.on("use_vllm") else "none"

    # ------------------------------------------------------------------------ the batch

    @property
    def spreads_generations(self) -> bool:
        """Whether a generation may span several micro-batches; in old releases each has its own."""
        return bool(self.kind(SPREAD))

    @property
    def micro(self) -> int:
        """Samples per micro-batch of one process."""
        return max(1, self.count(MICRO))

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step."""
        return max(1, self.count(ACCUMULATION))

    @property
    def passes(self) -> int:
        """Micro-batches per generation."""
        whole = self.count(WHOLE)
        spread = whole // (self.micro * self.processes) if whole else self.count(SPREAD)
        return max(1, spread or self.accumulation)

    @property
    def span(self) -> int:
        """Optimizer steps per generation; a checkpoint should not fall inside one."""
        return max(1, self.passes * self.count("num_iterations") // self.accumulation)

    def micro_sizes(self) -> tuple[int, ...]:
        """Return the micro-batch sizes that keep the optimizer's batch and the generation unchanged."""
        common = math.gcd(self.micro * self.accumulation, self.micro * self.passes)
        return tuple(size for size in range(common, 0, -1) if common % size == 0)

    def with_micro(self, size: int) -> dict[str, Any]:
        """Return the settings of another micro-batch size with the same batch; none if it is not legal."""
        if size not in self.micro_sizes():
            return {}
        changed = {MICRO: size, ACCUMULATION: self.micro * self.accumulation // size}
        if self.written.get(SPREAD) is not None:
            changed[SPREAD] = self.micro * self.passes // size
        return changed


@cache
def shown_settings(package: str) -> frozenset[str]:
    """Return the settings that a log may print: those of a framework's knobs and of `SHOWN`."""
    own = import_module(f"{package}.rows")  # which builds on the settings' own module
    table: Table[Any] = own.TABLE
    return frozenset((*(row.key for row in table.rows), *own.SHOWN.split())).difference(("", *ENVIRONMENT))


def arguments(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield settings as words of a command line for argparse; null yields none."""
    for name, value in settings.items():
        if isinstance(value, list):
            yield from (f"--{name}", *map(argument_text, value))
        elif value is not None:
            yield from (f"--{name}", argument_text(value))


def argument_text(value: Any) -> str:
    """Return a value as an argument."""
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)
