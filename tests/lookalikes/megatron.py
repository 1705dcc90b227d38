"""What the look-alikes of Relax, slime and miles share: flags in, the lines of Megatron and SGLang out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.lookalikes.core import CARD_GIB, Setup, Shortage, number, say, write

_ENGINE = "(SGLangEngine pid=3907) [2026-08-22 10:00:01 TP0]"
RANK = "(MegatronTrainRayActor pid=4101)"
_TRACKER = "latest_checkpointed_iteration.txt"
_FRAMES = {
    "log_prob": (
        ("backends/{actor}", 455, "compute_log_prob"),
        ("backends/{model}", 512, "forward_only"),
        ("utils/ppo_utils.py", 145, "calculate_log_probs_and_entropy"),
    ),
    "backward": (
        ("backends/{actor}", 512, "train_actor"),
        ("backends/{model}", 868, "train"),
        ("backends/{model}", 742, "train_one_step"),
        ("/root/Megatron-LM/megatron/core/pipeline_parallel/schedules.py", 476, "backward_step"),
        ("/root/Megatron-LM/megatron/core/pipeline_parallel/schedules.py", 174, "custom_backward"),
    ),
    "rollout": (
        ("backends/{actor}", 601, "update_weights"),
        ("distributed/ray/rollout.py", 411, "onload_kv"),
    ),
}


def parse(words: list[str]) -> argparse.Namespace:
    """Return the flags that matter here; like most of the real ones, the parser passes over all others."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("num-rollout", "save-interval", "max-tokens-per-gpu", "log-probs-max-tokens-per-gpu"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--sglang-max-running-requests", type=int, default=128)
    parser.add_argument("--sglang-server-concurrency", type=int, default=512)
    parser.add_argument("--sglang-mem-fraction-static", type=float, default=0.88)
    parser.add_argument("--recompute-granularity", default="off", choices=("off", "selective", "full"))
    for name in ("load", "save", "ref-load", "recompute-method"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--recompute-num-layers", type=int)
    switches = ("optimizer-cpu-offload", "use-precision-aware-optimizer", "sglang-disable-cuda-graph")
    for name in (*switches, "finetune", "use-health-check"):
        parser.add_argument(f"--{name}", action="store_true")
    flags, _ = parser.parse_known_args(words)
    if flags.optimizer_cpu_offload and not flags.use_precision_aware_optimizer:
        raise SystemExit("AssertionError: --optimizer-cpu-offload requires --use-precision-aware-optimizer")
    if flags.recompute_granularity == "full" and not (flags.recompute_method and flags.recompute_num_layers):
        raise SystemExit("AssertionError: full recompute needs --recompute-method and --recompute-num-layers")
    return flags


def setup_of(flags: argparse.Namespace, *, score_tokens: int) -> Setup:
    """Return what the flags come to."""
    return Setup(
        steps=flags.num_rollout,
        save_every=flags.save_interval or 0 if flags.save else 0,
        tokens=flags.max_tokens_per_gpu,
        score_tokens=score_tokens,
        recompute=flags.recompute_granularity,
        optimizer_offload=flags.optimizer_cpu_offload,
        fraction=flags.sglang_mem_fraction_static,
        engine_on_card=False,
        graphs=not flags.sglang_disable_cuda_graph,
        concurrency=min(flags.sglang_max_running_requests, flags.sglang_server_concurrency),
    )


class Trainer:
    """The lines and checkpoints that all have; `source` and `stamp` are where they differ."""

    package = "slime"
    actor, model = "megatron_utils/actor.py", "megatron_utils/model.py"

    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags = flags
        self._resumed = 0

    def info(self, source: str, text: str, *, who: str = RANK) -> None:
        """Say a line of the framework's own logger."""
        say(f"{who} [2026-08-22 10:00:12] {source} - {text}")

    def begin(self) -> None:
        say(f"{_ENGINE} Load weight begin. avail mem=78.53 GB")
        say(f"{_ENGINE} Load weight end. elapsed=3.21 s, type=Qwen3ForCausalLM, avail mem=70.74 GB")

    def pool_too_small(self, *, available_gib: float) -> int:
        say(f"{_ENGINE} Scheduler hit an exception: Traceback (most recent call last):")
        frame = "/usr/local/lib/python3.12/dist-packages/sglang/srt/managers/scheduler.py"
        say(f'(SGLangEngine pid=3907)   File "{frame}", line 2961, in run_scheduler_process')
        say(
            "(SGLangEngine pid=3907) RuntimeError: Not enough memory. Please try to increase "
            "--mem-fraction-static."
        )
        say(f"{_ENGINE} Received sigquit from a child process. It usually means the child failed.")
        return 1

    def ready(self, *, resumed: int) -> None:
        say(f"{_ENGINE} KV Cache is allocated. #tokens: 713420, K size: 24.50 GB, V size: 24.50 GB")
        say(f"{_ENGINE} The server is fired up and ready to roll!")
        self._resumed = resumed
        if resumed:
            say(
                f"{RANK}   successfully loaded checkpoint from {self._flags.load} [ t 1/2, p 1/1 ] "
                f"at iteration {resumed - 1}"
            )

    def memory_of(self, what: str, held_gib: float = 9.0) -> str:
        """Return a `Memory-Usage` line's text."""
        used = {"total_GB": CARD_GIB, "free_GB": round(CARD_GIB - held_gib, 2), "used_GB": held_gib}
        return f"[Rank 0] Memory-Usage {what}: {dict({'gpu': '0'}, **used)}"

    def rollout(self, rollout: int) -> None:
        """Say what a rollout says."""
        say("(RolloutManager pid=3805) Rollout generation:   0%|          | 0/256 [00:00<?, ?it/s]")
        say(f"{_ENGINE} Decode batch, #running-req: 64, #token: 91022, token usage: 0.13, #queue-req: 0, ")
        say("(RolloutManager pid=3805) Rollout generation: 100%|##########| 256/256 [01:31<00:00,  2.79it/s]")
        values = {"rollout/response_len/mean": 3402.7, "perf/rollout_time": 0.02}
        self.info("rollout_metrics.py:268", f"perf {rollout}: {values}", who="(RolloutManager pid=3805)")

    def trained(self, rollout: int, *, seconds: float, tokens: int) -> None:
        """Say what a training step says at its end."""
        self.info("model.py:918", f"step {rollout}: {{'train/loss': 0.0123, 'train/step': {rollout}}}")
        values: dict[str, Any] = {
            "perf/actor_train_time": seconds / 2,
            "perf/train_time": seconds * 0.6,
            "perf/train_wait_time": seconds * 0.4,
            "perf/actor_train_tok_per_s": tokens / (seconds / 2),
            "perf/step_time": seconds,
        }
        self.info("train_metric_utils.py:401", f"perf {rollout}: {values}")

    def checkpoint(self, step: int) -> None:
        folder = Path(self._flags.save)
        say(f"{RANK} saving checkpoint at iteration {step - 1:7} to {folder} in torch_dist format")
        write(folder / f"iter_{step - 1:07}" / "metadata.json", json.dumps({"iteration": step - 1}))
        write(folder / _TRACKER, str(step - 1))
        say(
            f"{RANK}   [2026-08-22 10:09:58.731042] successfully saved checkpoint from iteration "
            f"{step - 1:7} to {folder} [ t 1/2, p 1/1 ]"
        )

    def saved(self) -> int:
        if not self._flags.load or self._flags.finetune:
            return 0
        tracker = Path(self._flags.load) / _TRACKER
        return number(tracker) + 1 if tracker.exists() else 0

    def frames(self, short: Shortage) -> list[str]:
        """Return the traceback below the Ray task."""
        lines = []
        for file, line, name in _FRAMES[short.phase]:
            path = file.format(actor=self.actor, model=self.model)
            path = path if path.startswith("/") else f"/root/{self.package}/{self.package.lower()}/{path}"
            lines.append(f'  File "{path}", line {line}, in {name}')
        return [*lines, f"torch.OutOfMemoryError: {short.text}"]

    def task(self) -> str:
        """Return Ray's header of a failed training call."""
        return (
            "RayTaskError(OutOfMemoryError): ray::MegatronTrainRayActor.train() (pid=4104, ip=10.0.0.7, "
            "actor_id=53817f028daa72974175ece601000000, repr=<actor.MegatronTrainRayActor object at 0x7f2e>)"
        )
