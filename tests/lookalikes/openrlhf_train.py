"""Looks like `python -m openrlhf.cli.train_ppo_ray`: its flags in, its lines and DeepSpeed's out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.lookalikes.core import Setup, Shortage, main, say, write

_FACTS = Path(__file__).parents[2] / "launchers" / "frameworks" / "openrlhf" / "facts" / "0.11.2.json"
_TRAINER = "(PPOTrainer pid=4128) INFO 08-22 10:00:12"
_ACTOR, _ENGINE = "(PolicyModelActor pid=4139)", "(RolloutRayActor pid=4151) (EngineCore_DP0 pid=4153)"
_FRAMES = {
    "log_prob": (
        "forward",
        ("trainer/ray/ppo_actor.py", 640, "forward"),
        ("models/actor.py", 289, "forward"),
    ),
    "backward": (
        "fit",
        ("trainer/ray/ppo_actor.py", 603, "fit"),
        ("trainer/ray/ppo_actor.py", 330, "training_step"),
        ("utils/deepspeed/deepspeed.py", 165, "backward"),
    ),
    "rollout": ("broadcast_to_vllm", ("trainer/ray/ppo_actor.py", 652, "broadcast_to_vllm")),
}


def parse(words: list[str]) -> dict[str, Any]:
    """Return the flags by name; exits as argparse does where one is unknown."""
    known = json.loads(_FACTS.read_text())["flags"]
    result: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            if name not in known:
                sys.stderr.write(f"train_ppo_ray.py: error: unrecognized arguments: {word}\n")
                sys.exit(2)
            result[name] = True
        else:
            result[name] = float(word) if known[name].get("type") in ("int", "float") else word
    return result


class OpenRlhf:
    """OpenRLHF 0.11.2 with DeepSpeed 0.19 and vLLM."""

    def __init__(self, flags: dict[str, Any]) -> None:
        self._flags = flags
        self._folder = Path(str(flags.get("ckpt.path", "checkpoints"))) / "_actor"

    def begin(self) -> None:
        say(f"{_ENGINE} INFO 08-22 10:00:01 [gpu_model_runner.py:2603] Starting to load model Qwen...")

    def pool_too_small(self, *, available_gib: float) -> int:
        say(f"{_ENGINE} ERROR 08-22 10:02:11 [core.py:842] EngineCore failed to start.")
        say(
            f"{_ENGINE} ValueError: No available memory for the cache blocks. Try increasing "
            "`gpu_memory_utilization` when initializing the engine."
        )
        return self._dies(
            "RolloutRayActor.__init__", (), "RuntimeError", "Engine core initialization failed."
        )

    def ready(self, *, resumed: int) -> None:
        if self._flags.get("ckpt.load_enable") and self._folder.exists():
            say(f"{_ACTOR} Loading the checkpoint: {self._folder}")
            states = {"episode": 0, "global_step": resumed, "total_consumed_prompts": resumed * 32}
            say(f"{_TRAINER} ppo_trainer.py:439] checkpoint_states: {states}")

    def out_of_memory(self, short: Shortage) -> int:
        method, *frames = _FRAMES[short.phase]
        return self._dies(f"PolicyModelActor.{method}", frames, "OutOfMemoryError", short.text)

    def step(self, step: int, *, of: int, seconds: float, tokens: int, peak_gib: float) -> None:
        say("(PPOTrainer pid=4128) Generate samples:   0%|          | 0/32 [00:00<?, ?it/s]")
        say(f"{_TRAINER} experience_maker.py:116] 🚀 Starting experience making with 256 samples")
        say(f"{_TRAINER} experience_maker.py:232] ✨ Experience making completed in 0:00:01")
        say(f"{_ACTOR} Train epoch [1/1]:   0%|          | 0/8 [00:00<?, ?it/s]")
        status = {
            "policy_loss": 0.0123,
            "total_length": tokens / 256,
            "timing/make_experience": seconds / 4,
            "timing/ppo_train": seconds / 4,
            "rollout/num_samples": 256.0,
            "timing/generation": seconds / 2,
            "timing/step_total": seconds,
        }
        say(f"{_TRAINER} ppo_trainer.py:551] ✨ Global step {step}: {status}")

    def checkpoint(self, step: int) -> None:
        begun = f"[Torch] Checkpoint global_step{step} is about to be saved!"
        say(f"{_ACTOR} [2026-08-22 10:09:58,731] [INFO] [logging.py:107:log_dist] [Rank 0] {begun}")
        write(self._folder / f"global_step{step}" / "mp_rank_00_model_states.pt", "weights")
        write(self._folder / "latest", f"global_step{step}")

    def stuck(self, step: int) -> None:
        say("(PPOTrainer pid=4128) Generate samples:  25%|##5       | 8/32 [00:31<01:33,  2.79it/s]")

    def done(self) -> None:
        say("(PPOTrainer pid=4128) Episode [1/1]: 100%|##########| 192/192 [09:31<00:00,  2.98s/it]")

    def saved(self) -> int:
        latest = self._folder / "latest"
        if not self._flags.get("ckpt.load_enable") or not latest.exists():
            return 0
        return int(latest.read_text().removeprefix("global_step"))

    def _dies(self, method: str, frames: Any, kind: str, text: str) -> int:
        say("Traceback (most recent call last):")
        say('  File "/opt/openrlhf/openrlhf/cli/train_ppo_ray.py", line 196, in train')
        where = "pid=4139, ip=10.0.0.7, actor_id=a0569ffa9ff5d0ed3ed2157601000000"
        say(f"ray.exceptions.RayTaskError({kind}): ray::{method}() ({where})")
        for file, line, name in frames:
            say(f'  File "/opt/openrlhf/openrlhf/{file}", line {line}, in {name}')
        if method.endswith("fit"):
            say('  File "/opt/torch/autograd/graph.py", line 829, in _engine_run_backward')
        say(f"{'torch.' if kind == 'OutOfMemoryError' else ''}{kind}: {text}")
        return 1


def setup_of(flags: dict[str, Any]) -> Setup:
    """Return what the flags come to, with OpenRLHF's defaults."""
    tokens = int(flags.get("train.max_tokens_per_gpu", 16192))
    return Setup(
        steps=int(flags["data.max_samples"] // flags["rollout.batch_size"]),
        save_every=max(0, int(flags.get("ckpt.save_steps", -1))),
        tokens=tokens,
        score_tokens=int(flags.get("rollout.max_tokens_per_gpu", tokens)),
        recompute="full" if flags.get("actor.gradient_checkpointing_enable") else "off",
        optimizer_offload=bool(flags.get("ds.adam_offload")),
        fraction=float(flags.get("vllm.gpu_memory_utilization", 0.95)),
        graphs=not flags.get("vllm.enforce_eager"),
    )


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    sys.exit(main(setup_of(given), OpenRlhf(given)))
