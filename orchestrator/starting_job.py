"""The fastest configuration that is predicted to be safe for a model on some cards, as a job file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from autotune.launchers import frameworks
from autotune.orchestrator.config.cards import Gpus
from autotune.orchestrator.config.loader import assumed, parse_elsewhere
from autotune.orchestrator.config.schema import LITERAL
from autotune.orchestrator.config.yaml_edit import Edit, edited
from autotune.orchestrator.search.presets import presets
from autotune.policies.search.feasibility import Foresight, foreseen, judged
from autotune.policies.search.next_trial import SearchSpace
from autotune.policies.search.space import legal, space
from autotune.policies.values.events import Accepted
from autotune.policies.values.job import Job
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.profile import Profile
from autotune.policies.values.value import Value

FRAMEWORKS = ("verl", "slime")
_CHOSEN = "chosen by the memory and speed estimate"
_SAMPLES = 8  # of a prompt
_NEXT_TO_NOTHING = 1.005  # of a step's time: below what a search calls a gain
_ROUNDS = 3  # searches, each around the fastest of the one before
_VERL = """\
name: {name}
framework: verl
cluster: {{nodes: {nodes}, gpus_per_node: {per_node}, gpu: {card}}}
settings:
  algorithm.adv_estimator: grpo
  data.train_files: TRAIN.parquet   # yours
  data.val_files: TEST.parquet      # yours
  data.train_batch_size: {batch}
  data.max_prompt_length: {prompt}
  data.max_response_length: {response}
  actor_rollout_ref.model.path: {model}
  actor_rollout_ref.model.use_remove_padding: true
  actor_rollout_ref.actor.optim.lr: 1.0e-6
  actor_rollout_ref.actor.ppo_mini_batch_size: {mini_batch}
  actor_rollout_ref.actor.use_dynamic_bsz: true
  actor_rollout_ref.actor.use_kl_loss: true
  actor_rollout_ref.rollout.name: vllm
  actor_rollout_ref.rollout.n: {per_prompt}
  actor_rollout_ref.rollout.max_model_len: {longest}
  trainer.nnodes: {nodes}
  trainer.n_gpus_per_node: {per_node}
"""
_SLIME = """\
name: {name}
framework: slime
workdir: /root/slime   # slime's own folder
model: {model}
cluster: {{nodes: {nodes}, gpus_per_node: {per_node}, gpu: {card}}}
settings:  # and the model's own flags, from slime's scripts/models
  hf-checkpoint: {model}
  prompt-data: TRAIN.jsonl   # yours
  num-rollout: 1000
  rollout-batch-size: {batch}
  n-samples-per-prompt: {per_prompt}
  global-batch-size: {samples}
  rollout-max-prompt-len: {prompt}
  rollout-max-response-len: {response}
  advantage-estimator: grpo
  optimizer: adam
  lr: 1e-6
  colocate: true
  actor-num-nodes: {nodes}
  actor-num-gpus-per-node: {per_node}
  use-dynamic-batch-size: true
