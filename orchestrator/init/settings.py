"""Parse a training's command line into settings under the framework's own names, in their order."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from autotune.launchers.frameworks.dialects.hydra import bare, value_of, value_text
from autotune.launchers.frameworks.trl.config import is_of_launcher
from autotune.launchers.frameworks.verl.config import overrides_in
from autotune.orchestrator.init.bash.state import is_unknown
from autotune.policies.values.value import Value

_AREAL = re.compile(r"(\+{0,2}[A-Za-z_][\w.]*|~[A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_HYDRA_SWITCHES = frozenset({"-m", "--multirun", "-r", "--run", "--resolve", "--"})
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?")

_PROGRAM_END = {  # the last word of a program before its flags
    "slime": r"(?:^|/)train(?:_async)?\.py$",
    "miles": r"(?:^|/)train(?:_async)?\.py$",
    "relax": r"relax[./]entrypoints[./]train",
    "openrlhf": r"openrlhf[./]cli[./]train_ppo_ray",
}


class Settings(Value, frozen=True, kw_only=True):
    """The parts of a command line: the program with its own words, the settings, and a config file."""

    command: tuple[str, ...]
    given: dict[str, Any]
    config: str | None = None
    repeated: tuple[str, ...] = ()  # names given more than once; the last value is used


def settings_of(framework: str, argv: Sequence[str]) -> Settings:
    """Return the settings of a framework's command line."""
    if framework in ("verl", "skyrl"):
        return hydra_settings(argv)
    if framework == "areal":
        return areal_settings(argv)
    if framework == "nemo-rl":
        return file_and_overrides(argv)
    if framework == "trl":
        return trl_settings(argv)
    if framework == "ms-swift":
        return swift_settings(argv)
    if framework in _PROGRAM_END:
        return flag_settings(argv, last_of_program=_PROGRAM_END[framework])
    return Settings(command=tuple(argv), given={})


def hydra_settings(argv: Sequence[str]) -> Settings:
    """Return Hydra's overrides; all other words stay with the program."""
    command: list[str] = []
    given: dict[str, Any] = {}
    repeated: list[str] = []
    for before, word in itertools.pairwise(("", *argv)):
        result = None if takes_value(before) else next(iter(overrides_in([word]).items()), None)
        if result is None:
            command.append(word)
            continue
        key, text = result[0], word.partition("=")[2]
        for other in [name for name in given if bare(name) == bare(key)]:
            repeated.append(bare(key))
            del given[other]
        given[key] = None if "=" not in word else hydra_value(text)
    return Settings(command=tuple(command), given=given, repeated=tuple(repeated))


def takes_value(option: str) -> bool:
    """Return whether a word is an option that may take the next word as value; Hydra's switches do not."""
    return option.startswith("-") and "=" not in option and option not in _HYDRA_SWITCHES


def hydra_value(text: str) -> Any:
    """Return a parsed value if parsing loses nothing, otherwise the text."""
    value = value_of(text) if text else ""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return value if _NUMBER.fullmatch(text) else text
    if isinstance(value, list) and all(isinstance(item, (str, int, float)) for item in value):
        return value if value_of(value_text(value)) == value and _is_plain(value) else text
    return text


def _is_plain(items: list[Any]) -> bool:
    return all(not isinstance(item, str) or re.fullmatch(r"[A-Za-z_./][\w./@:-]*", item) for item in items)


def areal_settings(argv: Sequence[str]) -> Settings:
    """Return AReaL's overrides and the file of `--config`."""
    command: list[str] = []
    given: dict[str, Any] = {}
    repeated: list[str] = []
    config: str | None = None
    words = iter(argv)
    for word in words:
        match = _AREAL.fullmatch(word)
        if word == "--config":
            config = next(words, None)
        elif word.startswith("--config="):
            config = word.partition("=")[2]
        elif match is not None and (command and not command[-1].startswith("--")):
            if match[1] in given:
                repeated.append(match[1])
                del given[match[1]]
            given[match[1]] = hydra_value(match[2])
        else:
            command.append(word)
    return Settings(command=tuple(command), given=given, config=config, repeated=tuple(repeated))


def file_and_overrides(argv: Sequence[str]) -> Settings:
    """Return Hydra's overrides and the file of `--config`; all other words stay with the program."""
    at = next((n for n, word in enumerate(argv) if word.partition("=")[0] == "--config"), len(argv))
    config = next((word.partition("=")[2] for word in argv[at : at + 1] if "=" in word), None)
    after = at + (1 if config is not None else 2)
    config = config if config is not None else next(iter(argv[at + 1 : at + 2]), None)
    return msgspec.structs.replace(hydra_settings((*argv[:at], *argv[after:])), config=config)


def trl_settings(argv: Sequence[str]) -> Settings:
    """Return the flags of `trl grpo` or of a script, of `accelerate launch`, and the file of `--config`."""
    script = next((word for word in argv if word.endswith(".py")), None)
    parsed = flag_settings(argv, last_of_program="^grpo$" if script is None else f"^{re.escape(script)}$")
    config = parsed.given.pop("config", None)
    if script is None:
        return Settings(command=(), given=parsed.given, config=config, repeated=parsed.repeated)
    command, launch = _of_accelerate(parsed.command)
    return Settings(
        command=command, given={**launch, **parsed.given}, config=config, repeated=parsed.repeated
    )


def _of_accelerate(command: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the launcher and script without the flags that are also TRL settings, and these flags."""
    at = next((n for n, word in enumerate(command) if word in ("launch", "accelerate.commands.launch")), None)
    if at is None:
        return tuple(command), {}
    script = command[-1]
    parsed = flag_settings(command[at:-1], last_of_program=".")
    given = {name.replace("-", "_"): value for name, value in parsed.given.items()}
    if not all(map(is_of_launcher, given)):
        return tuple(command), {}
    return (*command[:at], *parsed.command, script), given


def swift_settings(argv: Sequence[str]) -> Settings:
    """Return the flags of `swift rlhf` and the config file before them."""
    has_file = argv[2:3] != [] and not argv[2].startswith("-")
    parsed = flag_settings((*argv[:2], *argv[3 if has_file else 2 :]), last_of_program="^rlhf$")
    config = argv[2] if has_file else None
    return Settings(command=(), given=parsed.given, config=config, repeated=parsed.repeated)


def flag_settings(argv: Sequence[str], *, last_of_program: str) -> Settings:
    """Return flags by name; the words up to the script or module are the program."""
    pattern = re.compile(last_of_program)
    at = next((n for n, word in enumerate(argv) if pattern.search(word)), 0)
    command, rest = list(argv[: at + 1]), list(argv[at + 1 :])
    given: dict[str, Any] = {}
    repeated: list[str] = []
    name = ""
    for word in rest:
        if is_unknown(word) and "[@]" in word:  # any number of flags, not the previous flag's value
            command.append(word)
            name = ""
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            if name in given:
                repeated.append(name)
                del given[name]
            given[name] = value if equals else True
        elif name:
            present = given[name]
            given[name] = (
                word
                if present is True
                else [*present, word]
                if isinstance(present, list)
                else [present, word]
            )
        else:
            command.append(word)
    values = {key: _flag_value(value) for key, value in given.items()}
    return Settings(command=tuple(command), given=values, repeated=tuple(repeated))


def _flag_value(value: Any) -> Any:
    """Return a number if it prints as the same text; otherwise the text."""
    if isinstance(value, list):
        return [_flag_value(item) for item in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        number = float(value) if "." in value else int(value)
        return number if str(number) == value else value
    return value
