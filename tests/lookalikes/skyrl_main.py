"""Looks like `python -m skyrl.train.entrypoints.main_base`: OmegaConf's overrides in, SkyRL's lines out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.lookalikes.core import Setup, Shortage, main, number, say, write

_ENTRY, _WORKER = (
    "\x1b[36m(skyrl_entrypoint pid=4128)\x1b[0m",
    "\x1b[36m(FSDPPolicyWorkerBase pid=4139)\x1b[0m",
)
_SERVER = "(VLLMServerActor pid=4151) ERROR 09-03 10:02:11 [core.py:842]"
_ENGINE = "generator.inference_engine"
_FRAMES = {
    "log_prob": (
        "forward",
        ("workers/worker.py", 1345, "forward"),
        ("workers/worker.py", 1485, "_forward_micro_batch"),
        ("workers/model_wrapper.py", 434, "forward"),
        ("utils/torch_utils.py", 131, "logprobs_from_logits"),
    ),
    "backward": (
        "forward_backward",
        ("workers/worker.py", 1030, "forward_backward"),
        ("workers/worker.py", 1246, "_forward_backward_micro"),
        ("distributed/fsdp_strategy.py", 150, "backward"),
    ),
    "rollout": (
        "broadcast_to_inference_engines",
        ("workers/fsdp/fsdp_worker.py", 214, "broadcast_to_inference_engines"),
    ),
}


def read(words: list[str]) -> dict[str, Any]:
    """Return the overrides by their keys; SkyRL refuses a `+`."""
    result: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key.startswith("+") or not equals:
            raise SystemExit(
                f"ValueError: The '+' prefix for adding new config fields is not supported: '{word}'"
            )
        result[key] = yaml.safe_load(value)
    return result


class SkyRL:
    """SkyRL 0.4.0 with FSDP and vLLM on the same cards."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._folder = Path(config["trainer.ckpt_path"])
        self._bar = ""
        # What workers print is lost in a file of their node unless this is set.
        self._workers_are_seen = os.environ.get("SKYRL_DUMP_INFRA_LOG_TO_STDOUT") == "1"

    def line(self, text: str) -> None:
        """Say a line of the driver's logger, behind the progress bar that stands there."""
        stamp = "\x1b[32m2026-09-03 10:03:02.910\x1b[0m | \x1b[1m\x1b[32mINFO    \x1b[0m | "
        where = "\x1b[36mskyrl.train.utils.utils\x1b[0m:\x1b[36m__enter__\x1b[0m:\x1b[36m52\x1b[0m - "
        say(f"{_ENTRY} {self._bar}{stamp}{where}\x1b[1m\x1b[32m{text}\x1b[0m")
        self._bar = ""

    def begin(self) -> None:
        self.line("Started: 'init_weight_sync_state'")

    def pool_too_small(self, *, available_gib: float) -> int:
        if self._workers_are_seen:
            say(f"{_SERVER} EngineCore failed to start.")
            frame = "/opt/skyrl/lib/python3.12/site-packages/vllm/v1/core/kv_cache_utils.py"
            say(f'{_SERVER}   File "{frame}", line 698, in check_enough_kv_cache_memory')
            say(
                f"{_SERVER} ValueError: No available memory for the cache blocks. Try increasing "
                "`gpu_memory_utilization` when initializing the engine."
            )
        return self._dies("VLLMServerActor.start", (), "RuntimeError", "Engine core initialization failed.")

    def ready(self, *, resumed: int) -> None:
        self.line("Finished: 'init_weight_sync_state', time cost: 2.11s")
        if self._config.get("trainer.resume_mode", "latest") != "none":
            self.line("Started: 'load_checkpoints'")
            if resumed:
                self.line(f"Loading checkpoint from: {self._folder}/global_step_{resumed}")
                self.line(f"Resuming from global_step: {resumed}")
            else:
                self.line("No checkpoint found, starting training from scratch")
            self.line("Finished: 'load_checkpoints', time cost: 3.07s")
        self.line("Started: 'sync_weights'")
        self.line("Finished: 'sync_weights', time cost: 1.50s")
        self._bar = _bar(resumed, self._steps, "?it/s")
        self.line("Started: 'step'")

    @property
    def _steps(self) -> int:
        return int(self._config["trainer.max_training_steps"])

    def out_of_memory(self, short: Shortage) -> int:
        method, *frames = _FRAMES[short.phase]
        self.line(f"Started: '{'train_critic_and_policy' if short.phase == 'backward' else 'generate'}'")
        return self._dies(f"FSDPPolicyWorkerBase.{method}", frames, "OutOfMemoryError", short.text)

    def step(self, step: int, *, of: int, seconds: float, tokens: int, peak_gib: float) -> None:
        for timer in ("generate", "fwd_logprobs_values_reward", "train_critic_and_policy", "sync_weights"):
            self.line(f"Started: '{timer}'")
            self.line(f"Finished: '{timer}', time cost: {seconds / 4:.2f}s")
        if self._due(step):
            self.line("Started: 'save_checkpoints'")
            self._save(step)
            self.line("Finished: 'save_checkpoints', time cost: 0.01s")
        self.line(f"Finished: 'step', time cost: {seconds:.2f}s")
        self._bar = _bar(step, of, f"{seconds:.2f}s/it")
        self.line("Started: 'step'" if step < of else f"Reached max_training_steps={of}, stopping early.")

    def checkpoint(self, step: int) -> None:
        """It is written inside the step."""

    def stuck(self, step: int) -> None:
        """The server is dead; its client tries again for ever."""
        self.line("Request to http://10.0.0.7:8001/inference/v1/generate failed: Cannot connect to host")

    def done(self) -> None:
        say(f"{_ENTRY} {_bar(self._steps, self._steps, '0.10s/it')}")
        self.line("Training done!")

    def saved(self) -> int:
        if self._config.get("trainer.resume_mode", "latest") == "none":
            return 0
        return number(self._folder / "latest_ckpt_global_step.txt")

    def _due(self, step: int) -> bool:
        every = int(self._config.get("trainer.ckpt_interval", 10))
        return every > 0 and (step % every == 0 or step == self._steps)

    def _save(self, step: int) -> None:
        folder = self._folder / f"global_step_{step}"
        write(folder / "policy" / "model_world_size_8_rank_0.pt", "state")
        write(self._folder / "latest_ckpt_global_step.txt", str(step))
        self.line(f"Successfully saved checkpoint for global_step_{step} to: {folder}")

    def _dies(self, method: str, frames: Any, kind: str, text: str) -> int:
        module = "torch." if kind == "OutOfMemoryError" else ""
        if self._workers_are_seen:
            say(f"{_WORKER} Traceback (most recent call last):")
        say("Traceback (most recent call last):")
        say('  File "/opt/skyrl/skyrl/train/entrypoints/main_base.py", line 498, in main')
        where = "pid=4128, ip=10.0.0.7"
        error = f"ray.exceptions.RayTaskError({kind})"
        say(f"{error}: ray::skyrl_entrypoint() ({where})")
        say('  File "/opt/skyrl/skyrl/train/trainer.py", line 442, in train')
        say(f"{error}: ray::{method}() ({where}, actor_id=a0569ffa9ff5d0ed3ed21576, repr=<{method}>)")
        for file, line, name in frames:
            say(f'  File "/opt/skyrl/skyrl/backends/skyrl_train/{file}", line {line}, in {name}')
        if method.endswith("forward_backward"):
            say('  File "/opt/skyrl/torch/autograd/graph.py", line 841, in _engine_run_backward')
        say(f"{module}{kind}: {text}")
        return 1


def _bar(step: int, of: int, rate: str) -> str:
    share = 100 * step // of
    drawn = f"{share:3d}%|{'█' * (share // 10):10}| {step}/{of} [00:41<01:22, {rate}]"
    return f"\rTraining Batches Processed: {drawn}"


def setup_of(config: dict[str, Any]) -> Setup:
    """Return what the overrides come to, with SkyRL's defaults."""
    return Setup(
        steps=config["trainer.max_training_steps"],
        save_every=0,  # SkyRL saves before it logs the step
        tokens=config.get("trainer.max_tokens_per_microbatch", -1),
        recompute="full" if config.get("trainer.gradient_checkpointing", True) else "off",
        optimizer_offload=config.get("trainer.policy.fsdp_config.cpu_offload", False),
        fraction=config.get(f"{_ENGINE}.gpu_memory_utilization", 0.8),
        graphs=not config.get(f"{_ENGINE}.enforce_eager", False),
        concurrency=config.get(f"{_ENGINE}.max_num_seqs", 1024),
    )


if __name__ == "__main__":
    config = read(sys.argv[1:])
    sys.exit(main(setup_of(config), SkyRL(config)))
