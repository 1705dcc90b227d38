"""A job per framework for its look-alike, as a user would write it, and how tests vary it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from tests.lookalikes.core import CARD_GIB, FAULT, PACE

ROOT = Path(__file__).parents[2]
_LONGEST = {"prompt": 512, "response": 1536}
_VERL = {
    "algorithm.adv_estimator": "grpo",
    "data.max_prompt_length": _LONGEST["prompt"],
    "data.max_response_length": _LONGEST["response"],
    "data.train_batch_size": 256,
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct",
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "actor_rollout_ref.rollout.max_model_len": 2048,
    "trainer.total_training_steps": 6,
    "trainer.val_before_train": False,
    "trainer.logger": ["console"],
}
_SKYRL = {
    "trainer.policy.model.path": "Qwen/Qwen2.5-7B-Instruct",
    "trainer.placement.policy_num_gpus_per_node": 8,
    "trainer.placement.ref_num_gpus_per_node": 8,
    "trainer.max_prompt_length": _LONGEST["prompt"],
    "generator.sampling_params.max_generate_length": _LONGEST["response"],
    "generator.inference_engine.num_engines": 8,
    "generator.inference_engine.gpu_memory_utilization": 0.7,
    "trainer.max_tokens_per_microbatch": 16384,
    "trainer.max_training_steps": 6,
    "trainer.logger": "console",
}
_NEMO_RL = {
    "policy.model_name": "Qwen/Qwen2.5-7B-Instruct",
    "policy.max_total_sequence_length": sum(_LONGEST.values()),
    "policy.sequence_packing.train_mb_tokens": 16384,
    "policy.sequence_packing.logprob_mb_tokens": 8192,
    "policy.dtensor_cfg.activation_checkpointing": True,
    "policy.generation.vllm_cfg.gpu_memory_utilization": 0.7,
    "checkpointing.save_period": 1,
    "grpo.max_num_steps": 6,
}
# What the job's own file says beyond those; it extends another one, as NeMo-RL's recipes do.
_NEMO_RL_CLUSTER = {"cluster": {"gpus_per_node": 8, "num_nodes": 1}}
_FLAGS = {
    "num-layers": 28,
    "num-attention-heads": 28,
    "num-query-groups": 4,
    "hf-checkpoint": "/models/Qwen2.5-7B",
    "num-rollout": 6,
    "rollout-batch-size": 32,
    "n-samples-per-prompt": 8,
    "rollout-max-context-len": 2048,
    "rollout-max-response-len": _LONGEST["response"],
    "global-batch-size": 256,
    "colocate": True,
    "actor-num-nodes": 1,
    "actor-num-gpus-per-node": 8,
    "tensor-model-parallel-size": 2,
    "recompute-granularity": "full",
    "recompute-method": "uniform",
    "recompute-num-layers": 1,
    "use-dynamic-batch-size": True,
    "max-tokens-per-gpu": 16384,
    "sglang-mem-fraction-static": 0.7,
}
_OPENRLHF = {
    "actor.model_name_or_path": "Qwen/Qwen2.5-7B-Instruct",
    "actor.num_gpus_per_node": 8,
    "train.agent_func_path": "agent.py",
    "algo.advantage.estimator": "reinforce_baseline",
    "data.prompt_dataset": "prompts",
    "data.max_len": 2048,
    "data.max_samples": 192,
    "rollout.max_new_tokens": _LONGEST["response"],
    "rollout.batch_size": 32,
    "rollout.n_samples_per_prompt": 8,
    "train.batch_size": 256,
    "train.dynamic_batch_enable": True,
    "train.max_tokens_per_gpu": 16384,
    "train.colocate_all": True,
    "actor.gradient_checkpointing_enable": True,
    "vllm.num_engines": 8,
    "vllm.gpu_memory_utilization": 0.7,
    "vllm.enable_sleep": True,
}
_MS_SWIFT = {
    "rlhf_type": "grpo",
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "dataset": "AI-MO/NuminaMath-TIR",
    "max_length": _LONGEST["prompt"],
    "max_completion_length": _LONGEST["response"],
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 5,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.55,
    "sleep_level": 1,
    "max_steps": 6,
    "report_to": "none",
}
_COMMAND = {
    "tokens_per_microbatch": 16384,
    "recompute": "full",
    "memory_fraction": 0.7,
    "concurrency": 128,
    "longest_sequence": 2048,
    "steps": 6,
    "resume": ["--resume"],
    "placement": "separate",
    "engine": "vllm",
}
_SCRIPT_WORDS = [
    "--tokens={tokens_per_microbatch}",
    "--fraction={memory_fraction}",
    "--concurrency={concurrency}",
    "--steps={steps}",
    "--save-to={folder}",
    "{recompute?--recompute}",
]
_PROGRAMS = {
    "verl": ["tests.lookalikes.verl_main_ppo"],
    "areal": ["tests.lookalikes.areal_script"],
    "relax": ["tests.lookalikes.relax_train"],
    "slime": ["tests.lookalikes.slime_train"],
    "skyrl": ["tests.lookalikes.skyrl_main"],
    "nemo-rl": ["tests.lookalikes.nemo_rl_grpo"],
    "miles": ["tests.lookalikes.miles_train"],
    "openrlhf": ["tests.lookalikes.openrlhf_train"],
    "ms-swift": [],  # its entry runs `swift.cli.rlhf`, which is the one of tests/lookalikes/site
    "command": ["tests.lookalikes.any_script", *_SCRIPT_WORDS],
}
FRAMEWORKS = tuple(_PROGRAMS)
OF_DATA_FILES = (
    "skyrl",
    "nemo-rl",
    "ms-swift",
)  # they differ in files that launchers/frameworks/tabular reads
# What makes each training pass, or the engine's start, fail as the job is written.
_TOO_MANY = {
    "verl": {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 40960},
    "areal": {"actor.mb_spec.max_tokens_per_mb": 40960},
    "relax": {"max-tokens-per-gpu": 40960},
    "slime": {"max-tokens-per-gpu": 40960},
    "skyrl": {"trainer.max_tokens_per_microbatch": 40960},
    "nemo-rl": {"policy.sequence_packing.train_mb_tokens": 40960},
    "miles": {"max-tokens-per-gpu": 40960},
    "openrlhf": {"train.max_tokens_per_gpu": 40960},
    "ms-swift": {"per_device_train_batch_size": 20, "gradient_accumulation_steps": 2},
    "command": {"tokens_per_microbatch": 40960},
}
_TOO_SMALL = {
    "verl": {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.1},
    "areal": {"sglang.mem_fraction_static": 0.1},
    "relax": {"sglang-mem-fraction-static": 0.1},
    "slime": {"sglang-mem-fraction-static": 0.1},
    "skyrl": {"generator.inference_engine.gpu_memory_utilization": 0.1},
    "nemo-rl": {"policy.generation.vllm_cfg.gpu_memory_utilization": 0.1},
    "miles": {"sglang-mem-fraction-static": 0.1},
    "openrlhf": {"vllm.gpu_memory_utilization": 0.1},
    "ms-swift": {"vllm_gpu_memory_utilization": 0.1},
    "command": {"memory_fraction": 0.1},
}


def overflowing(framework: str) -> dict[str, Any]:
    """Return settings with which a training pass does not fit."""
    return dict(_TOO_MANY[framework])


def starved(framework: str) -> dict[str, Any]:
    """Return settings with which the engine refuses to start."""
    return dict(_TOO_SMALL[framework])


def with_critic() -> dict[str, Any]:
    """Return verl's settings of PPO with passes of the critic that do not fit."""
    return {
        "algorithm.adv_estimator": "gae",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
        "critic.fsdp.optimizer_offload": True,
        "critic.ppo_infer_max_token_len_per_gpu": 262144,
    }


