"""A TRL job's resolved settings: over its YAML file over TRL's defaults."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from autotune.launchers.frameworks.core.renames import Renamed
from autotune.launchers.frameworks.hugging_face.settings import (
    ACCUMULATION,
    ALLOCATORS,
    MICRO,
    TrainerSettings,
    shown_settings,
)
from autotune.launchers.frameworks.tabular.declared import facts
from autotune.policies.values.job import Job

RELEASES = ("1.16.0",)
OLDER = (
    "0.15.2",
    "0.17.0",
    "0.21.0",
    "0.24.0",
    "0.29.1",
    "1.0.0",
)  # only names and defaults are on record
RENAMED = (
    Renamed("torch_dtype", "dtype", since="0.24.0", until="0.27.0"),
    Renamed("wandb_log_unique_prompts", "log_unique_prompts", since="0.26.0", until="0.28.0"),
    Renamed("vllm_guided_decoding_regex", "vllm_structured_outputs_regex", since="0.27.0", until="0.28.0"),
    Renamed("max_prompt_length", since="0.28.0", hint="leave it out: TRL limits no prompt"),
    Renamed("use_liger_loss", "use_liger_kernel", since="0.28.0"),
    Renamed("vllm_max_model_len", since="0.18.0", hint="write vllm_max_model_length"),
    Renamed("vllm_device", since="0.16.0", hint="write vllm_mode: server, and start `trl vllm-serve`"),
)
_FUSED_HEAD = (1, 15)  # the first release whose trainer has a fused head of its own
_DAPO = (0, 24)  # the first whose default loss is dapo (pull request 3938); before it was bnpo
_PACKAGED_RANKS = 8  # of the configurations that TRL ships, but for single_gpu
_LAUNCH = "launch"  # prefix of the types of `accelerate launch` settings, such as `launch int`
_LAUNCH_SWITCH = f"{_LAUNCH} switch"  # a flag without a value


@cache
def types() -> dict[str, str]:
    """Return the settings that TRL accepts, and their types."""
    return facts(__package__, RELEASES[-1]).types


def is_of_launcher(name: str) -> bool:
    """Return whether a setting belongs to `accelerate launch`; names that both know are the training's."""
    return types().get(name, "").startswith(_LAUNCH)


def is_switch(name: str) -> bool:
    """Return whether a setting is a flag of `accelerate launch` without a value."""
    return types().get(name) == _LAUNCH_SWITCH


def setting_of(word: str) -> str:
    """Return the setting that a flag of the training sets; empty for an unknown flag.

    argparse accepts hyphens for underscores, `no_` before a switch, and unique prefixes of names.
    """
    flag = word[2:].partition("=")[0].replace("-", "_")
    if not word.startswith("--") or not flag:
        return ""
    own = [name for name in types() if not is_of_launcher(name)]
    for name in (flag, flag.removeprefix("no_")):
        if name in own:
            return name
    longer = [name for name in own if name.startswith(flag)]
    return longer[0] if len(longer) == 1 and longer[0] in shown_settings(__package__) else ""


class Config(TrainerSettings):
    """A job's resolved settings."""

    renamed = RENAMED
    older = OLDER
    router_by_default = True

    def __init__(self, job: Job) -> None:
        super().__init__(job, __package__, RELEASES)

    def get(self, key: str) -> Any:
        """Return a setting's value, otherwise the one in the launcher's file."""
        own = self.job.launcher
        if own.source and self.written.get(key) is None:
            match key:
                case "offload_optimizer_device":
                    return "cpu" if own.optimizer_on_host else "none"
                case "offload_param_device":
                    return "cpu" if own.parameters_on_host else "none"
                case "fsdp_offload_params":
                    return own.parameters_on_host
        return super().get(key)

    def kind(self, name: str) -> str:
        """Return the type of a setting, also of the launcher's; empty if any value may be valid."""
        kind = super().kind(name)
        return "bool" if kind == _LAUNCH_SWITCH else kind.removeprefix(_LAUNCH).strip()

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt plus response; None if TRL limits no prompt."""
        prompt = self.count("max_prompt_length")
        return prompt + self.count("max_completion_length") if prompt else None

    @property
    def version(self) -> tuple[int, int]:
        """Major and minor number of the job's release; zeros if unknown.

        A job read from a log has no folder and is not started: the newest known release counts for it.
        """
        assumed = "" if self.job.workdir.startswith("/") else RELEASES[-1]
        match = re.match(r"(\d+)\.(\d+)", self.job.framework_version or assumed)
        return (int(match[1]), int(match[2])) if match is not None else (0, 0)

    @property
    def has_head(self) -> bool:
        """Whether the trainer has the fused head, which materializes only a tile of the logits."""
        is_new = not self.job.framework_version and self.release.version not in self.older
        return is_new or self.version >= _FUSED_HEAD

    @property
    def sharding(self) -> str:
        """The sharding by settings, launcher or TRL's file: zero0 to zero3, fsdp1, fsdp2, another name."""
        stage = self.get("zero_stage")
        if stage is not None:
            return f"zero{stage}"
        return self.job.launcher.sharding or str(self.get("accelerate_config") or "")

    @property
    def leaves_layout_open(self) -> bool:
        """Whether the job does not determine how its processes shard the model."""
        return not self.sharding and not self.job.launcher.source and self.processes > 1

    @property
    def is_fsdp(self) -> bool:
        """Whether accelerate shards by FSDP."""
        return self.sharding.startswith("fsdp")

    @property
    def is_sharded(self) -> bool:
        """Whether a process holds only a shard of the weights."""
        return self.is_fsdp or self.sharding == "zero3"

    @property
    def zero(self) -> int | None:
        """DeepSpeed's stage, None without DeepSpeed."""
        return {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}.get(self.sharding)

    @property
    def processes(self) -> int:
        """The trainer's processes: as set, as in the shipped configuration, otherwise one per GPU."""
        return max(1, self.stated_processes or self.job.cluster.gpus_per_node or 0)

    @property
    def stated_processes(self) -> int:
        """The trainer's processes as set or as in the shipped configuration; 0 for one per GPU."""
        own = self.job.launcher
        is_packaged = not own.source and self.sharding[:4] in ("zero", "fsdp", "mult")
        return self.count("num_processes") or own.processes or (_PACKAGED_RANKS if is_packaged else 0)

    @property
    def has_newer_switch(self) -> bool:
        """Whether the job sets recomputation by its name in transformers 5.23."""
        return self.written.get("activation_checkpointing") is not None

    @property
    def has_newer_variable(self) -> bool:
        """Whether the job sets the environment variable that torch prefers from 2.9 on."""
        return bool(self.variable(ALLOCATORS[1]))

    @property
    def hides_its_batch(self) -> bool:
        """Whether a script may use another batch size than the settings give."""
        return self.has_script and any(self.written.get(name) is None for name in (MICRO, ACCUMULATION))

    @property
    def leaves_an_unknown_loss(self) -> bool:
        """Whether the job uses the release's default loss, which is not known to be dapo."""
        return self.written.get("loss_type") is None and self.version < _DAPO

    @property
    def normalises_by_pass(self) -> bool:
        """Whether liger computes the loss."""
        return self.on("use_liger_kernel") and self.version < _FUSED_HEAD
