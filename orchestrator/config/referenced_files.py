"""Files that a job refers to, read before it starts: its model's shape, its config files, its prompts."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path, PurePath
from statistics import fmean
from typing import Any

import msgspec

from autotune.launchers.base import Framework, Problem
from autotune.launchers.runners.node.model_folder import find_folder
from autotune.orchestrator.config.model_files import find_model
from autotune.orchestrator.config.own_code import is_file, is_folder, is_there
from autotune.orchestrator.config.public_models import find_public
from autotune.orchestrator.config.yaml_nodes import Document, UnreadableError, read_text, scalar_1_1
from autotune.orchestrator.errors import Failure, UserError
from autotune.policies.estimate.constants import constant
from autotune.policies.values.architecture.model import Model, model_from_shape
from autotune.policies.values.job import ASSUMED_SHAPE, Job, Launcher, PromptSample

_DEEPEST = 16  # files that extend one another
_REPLACES = "_override_"  # a section with this key replaces the one that it would extend
_SAMPLE = 256  # prompts from the beginning of a file
_LONGEST_LINE = 4 << 20  # bytes
_SHAPE = "{layers: 36, hidden: 4096, heads: 32, kv_heads: 8, intermediate: 12288, vocab: 151936}"
_LAUNCHER_FILE = re.compile(r".*\.(?:json|ya?ml)")
_LAUNCHER_KEYS = ("deepspeed", "config_file", "accelerate_config")  # settings, also flags of a launcher
_ON_HOST = ("cpu", "nvme")
_STAGE_NAME = re.compile(r"(?:zero|stage|ds)[-_]?([0-3])(?!\d)", re.IGNORECASE)
_FSDP_NAME = re.compile(r"(fsdp)[-_]?v?([12])?(?!\d)", re.IGNORECASE)
_UNSHARDED = ("NO_SHARD", "3")
_PATHS = ("/", "./", "../", "~")  # prefixes of a model's path on disk, unlike a hub name
_INTERPRETER = re.compile(r"python[\d.]*|bash|sh|\{python\}")
_SCRIPT = re.compile(r"[^\s{}$]+\.(?:py|sh)")


def with_document(job: Job, *, builds_on: str = "") -> tuple[Job, Document | None, tuple[Problem, ...]]:
    """Return the job with the content of its `config:` file, that file, and why it cannot be read.

    `builds_on` is the key in the file that names the files it extends, relative to its own folder: later ones
    override earlier ones, and the file itself overrides all (NeMo-RL, utils/config.py). Syntax errors are
    complaints of the returned document.
    """
    if job.config is None:
        return job, None, ()
    path = Path(job.workdir) / Path(job.config).expanduser()
    document, problem = _document(path)
    if document is None or document.complaints or problem is not None:
        return job, document, () if problem is None else (problem,)
    try:
        result = _extended(document.value, path, builds_on, ()) if builds_on else document.value
    except _ChainError as error:
        return job, None, (error.problem,)
    return msgspec.structs.replace(job, document=result), document, ()


def with_extended(own: dict[str, Any], path: Path, *, builds_on: str) -> dict[str, Any]:
    """Return settings merged over those of the files they extend; raises Failure if a file is unusable."""
    try:
        return _extended(own, path, builds_on, ())
    except _ChainError as error:
        raise UserError(error.problem.message, hint=error.problem.hint) from None


class _ChainError(Exception):
    """A file that another one extends cannot be used."""

    def __init__(self, path: Path, reason: str, *, named_in: Path) -> None:
        hint = f"looked for {path}"
        self.problem = Problem(path=("config",), message=f"{named_in.name} extends {reason}", hint=hint)


def _document(path: Path) -> tuple[Document | None, Problem | None]:
    try:
        text = read_text(path)
    except UnreadableError as error:
        if error.absent:
            return None, Problem(path=("config",), message="no such file", hint=f"looked for {path}")
        return None, Problem(path=("config",), message=f"cannot be read: {error.reason}", hint=str(path))
    document = Document(text, str(path), read=scalar_1_1)
    if not document.complaints and not isinstance(document.value, dict):
        return None, Problem(path=("config",), message="holds no mapping of settings", hint=str(path))
    return document, None


def _extended(own: dict[str, Any], path: Path, key: str, above: tuple[Path, ...]) -> dict[str, Any]:
    """Return a file's settings merged over those of the files that it extends."""
    named = own.get(key)
    base: dict[str, Any] = {}
    within = (*above, path.resolve())
    for name in named if isinstance(named, list) else () if named is None else (named,):
        file = (path.parent / str(name)).resolve()
        if file in within or len(within) > _DEEPEST:
            raise _ChainError(file, f"{name}, which extends it in turn", named_in=path)
        document, problem = _document(file)
        if document is None or document.complaints:
            reason = problem.message if problem is not None else document.complaints[0].message  # type: ignore[union-attr]
            raise _ChainError(file, f"{name}: {reason}", named_in=path)
        base = _merged(base, _extended(document.value, file, key, within))
    return _merged(base, {name: value for name, value in own.items() if name != key})


