"""TRL's GRPOTrainer: `trl grpo`, or a script of the user's, under accelerate on one node."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import PurePath
from typing import Any

import msgspec

from autotune.launchers.base import Problem, Tracked
from autotune.launchers.frameworks.core import rehearsals, trackers
from autotune.launchers.frameworks.core.checkpoints import absolute, folder_of
from autotune.launchers.frameworks.core.data import GuidedFramework, document
from autotune.launchers.frameworks.core.types import misfit
from autotune.launchers.frameworks.dialects.flags import parsed_value
from autotune.launchers.frameworks.dialects.own_lines import own_marker
from autotune.launchers.frameworks.trl.config import (
    ENVIRONMENT,
    RELEASE,
    Config,
    defaults,
    has_script,
    is_known_release,
    keys,
    kind_of,
    said,
    setting_of,
    typed,
    unknown,
)
from autotune.launchers.frameworks.trl.profile import (
    EXPANDABLE,
    knobs_of,
    profile_of,
    setting_value,
    settings_of,
)
from autotune.policies.values.command import Command, File
from autotune.policies.values.job import SAVE_STEPS, Cluster, Job
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Marker
from autotune.policies.values.profile import Profile
from autotune.policies.values.rehearsing import SAVED_AT, STEPS, LateEvent, Met, Part

_ENTRY = "{attempt}/entry.py"
_MODULE = "trl.scripts.grpo"
_RESUMED = "resume_from_checkpoint"
_BEST = "load_best_model_at_end"
_INTERPRETERS = re.compile(r"python(3(\.\d+)?)?")
_BLANK = "..."  # a value that is not known: these settings have only one that saves memory
_SAVING = {
    "gradient_checkpointing": True,
    "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE,
    "PYTORCH_ALLOC_CONF": EXPANDABLE,
    "offload_optimizer_device": "cpu",
    "offload_param_device": "cpu",
}
_FACTOR = "gradient_accumulation_steps and steps_per_generation up by the same factor"


class Trl(GuidedFramework):
    """Attempts run TRL's own script or the user's inside `entry.py`, which continues and tells progress."""

    name = "trl"
    saves_by_time = False
    announces_end = True
    done_is_final = True  # a callback may end the training before max_steps, and it says so
    traces: tuple[str, ...] = (
        "trl/trainer",
        "trl/generation",
        "trl/scripts",
        "trl/cli",
        "trl/experimental",
        "GRPOTrainer",
        "trl.GRPOConfig",
        "trl: phase ",
        "trl: step ",
    )
    distribution = "trl"
    modules = ("trl",)

    def check(self, job: Job) -> tuple[Problem, ...]:
        """Return what is wrong with the job's command and settings."""
        return (*_of_command(job), *_of_keys(job), *_of_batch(job))

    def model_path(self, job: Job) -> str | None:
        """Return `model_name_or_path`."""
        path = Config(job).get("model_name_or_path")
        return path if isinstance(path, str) else None

    def checkpoint_folder(self, job: Job) -> str:
        """Return output_dir, or the folder below which every run has its own."""
        return absolute(job, str(Config(job).get("output_dir") or "checkpoints"))

    def profile(self, job: Job, cluster: Cluster) -> Profile:
        """Return the job's knobs with TRL's defaults filled in, and what limits them."""
        return profile_of(job, cluster, name=self.name)

    def command(self, job: Job, knobs: Knobs, *, run: str, attempt: int, resume: bool) -> Command:
        """Render the script inside the entry, under the launcher of the job."""
        settings = {**job.settings, **self.settings(job, knobs)}
        config = Config(job, settings)
        settings["output_dir"] = _output(config, job, run=run)
        # Which checkpoint is the best depends on which there are.
        if not {"save_steps", "save_strategy"} & config.written.keys() and not config.on(_BEST):
            span = _span(config)
            every = job.recovery.save_every or SAVE_STEPS
            settings["save_steps"] = -(-every // span) * span  # a generation is never cut in two
            if not job.resume and "save_total_limit" not in config.written:
                settings["save_total_limit"] = 2  # the folder is the run's alone
        mode = "start" if not resume else "any" if job.resume else "own"
        if job.settings.get(_RESUMED, "") is None:  # it takes away what the file says
            mode = f"fresh-{mode}" if resume else "fresh"
        launcher, script, rest = _parts(job)
        flags = {**job.document, **settings}
        if script != _MODULE:  # accelerate does not know the files that TRL ships by name
            flags = {} if not _takes_flags(launcher) else {**flags, "accelerate_config": None}
        launch = (*launcher, *typed(flags, launch=True))
        file = () if job.config is None else ("--config", job.config)
        reported = any(name in str(config.get("report_to")) for name in ("wandb", "all"))
        variables = {name: settings[name] for name in ENVIRONMENT if name in settings}
        return Command(
            argv=(*launch, _ENTRY, run, mode, script, *rest, *file, *typed(settings, launch=False)),
            env={
                **({"WANDB_RUN_ID": f"{job.name}-{run}", "WANDB_RESUME": "allow"} if reported else {}),
                **{name: value for name, value in job.env.items() if name not in variables},
                **{name: str(value) for name, value in variables.items() if value},
            },
            cwd=job.workdir,
            files=(File(name="entry.py", text=(resources.files(__package__) / "entry.py").read_text()),),
            ray_native=False,
        )

    def settings(self, job: Job, knobs: Knobs) -> dict[str, Any]:
        """Return the settings that differ from the job as written."""
        config = Config(job)
        own, changed = knobs_of(config), dict[str, Any]()
        for knob, setting in settings_of(config).items():
            value = getattr(knobs, knob)
            if value is None or value == getattr(own, knob):
                continue
            if knob == "microbatch_size":
                changed |= config.with_micro(value)
            else:
                changed[setting] = setting_value(knob, value, setting, config)
        return changed

    def tracked(self, job: Job, *, run: str) -> tuple[Tracked, ...]:
        """Return where trackers keep the run; transformers writes events below its checkpoints."""
        config = Config(job)
        return trackers.tracked(__package__, config.get, given={"output": _output(config, job, run=run)})

    def words(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return settings as arguments of GRPOConfig, variables, or flags of accelerate."""
        lines = []
        for name, written in settings.items():
            value = _SAVING.get(name, written) if written in (True, _BLANK) else written
            if name in ENVIRONMENT:
                lines.append(f"{name}={value}" if value else f"without {name}")
            elif kind_of(name) == "launch":
                lines.append(f"--{name} {said(value)}")
            else:
                alone = (
                    name == "per_device_train_batch_size" and "gradient_accumulation_steps" not in settings
                )
                lines.append(f"{name}={value}" + (f", {_FACTOR}" if alone else ""))
        return tuple(lines)

    def printed(self, text: str) -> dict[str, Any]:
        """Return the settings that a command line, a configuration or GRPOConfig's own text shows."""
        found: dict[str, Any] = {}
        for name in defaults():
            match = re.search(rf"(?:--{name}[\s=]+|(?<![\w.-]){name}['\"]?\s?[=:]\s?)['\"]?([\w.+-]+)", text)
            if match is not None and not misfit(kind_of(name), value := parsed_value(match[1].rstrip("."))):
                found[name] = value
        return found

    def marker(self, line: str) -> Marker | None:
        """Return what a line of the entry says; TRL's own records name no step."""
        return own_marker(line, program="trl")

    def last_step(self, job: Job) -> int | None:
        """Return `max_steps` where it is set; every line of a step says how many there are."""
        steps = Config(job).count("max_steps")
        return steps if steps > 0 else None

    def can_force_longest(self, job: Job) -> bool:
        """Return True: both generators can be told to go on to `max_completion_length`."""
        return True

    def trial(self, job: Job, *, folder: str, steps: int, longest: bool) -> Job:
        """Return the job with a few steps and a folder of its own, and nothing reported or saved."""
        own = {**document(__package__, "trial.yaml", dict[str, Any])}
        own |= {"max_steps": steps, "output_dir": f"{folder}/checkpoints"}
        if longest:
            config = Config(job)
            least = {"min_new_tokens": config.count("max_completion_length")}
            given = config.get("generation_kwargs")
            forced = {"ignore_eos": True} if config.on("use_vllm") else least
            own["generation_kwargs"] = {**(given if isinstance(given, dict) else {}), **forced}
        return msgspec.structs.replace(job, settings={**job.settings, **own}, resume=False)

    def meets(self, job: Job) -> tuple[Met, ...]:
        """Return what a rehearsal meets, by what the job itself saves and validates."""
        config = Config(job)
        without = [] if _saves(config) else [LateEvent.SAVE]
        without += [LateEvent.RELOAD] if config.on("save_only_model") else []
        without += [] if rehearsals.validates(__package__, config.get) else [LateEvent.VALIDATION]
        return rehearsals.met(__package__, without=without)

    def rehearsal(self, job: Job, *, folder: str, part: Part, longest: bool) -> Job:
        """Return a trial that saves below `folder` and validates in the same step, where the job does.

        Its steps are generations of answers, each of which may be several optimizer steps.
        """
        config, span = Config(job), _span(Config(job))
        trial = self.trial(job, folder=folder, steps=STEPS[part] * span, longest=longest)
        if not _saves(config):
            return trial
        validation = rehearsals.validates(__package__, config.get)
        own = rehearsals.additions(__package__, validation=validation)
        own |= {"save_steps": SAVED_AT * span, **({"eval_steps": SAVED_AT * span} if validation else {})}
        return msgspec.structs.replace(trial, settings={**trial.settings, **own})


def _output(config: Config, job: Job, *, run: str) -> str:
    named = config.get("output_dir")
    return folder_of(job, str(named or f"checkpoints/{job.name}-{run}"), run=run, named=bool(named))


def _saves(config: Config) -> bool:
    return str(config.get("save_strategy")) not in ("no", "False")


def _span(config: Config) -> int:
    """Return the optimizer steps of one generation of answers, which no checkpoint should cut in two."""
    return max(1, config.passes * config.count("num_iterations") // config.accumulation)


def _parts(job: Job) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the launcher of a job, its script, and the words behind it."""
    words = job.command
    if not has_script(job):
        return ("{python}", _ENTRY, "launch"), _MODULE, words[2:]
    at = next(n for n, word in enumerate(words) if word.endswith(".py"))
    launcher = words[:at] or ("{python}",)
    if _INTERPRETERS.fullmatch(launcher[0]):
        launcher = ("{python}", *launcher[1:])
    return launcher, words[at], words[at + 1 :]


def _takes_flags(launcher: tuple[str, ...]) -> bool:
    """Return whether a launcher takes the flags of `accelerate launch`."""
    return any(
        PurePath(word).name in ("accelerate", "accelerate-launch") or word.startswith("accelerate.")
        for word in launcher
    )


def _of_command(job: Job) -> Iterator[Problem]:
    if job.command and not has_script(job) and job.command[:2] != ("trl", "grpo"):
        yield Problem(
            path=("command",),
            message="the command names no script of Python, and is not `trl grpo`",
            hint="leave it out for `trl grpo`, or write such as `command: [accelerate, launch, train.py]`",
        )
    if not job.env.get("AUTOTUNE_DEVICE_BUDGET", "0").isdigit():
        path = ("env", "AUTOTUNE_DEVICE_BUDGET")
        yield Problem(path=path, message="the budget is a whole number of bytes")
    yield from _of_words(job)
    launcher, _, _ = _parts(job)
    for name in job.settings if has_script(job) else ():
        if kind_of(name) == "launch" and not _takes_flags(launcher):
            yield Problem(
                path=("settings", name),
                message=f"`{name}` goes to `accelerate launch`, which `command` does not start",
            )
        elif name == "accelerate_config":
            yield Problem(
                path=("settings", name),
                message="`accelerate_config` is of `trl grpo`; `accelerate launch` does not know it",
                hint="write `config_file`, the path of such a file",
            )


def _of_words(job: Job) -> Iterator[Problem]:
    """Yield the flags that the command itself gives: a second value behind them would change the batch."""
    _, script, words = _parts(job)
    for word in words:
        flag = word.partition("=")[0]
        name = flag.removeprefix("--").replace("-", "_")
        if flag == "--config":
            yield Problem(
                path=("command",),
                message=f"the file behind `{flag}` is not read there",
                hint="write it under `config:`, and leave the flag out of the command",
            )
        elif setting_of(word) or (script == _MODULE and word.startswith("--") and kind_of(name) == "launch"):
            name = setting_of(word) or name
            yield Problem(
                path=("command",),
                message=f"`{flag}` is not read there",
                hint=f"write it under `settings:` as `{name}`, and leave it out of the command",
            )


def _of_keys(job: Job) -> Iterator[Problem]:
    for place, name in unknown(job) if is_known_release(job) else ():
        close = difflib.get_close_matches(str(name), frozenset().union(*keys().values()), n=1)
        hint = f"did you mean `{close[0]}`?" if close else "`trl grpo --help` lists what there is"
        yield Problem(path=(place, name), message=f"TRL {RELEASE} has no setting `{name}`", hint=hint)
    for place, values in (("settings", job.settings), ("config", job.document)):
        for name, value in values.items():
            if wanted := misfit(kind_of(name), value):
                yield Problem(path=(place, name), message=f"`{name}` is {wanted}, not {value!r}")
    if Config(job).on(_RESUMED):
        yield Problem(
            path=("settings", _RESUMED),
            message="TRL's command line takes a path",
            hint="write `resume: true` of the job to continue the newest checkpoint of output_dir",
        )


def _of_batch(job: Job) -> Iterator[Problem]:
    config = Config(job)
    group, whole = config.count("num_generations"), config.count("generation_batch_size")
    place = ("settings", "per_device_train_batch_size")
    if config.on("auto_find_batch_size"):
        yield Problem(
            path=("settings", "auto_find_batch_size"), message="GRPOTrainer refuses it; autotune does it"
        )
    if group < 2:
        yield Problem(
            path=("settings", "num_generations"), message="GRPO compares at least 2 samples of a prompt"
        )
    elif whole and config.written.get("steps_per_generation") is not None:
        message = "generation_batch_size and steps_per_generation exclude each other"
        yield Problem(path=("settings", "generation_batch_size"), message=message)
    elif whole and "num_processes" in config.written and whole % (config.micro * config.processes):
        message = (
            f"generation_batch_size {whole} is no multiple of {config.micro} x {config.processes} processes"
        )
        yield Problem(path=place, message=message)
    elif (whole or config.micro * config.passes * config.processes) % group:
        samples = whole or config.micro * config.passes * config.processes
        message = f"a generation of {samples} samples is no multiple of num_generations {group}"
        yield Problem(path=place, message=message)
