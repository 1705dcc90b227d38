"""TRL's GRPOTrainer: `trl grpo`, or a script of the user's, under accelerate on one node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, ClassVar

from autotune.launchers.base import Problem
from autotune.launchers.frameworks.dialects.settings import with_sizes
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
from autotune.launchers.frameworks.trl.config import (
    RELEASES,
    Config,
    is_of_launcher,
    is_switch,
    setting_of,
)
from autotune.launchers.frameworks.trl.layout import layout
from autotune.launchers.frameworks.trl.rows import TABLE
from autotune.policies.values.job import Job
from autotune.policies.values.provenance import CodeQuery, Origin

_MODULE = "trl.scripts.grpo"
_OWN_PARSER = "a parser of its own"  # a name in the code query
_OF_TRAINERS, _OF_OTHERS = (
    "HfArgumentParser|H4ArgumentParser|TrlParser",
    "argparse|click|fire|hydra|typer|tyro",
)
_PARSERS = {_OWN_PARSER: rf"(?s)\A(?!.*(?:{_OF_TRAINERS})).*\b(?:{_OF_OTHERS})\b"}
_RESUMED = "resume_from_checkpoint"
_INTERPRETERS = re.compile(r"python(3(\.\d+)?)?")


class Trl(HuggingFaceTrainer[Config]):
    """TRL's script, or the user's, under the job's launcher."""

    name = "trl"
    settings_class = Config
    title = "TRL"
    reported_as = "trl"
    distribution = "trl"
    releases = RELEASES
    modules = ("trl",)
    table = TABLE
    layout = staticmethod(layout)
    makes_pieces = True
    saving: ClassVar[Mapping[str, Any]] = {
        "gradient_checkpointing": True,
        **dict.fromkeys(ALLOCATORS, EXPANDABLE),
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
    }
    section = "env"
    sizes_batch = frozenset({WHOLE, "num_generations"})
    factor = f"{ACCUMULATION} and {SPREAD} up by the same factor"
    model_key = "model_name_or_path"
    longest_request = "vllm_max_model_length"
    own_settings = ("output_dir", "save_steps", "save_total_limit")

    def unknown(self, config: Config) -> Iterator[Problem]:
        """Yield every setting that `trl grpo` does not accept; a script may have its own arguments."""
        if not config.has_script:
            yield from super().unknown(config)

    def code_query(self, job: Job) -> CodeQuery | None:
        """Return what to look up in the job's script: whether its parser accepts the added flags."""
        if not self.config(job).has_script:
            return super().code_query(job)
        script, names = _parts(job)[1], frozenset(self.own_settings)
        return CodeQuery(package="trl", program=script, names=names, as_flags=True, patterns=_PARSERS)

    def _absent(self, config: Config, key: str) -> str:
        """Return a flag that the script's own parser lacks; transformers' parser has all of them."""
        parses = config.has_script and config.code is not None and _OWN_PARSER in config.code.names
        return super()._absent(config, key) if parses else ""

    def knows_processes(self, config: Config) -> bool:
        """Return whether the job sets the number of training processes."""
        return "num_processes" in config.written

    def gpus(self, job: Job) -> int | None:
        """Return the number of processes, each on a GPU; None for one on every GPU."""
        return self.config(job).stated_processes or None

    def on_gpus(self, job: Job, *, nodes: int, per_node: int) -> Job | None:
        """Return the job with a process on each of other GPUs."""
        return with_sizes(job, {"num_processes": nodes * per_node})

    def refused(self, config: Config) -> Iterator[Problem]:
        """Yield the settings that TRL and accelerate refuse."""
        yield from _of_command(config)
        yield from super().refused(config)

    def launch(self, config: Config, own: Mapping[str, Any], entry: tuple[str, ...]) -> tuple[str, ...]:
        """Return the script inside the entry under the job's launcher, followed by its config file."""
        launcher, script, rest = _parts(config.job)
        settings = {**config.given, **own}
        flags = {**config.written, **own}
        if script != _MODULE:  # accelerate does not know TRL's configurations by name
            flags = {} if not _takes_flags(launcher) else {**flags, "accelerate_config": None}
        launch = (*launcher, *_typed(flags, launch=True))
        file = () if config.job.config is None else ("--config", config.job.config)
        return (*launch, *entry, script, *rest, *file, *_typed(settings, launch=False))

    def mode(self, job: Job, *, resume: bool) -> str:
        """Return which checkpoints the entry may resume from; null drops the one in the job's file."""
        mode = super().mode(job, resume=resume)
        if job.settings.get(_RESUMED, "") is None:
            return f"fresh-{mode}" if resume else "fresh"
        return mode

    def flag(self, name: str, value: Any) -> str:
        """Return an argument of GRPOConfig, or a flag of accelerate."""
        return super().flag(name, value) if is_of_launcher(name) else f"{name}={value}"

    def can_force_longest(self, job: Job) -> bool:
        """Return True: both generators can be forced to `max_completion_length`."""
        return True

    def longest_settings(self, config: Config) -> dict[str, Any]:
        """Return the generation arguments that force full length, with the job's own."""
        least = {"min_new_tokens": config.count("max_completion_length")}
        given = config.get("generation_kwargs")
        more = {"ignore_eos": True} if config.on("use_vllm") else least
        return {"generation_kwargs": {**(given if isinstance(given, dict) else {}), **more}}


