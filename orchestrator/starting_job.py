"""A job file for a model and GPUs: the fastest configuration that is predicted to be safe.

The starting point is a first job without chosen knobs, derived from an example in configs/.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import yaml

import autotune.configs
from autotune.launchers import frameworks
from autotune.launchers.frameworks.core.data import document
from autotune.orchestrator.cluster_fit import with_gpu_memory
from autotune.orchestrator.config.cards import Card
from autotune.orchestrator.config.loader import assumed, parse_elsewhere
from autotune.orchestrator.config.model_files import find_model
from autotune.orchestrator.config.schema import LITERAL
from autotune.orchestrator.config.yaml_edit import Edit, edited
from autotune.orchestrator.errors import JobErrors, UserError
from autotune.orchestrator.search.presets import presets
from autotune.policies.estimate.constants import has_speed
from autotune.policies.remedies.legality import objections
from autotune.policies.search.feasibility import Foresight, assess, foreseen
from autotune.policies.search.next_trial import SearchSpace
from autotune.policies.search.space import space
from autotune.policies.values.events import Accepted
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.profile import Profile
from autotune.policies.values.value import Value

_CLUSTERS = ((1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))  # nodes and GPUs of each, tried in this order
_CHOSEN = "the fastest that is predicted to fit"
_NEXT_TO_NOTHING = 1.005  # ratio of step times that is negligible, below what a search counts as a gain
_ROUNDS = 3  # searches, each around the fastest configuration of the previous one


class Start(Value, frozen=True, kw_only=True):
    """A configuration that is predicted to be safe."""

    text: str  # of the job file
    step_s: float | None  # predicted seconds per step; None if the GPU's speed is unknown
    host_bytes: int  # predicted peak of host memory per node, whose size is unknown
    looked_at: int  # number of configurations that fit


def starting_job(wish: Wish) -> Start | None:
    """Return the fastest configuration that is predicted to fit with headroom; None if none is.

    Raises JobErrors if the wish itself is not a legal job.
    """
    refused: JobErrors | None = None
    for text in _first_texts(wish):
        try:
            result = _fastest(text)
        except JobErrors as errors:
            refused = refused or errors
            continue
        if result is not None:
            return result
    if refused is not None:
        raise refused
    return None


def _fastest(text: str) -> Start | None:
    """Return the fastest configuration of a first job that is predicted to fit."""
    job, _ = parse_elsewhere(text, file="this model")
    framework = frameworks.find(job.framework)
    cluster = assumed(job)
    job = with_gpu_memory(job, cluster)
    profile = framework.profile(job, cluster)
    accepted = Accepted(run="plan", job=job, profile=profile, cluster=cluster)
    free = msgspec.structs.replace(job, settings={})  # no value was chosen by a person
    dimensions = space(free, profile, profile.knobs)
    starts = (profile.knobs, *presets(framework, job, accepted, profile.knobs, dimensions))
    varied = SearchSpace(profile=profile, dimensions=dimensions, starts=starts, min_gain=0.0)
    sight = foreseen(accepted, (), (), dimensions, neighbours=varied.neighbours)
    if sight is None:
        return None
    centers, result = starts, tuple[Knobs, ...]()
    for _ in range(_ROUNDS):
        result = sight.proposals(centers, gain=0.0)
        if not result or result[0] == centers[0]:
            break
        centers = (result[0], *starts)
    if not result:
        return None
    chosen = _with_defaults(sight, profile, result[0])
    changes = framework.settings(job, chosen)
    worth = _worth(sight, profile, chosen) if has_speed(cluster.gpu_name) else {}
    edits = []
    for key, value in changes.items():
        why = worth.get(key.lstrip("+"), _CHOSEN if key in job.settings else "")
        by_default = "by default " if why and key not in job.settings else ""
        edits.append(Edit(("settings", key), value, by_default + why))
    estimate = assess(sight, (chosen,)).estimate
    return Start(
        text=edited(text, edits, literal=LITERAL).rstrip() + "\n",
        step_s=float(estimate.step_s[0]) if has_speed(cluster.gpu_name) else None,
        host_bytes=int(estimate.host[:, 0].max()),
        looked_at=len(result),
    )


def _with_defaults(sight: Foresight, profile: Profile, knobs: Knobs) -> Knobs:
    """Return a configuration with the knobs that hardly improve speed reset to the framework's defaults."""
    fastest = float(assess(sight, (knobs,)).estimate.step_s[0])
    for name in changed(profile.knobs, knobs):
        plain = msgspec.structs.replace(knobs, **{name: getattr(profile.knobs, name)})
        if objections(profile, profile.knobs, plain, started=False):
            continue
        one = assess(sight, (plain,))
        if one.allowed[0] and float(one.estimate.step_s[0]) <= _NEXT_TO_NOTHING * fastest:
            knobs = plain
    return knobs


