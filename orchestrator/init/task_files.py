"""The shell texts in task files: of SkyPilot and dstack, of Ray jobs, of Kubernetes and its operators."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

import yaml

from autotune.orchestrator.config.cards import find_card
from autotune.orchestrator.init.entry_points import framework_of_document, is_shell_text
from autotune.orchestrator.init.hardware import Hardware
from autotune.orchestrator.init.ray_job import variables_of
from autotune.policies.values.value import Value

_MOST = 10_000  # values of a file that are looked at
_ENVIRONMENTS = ("env", "envs", "environment")
_TEXTS = ("run", "entrypoint", "commands", "command")
_OF_PODS = ("kubectl", "oc")
_OF_KUBERNETES = re.compile(r"\$\(([A-Za-z_]\w*)\)")  # a variable, which a shell would take for a command
_GPUS = re.compile(r"(?:([A-Za-z][\w.-]*):)?(?:\d+GB:)?(\d+)", re.IGNORECASE)


class Task(Value, frozen=True, kw_only=True):
    """A shell text of a task file, with line feeds before it so that its lines count as the file's."""

    text: str
    env: dict[str, str] = {}
    provided: dict[str, str] = {}  # variables of the system that runs the task
    hardware: Hardware = Hardware()


def manifest_in(words: Sequence[str]) -> str:
    """Return the file of a `kubectl apply` or `create`, `-` for its input; empty for other commands."""
    if PurePosixPath(words[0]).name not in _OF_PODS or not {"apply", "create"} & set(words[1:]):
        return ""
    for word, following in pairwise((*words, "")):
        name, equals, value = word.partition("=")
        if name in ("-f", "--filename"):
            return (value if equals else following) or "-"  # the parser loses a `-` before a here-document
    return ""


def tasks_of(source: str) -> list[Task]:
    """Return the shell texts of a YAML file; none if it is a job, or the configuration of a framework."""
    try:
        documents = [each for each in yaml.safe_load_all(source) if isinstance(each, dict)]
    except (yaml.YAMLError, RecursionError):
        return []
    if any(framework_of_document(each) or {"name", "framework"} <= set(each) for each in documents):
        return []
    left = iter(range(_MOST))
    return [task for each in documents for task in _tasks(each, source, {}, Hardware(), left)]


def _tasks(
    section: Mapping[str, Any], source: str, env: Mapping[str, str], around: Hardware, left: Iterator[int]
) -> Iterator[Task]:
    """Yield the texts of a section and of those in it, which have its variables and its resources."""
    env = {**env, **_variables(section)}
    hardware = _requested(section).or_else(around)
    text = _text(section, env)
    if text:
        first = next(line for line in text.splitlines() if line.strip()).strip()
        above = source.partition(first)[0].count("\n") if first in source else 0
        padded = "\n" * above + text.lstrip("\n")
        yield Task(text=padded, env=dict(env), provided=_provided(hardware), hardware=hardware)
    for value in section.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict) and next(left, None) is not None:
                yield from _tasks(each, source, env, hardware, left)


def _text(section: Mapping[str, Any], env: Mapping[str, str]) -> str:
    given = next((section[key] for key in _TEXTS if section.get(key)), None)
    if isinstance(given, str):
        return given
    if "commands" in section:
        return "\n".join(map(str, given)) if isinstance(given, list) else ""
    more = section.get("args")
    words = [str(word) for each in (given, more) if isinstance(each, list) for word in each]
    words = [_OF_KUBERNETES.sub(lambda m: f"${{{m[1]}}}" if m[1] in env else m[0], word) for word in words]
    return words[2] if is_shell_text(words) else shlex.join(words)


def _variables(section: Mapping[str, Any]) -> dict[str, str]:
    result = variables_of(str(section.get("runtimeEnvYAML", "")))[0]
    for given in (section.get(key) for key in _ENVIRONMENTS):
        for each in given.items() if isinstance(given, dict) else given if isinstance(given, list) else ():
            if isinstance(each, dict):
                each = (each.get("name"), each.get("value"))
            elif isinstance(each, str):
                each = each.partition("=")[::2]
            if each[1] not in (None, ""):
                result[str(each[0])] = str(each[1])
    return result


def _requested(section: Mapping[str, Any]) -> Hardware:
    """Return the nodes and GPUs that a section asks for."""
    resources = section.get("resources")
    requested = resources if isinstance(resources, dict) else {}
    limits = requested.get("limits")
    of_pod = limits.get("nvidia.com/gpu") if isinstance(limits, dict) else None
    given = requested.get("accelerators") or requested.get("gpu") or of_pod
    if isinstance(given, dict) and len(given) == 1:
        given = ":".join(map(str, next(iter(given.items()))))
    match = _GPUS.fullmatch(str(given))
    card = find_card(match[1]) if match and match[1] else None
    nodes = section.get("num_nodes", section.get("nodes"))
    return Hardware(
        nodes=nodes if isinstance(nodes, int) else None,
        gpus_per_node=int(match[2]) if match else None,
        gpu=card.name if card else None,
    )


def _provided(hardware: Hardware) -> dict[str, str]:
    """Return the variables that SkyPilot and dstack set on the first node."""
    nodes, per_node = hardware.nodes or 1, hardware.gpus_per_node
    counts = {"SKYPILOT_NUM_NODES": nodes, "DSTACK_NODES_NUM": nodes}
    counts |= dict.fromkeys(("SKYPILOT_NODE_RANK", "DSTACK_NODE_RANK"), 0)
    if per_node:
        counts |= dict.fromkeys(("SKYPILOT_NUM_GPUS_PER_NODE", "DSTACK_GPUS_PER_NODE"), per_node)
        counts |= {"DSTACK_GPUS_NUM": nodes * per_node}
    return {name: str(count) for name, count in counts.items()}