def beside_critic() -> dict[str, Any]:
    """Return verl's settings of PPO whose passes fit, with the optimizers of actor and critic on the card."""
    return {
        "algorithm.adv_estimator": "gae",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.2,
    }


def timid(framework: str) -> dict[str, Any]:
    """Return settings that work and waste time, and what a search may vary to find better ones."""
    if framework == "command":  # nothing is known beyond its starting values but the other words
        return {"vary": ["recompute"], "settings": {"tokens_per_microbatch": 2048}}
    if framework == "ms-swift":
        settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 40}
        return {"vary": ["microbatch_size"], "settings": settings}
    return {"vary": ["tokens_per_microbatch"], "settings": dict.fromkeys(_TOO_MANY[framework], 2048)}


def written(
    framework: str,
    folder: Path,
    *,
    address: str,
    settings: dict[str, Any],
    fault: str = "",
    pace_s: float = 0.05,
    **fields: Any,
) -> Path:
    """Write a job for a framework's look-alike and return its file."""
    others: dict[str, dict[str, Any]] = {
        "verl": _VERL,
        "areal": {},
        "openrlhf": _OPENRLHF,
        "skyrl": _SKYRL,
        "nemo-rl": _NEMO_RL,
        "ms-swift": _MS_SWIFT,
        "command": _COMMAND,
    }
    own = others.get(framework, _FLAGS)
    job: dict[str, Any] = {
        "name": framework,
        "framework": framework,
        "command": ["{python}", "-m", *_PROGRAMS[framework]],
        "settings": {**own, **settings},
        "cluster": {"address": address, "gpu_memory": f"{CARD_GIB}GiB"},
        "env": {"PYTHONPATH": str(ROOT), PACE: str(pace_s), FAULT: fault},
        "goal": {"steps": 3},
        "recovery": {"save_every": 1, "relaunches": 3, "infrastructure_retries": 0, "preflight": "off"},
    }
    if framework == "areal":
        job["config"] = _areal(folder)
    if framework == "nemo-rl":
        job["config"] = _nemo_rl(folder)
    if framework == "ms-swift":
        del job["command"]
        job["env"]["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests' / 'lookalikes' / 'site'}"
    if own is _FLAGS:
        job["settings"] = {"save": str(folder / "checkpoints"), **job["settings"]}
    if framework == "openrlhf":
        job["settings"] = {"ckpt.path": str(folder / "checkpoints"), **job["settings"]}
    for name, value in fields.items():
        job[name] = {**job[name], **value} if isinstance(job.get(name), dict) else value
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    return file


def _nemo_rl(folder: Path) -> str:
    """Write the file that NeMo-RL's settings come from and one that extends it by the cards."""
    facts = json.loads((ROOT / "launchers/frameworks/nemo_rl/facts/0.7.0.json").read_text())
    tree: dict[str, Any] = {}
    for key in facts["types"]:
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = facts["defaults"].get(key)
    (folder / "grpo_math_1B.yaml").write_text(yaml.safe_dump(tree))
    (folder / "nemo-rl.yaml").write_text(
        yaml.safe_dump({"defaults": "grpo_math_1B.yaml", **_NEMO_RL_CLUSTER})
    )
    return "nemo-rl.yaml"


def _areal(folder: Path) -> str:
    """Write AReaL's own file: the example of configs/ with its folders here and a few steps."""
    tree = yaml.safe_load((ROOT / "configs" / "areal" / "gsm8k.yaml").read_text())
    tree["cluster"]["fileroot"] = str(folder / "areal")
    tree["total_train_steps"] = 6
    tree["recover"]["freq_steps"] = 1
    tree["gconfig"]["max_new_tokens"] = _LONGEST["response"]
    tree["train_dataset"]["max_length"] = _LONGEST["prompt"]
    tree["actor"]["gradient_checkpointing"] = True
    tree["sglang"]["mem_fraction_static"] = 0.7
    tree["stats_logger"]["wandb"]["mode"] = "disabled"
    (folder / "areal.yaml").write_text(yaml.safe_dump(tree))
    return "areal.yaml"