def _worth(sight: Foresight, profile: Profile, knobs: Knobs) -> dict[str, str]:
    """Return, by setting, what is predicted without its change alone: that it may not fit, or is slower."""
    fastest = float(assess(sight, (knobs,)).estimate.step_s[0])
    result = {}
    for name in changed(profile.knobs, knobs):
        plain = msgspec.structs.replace(knobs, **{name: getattr(profile.knobs, name)})
        if name not in profile.supported or objections(profile, profile.knobs, plain, started=False):
            continue
        one = assess(sight, (plain,))
        slower = float(one.estimate.step_s[0]) / fastest - 1
        longer = f"steps would take {100 * slower:.0f} % longer" if slower >= 0.005 else _CHOSEN
        result[profile.supported[name].setting.lstrip("+")] = longer if one.allowed[0] else "it may not fit"
    return result


_START, _START_OF_EXPERTS = "start.yaml", "start_megatron.yaml"  # in a framework's folder
_SAMPLES = 8  # per prompt
_BUDGET = 16384  # minimum token budget of a micro-batch
_PLACE = re.compile(r"\{(\w+)\}")


class Recipe(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to derive a framework's first job from an example in configs/."""

    example: str
    keeps: str  # settings of the example, separated by spaces
    sets: dict[str, Any]
    yours: dict[str, Any] = {}
    experts: dict[str, Any] = {}
    env: dict[str, str] = {}
    note: str = ""
    workdir: str = ""  # used before the example's
    config: str = ""  # a file in the framework's checkout
    apart: bool = False  # disaggregated: trainer and engines share no GPU
    one_node: bool = False  # the framework runs on one node only


class Wish(Value, frozen=True, kw_only=True):
    """The model, framework, GPUs and sizes that a configuration is requested for."""

    model: str  # hub name, folder or config.json
    framework: str
    card: Card
    nodes: int = 1
    per_node: int = 8  # GPUs
    prompt: int = 1024  # tokens of the longest prompt
    response: int = 4096  # tokens of the longest response
    batch: int = 256  # prompts per step

    @property
    def gpus(self) -> int:
        """The number of GPUs of all nodes."""
        return self.nodes * self.per_node

    @property
    def unit(self) -> int:
        """The number of prompts whose multiples are divided evenly among the GPUs."""
        return self.gpus // math.gcd(self.gpus, _SAMPLES)

    def with_even_batch(self) -> Wish:
        """Return the wish with the nearest number of prompts whose samples are divided evenly among the GPUs.

        verl refuses uneven chunks, also with dynamic batching (DataProto.chunk in its protocol.py).
        """
        return msgspec.structs.replace(self, batch=max(1, round(self.batch / self.unit)) * self.unit)


def enough_gpus(wish: Wish) -> str:
    """Return `--gpus` with the fewest GPUs of the wished kind that hold the job; empty if 64 do not."""
    for nodes, per_node in _CLUSTERS:
        if nodes * per_node > wish.gpus:
            larger = msgspec.structs.replace(wish, nodes=nodes, per_node=per_node).with_even_batch()
            with contextlib.suppress(JobErrors):
                if starting_job(larger) is not None:
                    return f"--gpus {f'{nodes}x' if nodes > 1 else ''}{per_node}x{wish.card.name}, which fits"
    return ""


def check(wish: Wish) -> None:
    """Raise UserError if a framework has no recipe for a first job, or its jobs cannot use these GPUs."""
    recipe, card = _recipe(wish.framework, _START), wish.card.name
    if recipe is None:
        able = (name for name in frameworks.FRAMEWORKS if _recipe(name, _START) is not None)
        reason = f"--model generates jobs only for {', '.join(able)}"
        hint = "`autotune init FILE` creates a job from a script or config"
    elif recipe.one_node and wish.nodes > 1:
        reason, hint = "its jobs run on one node", f"--gpus {wish.per_node}x{card}"
    elif recipe.apart and wish.gpus == 1:
        reason, hint = "its trainer and its engines have GPUs of their own", f"--gpus 2x{card}"
    else:
        return
    raise UserError(f"--framework {wish.framework}: {reason}", hint=hint)


def _first_texts(wish: Wish) -> Iterator[str]:
    """Yield the candidate jobs without chosen knobs, in order of preference.

    verl trains with FSDP or Megatron; Megatron shards experts, and comes first for a model that has some.
    """
    known = find_model(wish.model, ".")[0]
    experts = known.experts if known is not None else 0
    files = (_START_OF_EXPERTS, _START) if experts else (_START, _START_OF_EXPERTS)
    for recipe in (_recipe(wish.framework, file) for file in files):
        if recipe is not None:
            yield _job_text(wish, recipe, experts)


@cache
def _recipe(framework: str, file: str) -> Recipe | None:
    package = frameworks.package_of(framework)
    folder = Path(next(iter(import_module(package).__path__)))
    return document(package, file, Recipe) if (folder / file).is_file() else None


def _job_text(wish: Wish, recipe: Recipe, experts: int) -> str:
    """Return a job with the settings kept from an example and those that follow from the wish.

    Megatron shards a model's experts over the GPUs of a node: its expert-parallel size is the greatest common
    divisor of GPUs and experts. It requires sequence parallelism with expert and tensor parallelism, and by
    default splits each expert like other tensors.
    """
    file = Path(next(iter(autotune.configs.__path__))) / recipe.example
    example = yaml.safe_load(file.read_bytes())
    sizes = _sizes(wish, experts)
    kept = {name: example["settings"][name] for name in recipe.keeps.split()}
    follows = recipe.sets | (recipe.experts if experts else {})
    settings = {**kept, **{name: _with_sizes(value, sizes) for name, value in follows.items()}}
    # NPROC_PER_NODE of an example counts its own GPUs.
    env = {name: value for name, value in (example.get("env") or {}).items() if name != "NPROC_PER_NODE"}
    env |= {name: str(_with_sizes(value, sizes)) for name, value in recipe.env.items()}
    lines = [f"name: {_name(wish)}", f"framework: {wish.framework}"]
    if folder := recipe.workdir or example.get("workdir"):
        lines.append(f"workdir: {folder}   # yours: the framework's folder, as it is in its container")
    if "command" in example:
        lines.append(f"command: {_flow(example['command'])}")
    if recipe.config:
        lines.append(f"config: {recipe.config}")
    cluster = f"nodes: {sizes['nodes']}, gpus_per_node: {sizes['per_node']}, gpu: {wish.card.name}"
    lines += [f"model: {wish.model}", f"cluster: {{{cluster}}}"]
    if env:
        lines.append(f"env: {_flow(env)}")
    lines.append(f"settings:  # some of configs/{recipe.example}{f'; {recipe.note}' if recipe.note else ''}")
    lines += [f"  {name}: {_flow(value)}   # yours" for name, value in recipe.yours.items()]
    lines += [f"  {name}: {_flow(value)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"


def _sizes(wish: Wish, experts: int) -> dict[str, Any]:
    parts = (wish.batch // share // wish.unit * wish.unit for share in (4, 2))
    longest, samples = wish.prompt + wish.response, wish.batch * _SAMPLES
    return {
        "model": wish.model,
        "nodes": wish.nodes,
        "per_node": wish.per_node,
        "gpus": wish.gpus,
        "half": wish.gpus // 2,
        "other_half": wish.gpus - wish.gpus // 2,
        "batch": wish.batch,
        "mini_batch": next((size for size in parts if size), wish.batch),
        "samples": samples,
        "share": samples // wish.gpus,
        "per_prompt": _SAMPLES,
        "prompt": wish.prompt,
        "response": wish.response,
        "longest": longest,
        "budget": max(_BUDGET, longest),
        "expert_parallel": math.gcd(wish.per_node, experts),
        "even_engine": 1 if wish.gpus % 2 else 2,  # verl's default is an engine on two GPUs
    }


def _with_sizes(value: Any, sizes: Mapping[str, Any]) -> Any:
    """Return a value of a recipe with its `{name}` replaced by sizes; a number stays a number."""
    if isinstance(value, list):
        return [_with_sizes(each, sizes) for each in value]
    if isinstance(value, dict):
        return {name: _with_sizes(each, sizes) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    whole = _PLACE.fullmatch(value)
    return sizes[whole[1]] if whole else _PLACE.sub(lambda match: str(sizes[match[1]]), value)


def _flow(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def _name(wish: Wish) -> str:
    name = wish.model.rstrip("/").rpartition("/")[2].lower()
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip("-._") or "job"
