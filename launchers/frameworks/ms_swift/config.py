"""An ms-swift job's resolved settings: over its file over the defaults of GRPO."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from autotune.launchers.frameworks.core.renames import Renamed
from autotune.launchers.frameworks.hugging_face.settings import SPREAD, TrainerSettings
from autotune.policies.values.job import Job

RELEASES = ("4.5.3", "4.6.0")
OLDER = ("3.2.2", "3.5.3", "3.8.3", "3.12.6")  # only names and defaults are on record
RENAMED = (
    Renamed("train_type", "tuner_type", since="4.0.0"),
    Renamed("tensor_parallel_size", "vllm_tensor_parallel_size", since="3.5.0"),
    Renamed("use_liger", "use_liger_kernel", since="3.3.0"),
    Renamed("multi_turn_func", "multi_turn_scheduler", since="3.6.0"),
    Renamed("num_infer_workers", since="3.6.0", hint="write vllm_mode: colocate, or server"),
    Renamed("vllm_device", since="3.6.0", hint="write vllm_mode: colocate, or server"),
    Renamed("use_lmdeploy", since="3.5.0", hint="it was removed: use_vllm"),
)
PROCESSES, ENGINE_KWARGS = "NPROC_PER_NODE", "vllm_engine_kwargs"
# Settings that `swift` passes to torchrun (cli/main.py), in its order.
LAUNCH_VARIABLES = (PROCESSES, "MASTER_PORT", "NNODES", "NODE_RANK", "MASTER_ADDR")
# Values with which liger's loss equals the job's own up to rounding (arguments/rlhf_args.py, _check_grpo);
# None: neither the job nor ms-swift sets it.
_OF_LIGER: Mapping[str, tuple[Any, ...]] = {
    "loss_type": ("grpo", "dr_grpo"),
    "importance_sampling_level": ("token", "sequence"),
    "advantage_estimator": ("grpo",),
    "top_entropy_quantile": (1.0,),
    "sequence_parallel_size": (None, 0, 1),
    "padding_free": (None, False),
    "packing": (None, False),
    "log_entropy": (None, False),
    "delta": (None,),
    "off_policy_sequence_mask_delta": (None,),
    "teacher_model": (None,),
    "teacher_model_server": (None,),
    "advantage_reweight": (None,),
}
# Losses that liger normalizes by the tokens of a micro-batch, and ms-swift by those of a step.
_BY_PASS = ("dapo", "cispo", "fipo")


class Config(TrainerSettings):
    """A job's resolved settings."""

    renamed = RENAMED
    older = OLDER

    def __init__(self, job: Job) -> None:
        super().__init__(job, __package__, RELEASES)
        section = self.written.pop("ENV", None)  # variables of the file
        own = section if isinstance(section, Mapping) else {}
        self.env = {**{name: str(value) for name, value in own.items()}, **job.env}

    def get(self, key: str) -> Any:
        """Return a setting's value with the defaults of `swift rlhf`."""
        value = super().get(key)
        if key == "vllm_mode" and not self.job.server and (not self.kind(key) or key in self.facts.defaults):
            return self._mode_by_server if self.on("use_vllm") else None  # until 3.9
        if key == "eval_strategy" and (value is None or not self._has_validation_data):
            return super().get("save_strategy") if self._has_validation_data else "no"
        if key == "loss_type" and isinstance(value, list) and len(value) == 1:
            return value[0]
        return value

    @property
    def engine_kwargs(self) -> dict[str, Any] | None:
        """Further arguments of vLLM, given as JSON; None if they are no valid JSON."""
        value = self.get(ENGINE_KWARGS) or {}
        with suppress(ValueError):
            value = json.loads(value) if isinstance(value, str) else value
        return value if isinstance(value, dict) else None

    @property
    def _mode_by_server(self) -> str:
        """The mode of vLLM in releases that only know the address of a server."""
        has_server = self.get("vllm_server_host") or self.get("vllm_server_base_url")
        return "server" if has_server else "colocate"

    @property
    def colocated(self) -> bool:
        """Whether vLLM generates in the trainer's processes; before 3.6 it may have its own GPUs."""
        engines = self.count("num_infer_workers")
        return self.on("use_vllm") and self.get("vllm_mode") == "colocate" and engines in (0, self.processes)

    @property
    def _has_validation_data(self) -> bool:
        names = ("val_dataset", "eval_dataset", "split_dataset_ratio")
        return any(super(Config, self).get(name) for name in names)

    @property
    def processes(self) -> int:
        """The trainer's processes on its one node."""
        count = self.env.get(PROCESSES, "1")
        return max(1, int(count)) if count.isdigit() else 1

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt plus response; None if prompts are not truncated."""
        prompt = self.count("max_length")
        return prompt + self.count("max_completion_length") if prompt and not self.takes_turns else None

    @property
    def takes_turns(self) -> bool:
        """Whether a response has several turns, each of which may become a sample."""
        return bool(self.get("multi_turn_scheduler")) or self.on("use_gym_env") or bool(self.get("gym_env"))

    @property
    def deepspeed(self) -> str:
        """The name of a shipped DeepSpeed configuration, or of one that a file equals, or a path.

        Empty without DeepSpeed.
        """
        value, own = self.get("deepspeed"), self.job.launcher
        if own.sharding.startswith("zero"):
            return own.sharding + ("_offload" if own.optimizer_on_host else "")
        return value if isinstance(value, str) else "own" if value else ""

    @property
    def is_sharded(self) -> bool:
        """Whether a process holds only a shard of the weights."""
        return self.deepspeed.startswith("zero3") or self.is_fsdp

    @property
    def is_fsdp(self) -> bool:
        """Whether transformers shards by FSDP."""
        return bool(self.get("fsdp"))

    @property
    def zero(self) -> int | None:
        """The stage of a shipped DeepSpeed configuration; None without DeepSpeed or for the user's file."""
        stages = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3}
        return stages.get(self.deepspeed.removesuffix("_offload"))

    @property
    def trains_all(self) -> bool:
        """Whether all weights are trained, without adapters."""
        return str(self.get("tuner_type")) == "full"

    @property
    def liger_divides_by_pass(self) -> bool:
        """Whether liger normalizes a loss per micro-batch that ms-swift itself normalizes per step."""
        return self.on("use_liger_kernel") and self.get("loss_type") in _BY_PASS

    @property
    def adds_a_mean(self) -> bool:
        """Whether the loss has a supervised or distillation term, which is a mean over a micro-batch."""
        return bool(self.get("sdar_loss_coef")) or bool(self.get("chord_sft_dataset"))

    @property
    def takes_liger(self) -> bool:
        """Whether liger's loss equals the job's own up to rounding."""
        return not self.adds_a_mean and all(self.get(name) in values for name, values in _OF_LIGER.items())

    @property
    def samples_of_a_pass(self) -> int:
        """Samples per micro-batch over all processes."""
        return self.micro * self.processes

    @property
    def passes_written(self) -> int:
        """Micro-batches per generation as set by the job; 0 if unset."""
        return self.count(SPREAD) if self.written.get(SPREAD) is not None else 0
