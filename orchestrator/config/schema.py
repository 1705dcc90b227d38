"""The keys of job.yaml: type, default as a person writes it, and meaning.

The job file is validated by these classes; docs/site makes the JSON schema and the reference page of them.
"""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.launchers.likeness import nearest
from autotune.orchestrator.config.fields import (
    Address,
    AppriseUrl,
    Boolean,
    CardName,
    CommandLine,
    Count,
    DeniedName,
    Duration,
    EffectName,
    Environment,
    ForecastName,
    GpuMemory,
    HostMemory,
    JobName,
    KnobName,
    ListOf,
    ModelSource,
    Natural,
    OccasionName,
    OrAuto,
    OrNull,
    OrOff,
    PreflightName,
    Settings,
    Share,
    Size,
    Text,
    ThenName,
    Trackers,
    WebhookUrl,
    framework_name,
)
from autotune.policies.values.job import Job


def _key(
    default: object, *, description: str, alias: str | None = None, schema: dict[str, Any] | None = None
) -> Any:
    """Return a key of a mapping; `default` is as a person writes it, `...` if the key is required."""
    return Field(default, alias=alias, description=description, json_schema_extra=schema)


def _section(keys: type[Section]) -> Any:
    return Field(default_factory=keys)


class Keys(BaseModel):
    """Keys of one mapping; an unknown one is an error, and defaults are read like what a person wrote."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Section(Keys):
    """A mapping below a key of its own; null is the empty one."""

    model_config = ConfigDict(json_schema_extra={"type": ["object", "null"]})

    @model_validator(mode="before")
    @classmethod
    def _mapping(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, dict):
            raise PydanticCustomError("section", "must be a mapping")
        return value or {}


class ClusterKeys(Section):
    """The Ray cluster and the hardware that the job uses. `null`: measured before the first launch."""

    address: OrNull[Address] = _key(
        None,
        description=(
            "`auto`: the existing Ray cluster, an error if there is none. `local`: a new local Ray on this"
            " machine. `host:port`: the GCS address of a cluster. `null`: the existing cluster if there is"
            " one, else `local`."
        ),
    )
    nodes: Count = _key(1, description="Number of nodes that the job uses.")
    gpus_per_node: OrNull[Natural] = _key(
        None, description="GPUs per node that the job uses. `null`: as many as the cluster reports."
    )
    gpu_memory_bytes: OrNull[GpuMemory] = _key(
        None,
        alias="gpu_memory",
        description=(
            "Memory of one GPU, 1GiB to 1TiB. `null`: measured, if NVML answers. A value that differs from"
            " the measured one by more than 3 % is an error."
        ),
    )
    host_memory_bytes: OrNull[HostMemory] = _key(
        None,
        alias="host_memory",
        description=(
            "Host memory of one node, 1GiB to 64TiB. `null`: measured on the cluster, and unknown to a `plan`"
            " elsewhere."
        ),
    )
    gpu: OrNull[CardName] = _key(
        None,
        description=(
            "GPU model of the cluster, such as `H100-80GB`, `MI300X` or `Ascend-910B`: gives memory and speed"
            " for a `plan` elsewhere. On the cluster, measured values are used, where there are any."
        ),
    )
    wait_for_nodes_s: OrNull[Duration] = _key(
        None,
        alias="wait_for_nodes",
        description=(
            "How long to wait for `nodes` nodes with `gpus_per_node` free GPUs, before the first launch and"
            " before each relaunch. `null`: 30 minutes where an autoscaler starts nodes; on any other"
            " cluster missing nodes are an error at once ([details](operations.md#clusters-that-grow))."
        ),
    )


class LengthKeys(Section):
    """How long the job's sequences are on average; knowing it makes the memory estimate more accurate."""

    prompt: OrNull[Count] = _key(
        None,
        description=(
            "Mean tokens of a prompt. `null`: measured in the job's data where that is a `.jsonl` or"
            " `.parquet` file on the driver's machine, else assumed from the longest prompt allowed."
        ),
    )
    response: OrNull[Count] = _key(
        None,
        description=(
            "Mean tokens of a response, all turns together. `null`: assumed from the longest"
            " response allowed."
        ),
    )


class GoalKeys(Section):
    """When a configuration counts as stable. autotune then writes `stable.yaml` and `launch.sh`."""

    steps: Count = _key(
        20, description="Number of consecutive training steps without a failure that makes it stable."
    )
    headroom: Share = _key(
        "5%",
        description=(
            "Share of the GPU memory and of the host memory that must stay free in every phase. A running job"
            " is not stopped for it; its stable configuration is then marked marginal."
        ),
    )
    then: ThenName = _key(
        "continue",
        description="What follows the goal. `continue`: train to the end. `stop`: end the run.",
    )


