"""How an OpenRLHF job is spread, and who holds device memory in which phase."""

from __future__ import annotations

from autotune.launchers.frameworks.core import residency
from autotune.launchers.frameworks.core.optimizer_state import with_zero
from autotune.launchers.frameworks.openrlhf.config import SCORE_SIZE, TRAIN_SIZE, Config
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
    """Return the layout for the job's memory estimate; ZeRO-3 shards like FSDP."""
    response = min(config.longest, config.count("rollout.max_new_tokens") or config.longest)
    result = Layout(
        ranks=config.actors,
        engine_ranks=config.engine_gpus,
        reference=config.reference,
        reference_offload=config.flag("ref.offload"),
        critic=config.critic,
        critic_follows=True,
        lora_rank=config.count("ds.lora.rank"),
        entropy=config.has("actor.entropy_coef"),
        loss="cast_kernel",
        engine_sleeps=config.sleeps,
        grad_offload_takes_optimizer=True,
        padded=not (config.dynamic or config.ring > 1 or config.flag("ds.packing_samples")),
        sync_buckets=1,
        sends_tensors=True,
        scored_sequences=config.count(SCORE_SIZE) / max(1, config.count(TRAIN_SIZE)),
        sequences=config.batch,
        mini_batch=min(config.update, config.batch),
        prompt_tokens=config.longest - response,
        response_tokens=response,
    )
    in_fp32 = config.text("ds.grad_accum_dtype") in ("fp32", "float32")
    return with_zero(
        result,
        config.count("ds.zero_stage"),
        optimizer=config.text("actor.optim"),
        ranks=config.actors // config.tensor,
        buckets=2 if config.flag("ds.overlap_comm") else 1,
        accumulated=4 if in_fp32 else 2,
        secondary=config.count("ds.zpg"),
    )
