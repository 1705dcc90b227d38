"""What a job file refers to: the model's shape and the framework's own YAML, read before anything starts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autotune.launchers.base import Framework, Problem
from autotune.launchers.runners.node.model_folder import find_folder
from autotune.orchestrator.config.model_files import find_model
from autotune.orchestrator.config.yaml_nodes import Document, scalar_1_1
from autotune.orchestrator.errors import Failure
from autotune.policies.values.job import Job
from autotune.policies.values.model import Model, model_from_shape


def with_document(job: Job) -> tuple[Job, Document | None, tuple[Problem, ...]]:
    """Return the job with the content of `config:`, that file, and why it cannot be read.

    Mistakes of form are complaints of the file itself.
    """
    if job.config is None:
        return job, None, ()
    path = Path(job.workdir) / Path(job.config).expanduser()
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        return job, None, (Problem(path=("config",), message="no such file", hint=f"looked for {path}"),)
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error.strerror).lower()
        return job, None, (Problem(path=("config",), message=f"cannot be read: {reason}", hint=str(path)),)
    document = Document(text, str(path), read=scalar_1_1)
    if document.complaints:
        return job, document, ()
    if not isinstance(document.value, dict):
        problem = Problem(path=("config",), message="holds no mapping of settings", hint=str(path))
        return job, None, (problem,)
    return msgspec.structs.replace(job, document=document.value), document, ()


def with_shape(job: Job, framework: Framework) -> tuple[Job, tuple[Problem, ...]]:
    """Return the job with its model's shape where that can be known, and what is wrong with the model."""
    if isinstance(job.model, dict):
        shape, problem = _written(job.model)
        return msgspec.structs.replace(job, shape=shape, shape_from="`model:` of the job"), problem
    name = job.model if job.model is not None else framework.model_path(job)
    try:
        found, place = (None, "") if name is None else find_model(name, job.workdir)
    except Failure as failure:
        path: tuple[str | int, ...] = ("model",) if job.model is not None else ("settings",)
        return job, (Problem(path=path, message=failure.message, hint=failure.hint),)
    # Settings may describe a model that is not on this machine; they go before a mere name.
    own = framework.shape(job)
    read_here = name is not None and find_folder(name, job.workdir) is not None
    if own is not None and (found is None or (not read_here and _differ(own, found))):
        found, place = own, "the framework's own settings"
    return msgspec.structs.replace(job, shape=found, shape_from=place), ()


def _differ(own: Model, found: Model) -> bool:
    """Return whether settings describe another model than the one of the same name."""
    return (own.layers, own.hidden, own.heads, own.vocab) != (
        found.layers,
        found.hidden,
        found.heads,
        found.vocab,
    )


def _written(shape: dict[str, int | str]) -> tuple[Model | None, tuple[Problem, ...]]:
    """Return a shape written in the job; what follows from the rest may be left out."""
    try:
        return model_from_shape(shape), ()
    except ValueError as error:
        hint = "or name a folder with a config.json"
        return None, (Problem(path=("model",), message=str(error), hint=hint),)
