"""The keys of job.yaml in one table: how each is written, read and described to an editor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from autotune.orchestrator.config import fields as values
from autotune.policies.values.types import KNOBS, ClusterSpec, Effect, Goal, Preflight, Recovery, Search, Then


class Key(NamedTuple):
    """One key: the field it fills, how its value is read, its schema and what it means."""

    name: str
    field: str
    read: Callable[[Any], Any]
    schema: dict[str, Any]
    doc: str


class Section(NamedTuple):
    """A nested mapping of keys and the value it becomes."""

    name: str
    make: Callable[..., Any]
    keys: tuple[Key, ...]
    doc: str


_TEXT = {"type": "string"}
_BOOLEAN = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 1}
_NATURAL = {"type": "integer", "minimum": 0}
_SIZE_SCHEMA = {"type": ["string", "integer", "null"], "examples": ["79.1GiB"]}
_DURATION_SCHEMA = {"type": ["string", "number"], "examples": ["20s", "10m", "8h"]}
_SHARE_SCHEMA = {"type": ["string", "number"], "examples": ["5%", 0.05]}
_KNOB_SCHEMA = {"type": "string", "enum": list(KNOBS)}
_EFFECTS = tuple(effect.value for effect in Effect)
_PREFLIGHT = tuple(item.value for item in Preflight)
_THEN = tuple(item.value for item in Then)


def _null(schema: dict[str, Any]) -> dict[str, Any]:
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": [*kinds, "null"]}


TOP = (
    Key("name", "name", values.job_name, _TEXT, "name of the job, shown in every table"),
    Key("framework", "framework", values.text, _TEXT, "which framework runs the job"),
    Key(
        "command",
        "command",
        values.command,
        {"type": "array", "items": {"type": ["string", "number"]}},
        "the framework's own entry point, as a list of words",
    ),
    Key(
        "python",
        "python",
        values.either_or(None, values.text),
        _null(_TEXT),
        "the framework's own interpreter, when it is not autotune's",
    ),
    Key(
        "settings",
        "settings",
        values.settings,
        {"type": ["object", "null"]},
        "the framework's own settings under its own names",
    ),
    Key(
        "config", "config", values.either_or(None, values.text), _null(_TEXT), "the framework's own YAML file"
    ),
    Key(
        "model",
        "model",
        values.either_or(None, values.model),
        {"type": ["string", "object", "null"]},
        "folder or config.json of the model, or its shape",
    ),
    Key(
        "env",
        "env",
        values.environment,
        {
            "type": ["object", "null"],
            "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
        },
        "environment of the job",
    ),
    Key(
        "workdir",
        "workdir",
        values.text,
        _TEXT,
        "working directory of the job; relative to where autotune is called",
    ),
    Key(
        "resume",
        "resume",
        values.boolean,
        _BOOLEAN,
        "true: attempt 1 may continue a checkpoint that is already there",
    ),
)
SECTIONS = (
    Section(
        "cluster",
        ClusterSpec,
        (
            Key(
                "address",
                "address",
                values.either_or(None, values.address),
                _null(_TEXT),
                "auto, local or host:port; absent: auto, else local",
            ),
            Key("nodes", "nodes", values.count(1), _COUNT, "nodes the job uses"),
            Key(
                "gpus_per_node",
                "gpus_per_node",
                values.either_or(None, values.count(0)),
                _null(_NATURAL),
                "null: as many as the cluster reports",
            ),
            Key(
                "gpu_memory",
                "gpu_memory_bytes",
                values.either_or(None, values.size),
                _SIZE_SCHEMA,
                "memory of a card; null: measured",
            ),
            Key(
                "host_memory",
                "host_memory_bytes",
                values.either_or(None, values.size),
                _SIZE_SCHEMA,
                "memory of a node; null: measured",
            ),
        ),
        "where the job runs",
    ),
    Section(
        "goal",
        Goal,
        (
            Key(
                "steps",
                "steps",
                values.count(1),
                _COUNT,
                "consecutive steps that make a configuration stable",
            ),
            Key("headroom", "headroom", values.share, _SHARE_SCHEMA, "share of every memory that stays free"),
            Key(
                "then",
                "then",
                lambda v: Then(values.choice(*_THEN)(v)),
                {"enum": list(_THEN)},
                "what follows the goal",
            ),
        ),
        "when a configuration counts as stable",
    ),
    Section(
        "recovery",
        Recovery,
        (
            Key(
                "relaunches",
                "relaunches",
                values.count(0),
                _NATURAL,
                "most relaunches after failures of the job",
            ),
            Key(
                "infrastructure_retries",
                "infrastructure_retries",
                values.count(0),
                _NATURAL,
                "most relaunches after losses of the cluster",
            ),
            Key(
                "silence",
                "silence_s",
                values.either_or("auto", values.duration),
                _DURATION_SCHEMA,
                "how long a job may be silent; auto: from its steps",
            ),
            Key(
                "allow",
                "allow",
                lambda v: tuple(Effect(e) for e in values.list_of(values.choice(*_EFFECTS))(v)),
                {"type": "array", "items": {"enum": list(_EFFECTS)}},
                "effects on the numbers that a remedy may have",
            ),
            Key(
                "deny",
                "deny",
                values.list_of(values.denied_name),
                {"type": "array", "items": _TEXT},
                "remedies or knobs that are never used",
            ),
            Key(
                "preflight",
                "preflight",
                lambda v: Preflight(values.choice(*_PREFLIGHT)(v)),
                {"enum": list(_PREFLIGHT)},
                "what an estimate may do before the first launch",
            ),
            Key("climb", "climb", values.boolean, _BOOLEAN, "true: follow the ladder's order only"),
            Key(
                "save_every",
                "save_every",
                values.either_or("auto", values.count(1)),
                {"type": ["integer", "string"], "minimum": 1},
                "steps between checkpoints, or auto",
            ),
            Key(
                "duration",
                "duration_s",
                values.either_or(None, values.duration),
                _null(_DURATION_SCHEMA),
                "longest time for the whole run",
            ),
        ),
        "budgets and permissions of the recovery",
    ),
    Section(
        "search",
        Search,
        (
            Key("trials", "trials", values.count(1), _COUNT, "most trials"),
            Key("duration", "duration_s", values.duration, _DURATION_SCHEMA, "longest time for the search"),
            Key("probe_steps", "probe_steps", values.count(1), _COUNT, "steps of a trial"),
            Key("confirm", "confirm", values.count(0), _NATURAL, "trials that repeat the best"),
            Key("parallel", "parallel", values.count(1), _COUNT, "trials at the same time"),
            Key(
                "vary",
                "vary",
                values.either_or(None, values.list_of(values.knob_name)),
                {"type": ["array", "null"], "items": _KNOB_SCHEMA},
                "knobs to vary; null: all that help",
            ),
            Key("min_gain", "min_gain", values.share, _SHARE_SCHEMA, "gain in speed that is worth a change"),
        ),
        "how the fastest configuration is searched",
    ),
)
REQUIRED = ("name", "framework")


def schema(frameworks: tuple[str, ...]) -> dict[str, Any]:
    """Return the JSON schema of job.yaml, for editors."""
    properties: dict[str, Any] = {key.name: {**key.schema, "description": key.doc} for key in TOP}
    properties["framework"]["enum"] = list(frameworks)
    for section in SECTIONS:
        properties[section.name] = {
            "type": ["object", "null"],
            "description": section.doc,
            "additionalProperties": False,
            "properties": {key.name: {**key.schema, "description": key.doc} for key in section.keys},
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "autotune job",
        "type": "object",
        "additionalProperties": False,
        "required": list(REQUIRED),
        "properties": properties,
    }
