"""A TRL job as one configuration: its YAML file, the settings over it, TRL's defaults underneath."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from autotune.launchers.frameworks.core.data import Words, table
from autotune.launchers.frameworks.dialects.flags import parsed_value
from autotune.policies.values.job import Job

ENVIRONMENT = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "LD_PRELOAD",
)  # settings that go to the environment
RELEASE = "1.16.0"  # of the lists of names and defaults
FUSED_HEAD = (1, 15)  # the first release whose trainer has a fused head of its own
_DAPO = (0, 24)  # the first whose default loss is dapo (pull request 3938); before it was bnpo
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_PACKAGED_RANKS = 8  # of the configurations that TRL ships, but for single_gpu


@cache
def keys() -> dict[str, frozenset[str]]:
    """Return the names that TRL takes, by type; `launch` are those of accelerate."""
    return {kind: frozenset(names) for kind, names in table(__package__, "keys.yaml", Words).items()}


@cache
def defaults() -> dict[str, Any]:
    """Return the defaults of the settings that are read here."""
    return table(__package__, "defaults.yaml", Any)


def kind_of(name: str) -> str:
    """Return the type of a setting, `launch` for accelerate's, empty for one that is not known."""
    return next((kind for kind, names in keys().items() if name in names and kind != "switches"), "")


def is_known_release(job: Job) -> bool:
    """Return whether the lists of names are those of the release that the job runs."""
    return (job.framework_version or RELEASE).startswith(RELEASE.rpartition(".")[0] + ".")


def release_of(job: Job) -> tuple[int, int]:
    """Return the major and the minor number of the release that the job runs, zeros where nobody knows it.

    What a log shows of a job has no folder, and nothing starts it: it is taken to be of the known release.
    """
    assumed = "" if job.workdir.startswith("/") else RELEASE
    match = re.match(r"(\d+)\.(\d+)", job.framework_version or assumed)
    return (int(match[1]), int(match[2])) if match is not None else (0, 0)


def has_script(job: Job) -> bool:
    """Return whether the job names a script of its own."""
    return any(word.endswith(".py") for word in job.command)


def setting_of(word: str) -> str:
    """Return the setting that a flag of the training means, empty for a flag of somebody else's.

    argparse takes a hyphen for an underscore, `no_` before a switch, and the beginning of a name that is read
    here where no other begins so.
    """
    flag = word[2:].partition("=")[0].replace("-", "_")
    if not word.startswith("--") or not flag:
        return ""
    own = frozenset().union(*(names for kind, names in keys().items() if kind not in ("launch", "switches")))
    for name in (flag, flag.removeprefix("no_")):
        if name in own:
            return name
    longer = [name for name in own if name.startswith(flag)]
    return longer[0] if len(longer) == 1 and longer[0] in defaults() else ""


def unknown(job: Job) -> Iterator[tuple[str, str]]:
    """Yield the place and the name of every setting that `trl grpo` of the known release does not take."""
    if has_script(job):
        return  # a script may have arguments of its own
    known = frozenset().union(*keys().values(), ENVIRONMENT, ("env",))
    for place, values in (("settings", job.settings), ("config", job.document)):
        yield from ((place, name) for name in values if name not in known)


