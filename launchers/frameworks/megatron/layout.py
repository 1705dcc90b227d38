"""The layout of a job, and which components hold GPU memory in which phase."""

from __future__ import annotations

from autotune.launchers.frameworks.core import residency, transformer
from autotune.launchers.frameworks.core.optimizer_state import megatron_bytes
from autotune.launchers.frameworks.megatron.config import Config
from autotune.policies.values.architecture.model import Layout

# Bytes per weight, by words in the engine's quantization or the checkpoint's name. With four bits there are
# also scales, and embeddings and head are not quantized (Qwen3-30B-A3B-INT4: 17 GB, Kimi-K2-Thinking: 594
# GB).
_ENGINE_BYTES = (
    (("int4", "w4a", "awq", "gptq", "mxfp4", "nvfp4", "fp4"), 0.6),
    (("fp8", "w8a8", "int8", "mxfp"), 1.0),
)


def resident(config: Config) -> dict[str, residency.Held]:
    """Return the components that hold GPU memory, by phase of a colocated job; empty if disaggregated."""
    if not config.colocated:
        return {}
    return residency.taking_turns(
        reference=config.reference,
        critic=config.critic,
        engine_sleeps=config.sleeps("rollout"),
        trainer_sleeps=config.sleeps("train"),
        trainer_first=config.dialect.trainer_first,
    )


def layout(config: Config) -> Layout:
    """Return the layout for the job's memory estimate."""
    trainer = transformer.spread(
        ranks=config.trainer_gpus,
        tensor=config.tensor,
        pipeline=config.pipeline,
        chunks=pipeline_chunks(config),
        expert=config.expert,
        expert_tensor=config.count("expert-tensor-parallel-size"),
    )
    trainer |= megatron_bytes(
        config.text("optimizer"),
        gradient_bytes=2 if config.flag("grad-reduce-in-bf16") else 4,
        precise=config.flag("use-precision-aware-optimizer"),
        on_host=config.flag("optimizer-cpu-offload"),
        master=config.text("main-params-dtype"),
        moments=(config.text("exp-avg-dtype"), config.text("exp-avg-sq-dtype")),
    )
    if config.flag("use-stateless-adam"):
        trainer["optimizer_bytes"] = 4  # master weights only: moments live for one step (stateless_adam.py)
    result = Layout(
        **trainer,
        engine_ranks=config.engine_gpus,
        engine_bytes=_engine_bytes(config),
        kv_bytes=1 if config.text("sglang-kv-cache-dtype").startswith("fp8") else 2,
        reference=config.reference,
        # Its weights are in host memory and replace the actor's on the GPU while it computes log-probs.
        reference_offload=config.reference,
        critic=config.critic,
        critic_offload=config.critic and config.sleeps("train"),
        entropy=True,  # computed as a metric in every update, even with coefficient 0
        engine_sleeps=config.sleeps("rollout"),
        engine_weights_on_host=config.flag("sglang-enable-weights-cpu-backup"),
        trainer_sleeps=config.sleeps("train"),
        # slime/backends/megatron_utils/actor.py, update_weights; miles has the same
        sends_from_host=config.dialect.sends_from_host
        and config.sleeps("train")
        and not config.flag("rematerialize-param-from-master-weight"),
        optimizer_stays_offloaded=True,
        pinned="tensors",  # slime/utils/tensor_backper.py; Relax and miles have it too
        # slime/ray/rollout.py, _split_train_data_by_dp; slime/utils/routing_replay.py, record
        routing="recorded" if config.flag("use-rollout-routing-replay") else "",
        staged="gathered" if config.flag("dist-ckpt-optim-fully-reshardable") else "shard",
        saves_optimizer=not config.flag("no-save-optim"),
        predicting_loss=config.flag("enable-mtp-training"),
        padded=config.text("qkv-format") == "bshd",
        sequences=config.sequences,
        mini_batch=min(config.count("global-batch-size"), config.sequences),
        prompt_tokens=config.prompt,
        response_tokens=config.response,
    )
    return transformer.with_transformer(result, config.field, config.job.shape)


def pipeline_chunks(config: Config) -> int:
    """Return the virtual stages per rank; Megatron accepts their number or their size in layers."""
    layers = config.count("num-layers-per-virtual-pipeline-stage")
    of_size = config.count("num-layers") // (config.pipeline * layers) if layers else 1
    return max(1, config.count("num-virtual-stages-per-pipeline-rank") or of_size)


def _engine_bytes(config: Config) -> float:
    """Return the bytes per weight in the engines, which load the checkpoint and may quantize it."""
    checkpoint = config.text("hf-checkpoint").rstrip("/").rpartition("/")[2]
    words = f"{config.text('sglang-quantization')} {checkpoint}".lower()
    return next((size for names, size in _ENGINE_BYTES if any(name in words for name in names)), 2.0)
