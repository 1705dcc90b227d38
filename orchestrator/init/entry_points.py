"""Detect the program that a command line starts, behind `ray job submit`, `nohup`, `srun` and the like."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

from autotune.launchers.frameworks.areal.config import known as areal_settings
from autotune.launchers.frameworks.nemo_rl.config import PROGRAM as NEMO_RL_PROGRAM
from autotune.launchers.frameworks.verl.config import overrides_in
from autotune.orchestrator.containers import is_container
from autotune.orchestrator.init.bash.state import is_unknown
from autotune.orchestrator.init.ray_job import submission
from autotune.orchestrator.init.roll import is_roll
from autotune.orchestrator.init.settings import takes_value
from autotune.policies.values.value import Value

_PROGRAM = re.compile(
    r"(?:.*/)?(?:python(?:3(?:\.\d+)?)?|torchrun|accelerate|deepspeed|uv|bash|sh|ray|trl|rl|swift|megatron)"
)
_PLAIN_WRAPPERS = frozenset(
    {"nohup", "exec", "coproc", "time", "setsid", "env", "sudo", "unbuffer", "command"}
)
_WITH_VALUE = {
    "env": ("-u", "--unset", "-C", "--chdir"),
    "sudo": ("-u", "-g"),
    "time": ("-f", "-o"),
    "exec": ("-a",),
}
# Wrappers with options of their own before the program that they start.
_WRAPPERS = frozenset(
    {
        "srun",
        "sbatch",
        "timeout",
        "stdbuf",
        "numactl",
        "nice",
        "ionice",
        "taskset",
        "mpirun",
        "conda",
        "nsys",
    }
)
# Frameworks whose settings may be appended to any command, also to one that runs a container.
_ADDED_BEHIND = frozenset({"verl", "skyrl", "nemo-rl", "slime", "miles", "relax", "openrlhf"})
# Names of programs that make ready what a training needs, or look at what it made.
_AROUND_TRAINING = re.compile(
    r"(?:pre(?:pare|process)|process|download|convert|build|make|create|generate|split|filter|merge|export"
    r"|eval|evaluate|infer|test|check|plot|analy[sz]e|serve|deploy)(?:_|$)"
)
_NO_TRAINING = frozenset({"pip", "venv", "ensurepip", "http.server", "compileall", "zipfile", "pytest"})
_LAUNCHERS = frozenset({"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"})
_SEEMS = re.compile(r"train|grpo|ppo|rlhf|verl|swift|run")  # a command in a container that may train
_PREPARES = re.compile(
    r"(?:cd|export|echo|ls|mkdir|cp|mv|rm|git|apt|apt-get|hf|huggingface-cli|pip3?|(?:uv|python3? -m) pip"
    r"|ray (?:start|stop|status))\b"
)
_BLANK = re.compile(r"\s")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_AREAL_KEYS = frozenset(
    {"gconfig", "rollout", "train_dataset", "actor", "allocation_mode", "sglang", "stats_logger"}
)
# Sections of NeMo-RL's config files that imply the script `examples/run_SECTION.py`; GRPO has an adapter.
NEMO_RL_TRAINERS = ("sft", "dpo", "rm", "ppo", "distillation")
_FILES = (".yaml", ".yml", ".json")  # config files that `swift` accepts before its flags
_SKYRL_KEYS = ("trainer.policy.", "trainer.placement.", "generator.inference_engine.")
_MILES = re.compile(
    r"(?:^|/)miles/train(?:_async)?\.py$"
)  # recognised by the folder of its checkout, or by its own flags
_MILES_FLAGS = frozenset(
    {"--use-miles-router", "--use-miles-dashboard", "--update-weight-transfer-mode"}
    | {"--rematerialize-param-from-master-weight", "--offload-train-target", "--fully-async"}
)
_VIME = re.compile(r"(?:^|/)vime/train(?:_async)?\.py$")
_VIME_ENGINE = "--vllm-"  # prefix of vLLM's arguments; vime is slime's trainer with vLLM
_SLIME_FLAGS = frozenset({"--hf-checkpoint", "--rollout-batch-size", "--actor-num-gpus-per-node"})
_TRL_FLAGS = frozenset(
    {"model_name_or_path", "dataset_name", "per_device_train_batch_size", "num_generations", "output_dir"}
    | {"max_completion_length", "use_vllm", "vllm_mode", "learning_rate", "reward_funcs"}
)
_ENOUGH = 3  # of these flags: then a script named after GRPO is assumed to start TRL's trainer
# ... if one of them is a flag that a parser of somebody else hardly has
_TRLS_OWN = frozenset({"model_name_or_path", "dataset_name", "use_vllm", "vllm_mode", "reward_funcs"})
_VERL_PROGRAM = re.compile(r"verl[./].*main_\w*ppo|(?:^|[./])main_ppo\b")
_TRAINER = re.compile(r"--train-backend[ =](?!megatron)(\w+)")  # slime's own is Megatron's
_OF_NEMO_RL = re.compile(r"\buv run .*run_\w*grpo\w*\.py .*--config")  # a user's own program
# Other frameworks by patterns of their command lines: the first match counts.
_OTHERS: tuple[tuple[str, str], ...] = (
    ("verl's supervised trainer", r"verl[./].*sft_trainer"),
    ("EasyR1", r"\bverl[./]trainer[./]main(?:\.py)?(?:\s|$)"),  # a fork of verl with settings of its own
    ("SkyRL's supervised trainer", r"skyrl[./]train[./]main_sft\b"),
    ("OpenRLHF", r"openrlhf[./]\S*train_"),
    (
        "NeMo-RL",
        rf"nemo_rl|run_grpo_(?:sliding|single)\w*\.py|examples/run_(?:{'|'.join(NEMO_RL_TRAINERS)})\.py",
    ),
    ("ROLL", r"start_(?:rlvr|agentic|dpo|distill|sft)\w*_pipeline\.py|(?:^|\s)roll\.pipeline"),
    (
        "TRL",
        r"(?:^|\s)trl\s|(?:^|/)trl/|trl[./]scripts|grpo_trainer\.py|examples/scripts/(?:grpo|ppo|rloo|sft|dpo)",
    ),
    ("prime-rl", r"prime[-_]rl|(?:^|\s)rl @"),
    ("ms-swift", r"(?:^|/|\s)swift (?:rlhf|sft)"),
    ("ms-swift's Megatron trainer", r"^megatron (?:rlhf|sft|pt|dpo)\b|(?:^|[\s/])swift/cli/_megatron/"),
    ("LLaMA-Factory", r"llamafactory-cli"),
)


class Program(Value, frozen=True, kw_only=True):
    """A program with its arguments, without the wrappers before it."""

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    workdir: str = ""  # `--working-dir` of a submission
    around: tuple[str, ...] = ()  # wrappers that were removed
    problems: tuple[str, ...] = ()


def unwrapped(argv: Sequence[str], *, is_script: Callable[[str], bool] | None = None) -> Program:
    """Return the program that a command line finally starts.

    `is_script` returns whether a word after a wrapper names a shell script; with it, the text of `bash -c`
    is left to who reads scripts.
    """
    words, env, around, problems, workdir = list(argv), dict[str, str](), list[str](), list[str](), ""
    while words:
        name = PurePosixPath(words[0]).name
        variable = _VARIABLE.fullmatch(words[0])
        if variable is not None:
            env[variable[1]] = variable[2]
            words.pop(0)
        elif name in _PLAIN_WRAPPERS:
            around.append(name)
            words.pop(0)
            while words and words[0].startswith("-"):
                takes_next = words.pop(0) in _WITH_VALUE.get(name, ())
                words = words[1:] if takes_next else words
        elif name in _WRAPPERS:
            at = _program_at(words, is_script or (lambda _: False))
            if at is None or (is_container(words) and _is_one(words[at:])):
                break
            around.append(" ".join(words[:at]))
            words = words[at:]
        elif name == "uv" and (at := _submission_at(words)):
            words = words[at:]
        elif name == "ray" and words[1:3] == ["job", "submit"]:
            inner, variables, workdir, wrong = submission(words[3:])
            if not inner:
                break
            around.append("ray job submit")
            env |= variables
            problems += wrong
            words = inner
        elif is_script is None and is_shell_text(words) and "\n" not in words[2].strip():
            *before, inner = _commands_of(words[2]) or [[]]
            if not inner:
                break
            around += [" ".join(each) for each in before]
            words = inner
        else:
            break
    return Program(
        argv=tuple(words), env=env, workdir=workdir, around=tuple(around), problems=tuple(problems)
    )


def _is_one(words: Sequence[str]) -> bool:
    """Return whether a command line starts a program other than a shell script or a Ray job submission."""
    is_program = _PROGRAM.fullmatch(words[0]) and PurePosixPath(words[0]).name not in ("bash", "sh", "ray")
    return bool(is_program) and not (words[0] == "uv" and _submission_at(words))


def _submission_at(words: Sequence[str]) -> int:
    """Return the index of `ray job submit` after `uv run` and its options; 0 if there is none."""
    own = list(words[: words.index("--")]) if "--" in words else list(words)
    at = own.index("ray") if "ray" in own[2:] else 0
    return at if words[1] == "run" and own[at + 1 : at + 3] == ["job", "submit"] else 0


def _program_at(words: Sequence[str], is_script: Callable[[str], bool]) -> int | None:
    """Return the index of the program after a wrapper; None if no known program is there.

    A file after an option may be the option's value: it is used only if there is no other candidate.
    """
    programs = [n for n, word in enumerate(words) if n and (_PROGRAM.fullmatch(word) or is_script(word))]
    plain = (n for n in programs if _PROGRAM.fullmatch(words[n]) or not words[n - 1].startswith("-"))
    return next(plain, programs[0] if programs else None)


def is_shell_text(words: Sequence[str]) -> bool:
    """Return whether a command is `bash -c TEXT`."""
    name = PurePosixPath(words[0]).name if words else ""
    return name in ("bash", "sh") and len(words) == 3 and re.fullmatch(r"-[a-z]*c", words[1]) is not None


def framework_of(argv: Sequence[str], document: dict[str, Any] | None = None) -> str:
    """Return the framework of a program, `command: NAME` if it has no adapter; empty if not recognised.

    `document` is the content of the file of `--config`. `command:` means a training of unknown framework.
    """
    if is_container(argv) or is_inside_text(argv):
        return _of_container(argv) if is_container(argv) else "command:"
    joined = " ".join(argv)
    if re.search(r"relax[./]entrypoints[./]train", joined):
        return "relax"
    other = next((name for name, pattern in _OTHERS if re.search(pattern, joined)), "")
    own_words = [word for before, word in itertools.pairwise(("", *argv)) if not takes_value(before)]
    own = [key.lstrip("+~") for key in overrides_in(own_words)]
    is_verl = any(key.startswith("actor_rollout_ref.") for key in own)
    if is_verl or _VERL_PROGRAM.search(program_in(argv)):
        return "verl"
    if other.startswith("SkyRL"):
        return f"command: {other}"
    if "skyrl.train." in joined or any(key.startswith(_SKYRL_KEYS) for key in own):
        return "skyrl"
    if any(map(NEMO_RL_PROGRAM.search, argv)) or (not other and _OF_NEMO_RL.search(joined)):
        return "nemo-rl"
    if framework := _of_flags(argv):
        return framework
    if document is not None and framework_of_document(document) == "areal":
        return "areal"
    named = {word.partition("=")[0].lstrip("+") for word in argv if "=" in word}
    known = any("." in name and name in areal_settings() for name in named)
    if (known or re.search(r"(?:^|[\s./])areal[./]", joined)) and "--config" in argv:
        return "areal"
    if _is_grpo(argv, document):
        return "trl"
    if other:
        return "ms-swift" if _is_swift_grpo(argv) else f"command: {other}"
    return "command:" if _PROGRAM.fullmatch(argv[0]) and len(argv) > 1 and _trains(argv) else ""


def program_in(argv: Sequence[str]) -> str:
    """Return the module or script that an interpreter or a launcher runs; empty if there is none."""
    pairs = [*itertools.pairwise(("", *argv))]
    named = (
        word
        for before, word in pairs
        if (before in ("-m", "--module") and word not in _LAUNCHERS)
        or (word.endswith(".py") and not before.startswith("--"))
    )
    return next(named, next((word for word in argv if word.endswith(".py")), ""))


def is_inside_text(argv: Sequence[str]) -> bool:
    """Return whether a training is in a text for another shell, as in `ssh host 'python3 …'`.

    No settings can be appended to such a command line, and its settings are not read.
    """
    texts = [word for word in argv if _BLANK.search(word)]
    if not texts or _PROGRAM.fullmatch(argv[0]):
        return False
    own = [word for word in argv if word not in texts]
    if own and framework_of(own):
        return False
    return any((words := _words_of(text)) and framework_of(words) for text in texts)


def _words_of(text: str) -> list[str]:
    try:
        return shlex.split(text.partition("=")[2] if text.startswith("--") else text)
    except ValueError:  # an open quote
        return []


def _of_container(argv: Sequence[str]) -> str:
    """Return the framework of a program in a container; `command:` if no settings can be appended to it."""
    at = _program_at(argv, lambda _: False)
    inner = list(argv[at:]) if at is not None else []
    if inner and PurePosixPath(inner[0]).name in ("bash", "sh"):
        commands = _commands_of(inner[2]) if is_shell_text(inner) else []
        texts = [" ".join(each) for each in commands] or [inner[-1]]
        return "command:" if any(_SEEMS.search(each) and not _PREPARES.match(each) for each in texts) else ""
    framework = framework_of(inner) if inner else ""
    return framework if framework in _ADDED_BEHIND else "command:" if framework else ""


def _of_flags(argv: Sequence[str]) -> str:
    flags = {word.partition("=")[0] for word in argv}
    if any(re.search(r"(?:^|/)train(?:_async)?\.py$", word) for word in argv) and _SLIME_FLAGS & flags:
        if any(flag.startswith(_VIME_ENGINE) for flag in flags) or any(map(_VIME.search, argv)):
            return "command: vime"
        framework = "miles" if _MILES_FLAGS & flags or any(map(_MILES.search, argv)) else "slime"
        trainer = _TRAINER.search(" ".join(argv))
        return f"command: {framework}'s {trainer[1]} trainer" if trainer is not None else framework
    if "openrlhf.cli.train_ppo_ray" in argv or any(w.endswith("openrlhf/cli/train_ppo_ray.py") for w in argv):
        return "openrlhf"
    return ""


def framework_of_document(document: dict[str, Any]) -> str:
    """Return the framework of a configuration file; empty if not recognised."""
    keys = set(document)
    if {"actor", "gconfig"} <= keys or len(keys & _AREAL_KEYS) >= 4:
        return "areal"
    if "policy" in keys and keys & {"grpo", "loss_fn", *NEMO_RL_TRAINERS}:
        return "nemo-rl" if "grpo" in keys else "command: NeMo-RL"
    if is_roll(frozenset(keys)):
        return "command: ROLL"
    if {"actor_rollout_ref", "trainer"} <= keys:
        return "verl"
    if document.get("rlhf_type") == "grpo":
        return "ms-swift"
    if {"model_name_or_path", "per_device_train_batch_size"} & keys and keys & {
        "num_generations",
        "use_vllm",
        "max_completion_length",
        "learning_rate",
        "output_dir",
    }:
        return "trl"
    return ""


def interpreter_beside(program: str) -> str | None:
    """Return the interpreter next to a console script such as `env/bin/trl`; None if not in a `bin`."""
    path = PurePosixPath(program)
    known = path.parent.name == "bin" and not is_unknown(program)
    return str(path.with_name("python3")) if known else None


def _is_grpo(argv: Sequence[str], document: dict[str, Any] | None) -> bool:
    """Return whether TRL's command or a script with TRL's flags starts its GRPOTrainer."""
    if PurePosixPath(argv[0]).name == "trl":
        return list(argv[1:2]) == ["grpo"]
    script = PurePosixPath(program_in(argv)).name
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in argv if word[:2] == "--"}
    by_file = document is not None and framework_of_document(document) == "trl"
    by_flags = len(given & _TRL_FLAGS) >= _ENOUGH and bool(given & _TRLS_OWN)
    return "grpo" in script and (by_file or by_flags)


def _is_swift_grpo(argv: Sequence[str]) -> bool:
    """Return whether ms-swift's command starts its GRPO trainer, by a flag or by a config file."""
    if PurePosixPath(argv[0]).name != "swift" or list(argv[1:2]) != ["rlhf"]:
        return False
    words = " ".join(argv).replace("=", " ")
    return "--rlhf_type grpo" in words or (argv[2:3] != [] and PurePosixPath(argv[2]).suffix in _FILES)