def _typed(settings: Mapping[str, Any], *, launch: bool) -> Iterator[str]:
    """Yield the words of accelerate's command line, or of the training's after it."""
    for name, value in settings.items():
        if name in (*ENVIRONMENT, "env") or is_of_launcher(name) != launch:
            continue
        if is_switch(name):
            yield from (f"--{name}",) if value else ()
        else:
            yield from arguments({name: value})


def _parts(job: Job) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the launcher of a job, its script, and the words after it."""
    words = job.command
    at = next((n for n, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        return ("{python}", ENTRY, "launch"), _MODULE, words[2:]
    launcher = words[:at] or ("{python}",)
    if _INTERPRETERS.fullmatch(launcher[0]):
        launcher = ("{python}", *launcher[1:])
    return launcher, words[at], words[at + 1 :]


def _takes_flags(launcher: tuple[str, ...]) -> bool:
    """Return whether a launcher accepts the flags of `accelerate launch`."""
    return any(
        PurePath(word).name in ("accelerate", "accelerate-launch") or word.startswith("accelerate.")
        for word in launcher
    )


def _of_command(config: Config) -> Iterator[Problem]:
    job = config.job
    if job.command and not config.has_script and job.command[:2] != ("trl", "grpo"):
        yield Problem(
            path=("command",),
            message="the command names no script of Python, and is not `trl grpo`",
            hint="leave it out for `trl grpo`, or write such as `command: [accelerate, launch, train.py]`",
        )
    launcher, script, words = _parts(job)
    for word in words:  # a second value behind a flag of the command would change the batch
        flag = word.partition("=")[0]
        name = setting_of(word) or flag.removeprefix("--").replace("-", "_")
        if flag == "--config":
            yield Problem(
                path=("command",),
                message=f"the file behind `{flag}` is not read there",
                hint="write it under `config:`, and leave the flag out of the command",
            )
        elif setting_of(word) or (script == _MODULE and word.startswith("--") and is_of_launcher(name)):
            yield Problem(
                path=("command",),
                message=f"`{flag}` is not read there",
                hint=f"write it under `settings:` as `{name}`, and leave it out of the command",
            )
    for name in job.settings if config.has_script else ():
        if is_of_launcher(name) and not _takes_flags(launcher):
            yield Problem(
                path=("settings", name),
                message=f"`{name}` goes to `accelerate launch`, which `command` does not start",
                origin=Origin.WRITTEN,
            )
        elif name == "accelerate_config":
            yield Problem(
                path=("settings", name),
                message="`accelerate_config` is of `trl grpo`; `accelerate launch` does not know it",
                hint="write `config_file`, the path of such a file",
                origin=Origin.WRITTEN,
            )