def _merged(base: dict[str, Any], own: dict[str, Any], *, top: bool = True) -> dict[str, Any]:
    result = dict(base)
    for name, value in own.items():
        if not isinstance(value, dict):
            result[name] = value
            continue
        replaces = top and value.get(_REPLACES) is True
        content = {key: each for key, each in value.items() if not (replaces and key == _REPLACES)}
        before = None if replaces else result.get(name)
        result[name] = _merged(before if isinstance(before, dict) else {}, content, top=False)
    return result


def with_shape(job: Job, framework: Framework) -> tuple[Job, tuple[Problem, ...]]:
    """Return the job with its model's shape if it can be resolved, and problems with the model."""
    if isinstance(job.model, dict):
        shape, problem = _written(job.model)
        return msgspec.structs.replace(job, shape=shape, shape_from="`model:` of the job"), problem
    name = job.model if job.model is not None else framework.model_path(job)
    try:
        result, place = (None, "") if name is None else find_model(name, job.workdir)
    except Failure as failure:
        path: tuple[str | int, ...] = ("model",) if job.model is not None else ("settings",)
        hint = f"{failure.hint}, or write its shape: `model: {_SHAPE}`"
        return job, (Problem(path=path, message=failure.message, hint=hint),)
    # Settings may describe a model that is not on this machine; they have priority over its name alone.
    own = framework.shape(job)
    read_here = name is not None and find_folder(name, job.workdir) is not None
    if own is not None and (result is None or (not read_here and _differ(own, result))):
        result, place = own, "the framework's own settings"
    if place.startswith(ASSUMED_SHAPE):
        job = job.with_notes(f"the shape of the model `{name}` is {place.partition(':')[0]}")
    return msgspec.structs.replace(job, shape=result, shape_from=place), ()


def _differ(own: Model, other: Model) -> bool:
    """Return whether the shape in the settings differs from the shape found by name."""
    return any(getattr(own, size) != getattr(other, size) for size in ("layers", "hidden", "heads", "vocab"))


def _written(shape: dict[str, int | str]) -> tuple[Model | None, tuple[Problem, ...]]:
    """Return a shape written in the job; fields that follow from others may be left out."""
    try:
        return model_from_shape(shape), ()
    except ValueError as error:
        hint = f"such as `{_SHAPE}`; or name a folder with a config.json"
        return None, (Problem(path=("model",), message=str(error), hint=hint),)