"""
_TEXTS = {"verl": _VERL, "slime": _SLIME}


class Wish(Value, frozen=True, kw_only=True):
    """What a configuration is wanted for."""

    model: str  # hub name, folder or config.json
    framework: str
    gpus: Gpus
    prompt: int = 1024  # tokens of the longest prompt
    response: int = 4096  # tokens of the longest response
    batch: int = 256  # prompts of a step


class Start(Value, frozen=True, kw_only=True):
    """A configuration that is predicted to be safe."""

    text: str  # of the job file
    step_s: float  # predicted seconds of a step
    host_bytes: int  # predicted peak of host memory on a node, whose size is not known
    looked_at: int  # configurations that fit


def even_batch(gpus: Gpus, batch: int) -> int:
    """Return the number of prompts nearest to `batch` whose samples are the same number on every GPU.

    verl refuses other chunks, with a micro-batch of tokens too (DataProto.chunk in its protocol.py).
    """
    unit = _unit(gpus)
    return max(1, round(batch / unit)) * unit


def _unit(gpus: Gpus) -> int:
    """Return the number of prompts, of which every multiple spreads evenly."""
    count = (gpus.nodes or 1) * (gpus.per_node or 8)
    return count // math.gcd(count, _SAMPLES)


def first_text(wish: Wish) -> str:
    """Return the job without any knob chosen."""
    name = wish.model.rstrip("/").rpartition("/")[2].lower()
    unit = _unit(wish.gpus)
    parts = (wish.batch // share // unit * unit for share in (4, 2))
    mini_batch = next((size for size in parts if size), wish.batch)
    return _TEXTS[wish.framework].format(
        name="".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip("-._") or "job",
        nodes=wish.gpus.nodes or 1,
        per_node=wish.gpus.per_node or 8,
        card=wish.gpus.card.name,
        model=wish.model,
        batch=wish.batch,
        mini_batch=mini_batch,
        samples=wish.batch * _SAMPLES,
        per_prompt=_SAMPLES,
        prompt=wish.prompt,
        response=wish.response,
        longest=wish.prompt + wish.response,
    )


def starting_job(wish: Wish) -> Start | None:
    """Return the fastest configuration that is predicted to fit with headroom; None if none is.

    Raises JobErrors where the wish itself is no legal job.
    """
    text = first_text(wish)
    text = edited(text, _longest_fits(wish), literal=LITERAL)
    job, _ = parse_elsewhere(text, file="this model")
    if experts := _experts_apart(wish, job):
        text = edited(text, experts, literal=LITERAL)
        job, _ = parse_elsewhere(text, file="this model")
    framework = frameworks.find(job.framework)
    cluster = assumed(job)
    profile = framework.profile(job, cluster)
    accepted = Accepted(run="plan", job=job, profile=profile, cluster=cluster)
    free = _without_limits(job)
    dimensions = space(free, profile, profile.knobs)
    starts = (profile.knobs, *presets(framework, job, accepted, profile.knobs, dimensions))
    varied = SearchSpace(profile=profile, dimensions=dimensions, starts=starts, min_gain=0.0)
    sight = foreseen(accepted, (), (), dimensions, neighbours=varied.neighbours)
    if sight is None:
        return None
    centers, found = starts, tuple[Knobs, ...]()
    for _ in range(_ROUNDS):
        found = sight.proposals(centers, gain=0.0)
        if not found or found[0] == centers[0]:
            break
        centers = (found[0], *starts)
    if not found:
        return None
    chosen = _with_defaults(sight, profile, found[0])
    changes = framework.settings(job, chosen)
    edits = [Edit(("settings", key), value, _CHOSEN) for key, value in changes.items()]
    estimate = judged(sight, (chosen,)).estimate
    return Start(
        text=edited(text, edits, literal=LITERAL).rstrip() + "\n",
        step_s=float(estimate.step_s[0]),
        host_bytes=int(estimate.host[:, 0].max()),
        looked_at=len(found),
    )


def _with_defaults(sight: Foresight, profile: Profile, knobs: Knobs) -> Knobs:
    """Return a configuration with every knob back at the framework's default that gains next to nothing."""
    fastest = float(judged(sight, (knobs,)).estimate.step_s[0])
    for name in changed(profile.knobs, knobs):
        plain = msgspec.structs.replace(knobs, **{name: getattr(profile.knobs, name)})
        if not legal(profile, profile.knobs, plain, started=False):
            continue
        one = judged(sight, (plain,))
        if one.allowed[0] and float(one.estimate.step_s[0]) <= _NEXT_TO_NOTHING * fastest:
            knobs = plain
    return knobs


def _longest_fits(wish: Wish) -> list[Edit]:
    """Return the token budgets, and the engine's size, that the job needs to be legal at all."""
    longest = wish.prompt + wish.response
    # verl's default is an engine on two GPUs.
    odd = (wish.gpus.nodes or 1) * (wish.gpus.per_node or 8) % 2 == 1
    engine = {"actor_rollout_ref.rollout.tensor_model_parallel_size": 1} if odd else {}
    budget: Mapping[str, Any] = {
        "verl": {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": max(16384, longest), **engine},
        "slime": {"max-tokens-per-gpu": longest},
    }[wish.framework]
    return [Edit(("settings", key), value, "") for key, value in budget.items()]


def _experts_apart(wish: Wish, job: Job) -> list[Edit]:
    """Return how Megatron spreads a model's experts: over as many GPUs of a node as divide their number.

    Megatron asks for sequence parallelism where experts and tensors are both split, and splits each expert
    like a tensor unless told otherwise.
    """
    experts = job.shape.experts if job.shape is not None else 0
    if wish.framework != "slime" or not experts:
        return []
    settings: dict[str, Any] = {
        "expert-model-parallel-size": math.gcd(wish.gpus.per_node or 8, experts),
        "expert-tensor-parallel-size": 1,
        "sequence-parallel": True,
    }
    return [Edit(("settings", key), value, "") for key, value in settings.items()]


def _without_limits(job: Job) -> Job:
    """Return the job with every knob open to choice: none of its values is a person's yet."""
    return msgspec.structs.replace(job, settings={})
