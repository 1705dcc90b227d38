"""ms-swift: `swift rlhf --rlhf_type grpo`, under torchrun on one node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, ClassVar

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.core.splits import divisors, head_sizes
from autotune.launchers.frameworks.hugging_face.adapter import ENTRY, HuggingFaceTrainer
from autotune.launchers.frameworks.hugging_face.settings import (
    ACCUMULATION,
    ALLOCATORS,
    ENVIRONMENT,
    EXPANDABLE,
    SPREAD,
    WHOLE,
    arguments,
)
from autotune.launchers.frameworks.ms_swift.config import LAUNCH_VARIABLES, PROCESSES, READ, RELEASES, Config
from autotune.launchers.frameworks.ms_swift.layout import layout, placement
from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.command import Command
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import AtLeast, Constraint, Divides, Placement

_MODULE = "swift.cli.rlhf"
_KIND = "rlhf_type"
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "real", "fipo")
_SWITCHES = (
    "gradient_checkpointing",
    "offload_model",
    "offload_optimizer",
    "use_liger_kernel",
    "vllm_enforce_eager",
)
_TORCHRUN = ("{python}", "-m", "torch.distributed.run")

# The predicates that knobs.yaml and unsupported.yaml name.
WHEN: dict[str, Callable[[Config], bool]] = {
    "has_engine": lambda config: config.colocated,
    "has_no_engine": lambda config: not config.colocated,
    "limits_no_prompt": lambda config: config.longest is None,
    "uses_fsdp": lambda config: bool(config.get("fsdp")),
    "uses_no_fsdp": lambda config: not config.get("fsdp"),
    "offloads_optimizer_at_stage_2": lambda config: config.deepspeed == "zero2_offload",
    "offloads_weights_natively": lambda config: config.deepspeed == "zero3_offload",
    "takes_no_liger": lambda config: not config.takes_liger,
    "averages_tokens_by_pass": lambda config: config.get("loss_type") == "bnpo",
    "compares_groups_by_pass": lambda config: config.get("loss_type") == "real",
    "liger_divides_by_pass": lambda config: config.liger_divides_by_pass,
    "masks_by_pass": lambda config: config.get("top_entropy_quantile") != 1.0,
    "adds_a_mean": lambda config: config.adds_a_mean,
    "balances_experts_by_pass": lambda config: config.balances_experts,
    "takes_turns": lambda config: config.takes_turns,
    "splits_sequences": lambda config: config.count("sequence_parallel_size") > 1,
}


class MsSwift(HuggingFaceTrainer[Config]):
    """Attempts run the module behind `swift rlhf` as it would, with its file's settings as flags."""

    name = "ms-swift"
    title = "ms-swift"
    reported_as = "swift"
    help_command = "swift rlhf --help"
    traces: tuple[str, ...] = (
        "swift rlhf",
        "swift/trainers",
        "swift/llm",
        "swift/rlhf_trainers",
        "swift/pipelines",
        "swift/cli",
        "swift.cli",
        "ms-swift",
        "ms_swift",
        "swift: phase ",
        "swift: step ",
    )
    runs = ("trl",)
    distribution = "ms-swift"
    releases = RELEASES
    modules = ("swift",)
    when = WHEN
    read = READ
    saving: ClassVar[Mapping[str, Any]] = {**dict.fromkeys(_SWITCHES, True), ALLOCATORS[0]: EXPANDABLE}
    section = "ENV"
    factor = f"--{ACCUMULATION} up by the same factor"
    model_key = "model"

    def config(self, job: Job) -> Config:
        """Return what a job's file and settings come to."""
        return Config(job)

    def refused(self, config: Config) -> Iterator[Problem]:
        """Yield what ms-swift refuses (arguments/rlhf_args.py, rlhf_trainers/args_mixin.py)."""

        def problem(name: str, message: str, hint: str = "") -> Problem:
            return Problem(path=("settings", name), message=message, hint=hint)

        command = config.job.command
        if command and (len(command) != 2 or PurePath(command[0]).name != "swift" or command[1] != "rlhf"):
            hint = "leave it out, and write the flags under `settings:`"
            yield Problem(path=("command",), message="the command is not `swift rlhf`", hint=hint)
        if config.get(_KIND) != "grpo":
            yield problem(
                _KIND, f"{_KIND} is {config.get(_KIND)}; autotune drives `grpo`", f"write {_KIND}: grpo"
            )
        if config.get("loss_type") not in _LOSSES:
            yield problem("loss_type", f"GRPO has no loss_type {config.get('loss_type')}", ", ".join(_LOSSES))
        if not config.env.get(PROCESSES, "1").isdigit():
            yield Problem(path=("env", PROCESSES), message="the processes of a node are a whole number")
        if config.count("num_generations") < 1:
            yield problem("num_generations", "a prompt has at least one sample")
        if config.on("auto_find_batch_size"):
            yield problem(
                "auto_find_batch_size", "it breaks the groups of a prompt's samples; autotune does it"
            )
        if config.on("use_vllm") != (config.get("vllm_mode") is not None):
            yield problem("vllm_mode", "use_vllm and vllm_mode are written together", "colocate or server")
        whole = config.count(WHOLE)
        spread = config.count(SPREAD) if config.written.get(SPREAD) is not None else 0
        batch = config.micro * config.processes
        if whole and spread and whole != batch * spread:
            yield problem(WHOLE, f"{WHOLE} {whole} is not {batch} samples of a pass times {SPREAD} {spread}")
        else:
            yield from super().refused(config)

    def sizes(self, config: Config, shape: Model | None) -> dict[str, tuple[int, ...]]:
        """Return the sizes of a pass and of an engine."""
        engines = head_sizes(divisors(config.processes), shape)
        return {"microbatch_size": config.micro_sizes(), "rollout_tensor_parallel": engines}

    def constraints(self, config: Config) -> Iterator[Constraint]:
        """Yield what binds the knobs beyond their grids."""
        why = f"it divides {PROCESSES}"
        yield Divides(knob="rollout_tensor_parallel", of=config.processes, why=why)
        if config.longest is not None:
            why = f"max_length and max_completion_length are {config.longest} tokens together"
            yield AtLeast(knob="max_model_len", value=config.longest, why=why)

    def spread(self, config: Config) -> tuple[Placement, dict[str, tuple[str, ...]], Layout]:
        """Return the placement and every size; who is on a card follows from the placement."""
        return placement(config), {}, layout(config)

    def warnings(self, config: Config) -> Iterator[str]:
        """Yield what the user should know before the launch."""
        yield from super().warnings(config)
        cards = config.job.cluster.gpus_per_node or 0
        if PROCESSES not in config.env and cards > 1:
            yield (
                f"{PROCESSES} is not in `env:`: ms-swift spreads the layers of one model over all {cards} "
                "cards of one process, and estimates are of one card."
            )
        if config.job.cluster.nodes > 1:
            yield "ms-swift runs on one node here: the others stay idle."

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render the module inside the entry, under torchrun where the job asks for processes."""
        changed = self.settings(job, knobs)
        config = Config(job, changed)
        own = {**self.started(config, job, run=run, resume=resume), "add_version": False}
        launch = [name for name in LAUNCH_VARIABLES if name in config.env]
        torchrun = [word for name in launch for word in (f"--{name.lower()}", config.env[name])]
        words = {name: value for name, value in {**config.written, **own}.items() if name not in ENVIRONMENT}
        mode = self.mode(job, resume=resume)
        launcher = (*_TORCHRUN, *torchrun) if {PROCESSES, "NNODES"} & config.env.keys() else ("{python}",)
        return Command(
            argv=(*launcher, ENTRY, run, mode, _MODULE, *arguments(words)),
            env={**config.env, **self.environment(config, job, run)},
            cwd=job.workdir,
            files=self.files,
            ray_native=False,
        )

    def forced(self, config: Config) -> dict[str, Any]:
        """Return nothing: no setting lengthens an answer."""
        return {}
