"""The files of accelerate and DeepSpeed that a job names: how they shard its trainer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from autotune.orchestrator.config.yaml_nodes import Document, UnreadableError, read_text, scalar_1_1
from autotune.policies.values.job import Job, Launcher

_FILE = re.compile(r".*\.(?:json|ya?ml)")
_KEYS = ("deepspeed", "config_file", "accelerate_config")  # of settings; flags of a launcher bear them too
_ON_HOST = ("cpu", "nvme")
_STAGE = re.compile(r"(?:zero|stage|ds)[-_]?([0-3])(?!\d)", re.IGNORECASE)
_NAMED = re.compile(r"(fsdp)[-_]?v?([12])?(?!\d)", re.IGNORECASE)
_UNSHARDED = ("NO_SHARD", "3")


def with_launcher(job: Job) -> Job:
    """Return the job with what its launcher's file says; of a file that is not here, what its name says.

    A note tells that the layout is assumed where the file is not here.
    """
    name = _named(job)
    if not name:
        return job
    try:
        content = _content(Path(job.workdir) / Path(name).expanduser())
    except UnreadableError:
        stage, sharded = _STAGE.search(Path(name).name), _NAMED.search(Path(name).name)
        kind = f"zero{stage[1]}" if stage else f"fsdp{sharded[2] or 1}" if sharded else ""
        how = f"its name says {kind}" if kind else "one whole copy per process"
        note = f"the layout of the trainer is assumed, {how}: `{name}` cannot be read here"
        launcher = Launcher(sharding=kind, source=name, is_assumed=True)
        return msgspec.structs.replace(job, launcher=launcher, notes=(*job.notes, note))
    inner = content.get("deepspeed_config")
    file = inner.get("deepspeed_config_file") if isinstance(inner, dict) else None
    found = _of_content(content, name)
    if isinstance(file, str):  # accelerate's file names DeepSpeed's own
        nested = with_launcher(
            msgspec.structs.replace(job, settings={"deepspeed": file}, document={}, command=())
        )
        processes = found.processes or nested.launcher.processes
        found = msgspec.structs.replace(nested.launcher, processes=processes)
        job = msgspec.structs.replace(job, notes=nested.notes)
    return msgspec.structs.replace(job, launcher=found)


def _named(job: Job) -> str:
    """Return the file that a job's settings, its own file or its command name; empty if none."""
    for place in (job.settings, job.document):
        for key in _KEYS:
            value = place.get(key)
            if isinstance(value, str) and _FILE.fullmatch(value):
                return value
    words = list(job.command)
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        value = value if equals else words[at + 1] if at + 1 < len(words) else ""
        if flag.lstrip("-") in _KEYS and flag.startswith("--") and _FILE.fullmatch(value):
            return value
    return ""


def _content(path: Path) -> dict[str, Any]:
    """Return the mapping in a file of YAML or JSON; raises UnreadableError if there is none."""
    document = Document(read_text(path), str(path), read=scalar_1_1)
    if document.complaints or not isinstance(document.value, dict):
        raise UnreadableError(path, "it holds no mapping of settings")
    return document.value


def _of_content(content: dict[str, Any], name: str) -> Launcher:
    zero = content.get("zero_optimization")
    if isinstance(zero, dict):
        return Launcher(
            sharding=f"zero{zero.get('stage', 0)}",
            optimizer_on_host=_device(zero.get("offload_optimizer")) in _ON_HOST,
            parameters_on_host=_device(zero.get("offload_param")) in _ON_HOST,
            source=name,
            is_json=True,
        )
    count = content.get("num_processes")
    processes = count if isinstance(count, int) else 0
    match str(content.get("distributed_type", "NO")).upper():
        case "DEEPSPEED":
            section = _section(content, "deepspeed_config")
            return Launcher(
                sharding=f"zero{section.get('zero_stage', 2)}",
                optimizer_on_host=str(section.get("offload_optimizer_device")) in _ON_HOST,
                parameters_on_host=str(section.get("offload_param_device")) in _ON_HOST,
                processes=processes,
                source=name,
            )
        case "FSDP":
            section = _section(content, "fsdp_config")
            shards = str(section.get("fsdp_sharding_strategy", "FULL_SHARD")) not in _UNSHARDED
            return Launcher(
                sharding=f"fsdp{section.get('fsdp_version', 1)}" if shards else "multi_gpu",
                parameters_on_host=str(section.get("fsdp_offload_params")).lower() == "true",
                processes=processes,
                source=name,
            )
    return Launcher(sharding="multi_gpu", processes=processes, source=name)


def _section(content: dict[str, Any], name: str) -> dict[str, Any]:
    section = content.get(name)
    return section if isinstance(section, dict) else {}


def _device(section: Any) -> str:
    return str(section.get("device", "")) if isinstance(section, dict) else ""
