"""Find a model on this machine and read its shape; never asks the network."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from autotune.orchestrator.config.public_models import PublicModel, find_public
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.policies.values.model import Model, model_from_config

_CONFIG = "config.json"
_LARGEST_CONFIG_BYTES = 8 << 20  # the longest public ones list every layer's quantisation, below 1 MiB
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def read_model(path: str | Path) -> Model:
    """Return the shape of a model's folder or config.json; raises Failure with a hint."""
    place = Path(path).expanduser()
    file = place / _CONFIG if place.is_dir() else place
    try:
        if file.stat().st_size > _LARGEST_CONFIG_BYTES:
            raise _failure(file, "is too large for a config.json")
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise _failure(file, "does not exist") from None
    except OSError as error:
        raise _failure(file, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _failure(file, f"is no JSON: {error}") from error
    try:
        return model_from_config(document)
    except ValueError as error:
        raise _failure(file, f"describes no language model: {error}") from error


def find_model(name: str, workdir: str | Path) -> tuple[Model | None, str]:
    """Return a model's shape and where it was read: a folder, the Hugging Face cache, or what is shipped."""
    place = find_folder(name, workdir)
    if place is not None:
        return read_model(place), str(place / _CONFIG if place.is_dir() else place)
    known = find_public(name)
    if known is None:
        return None, ""
    return known.shape, shipped_as(known)


def shipped_as(known: PublicModel) -> str:
    """Return in words that a shape is shipped, and the public file that it was read from."""
    source = known.read_from
    return (
        f"autotune's table of public models, {known.names[0]} "
        f"({source.repository} {source.path} at {source.commit[:7]})"
    )


def find_folder(name: str, workdir: str | Path) -> Path | None:
    """Return the folder or config.json that a model's path or hub name stands for on this machine."""
    local = Path(workdir) / Path(name).expanduser()
    if local.is_file() or (local / _CONFIG).is_file():
        return local
    if not _HUB_NAME.fullmatch(name):
        return None
    return _snapshot(_cache() / f"models--{name.replace('/', '--')}")


def _cache() -> Path:
    # The order of huggingface_hub's own constants.py.
    for variable, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        value = os.environ.get(variable)
        if value:
            return Path(value).expanduser() / below
    return Path.home() / ".cache" / "huggingface" / "hub"


def _snapshot(repository: Path) -> Path | None:
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        revision = ""
    named = repository / "snapshots" / revision
    if revision and (named / _CONFIG).is_file():
        return named
    complete = (path.parent for path in repository.glob(f"snapshots/*/{_CONFIG}"))
    return max(complete, key=lambda folder: folder.stat().st_mtime, default=None)


def _failure(file: Path, problem: str) -> Failure:
    return Failure(
        f"{file} {problem}",
        hint="name a folder with a Hugging Face config.json, or write the shape: {hidden: ..., layers: ...}",
        code=ExitCode.USAGE,
    )