class RecoveryKeys(Section):
    """What autotune may do after a failure: how often it relaunches the job, and what it may change."""

    relaunches: Natural = _key(
        12,
        description="Maximum number of relaunches after failures of the job, since it last saved new steps.",
    )
    infrastructure_retries: Natural = _key(
        3,
        description="Maximum number of relaunches after losses of a node, since it last saved new steps.",
    )
    silence_s: OrAuto[Duration] = _key(
        "auto",
        alias="silence",
        description=(
            "A job that writes nothing to its logs and uses neither CPU nor GPU for this long counts as hung."
            " `auto`: 45 minutes before the first step, then the longer of 15 minutes and 5 median steps."
        ),
    )
    stall_s: OrAuto[OrOff[Duration]] = _key(
        "auto",
        alias="stall",
        description=(
            "A job that completes no training step for this long counts as hung, whatever it writes and"
            " however busy it is: longer than the longest validation. `auto`: 8 hours, or 10 median steps if"
            " that is longer; less where neither CPU nor GPU works meanwhile ([details](stops.md)). `off`:"
            " missing steps stop no job."
        ),
    )
    allow: ListOf[EffectName] = _key(
        ["exact", "numeric"],
        description=(
            "Which remedies may be applied, by their effect on the results. `exact`: the same update up to"
            " the order of summation. `numeric`: other rounding, as with fused kernels."
        ),
    )
    deny: ListOf[DeniedName] = _key(
        [], description="Remedies and knobs that are never used, also if `allow` admits them."
    )
    preflight: PreflightName = _key(
        "apply",
        description=(
            "What happens before the first launch if the memory estimate says that the job cannot fit."
            " `apply`: start with the nearest configuration that fits. `advise`: name it, but start as"
            " written. `off`: start as written."
        ),
    )
    climb: Boolean = _key(
        False,
        description=(
            "Whether a job that reached its goal is stopped at a checkpoint, at most twice, to continue with"
            " a configuration that is predicted to be faster."
        ),
    )
    forecast: ForecastName = _key(
        "warn",
        description=(
            "What happens when memory grows from step to step and is expected to run out before the last"
            " step. `warn`: report at which step and in which phase. `act`: also stop at the last checkpoint"
            " before it and continue with a fresh process or with the remedy for that phase. `off`: report"
            " nothing. `tell` is the earlier name of `warn`."
        ),
    )
    in_place: OrAuto[Boolean] = _key(
        "auto",
        description=(
            "Whether the job itself may recover from an out-of-memory failure of log_prob, forward or"
            " backward: the same samples run again in smaller micro-batches, without a relaunch, and later"
            " steps keep that setting. `auto`: yes, if the framework can: the built-in job, and TRL in one"
            " process."
        ),
        schema={"anyOf": [{"type": "boolean"}, {"enum": ["auto", None]}]},
    )
    save_every: OrAuto[Count] = _key(
        "auto",
        description=(
            "Steps between checkpoints. `auto`: every 10 steps or every 20 minutes, whichever comes later."
            " Checkpoint options in `settings` take precedence."
        ),
        schema={"anyOf": [{"type": "integer", "minimum": 1}, {"enum": ["auto", None]}]},
    )
    duration_s: OrNull[Duration] = _key(
        None,
        alias="duration",
        description=(
            "Time of the run after which no relaunch begins, without the time until it is resumed; an attempt"
            " that runs goes on. `null`: none."
        ),
    )


class SearchKeys(Section):
    """How long `autotune search` may look for the fastest stable configuration, and what it varies."""

    trials: Count = _key(40, description="Maximum number of trials.")
    duration_s: Duration = _key("8h", alias="duration", description="Time limit for the search.")
    probe_steps: Count = _key(5, description="Number of training steps of a trial.")
    confirm: Natural = _key(
        2,
        description="How often the best configuration is run again, for `goal.steps` steps, before it wins.",
    )
    parallel: Count = _key(1, description="Number of trials that run at the same time.")
    vary: OrNull[ListOf[KnobName]] = _key(
        None, description="Knobs that the search varies. `null`: all that change speed or memory."
    )
    min_gain: Share = _key(
        "1%",
        description=(
            "Smallest relative gain in throughput that counts as an improvement; the search ends early when"
            " many trials in a row bring less."
        ),
    )


class NotifyKeys(Section):
    """Who is notified about a run. If a notification fails, autotune warns once; the run goes on."""

    on: ListOf[OccasionName] = _key(
        ["stable", "gave-up", "failed", "finished", "infrastructure"],
        description=(
            "Occasions. `stable`: the goal was reached. `gave-up`: no configuration is left. `failed`: the"
            " job's own failure. `finished`: the run is over and succeeded. `infrastructure`: the cluster,"
            " its memory or the driver failed, and somebody has to act."
        ),
    )
    command: CommandLine = _key(
        [],
        description=(
            "Command line, as a list; not run by a shell. It gets the notification as JSON on stdin and in"
            " AUTOTUNE_NOTIFY_* variables, runs in `workdir`, and is killed after 10 seconds."
        ),
    )
    webhook: OrNull[WebhookUrl] = _key(
        None,
        description=(
            "URL that gets the notification as JSON by POST. It is treated as a secret: `{env: NAME}` names"
            " the variable that holds it."
        ),
    )
    apprise: ListOf[AppriseUrl] = _key(
        [],
        description=(
            "URLs of the [Apprise](https://github.com/caronc/apprise) library, such as `ntfy://topic`, for"
            " chats, mail and telephones: `pip install 'rl-autotune[notify]'`. They are treated as secrets."
        ),
    )


