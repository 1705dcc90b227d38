"""Find a model on this machine and read its shape, without network access."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from autotune.launchers.runners.node.model_folder import CONFIG, HUB_NAME, find_folder
from autotune.orchestrator.config.own_code import is_folder
from autotune.orchestrator.config.public_models import PublicModel, find_like, find_public, names_like
from autotune.orchestrator.errors import Failure, UserError
from autotune.policies.values.architecture.model import Model, model_from_config
from autotune.policies.values.job import ASSUMED_SHAPE

_EXAMPLE = "Qwen/Qwen3-8B"
_LARGEST_CONFIG_BYTES = 8 << 20  # the longest public ones list every layer's quantisation in less than 1 MiB
_LARGEST_SIZE = 10**9  # of any count in a shape; the largest vocabularies have fewer than 10**6 entries


def read_model(path: str | Path) -> Model:
    """Return the shape of a model's folder or config.json; raises Failure with a hint."""
    place = Path(path).expanduser()
    file = place / CONFIG if is_folder(place) else place
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
        shape = model_from_config(document)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise _failure(file, f"describes no language model: {error}") from error
    if any(isinstance(size, int) and size > _LARGEST_SIZE for size in msgspec.structs.astuple(shape)):
        raise _failure(file, f"describes no language model: a size above {_LARGEST_SIZE}")
    return shape


def find_model(name: str, workdir: str | Path) -> tuple[Model | None, str]:
    """Return a model's shape and its source: a folder, the Hugging Face cache, or the shipped table."""
    place = find_folder(name, workdir)
    if place is not None:
        return read_model(place), str(place / CONFIG if is_folder(place) else place)
    known = find_public(name)
    if known is not None:
        return known.shape, shipped_as(known)
    like = find_like(name)
    if like is None:
        return None, ""
    name, model = like
    return model.shape, f"{ASSUMED_SHAPE} to be that of {name}, whose name it holds: {shipped_as(model)}"


def shipped_as(known: PublicModel) -> str:
    """Return a description of a shipped shape's source: the table entry and the public file behind it."""
    source = known.read_from
    return (
        f"autotune's table of public models, {known.names[0]} "
        f"({source.repository} {source.path} at {source.commit[:7]})"
    )


def unknown_model(name: str) -> Failure:
    """Return the failure for an option `--model` whose model is unknown, with a hint how to provide it."""
    if name.endswith(".json"):
        return _failure(Path(name), "does not exist")
    near = names_like(name)
    hint = f"pass a model's folder, its config.json, or a hub name such as `{_EXAMPLE}`"
    if near:
        hint = f"{near} Otherwise pass the path of its folder or its config.json"
    elif HUB_NAME.fullmatch(name):
        hint = f"`hf download {name} {CONFIG}` puts it where autotune looks; or pass the path of its {CONFIG}"
    return UserError(f"--model: the shape of `{name}` is unknown", hint=hint)


def _failure(file: Path, problem: str) -> Failure:
    return UserError(f"{file} {problem}", hint=f"name a model's folder or {CONFIG}")
