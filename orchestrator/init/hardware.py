"""The nodes and GPUs that a framework's settings request."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autotune.launchers import frameworks
from autotune.launchers.frameworks.openrlhf.renamed import RENAMED
from autotune.launchers.frameworks.verl.keys import names_own_file
from autotune.policies.values.job import Job
from autotune.policies.values.value import Value

_PLACED = "device_mapping"  # of a role: GPUs of the whole cluster, or a text such as `list(range(0, 8))`


class Hardware(Value, frozen=True, kw_only=True):
    """Nodes, GPUs and memory; None if unknown."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    gpu: str | None = None  # a name of config/cards.py
    host_memory: str | None = None  # per node, as written in job.yaml

    def or_else(self, other: Hardware) -> Hardware:
        """Return this hardware, with unknown fields taken from `other`."""
        return Hardware(
            nodes=self.nodes or other.nodes,
            gpus_per_node=self.gpus_per_node or other.gpus_per_node,
            gpu=self.gpu or other.gpu,
            host_memory=self.host_memory or other.host_memory,
        )


def hardware_of(
    framework: str,
    settings: Mapping[str, Any],
    document: Mapping[str, Any],
    *,
    command: Sequence[str] = (),
    env: Mapping[str, str] = {},
) -> Hardware:
    """Return the hardware that a job's settings request; `document` is the framework's own config file.

    For TRL and ms-swift, unknown fields are taken from the launcher in `command` and the variables in `env`.
    A config file in `command` hides verl's defaults; flags of a fork of slime in it count.
    """
    return _of_settings(framework, settings, document, command).or_else(
        _of_launcher(command, env, settings) if framework in ("trl", "ms-swift") else Hardware()
    )


