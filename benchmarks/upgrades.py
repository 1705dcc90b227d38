"""Public regressions of an upgrade, and what `autotune plan --against` says of them before it is made.

`python -m benchmarks.upgrades` writes docs/measured/upgrades.md.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from click.testing import CliRunner

from autotune.orchestrator.cli import main
from tests.faults.page import placed

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "measured" / "upgrades.md"
_QWEN_7B = "Qwen/Qwen2.5-7B-Instruct"


class Case(NamedTuple):
    """An upgrade that made jobs fail, or that a later one made good, as its thread says."""

    name: str
    thread: str  # below https://github.com/
    what: str  # in the thread's own terms
    framework: str
    before: str
    after: str  # PACKAGE==VERSION
    changed: str  # the setting that the answer has to name
    more: bool | None  # whether the answer has to show a higher peak; None: it is no matter of a peak
    settings: dict[str, Any]
    gpu: str = "H100-80GB"


_TRL = {
    "model_name_or_path": _QWEN_7B,
    "dataset_name": "trl-lib/DeepMath-103K",
    "reward_funcs": ["accuracy_reward"],
    "output_dir": "/checkpoints/grpo",
    "accelerate_config": "zero3",
    "num_processes": 8,
    "per_device_train_batch_size": 8,
    "num_generations": 8,
    "loss_type": "dapo",
    "gradient_checkpointing": True,
    "use_vllm": True,
}
CASES = (
    Case(
        "verl-graphs",
        "verl-project/verl/issues/3339",
        "backward runs out after an upgrade: vLLM's CUDA graphs are captured by default (verl#2956)",
        "verl",
        "0.5.0",
        "verl==0.6.1",
        "actor_rollout_ref.rollout.enforce_eager",
        True,
        {
            "actor_rollout_ref.model.path": _QWEN_7B,
            "data.train_batch_size": 256,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 4,
            "actor_rollout_ref.rollout.name": "vllm",
        },
    ),
    Case(
        "trl-colocated",
        "huggingface/trl/pull/5255",
        "vLLM moves from a server's GPUs onto the trainer's (`vllm_mode`)",
        "trl",
        "0.29.1",
        "trl==1.0.0",
        "vllm_mode",
        True,
        _TRL,
    ),
    Case(
        "trl-prompts",
        "huggingface/trl/issues/4358",
        "prompts are no longer cut to `max_prompt_length`",
        "trl",
        "0.24.0",
        "trl==0.29.1",
        "max_prompt_length",
        None,
        _TRL | {"max_prompt_length": 512},
    ),
    Case(
        "trl-answers",
        "huggingface/trl/issues/6263",
        "answers may be twice as long (`max_completion_length`)",
        "trl",
        "1.0.0",
        "trl==1.16.0",
        "max_completion_length",
        None,
        _TRL,
    ),
    Case(
        "trl-share",
        "huggingface/trl/issues/2688",
        "vLLM takes 0.9 of a GPU beside the trainer; 0.3 since, which is the upgrade that mends it",
        "trl",
        "0.15.2",
        "trl==0.21.0",
        "vllm_gpu_memory_utilization",
        False,
        _TRL,
    ),
    Case(
        "ms-swift-requests",
        "modelscope/ms-swift/issues/7999",
        "a GRPO job that ran runs out, by an unknown cause; the engine's limit of requests changed too",
        "ms-swift",
        "3.8.3",
        "ms-swift==3.12.6",
        "vllm_max_num_seqs",
        None,
        {
            "rlhf_type": "grpo",
            "model": _QWEN_7B,
            "dataset": ["/data/train.jsonl"],
            "output_dir": "/checkpoints/grpo",
            "torch_dtype": "bfloat16",
            "deepspeed": "zero3",
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.4,
            "max_length": 4000,
            "max_completion_length": 1000,
            "per_device_train_batch_size": 8,
            "num_generations": 8,
        },
    ),
    Case(
        "sglang-tier",
        "sgl-project/sglang/pull/37898",
        "on GPUs of 24 to 35 GiB SGLang captures graphs up to 48 requests and prefills 4,096 tokens at once",
        "slime",
        "624b824a",
        "sglang==0.5.23",
        "max_batched_tokens",
        True,
        {
            "hf-checkpoint": "Qwen/Qwen2.5-1.5B-Instruct",
            "actor-num-nodes": 1,
            "actor-num-gpus-per-node": 8,
            "colocate": True,
            "rollout-num-gpus-per-engine": 1,
            "num-rollout": 100,
            "rollout-batch-size": 32,
            "n-samples-per-prompt": 8,
            "rollout-max-response-len": 2048,
            "global-batch-size": 256,
            "use-dynamic-batch-size": True,
            "max-tokens-per-gpu": 4096,
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
            "optimizer-cpu-offload": True,
            "use-precision-aware-optimizer": True,
            "num-layers": 28,
            "hidden-size": 1536,
            "num-attention-heads": 12,
            "num-query-groups": 2,
            "group-query-attention": True,
            "ffn-hidden-size": 8960,
            "vocab-size": 151936,
        },
        gpu="RTX-5090",
    ),
)


def answer(case: Case) -> dict[str, Any]:
    """Return the JSON document of `autotune plan job.yaml --against`; raises RuntimeError with its error."""
    job = {
        "name": "job",
        "framework": case.framework,
        "python": "/usr/bin/python3",  # without an engine of this machine's own
        "cluster": {"nodes": 1, "gpus_per_node": 8, "gpu": case.gpu},
        "settings": case.settings,
    }
    if "." in case.before:
        job["framework_version"] = case.before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.yaml"
        path.write_text(yaml.safe_dump(job))
        result = CliRunner().invoke(main, ["plan", str(path), "--against", case.after, "--json"])
    if result.exit_code != 0:
        raise RuntimeError(result.output)
    return dict(json.loads(result.stdout))


def named(document: dict[str, Any], setting: str) -> str:
    """Return what an answer says of a setting; empty if it does not name it."""
    for part in ("defaults", "knobs"):
        if setting in document[part]:
            before, after = document[part][setting]
            return f"{before} → {after}"
    return "not a setting any more" if setting in document["lacking"] else ""


def rise(document: dict[str, Any]) -> tuple[str, float]:
    """Return the phase whose peak rises most and by how many bytes.

    Where none rises, the one that falls most, below 0; an empty name where none changes.
    """
    changes = {each["phase"]: each["against_bytes"] - each["now_bytes"] for each in document["phases"]}
    most = max(changes, key=lambda name: changes[name])
    phase = most if changes[most] > 0 else min(changes, key=lambda name: changes[name])
    return (phase, changes[phase]) if changes[phase] else ("", 0.0)


def _line(case: Case) -> str:
    document = answer(case)
    phase, change = rise(document)
    peak = f"{phase} {change / (1 << 30):+.1f} GiB" if phase else "none"
    address = f"[{case.thread}](https://github.com/{case.thread})"
    words = named(document, case.changed) or "nothing"
    if document["placement"]:
        words += f"; trainer and engines {' → '.join(document['placement'])}"
    releases = f"{case.framework} {case.before}, {case.after}"
    return f"| {address} | {case.what} | {releases} | `{case.changed}` {words} | {peak} |"


if __name__ == "__main__":
    head = "| thread | what changed | releases | the answer names | change of a peak |\n|---|---|---|---|---|"
    PAGE.write_text(placed(PAGE.read_text(), "upgrades", "\n".join([head, *map(_line, CASES)])))