def with_prompts(job: Job, framework: Framework) -> Job:
    """Return the job with the mean tokens of its prompts, if it states none and its data can be read here.

    The mean is over the first 256 prompts of the first file, estimated from the bytes of their text: accurate
    to about a quarter, and without the tokens of a chat template. If the data is absent or unreadable, the
    job is unchanged.
    """
    named = framework.prompts(job) if job.lengths.prompt is None else None
    file = next((path for name in named.files if (path := _data_file(job, name))), None) if named else None
    if named is None or file is None:
        return job
    sizes = [size for size in islice(_READERS[file.suffix](file, named.field), _SAMPLE) if size]
    if not sizes:
        return job
    mean = math.ceil(fmean(sizes) / constant("bytes_per_token"))
    sample = PromptSample(mean=mean, source=f"{len(sizes)} prompts of {file.name}")
    return msgspec.structs.replace(job, prompts=sample)


def _data_file(job: Job, name: str) -> Path | None:
    """Return the file on this machine with a name; None if there is none in a supported format."""
    try:
        path = Path(job.workdir) / Path(name).expanduser()
        return path if path.suffix in _READERS and is_file(path) else None
    except (OSError, RuntimeError):  # an invalid file name, or the home of an unknown user
        return None


def _json_lines(file: Path, field: str) -> Iterator[int]:
    """Yield the bytes of the prompt in each line, up to the first that is not JSON."""
    try:
        with file.open("rb") as stream:
            while line := stream.readline(_LONGEST_LINE):
                row = json.loads(line)
                yield _text_bytes(row.get(field)) if isinstance(row, dict) else 0
    except (OSError, ValueError, RecursionError):
        return


def _parquet_rows(file: Path, field: str) -> Iterator[int]:
    """Yield the bytes of the prompt in each row; none without pyarrow, which frameworks install."""
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        return
    try:
        with ParquetFile(file) as content:
            for batch in content.iter_batches(batch_size=_SAMPLE, columns=[field]):
                yield from map(_text_bytes, batch.column(0).to_pylist())
    except (OSError, ValueError, LookupError, NotImplementedError, RecursionError):
        return


_READERS = {".jsonl": _json_lines, ".parquet": _parquet_rows}


def _text_bytes(prompt: Any) -> int:
    """Return the UTF-8 bytes of a text or of chat messages except the assistant's; 0 for anything else."""
    match prompt:
        case str():
            return len(prompt.encode(errors="replace"))
        case list():
            return sum(map(_text_bytes, prompt))
        case {"content": content} if prompt.get("role") != "assistant":
            return _text_bytes(content)
        case {"text": str(text)}:
            return _text_bytes(text)
    return 0


def with_launcher(job: Job) -> Job:
    """Return the job with the layout from its launcher's file.

    If the file is not on this machine, the layout is assumed from its name, and a note says so.
    """
    name = _launcher_file(job)
    if not name:
        return job
    try:
        content = _mapping_in(Path(job.workdir) / Path(name).expanduser())
    except UnreadableError:
        stage, sharded = _STAGE_NAME.search(Path(name).name), _FSDP_NAME.search(Path(name).name)
        kind = f"zero{stage[1]}" if stage else f"fsdp{sharded[2] or 1}" if sharded else ""
        how = f"its name says {kind}" if kind else "one whole copy per process"
        note = f"the layout of the trainer is assumed, {how}: `{name}` cannot be read here"
        launcher = Launcher(sharding=kind, source=name, is_assumed=True)
        return msgspec.structs.replace(job.with_notes(note), launcher=launcher)
    inner = content.get("deepspeed_config")
    file = inner.get("deepspeed_config_file") if isinstance(inner, dict) else None
    result = _of_mapping_in(content, name)
    if isinstance(file, str):  # accelerate's file refers to a DeepSpeed file
        nested = with_launcher(
            msgspec.structs.replace(job, settings={"deepspeed": file}, document={}, command=())
        )
        processes = result.processes or nested.launcher.processes
        result = msgspec.structs.replace(nested.launcher, processes=processes)
        job = msgspec.structs.replace(job, notes=nested.notes)
    return msgspec.structs.replace(job, launcher=result)


