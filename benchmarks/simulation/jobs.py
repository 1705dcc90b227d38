"""Jobs that run out of memory as written, drawn from a seed."""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import msgspec

from autotune.policies.values.architecture.model import Layout, Model
from autotune.policies.values.events import Accepted
from autotune.policies.values.job import Cluster, Goal, Job, Preflight, Recovery
from autotune.policies.values.profile import Placement
from benchmarks.simulation.cluster import run
from benchmarks.simulation.frameworks import OFFERS, Offer, profile, written
from benchmarks.simulation.oracle import Best, best
from benchmarks.simulation.world import (
    CARDS,
    GIB,
    MODELS,
    Coefficients,
    Event,
    Late,
    Perturbation,
    Stratum,
    World,
)

_SPREAD = 0.10  # of the hidden factors
_WIDER: dict[Stratum | Perturbation, float] = {
    Stratum.FAR: 0.25,
    Perturbation.FACTORS: 0.50,
    Perturbation.ALL: 0.50,
}
_MOST_RESERVE = 0.125  # share of short-lived memory that an allocator cannot reuse
_TRIES = 4000
_SHORTEST_STEP_S, _LONGEST_STEP_S = 15.0, 2400.0  # of the best configuration: outside, nobody runs such a job


def worlds(*, jobs: int, seed: int) -> list[tuple[World, Best]]:
    """Return as many jobs, the strata in turn: each fails as written, and something holds for each."""
    strata = tuple(Stratum)
    return [drawn(strata[number % len(strata)], seed=seed * 100_003 + number) for number in range(jobs)]


def drawn(stratum: Stratum | Perturbation, *, seed: int) -> tuple[World, Best]:
    """Return one job of a stratum with the best configuration of its grid."""
    rng = Random(seed)
    for _ in range(_TRIES):
        world = _draw(rng, stratum, seed=seed)
        if world is None or run(world, world.accepted.profile.knobs).failure is None:
            continue
        solution = best(world)
        if solution is not None and _SHORTEST_STEP_S <= solution.step_s <= _LONGEST_STEP_S:
            return world, solution
    raise RuntimeError(f"no job was found for seed {seed}")


def undecided(stratum: Stratum | Perturbation, *, seed: int) -> World:
    """Return one job of a stratum, whether it would run as written or not."""
    rng = Random(seed)
    for _ in range(_TRIES):
        world = _draw(rng, stratum, seed=seed)
        if world is not None:
            return world
    raise RuntimeError(f"no job was found for seed {seed}")


def _draw(rng: Random, stratum: Stratum | Perturbation, *, seed: int) -> World | None:
    name, model = rng.choice(list(MODELS.items()))
    framework, offer = rng.choice(list(OFFERS.items()))
    card = rng.choice(CARDS)
    gpus = rng.choice((1, 2, 4, 8, 8, 16, 32, 64))
    per_node = min(8, gpus)
    placement = rng.choice(offer.placements)
    if placement is not Placement.COLOCATED and gpus < 2:
        return None
    layout = _layout(rng, offer, model, gpus=gpus, per_node=per_node, placement=placement)
    if layout is None:
        return None
    longest = layout.prompt_tokens + layout.response_tokens
    engine = rng.choice(offer.engines)
    legal = [d for d in (1, 2, 4, 8) if model.kv_heads % d == 0 and layout.engine_ranks % d == 0]
    tensor = (
        layout.ranks // (layout.shards * layout.pipeline_parallel) if layout.strategy == "megatron" else 1
    )
    knobs = written(
        rng,
        offer,
        longest=longest,
        sequences=layout.sequences,
        tensor=max(1, tensor),
        rollout_tp=rng.choice(legal),
    )
    job = Job(
        name=f"{name}-{framework}-{gpus}x{card.name}",
        framework=framework.partition("-")[0],
        shape=model,
        goal=Goal(steps=20),
        recovery=Recovery(relaunches=11, preflight=Preflight.OFF),
    )
    accepted = Accepted(
        run=f"{seed:x}",
        job=job,
        profile=profile(
            framework, offer, model=model, layout=layout, knobs=knobs, placement=placement, engine=engine
        ),
        cluster=Cluster(
            address="local",
            nodes=gpus // per_node,
            gpus_per_node=per_node,
            gpu_memory_bytes=int(card.memory_gib * GIB),
            host_memory_bytes=int(rng.choice((16, 32, 64, 128, 256)) * per_node * GIB),
            gpu_name=card.name,
        ),
    )
    size = sum(_size(model))
    perturbed = {stratum} if stratum is not Perturbation.ALL else set(Perturbation)
    return World(
        name=job.name,
        seed=seed,
        stratum=stratum,
        accepted=accepted,
        card=card,
        coefficients=_perturbed(_coefficients(rng, _WIDER.get(stratum, _SPREAD)), perturbed),
        late=_late(rng, card.memory_gib) if stratum is Stratum.LATE else (),
        trainer_sleeps=offer.trainer_sleeps and placement is Placement.COLOCATED,
        state_on_cpu=offer.state_on_cpu,
        reports=rng.random() < 0.6,
        startup_s=180 + 12 * size / 1e9,
        figures=Perturbation.SILENT not in perturbed,
        misplaced=0.2 if Perturbation.PHASE in perturbed else 0.0,
    )