def _trains(argv: Sequence[str]) -> bool:
    """Return whether a program looks like a training: a launcher, or Python with a name such as `train`."""
    name = PurePosixPath(argv[0]).name
    if name in ("torchrun", "accelerate", "deepspeed"):
        return True
    words, scripts = " ".join(argv), any(word.endswith(".py") for word in argv[1:])
    return (
        name.startswith(("python", "uv"))
        and program_in(argv) not in _NO_TRAINING
        and not _AROUND_TRAINING.match(re.split(r"[./]", program_in(argv).removesuffix(".py"))[-1])
        and bool(re.search(r"train|grpo|ppo|_rl\b|rlhf|rloo|dapo", words) and (scripts or "-m" in argv))
    )


def is_own_program(argv: Sequence[str]) -> bool:
    """Return whether a command starts a Python script or module that is not one of Python's own tools."""
    name = PurePosixPath(argv[0]).name if argv else ""
    if not name.startswith(("python", "uv", "torchrun", "accelerate", "deepspeed")) or is_container(argv):
        return False
    return program_in(argv) not in ("", *_NO_TRAINING)


def _commands_of(text: str) -> list[list[str]]:
    """Return the words of each command joined by `&&` or `;`; empty if a text has other operators."""
    reader = shlex.shlex(text, posix=True, punctuation_chars=True)
    reader.whitespace_split, reader.commenters = True, ""
    commands: list[list[str]] = [[]]
    try:
        for word in reader:
            if word in ("&&", ";"):
                commands.append([])
            elif set(word) <= set("();<>|&"):
                return []
            else:
                commands[-1].append(word)
    except ValueError:  # a quote is not closed
        return []
    return [each for each in commands if each]
