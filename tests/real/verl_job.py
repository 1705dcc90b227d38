"""A launch script of verl as a user has one, for a tiny model on this machine's processor."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.gpu.real import PROGRAMS, Sizes, verl_job
from tests.contracts.environments import environment

SIZES = Sizes(
    shape={"hidden": 128, "layers": 2, "heads": 4, "kv": 2, "inner": 512, "vocab": 8192},
    prompts=8,
    samples=4,
    short=16,
    long=32,
    response=32,
    score_tokens=512,
    update_tokens=2048,
    steps=4,
)
_OWN_CODE = """from transformers import Qwen2ForCausalLM

class Own(Qwen2ForCausalLM):
    supports_gradient_checkpointing = False
"""
# A user's own code that means to keep a row of each update and keeps the tensor that it is a view of.
_LEAKING_CODE = """import torch
from transformers import Qwen2ForCausalLM

class Leaking(Qwen2ForCausalLM):
    rows = []

    def forward(self, *arguments, **named):
        output = super().forward(*arguments, **named)
        if torch.is_grad_enabled():
            self.rows.append(output.logits[0, -1].detach())
        return output
"""
BUDGET = 200_000_000  # bytes above what the trainer has after its first step


def write_material(folder: Path, **changed: int) -> Path:
    """Write a model, prompts and rewards that no job changes; return their folder."""
    prompts = {"count": SIZES.prompts * (SIZES.steps + 1), "first": SIZES.prompts}
    sizes = SIZES.shape | prompts | {"short": SIZES.short, "long": SIZES.long} | changed
    words = [f"--{name}={value}" for name, value in sizes.items()]
    program = str(PROGRAMS / "material.py")
    subprocess.run([str(environment("verl")), program, str(folder), *words], check=True, timeout=600)
    return folder


def write_script(
    folder: Path,
    material: Path,
    variables: dict[str, str] | None = None,
    packages: str = "verl",
    **settings: Any,
) -> Path:
    """Write the script that starts verl of an environment; `settings` go by their last names, or are new."""
    written = verl_job(material, SIZES, cpu=True)
    by_name = {key.rpartition(".")[2]: key for key in written}
    written |= {by_name.get(name, name): value for name, value in settings.items()}
    exported = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_DEDUP_LOGS": "0",
        "MALLOC_ARENA_MAX": "1",  # what is freed serves the next request, whichever thread asks
        "PYTHONPATH": str(PROGRAMS),
        "VERL_USE_EXTERNAL_MODULES": "verl_plugin",
        "VERL_PLATFORM": "cpu",
        **(variables or {}),
    }
    script = folder / "run_grpo.sh"
    command = [str(environment(packages)), "-m", "verl.trainer.main_ppo"]
    command += [f"{key}={_word(value)}" for key, value in written.items()]
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]
    script.write_text("\n".join([*lines, " \\\n    ".join(map(shlex.quote, command))]) + "\n")
    return script


def with_critic(material: Path) -> dict[str, Any]:
    """Return the settings of PPO with a critic; the first step trains the critic alone."""
    return {
        "algorithm.adv_estimator": "gae",
        "trainer.critic_warmup": 2,
        "trainer.max_critic_ckpt_to_keep": 2,
        "critic.model.path": str(material / "model"),
        "critic.model.use_remove_padding": False,
        "+critic.model.override_config.attn_implementation": "sdpa",
        "critic.strategy": "fsdp2",
        "critic.fsdp.use_torch_compile": False,
        "++critic.fsdp.mixed_precision.param_dtype": "fp32",
    }


def with_vllm(folder: Path) -> dict[str, str]:
    """Return the variables of vLLM's build for processors, which gets the name `vllm` in a folder.

    Both verl and vLLM look for a distribution of that name, and vLLM for "cpu" in its version.
    """
    metadata = folder / "vllm-0.28.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.28.0+cpu\n")
    return {
        "PYTHONPATH": f"{PROGRAMS}:{folder}",
        "VERL_PLUGIN_ENGINE": "vllm",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENGINE_READY_TIMEOUT_S": "1200",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


# vLLM on a processor neither sleeps nor compiles.
AWAKE = {
    "actor_rollout_ref.rollout.enforce_eager": True,
    "actor_rollout_ref.rollout.free_cache_engine": False,
    "actor_rollout_ref.rollout.calculate_log_probs": True,  # and whether they are those of the trainer
    "++actor_rollout_ref.rollout.enable_sleep_mode": False,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 64,
}


def write_own_code(folder: Path, material: Path, *, leaks: bool = False) -> Path:
    """Copy material with a model that brings its own class: it cannot recompute activations, or it leaks."""
    shutil.copytree(material, folder)
    (folder / "model" / "modeling.py").write_text(_LEAKING_CODE if leaks else _OWN_CODE)
    config = folder / "model" / "config.json"
    own = {"auto_map": {"AutoModelForCausalLM": f"modeling.{'Leaking' if leaks else 'Own'}"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | own))
    return folder


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
