"""The settings file, and the files and folders that it names, looked at where the program runs."""

from pathlib import Path

import yaml

from autotune.launchers.builtin.config.settings import (
    ConfigError,
    Settings,
    SettingsError,
    parse_settings,
    single_error,
)
from autotune.launchers.builtin.storage.checkpoint import newest_complete


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
