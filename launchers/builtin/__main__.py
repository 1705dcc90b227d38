"""`python -m autotune.launchers.builtin --config FILE`: exit 0 when done, 1 failed, 2 on a bad setting."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import yaml

from autotune.launchers import packages
from autotune.launchers.builtin import lines
from autotune.launchers.builtin.config.settings import (
    ConfigError,
    Settings,
    SettingsError,
    parse_settings,
    single_error,
)
from autotune.launchers.builtin.storage.checkpoint import newest_complete

_FAILURE = 1
_BAD_SETTING = 2


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    del frame
    # A second signal must not interrupt the clean-up.
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def main() -> int:
    """Run the program and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m autotune.launchers.builtin")
    parser.add_argument("--config", type=Path, required=True, help="settings.yaml of the job")
    arguments = parser.parse_args()
    try:
        return _run(read_settings(arguments.config))
    except ModuleNotFoundError as error:
        if error.name is not None and error.name in packages.EXTRAS:
            absent = [error.name]
            error.add_note(f"the built-in job {packages.absence(absent)}: {packages.how_to_install(absent)}")
        raise
    except SettingsError as error:
        for problem in error.errors:
            sys.stdout.write(f"{problem.line()}\n")
        return _BAD_SETTING


def read_settings(path: Path) -> Settings:
    """Return the settings of a YAML file, or raise SettingsError with every error in it."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise single_error(
            "--config", f"cannot read {path}: {error.strerror}", "name a readable file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())
        raise single_error("--config", f"{path} is not YAML: {what}", "correct the file") from error
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise single_error(
            "--config", f"{path} is not a mapping of keys to values", "write `key: value` lines"
        )
    settings = parse_settings(document)
    if problems := unusable_paths(settings):
        raise SettingsError(problems)
    return settings


def unusable_paths(settings: Settings) -> tuple[ConfigError, ...]:
    """Return what is wrong with the files and folders that the settings name, on this machine."""
    errors = []
    if settings.model is not None and not (Path(settings.model) / "config.json").is_file():
        what = f"{settings.model} holds no config.json"
        errors.append(ConfigError("model", what, "name a folder with a Hugging Face causal LM"))
    if settings.replay_path is not None and not Path(settings.replay_path).is_dir():
        what = f"{settings.replay_path} is not a folder"
        errors.append(ConfigError("replay_path", what, "record one with record_path"))
    if not Path(settings.host_dir).is_dir():
        errors.append(ConfigError("host_dir", f"{settings.host_dir} is not a folder", "use /dev/shm"))
    fresh = settings.checkpoint_dir is not None and settings.resume == "never"
    if fresh and (result := newest_complete(Path(str(settings.checkpoint_dir)))):
        what = f"{result} is a checkpoint of another run"
        errors.append(ConfigError("checkpoint_dir", what, "use an empty folder, or set resume: auto"))
    return tuple(errors)


def _run(settings: Settings) -> int:
    # Slow imports come after the settings have been found good.
    import ray

    from autotune.launchers.builtin.actors import ActorFailure, connect
    from autotune.launchers.builtin.process.records import deliver
    from autotune.launchers.builtin.program import Program

    try:
        connect()
    except ConnectionError as error:
        lines.say(f"cannot reach Ray: {' '.join(str(error).split())}")
        return _FAILURE
    # After ray.init, which installs its own.
    signal.signal(signal.SIGTERM, _stop)
    program = Program(settings)
    try:
        program.run()
    except ActorFailure as failure:
        # Without a record the reason is in the actor's own log only.
        record = failure.record
        lines.say(failure.summary if record is None else record.line().removeprefix("builtin: "))
        if record is not None:
            deliver(record)
        return _FAILURE
    finally:
        program.close()
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