class JobFile(Keys):
    """A job for autotune: what to run, where to run it, and what autotune may change to keep it running."""

    name: JobName = _key(..., description="Name of the job, shown in every table.")
    framework: Annotated[Text, framework_name(lambda: FRAMEWORKS)] = _key(
        ...,
        description="RL framework that runs the job. `command`: any script with `{knob}` placeholders.",
        schema={"enum": list(FRAMEWORKS)},
    )
    framework_version: OrNull[Text] = _key(
        None,
        description=(
            "Version of the framework, such as `0.9.0`. `null`: the one that is installed for `python`, or"
            " else the newest known."
        ),
    )
    command: CommandLine = _key(
        [],
        description="Command line that starts the framework, as a list. Empty: the framework's usual one.",
    )
    server: CommandLine = _key(
        [],
        description=(
            "Command line of the inference server that the training of TRL or ms-swift uses, as a list."
            " autotune does not start it; the engine is then not on the GPUs of the job."
        ),
    )
    python: OrNull[Text] = _key(
        None, description="Python interpreter of the framework. `null`: the one that runs autotune."
    )
    settings: Settings = _key(
        {},
        description=(
            "The framework's own settings, under the framework's own names. `{env: NAME}`, in capitals, is"
            " the value of an environment variable as text, and is recorded by its name."
        ),
    )
    config: OrNull[Text] = _key(
        None, description="The framework's own YAML file, passed on to it; relative to `workdir`."
    )
    model: OrNull[ModelSource] = _key(
        None,
        description=(
            "Folder, `config.json` or hub name of the model, or its shape with `layers`, `hidden`, `heads`,"
            " `intermediate` and `vocab`, for"
            " the memory estimate. `null`: the model that `settings` name."
        ),
    )
    cluster: ClusterKeys = _section(ClusterKeys)
    env: Environment = _key(
        {},
        description=(
            "Environment variables of the job. Values are text: `01` stays `01`. `{env: NAME}` is the value"
            " of NAME where autotune runs, and is recorded by that name; secrets belong there."
        ),
    )
    workdir: Text = _key(".", description="Working directory of the job, relative to that of autotune.")
    log_limit_bytes: Size = _key(
        "1GiB",
        alias="log_limit",
        description=(
            "Disk that the recorded logs of all attempts of a run may take. Older parts are compressed; over"
            " the limit the middle goes, and the first and newest part of every attempt stay."
        ),
    )
    resume: Boolean = _key(
        False, description="Whether the first attempt may continue a checkpoint that is already there."
    )
    annotate: Trackers = _key(
        "none",
        description=(
            "Experiment trackers in which every attempt is annotated: its cause, its changed knobs and what"
            " follows, in the job's own run. `auto`: those that the job uses. See"
            " [annotations](notifications.md#annotations)."
        ),
    )
    lengths: LengthKeys = _section(LengthKeys)
    goal: GoalKeys = _section(GoalKeys)
    recovery: RecoveryKeys = _section(RecoveryKeys)
    search: SearchKeys = _section(SearchKeys)
    notify: NotifyKeys = _section(NotifyKeys)


SECTIONS: dict[str, type[Section]] = {
    "cluster": ClusterKeys,
    "lengths": LengthKeys,
    "goal": GoalKeys,
    "recovery": RecoveryKeys,
    "search": SearchKeys,
    "notify": NotifyKeys,
}
LITERAL = ("command", "env")  # keys below which `01` and `off` stay text


def keys(model: type[Keys]) -> tuple[str, ...]:
    """Return the names of the keys as a person writes them."""
    return tuple(field.alias or name for name, field in model.model_fields.items())


# Fields of a job without a key in its file: they are read or measured elsewhere.
READ_ELSEWHERE = tuple(name for name in Job.__struct_fields__ if name not in JobFile.model_fields)


def is_other_file(values: dict[str, Any]) -> bool:
    """Return whether the keys of a YAML file are those of another program's file."""
    known = keys(JobFile)
    if "framework" in values or nearest("framework", [str(key) for key in values]):
        return False
    return sum(key not in known for key in values) * 2 > len(values)


def way_from(file: str) -> str:
    """Return the hint for a file that is not a job file."""
    name = shlex.quote(file)
    if file.endswith(".py"):
        return f"`autotune launch -- python {name}` runs it as it is"
    return (
        f"`autotune init {name}` creates a job from a script or a framework's file; "
        f"`autotune explain {name}` reads a log"
    )


def values_of(job: Job) -> dict[str, Any]:
    """Return the values of a job file that defines a whole job."""
    return _values(msgspec.to_builtins(job), JobFile)


def _values(fields: dict[str, Any], model: type[Keys]) -> dict[str, Any]:
    return {
        field.alias or name: _values(fields[name], SECTIONS[name]) if name in SECTIONS else fields[name]
        for name, field in model.model_fields.items()
    }