def _layout(
    rng: Random, offer: Offer, model: Model, *, gpus: int, per_node: int, placement: Placement
) -> Layout | None:
    ranks = gpus if placement is Placement.COLOCATED else max(1, gpus // 2)
    strategy = rng.choice(offer.strategies)
    pipeline = experts = 1
    shards = ranks
    if strategy == "megatron":
        tensor = rng.choice(
            [t for t in (1, 2, 4, 8) if ranks % t == 0 and t <= per_node and model.heads % t == 0]
        )
        pipeline = rng.choice([p for p in (1, 1, 2, 4) if ranks % (tensor * p) == 0])
        shards = ranks // (tensor * pipeline)
        if model.experts:
            experts = rng.choice([e for e in (1, 2, 4, 8) if ranks % (e * pipeline) == 0])
    elif ranks >= 16 and rng.random() < 0.15:
        shards = per_node  # hybrid sharding
    elif ranks == 1:
        strategy = "none"
    prompt = rng.choice((512, 1024, 2048, 4096))
    response = rng.choice((1024, 2048, 4096, 8192, 16_384, 30_720))
    entropy = rng.random() < 0.5
    return Layout(
        strategy=strategy,
        ranks=ranks,
        shards=shards,
        pipeline_parallel=pipeline,
        expert_parallel=experts,
        engine_ranks=ranks if placement is Placement.COLOCATED else gpus - ranks,
        parameter_bytes=2 if strategy == "megatron" or offer.strategies == ("fsdp2",) else 4,
        optimizer_bytes=12 if strategy == "megatron" else 8,
        gradient_bytes=4,
        reference=rng.random() < 0.4,
        reference_offload=rng.random() < 0.7,
        entropy=entropy,
        lora_rank=rng.choice((0, 0, 0, 0, 32)) if strategy != "megatron" else 0,
        engine_sleeps=placement is Placement.COLOCATED,
        optimizer_stays_offloaded=offer.state_on_cpu,
        sequences=max(ranks, rng.choice((128, 256, 512, 1024))),
        prompt_tokens=prompt,
        response_tokens=response,
    )


def _coefficients(rng: Random, spread: float) -> Coefficients:
    def off() -> float:
        return rng.uniform(1 - spread, 1 + spread)

    return Coefficients(
        activation=off(),
        logits=off(),
        graphs=off(),
        context=off(),
        engine_batch=off(),
        sync=off(),
        host=off(),
        fill=rng.uniform(0.94, 1.0),
        reserve=rng.uniform(0.0, min(_MOST_RESERVE, spread / 2)),
        train_speed=rng.uniform(0.75, 1.25),
        decode_speed=rng.uniform(0.75, 1.25),
        link_speed=rng.uniform(0.7, 1.3),
        pass_overhead=rng.uniform(0.5e-3, 1.5e-3),
        prompts=rng.uniform(0.1, 0.7),
        responses=rng.betavariate(1.6, 2.2),
    )


def _perturbed(true: Coefficients, by: Collection[Stratum | Perturbation]) -> Coefficients:
    """Return the coefficients with the structural errors of a job."""
    return msgspec.structs.replace(
        true,
        logits=true.logits * (2.0 if Perturbation.LOGITS in by else 1.0),
        optimizer=1.3 if Perturbation.OPTIMIZER in by else 1.0,
        context_bytes=2.0 * GIB if Perturbation.CONTEXT in by else 0.0,
        fragmented=0.10 if Perturbation.FRAGMENTATION in by else 0.0,
    )


def _late(rng: Random, memory_gib: float) -> tuple[Late, ...]:
    event = rng.choice(tuple(Event))
    share = memory_gib * GIB
    match event:
        case Event.LONGEST:
            return (Late(event=event, step=rng.randint(5, 60), size=rng.uniform(0.06, 0.25)),)
        case Event.FRAGMENTATION:
            return (Late(event=event, step=rng.randint(15, 60), size=rng.uniform(0.01, 0.06) * share),)
        case Event.LEAK:
            return (Late(event=event, step=1, size=rng.uniform(5, 60) * (1 << 20)),)
        case Event.RESIDUE:
            return (Late(event=event, step=rng.randint(3, 8), size=rng.uniform(0.01, 0.06) * share),)


def _size(model: Model) -> tuple[float, float]:
    attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    if not model.experts:
        return model.layers * (attention + 3.0 * model.hidden * model.intermediate), 0.0
    return model.layers * float(
        attention
    ), model.layers * model.experts * 3.0 * model.hidden * model.expert_intermediate
