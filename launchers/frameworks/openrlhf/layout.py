"""How an OpenRLHF job is spread, and who holds device memory in which phase."""

from __future__ import annotations

from autotune.launchers.frameworks.core import residency
from autotune.launchers.frameworks.openrlhf.config import Config
from autotune.policies.values.architecture.model import Layout


def resident(config: Config) -> dict[str, residency.Held]:
    """Return who is on the shared cards: the weights stay there, whatever else sleeps."""
    if not config.colocated:
        return {}
    return residency.taking_turns(
        reference=config.reference,
        critic=config.critic,
        engine_sleeps=config.sleeps,
        trainer_sleeps=False,
        trainer_first=False,
    )


def layout(config: Config) -> Layout:
    """Return how the job is spread and what it holds.

    ZeRO-3 shards as FSDP does; below it every rank holds the weights, as with Megatron's optimizer. Adam's
    state counts outside the update too, where --ds.enable_sleep moves it: too much rather than too little.
    """
    response = min(config.longest, config.count("rollout.max_new_tokens") or config.longest)
    return Layout(
        strategy="fsdp2" if config.count("ds.zero_stage") == 3 else "megatron",
        ranks=config.actors,
        shards=config.actors // config.tensor,
        engine_ranks=config.engine_gpus,
        parameter_bytes=2,
        compute_bytes=2,
        gradient_bytes=4 if config.text("ds.grad_accum_dtype") in ("fp32", "float32") else 2,
        optimizer_bytes=12,  # fp32 master weights and moments
        logits_bytes=4,
        reference=config.reference,
        reference_bytes=2,
        reference_offload=config.flag("ref.offload"),
        critic=config.critic,
        critic_offload=False,
        lora_rank=config.count("ds.lora.rank"),
        entropy=config.has("actor.entropy_coef"),
        engine_sleeps=config.sleeps,
        optimizer_stays_offloaded=True,
        padded=not (config.dynamic or config.ring > 1 or config.flag("ds.packing_samples")),
        sync_buckets=1,
        sequences=config.batch,
        mini_batch=min(config.update, config.batch),
        prompt_tokens=config.longest - response,
        response_tokens=response,
    )