class Config:
    """The effective values of a job's settings."""

    def __init__(self, job: Job, changes: Mapping[str, Any] | None = None, *, cards: int = 0) -> None:
        self.written = {**job.document, **job.settings, **(changes or {})}
        self._env = job.env
        self._cards = cards or job.cluster.gpus_per_node or 0

    def get(self, name: str) -> Any:
        """Return a setting's value, TRL's default where the job is silent."""
        value = self.written.get(name)
        if isinstance(value, str):
            value = parsed_value(value)
        return defaults().get(name) if value is None else value

    def count(self, name: str) -> int:
        """Return a whole number, 0 where the setting holds none."""
        value = self.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return int(value) if number else 0

    def on(self, name: str) -> bool:
        """Return whether a switch is on."""
        return str(self.get(name)).lower() in ("true", "1")

    def variable(self, name: str) -> str:
        """Return a variable of the environment, as the settings or `env:` give it."""
        return str(self.written.get(name) or self._env.get(name, ""))

    @property
    def sharding(self) -> str:
        """The accelerate configuration: zero1 to zero3, fsdp1, fsdp2, or another name or file."""
        stage = self.get("zero_stage")
        return f"zero{stage}" if stage is not None else str(self.get("accelerate_config") or "")

    @property
    def processes(self) -> int:
        """The trainer's processes: as written, as the shipped configuration says, else one per card."""
        packaged = _PACKAGED_RANKS if self.sharding[:4] in ("zero", "fsdp", "mult") else 0
        return max(1, self.count("num_processes") or packaged or self._cards)

    @property
    def engine(self) -> bool:
        """Whether vLLM generates in the trainer's processes."""
        return self.on("use_vllm") and self.get("vllm_mode") == "colocate"

    @property
    def recompute(self) -> str:
        """The name under which the job switches recomputation: transformers 5.23 renamed it."""
        new = "activation_checkpointing"
        return new if self.written.get(new) is not None else "gradient_checkpointing"

    # ------------------------------------------------------------------------ the batch

    @property
    def micro(self) -> int:
        """Samples of one pass of one process."""
        return max(1, self.count("per_device_train_batch_size"))

    @property
    def accumulation(self) -> int:
        """Passes of an optimizer step."""
        return max(1, self.count("gradient_accumulation_steps"))

    @property
    def passes(self) -> int:
        """Passes over which the samples of one generation are spread."""
        whole = self.count("generation_batch_size")
        spread = whole // (self.micro * self.processes) if whole else self.count("steps_per_generation")
        return max(1, spread or self.accumulation)

    def micro_sizes(self) -> tuple[int, ...]:
        """Return the sizes of a pass that leave both the optimizer's batch and the generation as they are."""
        common = math.gcd(self.micro * self.accumulation, self.micro * self.passes)
        return tuple(size for size in range(common, 0, -1) if common % size == 0)

    def with_micro(self, size: int) -> dict[str, Any]:
        """Return the settings of passes of another size with the same batch; none where it is not legal."""
        if size not in self.micro_sizes():
            return {}
        changed = {"per_device_train_batch_size": size}
        changed["gradient_accumulation_steps"] = self.micro * self.accumulation // size
        if self.written.get("steps_per_generation") is not None:
            changed["steps_per_generation"] = self.micro * self.passes // size
        return changed

    def inexact(self, job: Job) -> str:
        """Return why passes of another size would change the gradient, empty where they would not."""
        if has_script(job) and any(self.written.get(name) is None for name in _BATCH):
            return f"the script may have defaults of its own: write {' and '.join(_BATCH)} under `settings:`"
        if self.written.get("loss_type") is None and release_of(job) < _DAPO:
            return "the default loss of this release is not known: write loss_type"
        if self.on("use_liger_kernel") and release_of(job) < FUSED_HEAD:
            return "liger's loss is normalised by the pass: other passes are another loss"
        if self.get("loss_type") == "bnpo":
            return "loss_type bnpo is a mean over the tokens of a pass: other passes are another loss"
        if self.get("entropy_coef") or self.on("use_adaptive_entropy"):
            return "the entropy bonus is a mean over a pass: other passes are another loss"
        if self.get("top_entropy_quantile") != 1.0:
            return "top_entropy_quantile is taken of a pass: other passes mask other tokens"
        if job.shape is not None and job.shape.experts and self.get("router_aux_loss_coef") != 0:
            return "the router's loss is taken of a pass, unless router_aux_loss_coef is 0"
        return ""


def typed(settings: Mapping[str, Any], *, launch: bool) -> Iterator[str]:
    """Yield the words of accelerate's command line, or of the training's behind it."""
    for name, value in settings.items():
        if value is None or name in (*ENVIRONMENT, "env") or (kind_of(name) == "launch") != launch:
            continue
        if name in keys()["switches"] and launch:
            yield from (f"--{name}",) if value else ()
        elif isinstance(value, list):
            yield from (f"--{name}", *map(str, value))
        else:
            yield from (f"--{name}", said(value))


def said(value: Any) -> str:
    """Return a value as an argument."""
    return json.dumps(value) if isinstance(value, dict | bool) else str(value)
