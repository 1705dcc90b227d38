"""46 jobs of the frameworks: the examples, and jobs of the sizes that the simulation draws from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count, cycle, islice
from math import gcd
from pathlib import Path
from random import Random
from typing import Any

import yaml
from msgspec.structs import replace

from autotune.launchers.frameworks import find
from autotune.orchestrator.config.loader import assumed, parse
from autotune.policies.values.architecture.model import Model
from autotune.policies.values.job import Cluster, ClusterSpec, Job
from autotune.policies.values.value import Value
from benchmarks.simulation.jobs import undecided
from benchmarks.simulation.world import Stratum

SEED = 2026
CONFIGS = Path(__file__).parents[2] / "configs"


class Sizes(Value, frozen=True, kw_only=True):
    """What a job trains and on what: the sizes that layouts and batches have to fit."""

    model: Model
    gpus: int
    per_node: int
    tensor: int
    pipeline: int
    context: int  # of context or sequence parallelism
    experts: int  # of parallelism
    engine: int  # GPUs of one
    prompts: int  # of a step
    samples: int  # of a prompt
    updates: int  # of a step
    prompt: int  # tokens
    response: int
    micro: int  # sequences of a micro-batch
    packed: bool

    @property
    def sequences(self) -> int:
        """Samples of a step."""
        return self.prompts * self.samples

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.response

    def passes(self, update: int, ranks: int) -> int:
        """Return the sequences of a micro-batch that fills updates of as many samples; 0: none does.

        `ranks`: that share a sequence.
        """
        each, left = divmod(update * ranks, self.gpus)
        return 0 if left else gcd(self.micro, each)


def drawn(rng: Random) -> Sizes:
    """Return the sizes of a simulated job, with batches that its layout may or may not fill."""
    world = undecided(rng.choice(tuple(Stratum)), seed=rng.randrange(1 << 30))
    accepted = world.accepted
    layout, model = accepted.profile.layout, accepted.job.shape
    assert model is not None
    gpus, pipeline = layout.ranks, layout.pipeline_parallel
    tensor = rng.choice([n for n in (1, 2, 4, 8) if gpus % (n * pipeline) == 0 and model.kv_heads % n == 0])
    splits = [n for n in (1, 1, 2, 4) if gpus % (n * tensor * pipeline) == 0 and model.kv_heads % n == 0]
    return Sizes(
        model=model,
        gpus=gpus,
        per_node=min(8, gpus),
        tensor=tensor,
        pipeline=pipeline,
        context=rng.choice(splits),
        experts=layout.expert_parallel,
        engine=rng.choice([n for n in (1, 2, 4, 8) if gpus % n == 0 and model.heads % n == 0]),
        prompts=rng.choice((4, 12, 24, 36, 64, 128, 192, 256)),
        samples=rng.choice((1, 4, 6, 8, 16)),
        updates=rng.choice((1, 1, 2, 4)),
        prompt=layout.prompt_tokens,
        response=layout.response_tokens,
        micro=rng.choice((1, 1, 2, 3, 4, 8)),
        packed=rng.random() < 0.5,
    )


def cluster(job: Job) -> Cluster:
    """Return the GPUs that a job asks for."""
    return assumed(job)


def _verl(sizes: Sizes, rng: Random) -> dict[str, Any] | None:
    megatron = rng.random() < 0.4
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    ref, mini = "actor_rollout_ref.ref", sizes.prompts // sizes.updates
    split = sizes.context * (sizes.tensor * sizes.pipeline if megatron else 1)
    micro = sizes.passes(mini * sizes.samples, split)
    if not mini or not micro or sizes.sequences % (sizes.gpus // split * micro):
        return None
    own: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": "/models/policy",
        "data.train_batch_size": sizes.prompts,
        "data.max_prompt_length": sizes.prompt,
        "data.max_response_length": sizes.response,
        "trainer.nnodes": sizes.gpus // sizes.per_node,
        "trainer.n_gpus_per_node": sizes.per_node,
        f"{actor}.ppo_mini_batch_size": mini,
        f"{actor}.use_dynamic_bsz": sizes.packed,
        f"{rollout}.name": rng.choice(("vllm", "sglang")),
        f"{rollout}.n": sizes.samples,
        f"{rollout}.tensor_model_parallel_size": sizes.engine,
    }
    if sizes.model.experts and rng.random() < 0.5:
        own[f"{rollout}.expert_parallel_size"] = sizes.engine
    if sizes.packed:
        own[f"{actor}.ppo_max_token_len_per_gpu"] = sizes.longest * 2
    else:
        own |= {
            f"{actor}.ppo_micro_batch_size_per_gpu": micro,
            f"{rollout}.log_prob_micro_batch_size_per_gpu": micro,
            f"{ref}.log_prob_micro_batch_size_per_gpu": micro,
        }
    if not megatron:
        own |= {f"{actor}.strategy": rng.choice(("fsdp", "fsdp2"))}
        return own | {
            f"{actor}.ulysses_sequence_parallel_size": sizes.context,
            "actor_rollout_ref.model.use_remove_padding": True,
        }
    own |= {"model_engine": "megatron"}
    keys = {"tensor_model": sizes.tensor, "pipeline_model": sizes.pipeline, "context": sizes.context}
    if sizes.model.experts:
        keys |= {"expert_model": sizes.experts}
    return own | {f"{actor}.megatron.{key}_parallel_size": size for key, size in keys.items()}


def _megatron(sizes: Sizes, rng: Random) -> dict[str, Any] | None:
    update = sizes.sequences // sizes.updates
    micro = sizes.passes(update, sizes.tensor * sizes.pipeline * sizes.context)
    if not micro:
        return None
    own: dict[str, Any] = {
        "hf-checkpoint": "/models/policy",
        "ref-load": "/models/policy_dist",
        "num-layers": sizes.model.layers,
        "hidden-size": sizes.model.hidden,
        "ffn-hidden-size": sizes.model.intermediate,
        "num-attention-heads": sizes.model.heads,
        "group-query-attention": True,
        "num-query-groups": sizes.model.kv_heads,
        "kv-channels": sizes.model.head_dim,
        "vocab-size": sizes.model.vocab,
        "num-rollout": 200,
        "rollout-batch-size": sizes.prompts,
        "n-samples-per-prompt": sizes.samples,
        "rollout-max-prompt-len": sizes.prompt,
        "rollout-max-response-len": sizes.response,
        "global-batch-size": update,
        "calculate-per-token-loss": True,
        "actor-num-nodes": sizes.gpus // sizes.per_node,
        "actor-num-gpus-per-node": sizes.per_node,
        "tensor-model-parallel-size": sizes.tensor,
        "pipeline-model-parallel-size": sizes.pipeline,
        "context-parallel-size": sizes.context,
        "rollout-num-gpus-per-engine": sizes.engine,
        "colocate": True,
        "use-dynamic-batch-size": sizes.packed,
        "use-distributed-optimizer": True,
    }
    own |= {"max-tokens-per-gpu": sizes.longest} if sizes.packed else {"micro-batch-size": micro}
    if sizes.tensor > 1 and rng.random() < 0.7:
        own["sequence-parallel"] = True
    elif sizes.tensor > 1 and rng.random() < 0.5:
        own |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
        own["distribute-saved-activations"] = True
    if sizes.model.experts:
        own |= {
            "num-experts": sizes.model.experts,
            "moe-router-topk": sizes.model.experts_per_token,
            "moe-ffn-hidden-size": sizes.model.expert_intermediate,
            "expert-model-parallel-size": sizes.experts,
        }
        own |= {"expert-tensor-parallel-size": 1} if rng.random() < 0.5 else {}
    if sizes.pipeline > 1 and sizes.model.layers % (sizes.pipeline * 2) == 0 and rng.random() < 0.5:
        own["num-layers-per-virtual-pipeline-stage"] = sizes.model.layers // sizes.pipeline // 2
    return own


def _openrlhf(sizes: Sizes, rng: Random) -> dict[str, Any] | None:
    engines = sizes.gpus // sizes.engine
    update, tensor = sizes.sequences // sizes.updates, rng.choice((1, sizes.tensor))
    micro = sizes.passes(update, tensor * sizes.context)
    if not micro or sizes.samples == 1:
        return None
    own: dict[str, Any] = {
        "actor.model_name_or_path": "/models/policy",
        "train.agent_func_path": "agent.py",
        "algo.advantage.estimator": rng.choice(("reinforce_baseline", "rloo", "reinforce")),
        "data.max_len": sizes.longest,
        "rollout.max_new_tokens": sizes.response,
        "rollout.batch_size": sizes.prompts,
        "rollout.n_samples_per_prompt": sizes.samples,
        "train.batch_size": update,
        "actor.num_nodes": sizes.gpus // sizes.per_node,
        "actor.num_gpus_per_node": sizes.per_node,
        "ref.num_nodes": sizes.gpus // sizes.per_node,
        "ref.num_gpus_per_node": sizes.per_node,
        "train.dynamic_batch_enable": sizes.packed,
        "train.colocate_all": True,
        "vllm.num_engines": engines,
        "vllm.tensor_parallel_size": sizes.engine,
        "ds.zero_stage": rng.choice((2, 3)),
        "ds.packing_samples": True,
        "ds.ring_attn_size": sizes.context,
        "ds.tensor_parallel_size": tensor,
    }
    if sizes.packed:
        return own | {"train.max_tokens_per_gpu": sizes.longest * 2}
    return own | {"train.micro_batch_size": micro, "rollout.micro_batch_size": micro}


def _hugging_face(sizes: Sizes, rng: Random) -> dict[str, Any]:
    micro, passes = sizes.micro * 2, rng.choice((1, 2, 3, 4))
    update = sizes.per_node * micro * passes
    own: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": passes,
        "num_generations": rng.choice([n for n in (2, 3, 4, 6, 8, 16) if update % n == 0]),
        "max_completion_length": sizes.response,
        "gradient_checkpointing": rng.random() < 0.5,
    }
    forms = {"steps_per_generation": passes, "generation_batch_size": update}
    form = rng.choice(("", *forms))
    return own | ({form: forms[form] * sizes.updates} if form else {})


def _trl(sizes: Sizes, rng: Random) -> dict[str, Any]:
    own = _hugging_face(sizes, rng)
    own |= {
        "loss_type": "dapo",
        "num_processes": sizes.per_node,
        "model_name_or_path": "/models/policy",
        "dataset_name": "d",
    }
    if rng.random() < 0.5:
        return own | {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4}
    return own


def _ms_swift(sizes: Sizes, rng: Random) -> dict[str, Any]:
    own = _hugging_face(sizes, rng)
    own |= {"rlhf_type": "grpo", "max_length": sizes.prompt, "loss_type": "grpo"}
    if rng.random() < 0.5:
        own |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_len": sizes.longest}
    return own


def _skyrl(sizes: Sizes, rng: Random) -> dict[str, Any] | None:
    mini, megatron = sizes.prompts // sizes.updates, rng.random() < 0.5
    split = sizes.context * (sizes.tensor * sizes.pipeline if megatron else 1)
    micro = sizes.passes(mini * sizes.samples, split)
    if not mini or not micro:
        return None
    own: dict[str, Any] = {
        "trainer.policy.model.path": "/models/policy",
        "trainer.placement.policy_num_nodes": sizes.gpus // sizes.per_node,
        "trainer.placement.policy_num_gpus_per_node": sizes.per_node,
        "trainer.placement.ref_num_nodes": sizes.gpus // sizes.per_node,
        "trainer.placement.ref_num_gpus_per_node": sizes.per_node,
        "trainer.train_batch_size": sizes.prompts,
        "trainer.policy_mini_batch_size": mini,
        "trainer.micro_train_batch_size_per_gpu": micro,
        "trainer.micro_forward_batch_size_per_gpu": micro,
        "trainer.max_prompt_length": sizes.prompt,
        "generator.sampling_params.max_generate_length": sizes.response,
        "generator.n_samples_per_prompt": sizes.samples,
        "generator.inference_engine.num_engines": sizes.gpus // sizes.engine,
        "generator.inference_engine.tensor_parallel_size": sizes.engine,
        "trainer.logger": "console",
    }
    if sizes.packed:
        own["trainer.max_tokens_per_microbatch"] = sizes.longest
    if not megatron:
        for role in ("policy", "ref"):
            own[f"trainer.{role}.sequence_parallel_size"] = sizes.context
    else:
        own["trainer.strategy"] = "megatron"
        for role in ("policy", "ref"):
            own[f"trainer.{role}.megatron_config.tensor_model_parallel_size"] = sizes.tensor
            own[f"trainer.{role}.megatron_config.pipeline_model_parallel_size"] = sizes.pipeline
            own[f"trainer.{role}.megatron_config.context_parallel_size"] = sizes.context
    return own


def _areal(sizes: Sizes, rng: Random) -> dict[str, Any] | None:
    trains = sizes.gpus // 2  # the engines have the others
    split, moe = sizes.tensor * sizes.context, bool(sizes.model.experts)
    pipeline = sizes.pipeline if moe or rng.random() < 0.3 else 1
    kind = "megatron" if moe or pipeline > 1 else rng.choice(("fsdp", "fsdp", "archon"))
    engine = rng.choice(("sglang", "vllm"))
    if sizes.gpus < 2 or trains % (split * pipeline) or trains % sizes.engine:
        return None
    layout = f"d{trains // (split * pipeline)}t{sizes.tensor}p{pipeline}c{sizes.context}"
    return {
        "cluster.n_nodes": sizes.gpus // sizes.per_node,
        "cluster.n_gpus_per_node": sizes.per_node,
        "train_dataset.batch_size": sizes.prompts,
        "train_dataset.max_length": sizes.prompt,
        "gconfig.n_samples": sizes.samples,
        "gconfig.max_new_tokens": sizes.response,
        "actor.backend": f"{kind}:{layout}",
        "actor.path": "/models/policy",
        "actor.ppo_n_minibatches": sizes.updates,
        "actor.mb_spec.max_tokens_per_mb": sizes.longest * 2,
        "rollout.backend": f"{engine}:d{trains // sizes.engine}t{sizes.engine}",
        "sglang.context_length": sizes.longest,
        "vllm.max_model_len": sizes.longest,
    }


Writer = Callable[[Sizes, Random], dict[str, Any] | None]
WRITERS: dict[str, tuple[Writer, int]] = {
    "verl": (_verl, 9),
    "slime": (_megatron, 8),
    "relax": (_megatron, 4),
    "miles": (_megatron, 3),
    "openrlhf": (_openrlhf, 4),
    "skyrl": (_skyrl, 4),
    "areal": (_areal, 6),
    "trl": (_trl, 4),
    "ms-swift": (_ms_swift, 4),
}
# What drawn jobs of a Megatron trainer have in turn, so that each of a few has what binds a layout.
_IN_TURN = (
    "num-layers-per-virtual-pipeline-stage",
    "distribute-saved-activations",
    "expert-model-parallel-size",
    "context-parallel-size",
)
_ONE_NODE = ("trl", "ms-swift")
_OWN: dict[str, dict[str, Any]] = {
    "areal": {
        "command": ("python", "train.py"),
        "config": "areal.yaml",
        "document": yaml.safe_load((CONFIGS / "areal" / "gsm8k.yaml").read_text()),
    }
}


def written(framework: str) -> Iterator[Job]:
    """Yield the example jobs of a framework."""
    for path in sorted(CONFIGS.glob(f"{framework}-*.yaml")):
        yield replace(parse(path.read_text()), **_OWN.get(framework, {}))


def sampled(framework: str) -> list[Job]:
    """Return the jobs of a framework: its examples, then drawn ones that autotune's own checks accept."""
    _, number = WRITERS[framework]
    return list(islice(chain(written(framework), _drawn(framework)), number))


def _drawn(framework: str) -> Iterator[Job]:
    adapter, (write, _) = find(framework), WRITERS[framework]
    rng = Random(f"{SEED} {framework}")
    turns = cycle(_IN_TURN if write is _megatron else ("",))
    wanted = next(turns)
    for number in count(1):
        sizes = drawn(rng)
        settings = write(sizes, rng)
        if settings is None or (wanted and str(settings.get(wanted, 1)) == "1"):
            continue
        nodes = 1 if framework in _ONE_NODE else sizes.gpus // sizes.per_node
        spec = ClusterSpec(nodes=nodes, gpus_per_node=sizes.per_node, gpu_memory_bytes=80 << 30)
        env = {"NPROC_PER_NODE": str(sizes.per_node)} if framework == "ms-swift" else {}
        job = Job(
            name=f"{framework}-{number}",
            framework=framework,
            framework_version=(*adapter.releases, None)[-2] if getattr(adapter, "releases", ()) else None,
            workdir="/home/me",
            settings=settings,
            shape=sizes.model,
            cluster=spec,
            env=env,
            **_OWN.get(framework, {}),
        )
        if not tuple(adapter.check(job)):
            yield job
            wanted = next(turns)