def _launcher_file(job: Job) -> str:
    """Return the launcher file named in a job's settings, its config file or its command; empty if none."""
    for place in (job.settings, job.document):
        for key in _LAUNCHER_KEYS:
            value = place.get(key)
            if isinstance(value, str) and _LAUNCHER_FILE.fullmatch(value):
                return value
    words = list(job.command)
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        value = value if equals else words[at + 1] if at + 1 < len(words) else ""
        if flag.lstrip("-") in _LAUNCHER_KEYS and flag.startswith("--") and _LAUNCHER_FILE.fullmatch(value):
            return value
    return ""


def _mapping_in(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file; raises UnreadableError if there is none."""
    document = Document(read_text(path), str(path), read=scalar_1_1)
    if document.complaints or not isinstance(document.value, dict):
        raise UnreadableError(path, "it holds no mapping of settings")
    return document.value


def _of_mapping_in(content: dict[str, Any], name: str) -> Launcher:
    zero = content.get("zero_optimization")
    if isinstance(zero, dict):
        return Launcher(
            sharding=f"zero{zero.get('stage', 0)}",
            optimizer_on_host=_device_of(zero.get("offload_optimizer")) in _ON_HOST,
            parameters_on_host=_device_of(zero.get("offload_param")) in _ON_HOST,
            source=name,
            is_json=True,
        )
    count = content.get("num_processes")
    processes = count if isinstance(count, int) else 0
    match str(content.get("distributed_type", "NO")).upper():
        case "DEEPSPEED":
            section = _section_of(content, "deepspeed_config")
            return Launcher(
                sharding=f"zero{section.get('zero_stage', 2)}",
                optimizer_on_host=str(section.get("offload_optimizer_device")) in _ON_HOST,
                parameters_on_host=str(section.get("offload_param_device")) in _ON_HOST,
                processes=processes,
                source=name,
            )
        case "FSDP":
            section = _section_of(content, "fsdp_config")
            shards = str(section.get("fsdp_sharding_strategy", "FULL_SHARD")) not in _UNSHARDED
            return Launcher(
                sharding=f"fsdp{section.get('fsdp_version', 1)}" if shards else "multi_gpu",
                parameters_on_host=str(section.get("fsdp_offload_params")).lower() == "true",
                processes=processes,
                source=name,
            )
    return Launcher(sharding="multi_gpu", processes=processes, source=name)


def _section_of(content: dict[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


def _device_of(section: Any) -> str:
    return str(section.get("device", "")) if isinstance(section, dict) else ""


def absent_paths(job: Job, framework: Framework) -> Iterator[Problem]:
    """Yield a problem for a missing model and, if the job runs here, a missing folder or program."""
    base = Path(job.workdir)
    looked = f"looked in {base}"
    if isinstance(job.model, str) and find_public(job.model) is None and not _is_in(base, job.model):
        yield Problem(path=("model",), message="no such file or folder", hint=looked)
    if job.cluster.address not in (None, "local"):
        return
    named = framework.model_path(job)
    if named is not None and job.model is None and named.startswith(_PATHS) and not _is_in(base, named):
        key = next((k for k, value in job.settings.items() if value == named), None)
        if key is not None:
            yield Problem(path=("settings", key), message="no such file or folder", hint=looked)
    if not is_folder(base):
        yield Problem(path=("workdir",), message="no such folder", hint=f"looked for {base}")
    elif job.cluster.address == "local":  # otherwise a cluster with other files may be detected
        yield from _absent_programs(job, base)


def _absent_programs(job: Job, base: Path) -> Iterator[Problem]:
    looked = f"looked in {base}"
    if job.python and not (_is_in(base, job.python) if "/" in job.python else shutil.which(job.python)):
        yield Problem(path=("python",), message="no such program", hint=looked)
    for at, word in enumerate(job.command[:2]):
        is_called = at == 0 or _INTERPRETER.fullmatch(PurePath(job.command[0]).name)
        if is_called and _SCRIPT.fullmatch(word) and not _is_in(base, word):
            yield Problem(path=("command", at), message=f"no such file: {word}", hint=looked)


def _is_in(base: Path, name: str) -> bool:
    return is_there(base / Path(name).expanduser())
