"""Looks like the module behind `swift rlhf`: its flags in, its trainer's traceback out."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from transformers.trainer import Trainer

from tests.lookalikes.core import Setup, Shortage, say
from tests.lookalikes.jobs import ROOT

_FACTS = ROOT / "launchers" / "frameworks" / "ms_swift" / "facts" / "4.6.0.json"
_SITE = "/opt/swift/lib/python3.12/site-packages"
# The frames of real failures on a processor, deepest last; those of vLLM, which did not run there, are read.
_TRAIN = (
    ("swift/cli/rlhf.py", 7, "<module>"),
    ("swift/pipelines/train/rlhf.py", 259, "rlhf_main"),
    ("swift/pipelines/base.py", 52, "main"),
    ("swift/ray_utils/base.py", 168, "wrapper"),
    ("swift/pipelines/train/sft.py", 189, "run"),
    ("swift/pipelines/train/sft.py", 263, "train"),
    ("swift/trainers/mixin.py", 1029, "train"),
    ("transformers/trainer.py", 1562, "train"),
    ("transformers/trainer.py", 1646, "_inner_training_loop"),
    ("transformers/trainer.py", 1892, "_run_epoch"),
    ("swift/rlhf_trainers/grpo_trainer.py", 1832, "training_step"),
    ("trl/trainer/grpo_trainer.py", 1085, "training_step"),
)
_INPUTS = (
    ("transformers/trainer.py", 2059, "training_step"),
    ("swift/rlhf_trainers/utils.py", 596, "wrapper"),
    ("swift/rlhf_trainers/grpo_trainer.py", 202, "_prepare_inputs"),
    ("swift/rlhf_trainers/utils.py", 596, "wrapper"),
)
_FRAMES = {
    "rollout": (
        *_INPUTS,
        ("swift/rlhf_trainers/rollout_mixin.py", 141, "_generate_and_score_completions"),
        ("swift/rlhf_trainers/grpo_trainer.py", 214, "_rollout_samples"),
        ("swift/rlhf_trainers/rollout_mixin.py", 1174, "_generate_completions"),
        ("swift/rlhf_trainers/rollout_mixin.py", 1128, "_infer_single_or_multi_turn"),
        ("swift/rlhf_trainers/rollout_mixin.py", 1105, "_rollout"),
        ("swift/rlhf_trainers/rollout_mixin.py", 1350, "_colocate_rollout"),
        ("swift/rlhf_trainers/rollout_mixin.py", 1371, "_engine_infer"),
    ),
    "log_prob": (
        *_INPUTS,
        ("swift/rlhf_trainers/rollout_mixin.py", 143, "_generate_and_score_completions"),
        ("swift/rlhf_trainers/utils.py", 596, "wrapper"),
        ("swift/rlhf_trainers/grpo_trainer.py", 762, "_prepare_batch_inputs"),
        ("swift/rlhf_trainers/utils.py", 596, "wrapper"),
        ("swift/rlhf_trainers/grpo_trainer.py", 1629, "_get_per_token_logps_and_entropies"),
        ("swift/rlhf_trainers/grpo_trainer.py", 1660, "_get_per_token_logps_and_entropies_single"),
        ("swift/rlhf_trainers/grpo_trainer.py", 1578, "_get_logps_via_local_forward"),
        ("torch/nn/modules/module.py", 1789, "_call_impl"),
        ("transformers/models/qwen2/modeling_qwen2.py", 444, "forward"),
    ),
    "backward": (
        ("transformers/trainer.py", 2101, "training_step"),
        ("accelerate/accelerator.py", 2861, "backward"),
        ("torch/_tensor.py", 623, "backward"),
        ("torch/autograd/__init__.py", 395, "backward"),
        ("torch/autograd/graph.py", 979, "_engine_run_backward"),
    ),
}


def parse(words: list[str]) -> dict[str, Any]:
    """Return the flags over the defaults; exits as argparse does where one is unknown."""
    facts = json.loads(_FACTS.read_text())
    items: dict[str, Any] = dict(facts["defaults"])
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            if name not in facts["types"]:
                raise SystemExit(f"ValueError: remaining_argv: ['{word}']")
        else:
            items[name] = _value(word)
    return items


def _value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


class Swift(Trainer):
    """ms-swift 4.6.0 with vLLM in the trainer's process."""

    def pool_too_small(self, *, available_gib: float) -> int:
        say("Traceback (most recent call last):")
        say(f'  File "{_SITE}/swift/rlhf_trainers/rollout_mixin.py", line 262, in _prepare_vllm')
        say(f'  File "{_SITE}/vllm/v1/core/kv_cache_utils.py", line 698, in check_enough_kv_cache_memory')
        say(
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` "
            "when initializing the engine."
        )
        return 1

    def out_of_memory(self, short: Shortage) -> int:
        self._until(short.phase)
        say("Traceback (most recent call last):")
        for file, line, name in (*_TRAIN, *_FRAMES[short.phase]):
            say(f'  File "{_SITE}/{file}", line {line}, in {name}')
        say(f"torch.OutOfMemoryError: {short.text}")
        return 1


def setup_of(flags: dict[str, Any]) -> Setup:
    """Return what the flags come to."""
    longest = flags["max_length"] + flags["max_completion_length"]
    batch = flags["per_device_train_batch_size"] * (flags["gradient_accumulation_steps"] or 1)
    assert batch % flags["num_generations"] == 0, "a generation has whole groups"
    assert flags["use_vllm"] and flags["vllm_mode"] == "colocate", "only colocated jobs look alike"
    return Setup(
        steps=flags["max_steps"],
        save_every=0 if flags["save_strategy"] == "no" else flags["save_steps"],
        tokens=flags["per_device_train_batch_size"] * longest,
        recompute="full" if flags["gradient_checkpointing"] else "off",
        fraction=flags["vllm_gpu_memory_utilization"],
        engine_on_card=not flags["sleep_level"],
        trainer_on_card=not flags["offload_model"],
        graphs=not flags["vllm_enforce_eager"],
        concurrency=flags.get("vllm_max_num_seqs") or 256,
    )


if __name__ == "__main__":
    flags = parse(sys.argv[1:])
    Swift(setup_of(flags), SimpleNamespace(output_dir=flags["output_dir"])).train()