def _of_launcher(command: Sequence[str], env: Mapping[str, str], settings: Mapping[str, Any]) -> Hardware:
    """Return the GPUs of torchrun, accelerate, ms-swift's variables or CUDA_VISIBLE_DEVICES.

    An interpreter that starts the script directly has one process.
    """
    flags = {name.lstrip("-").replace("-", "_"): value for name, value in _flags(command)}
    devices = [each for each in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    nodes = _whole(flags.get("nnodes") or settings.get("num_machines") or env.get("NNODES"))
    per_node = _whole(flags.get("nproc_per_node") or env.get("NPROC_PER_NODE"))
    total = _whole(settings.get("num_processes"))
    if per_node is None and total is not None:
        per_node = total // (nodes or 1)
    is_python = bool(command) and re.fullmatch(r"(?:.*/)?python[\d.]*", command[0]) is not None
    if per_node is None and is_python and "-m" not in command:
        return Hardware(nodes=1, gpus_per_node=len(devices) or 1)
    per_node = len(devices) or per_node
    return Hardware(nodes=nodes or (1 if per_node else None), gpus_per_node=per_node)


def _flags(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word, following in itertools.pairwise((*command, "")):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            yield name, value if equals else following


def _of_settings(
    framework: str, settings: Mapping[str, Any], document: Mapping[str, Any], command: Sequence[str]
) -> Hardware:
    match framework:
        case "verl":
            defaults = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8}
            defaults = {} if names_own_file(command) else defaults
            return _of_overrides({**defaults, **{key.lstrip("+"): value for key, value in settings.items()}})
        case "areal":
            return _of_section(settings, document, "n_nodes", "n_gpus_per_node", nodes=1)
        case "skyrl":
            return _of_skyrl(settings)
        case "nemo-rl":
            return _of_section(settings, document, "num_nodes", "gpus_per_node")
        case "slime" | "relax" | "miles":
            others = [_whole(value) or 0 for name, value in _flags(command) if name.endswith("-num-gpus")]
            return _of_flags(settings, others=sum(others))
        case "openrlhf":
            return _of_dotted_flags(settings)
        case "command":
            return _of_roles(document)
    return Hardware()


def _of_section(
    settings: Mapping[str, Any],
    document: Mapping[str, Any],
    name: str,
    per_node: str,
    *,
    nodes: int | None = None,
) -> Hardware:
    """Return the GPUs of a section `cluster`, whose keys overrides may set; `nodes` is the default."""
    section = document.get("cluster")
    written = section if isinstance(section, dict) else {}
    return Hardware(
        nodes=_whole(settings.get(f"cluster.{name}", written.get(name, nodes))),
        gpus_per_node=_whole(settings.get(f"cluster.{per_node}", written.get(per_node))),
    )


def _of_overrides(settings: Mapping[str, Any]) -> Hardware:
    """Return verl's GPUs: the trainer's, and the engines' own if disaggregated."""
    nodes = _whole(settings.get("trainer.nnodes"))
    per_node = _whole(settings.get("trainer.n_gpus_per_node"))
    engines = "rollout" if {"rollout.nnodes", "rollout.n_gpus_per_node"} & set(settings) else ""
    if settings.get("trainer.v1.trainer_mode") == "separate_async":
        engines = "actor_rollout_ref.rollout"
    if not (engines and nodes and per_node):
        return Hardware(nodes=nodes, gpus_per_node=per_node)
    more = _whole(settings.get(f"{engines}.nnodes", 1))
    more_per_node = _whole(settings.get(f"{engines}.n_gpus_per_node", 8))
    if more is None or more_per_node is None:
        return Hardware()
    if nodes == more and per_node + more_per_node <= 8:
        return Hardware(nodes=nodes, gpus_per_node=per_node + more_per_node)
    if per_node == more_per_node:
        return Hardware(nodes=nodes + more, gpus_per_node=per_node)
    return _spread(nodes * per_node + more * more_per_node)


def _of_skyrl(settings: Mapping[str, Any]) -> Hardware:
    """Return SkyRL's GPUs: the trainer's, and the engines' own if disaggregated."""
    place = "trainer.placement.policy_num"
    nodes = _whole(settings.get(f"{place}_nodes", 1))
    per_node = _whole(settings.get(f"{place}_gpus_per_node", 1))
    if nodes is None or per_node is None:
        return Hardware(nodes=nodes)
    total = frameworks.find("skyrl").gpus(Job(name="job", framework="skyrl", settings=dict(settings))) or 0
    return Hardware(nodes=nodes, gpus_per_node=per_node) if total <= nodes * per_node else _spread(total)


def _of_flags(settings: Mapping[str, Any], *, others: int) -> Hardware:
    """Return the GPUs of slime's family; `others`: those of roles that only a fork has."""
    roles = settings.get("resource")
    if isinstance(roles, str):
        try:
            wanted = [int(count[1]) for count in json.loads(roles).values()]
        except (ValueError, TypeError, IndexError, AttributeError):
            return Hardware()
        total = max(wanted, default=0) if settings.get("colocate") else sum(wanted)
        return _spread(total)
    per_node = _whole(settings.get("actor-num-gpus-per-node", 8)) or 8
    trainer = (_whole(settings.get("actor-num-nodes", 1)) or 1) * per_node
    if settings.get("colocate") and not others:
        return Hardware(nodes=trainer // per_node, gpus_per_node=per_node)
    engines = 0 if settings.get("colocate") else _whole(settings.get("rollout-num-gpus", 0)) or 0
    return _spread(trainer + engines + others)


def _of_dotted_flags(settings: Mapping[str, Any]) -> Hardware:
    """Return OpenRLHF's GPUs, also from the names that its flags had before 0.10."""
    older = {row.new: row.old for row in RENAMED}

    def given(name: str, default: Any = None) -> Any:
        names = (name, older.get(name, ""), name.replace(".", "_"), name.rpartition(".")[2])
        return next((settings[each] for each in names if each in settings), default)

    def gpus(role: str) -> int:
        nodes = _whole(given(f"{role}.num_nodes", 1)) or 1
        return nodes * (_whole(given(f"{role}.num_gpus_per_node", 8)) or 8)

    if given("train.colocate_all") and not given("train.async_enable"):
        return _spread(gpus("actor"))
    engines = _whole(given("vllm.num_engines", 0)) or 0
    beside = bool(given("train.colocate_actor_ref") or given("train.colocate_all"))
    of_reference = 0 if beside or str(given("algo.kl.init_coef")) in ("0", "0.0") else gpus("ref")
    per_engine = _whole(given("vllm.tensor_parallel_size", 1)) or 1
    return _spread(gpus("actor") + of_reference + engines * per_engine)


def _spread(total: int) -> Hardware:
    """Return a number of GPUs as nodes of eight, the usual size."""
    if total <= 8:
        return Hardware(nodes=1, gpus_per_node=total or None)
    return Hardware(nodes=-(-total // 8), gpus_per_node=8)


def _whole(value: Any) -> int | None:
    try:
        return int(value) if value is not None else None
    except (TypeError, ValueError):
        return None


def _of_roles(document: Mapping[str, Any]) -> Hardware:
    """Return the nodes and GPUs that the roles of a ROLL config file are placed on."""
    per_node = document.get("num_gpus_per_node")
    last = max(_gpus(document), default=None)
    if not isinstance(per_node, int) or isinstance(per_node, bool) or per_node < 1 or last is None:
        return Hardware()
    return Hardware(nodes=last // per_node + 1, gpus_per_node=min(per_node, last + 1))


def _gpus(document: Mapping[str, Any]) -> Iterator[int]:
    """Yield GPUs of each role, among them its last."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _gpus(value)
        elif name == _PLACED and isinstance(value, str):
            ranges = re.search(r"range\((?:\d+\s*,\s*)?(\d+)\)", value)
            yield from [int(ranges[1]) - 1] if ranges else map(int, re.findall(r"\d+", value))
        elif name == _PLACED and isinstance(value, list):
            yield from (each for each in value if isinstance(each, int))
