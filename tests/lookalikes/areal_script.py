"""Looks like an AReaL training script: `--config` with overrides behind it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.lookalikes.core import CARD_GIB, Setup, Shortage, main, say, write

_REFERENCE = re.compile(r"^\$\{([\w.]+)\}$")
# A failed update as AReaL 1.0.4 printed it, and the places of its source where others differ from that one.
_REAL = Path(__file__).parents[1] / "real" / "logs" / "areal-forward.log"
_TRAINED = (
    ("engine/fsdp_engine.py", 2178, "ppo_update"),
    ("trainer/ppo/actor.py", 254, "ppo_update"),
    ("utils/data.py", 426, "batched_call"),
    ("trainer/ppo/actor.py", 346, "_ppo_update"),
    ("engine/fsdp_engine.py", 793, "train_batch"),
)
_FRAMES: dict[str, tuple[Any, ...]] = {
    "forward": ("ppo_update",),
    "backward": ("ppo_update", *_TRAINED, ("engine/fsdp_engine.py", 758, "forward_backward_batch")),
    "log_prob": (
        "compute_logp",
        ("engine/fsdp_engine.py", 2171, "compute_logp"),
        ("trainer/ppo/actor.py", 132, "compute_logp"),
        ("utils/data.py", 426, "batched_call"),
        ("trainer/ppo/actor.py", 136, "_compute_logp"),
        ("api/engine_api.py", 483, "forward"),
        ("engine/fsdp_engine.py", 881, "forward_batch"),
        ("engine/fsdp_engine.py", 746, "forward_backward_batch"),
    ),
    "rollout": (
        "update_weights",
        ("engine/fsdp_engine.py", 616, "update_weights"),
        ("engine/fsdp_engine.py", 1615, "_update_weights_from_distributed"),
    ),
}


class Tree:
    """A YAML tree with overrides, read by dotted names; `${a.b}` is the value of another name."""

    def __init__(self, words: list[str]) -> None:
        file = Path(words[words.index("--config") + 1])
        self._tree: dict[str, Any] = yaml.safe_load(file.read_text())
        for word in words[words.index("--config") + 2 :]:
            key, _, value = word.lstrip("+").partition("=")
            *sections, name = key.split(".")
            place = self._tree
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = yaml.safe_load(value)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, the default where the tree has none."""
        place: Any = self._tree
        for section in name.split("."):
            if isinstance(place, str) and (result := _REFERENCE.match(place)):
                place = self.get(result[1])
            place = place.get(section) if isinstance(place, dict) else None
        if isinstance(place, str) and (result := _REFERENCE.match(place)):
            return self.get(result[1], default)
        return default if place is None else place


class Areal:
    """AReaL 1.0.4 with one controller."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        root = Path(tree.get("recover.fileroot", tree.get("cluster.fileroot")))
        names = Path(tree.get("recover.experiment_name"), tree.get("recover.trial_name"))
        self._recover = root / "checkpoints" / "me" / names / "recover_info"

    def line(self, name: str, text: str, *, level: str = "INFO") -> None:
        """Say a line of AReaL's own logger."""
        say(f"(AReaL) 20260822-10:00:01.700 {name} {level}: {text}")

    def begin(self) -> None:
        cards = "LocalScheduler initialized with GPU devices: [0, 1, 2, 3, 4, 5, 6, 7]"
        self.line("LocalScheduler", f"{cards}, log directory: /out/logs/root/gsm8k-grpo/trial0")
        self._memory("before model creation/loading", 0.52)
        self._memory("after model creation/loading", 7.92)
        self.line("[RemoteInfEngine Rank 0]", "Waiting for server ready...")

    def pool_too_small(self, *, available_gib: float) -> int:
        fraction = self._tree.get("sglang.mem_fraction_static")
        say("[2026-08-22 10:02:12] Scheduler hit an exception: Traceback (most recent call last):")
        say('  File "/opt/areal/sglang/srt/managers/scheduler.py", line 3128, in run_scheduler_process')
        say(
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
            f"Current value: self.server_args.mem_fraction_static={fraction}"
        )
        say("[2026-08-22 10:02:13] Received sigquit from a child process. It usually means the child failed.")
        return 1

    def ready(self, *, resumed: int) -> None:
        self.line("[RemoteInfEngine Rank 0]", "Servers are all ready!")
        if self._tree.get("recover.mode") not in ("on", "auto", True):
            return
        self.line("Recover", f"Loading recover info from {self._recover}")
        if resumed:
            self.line(
                "Recover",
                f"Recovering from StepInfo(epoch=0, epoch_step={resumed}, global_step={resumed}, "
                "steps_per_epoch=29).",
            )
        else:
            self.line(
                "Recover",
                f"Resume info not found at {self._recover}. This should not be a resumed experiment!",
                level="WARNING",
            )

    def out_of_memory(self, short: Shortage) -> int:
        keeps = not self._tree.get("actor.gradient_checkpointing", False)
        phase = "forward" if short.phase == "backward" and keeps else short.phase
        for line in failure(phase, short.text):
            say(line)
        return 1

    def step(self, step: int, *, of: int, seconds: float, tokens: int, peak_gib: float) -> None:
        self._memory("recompute logp", min(peak_gib, 61.9))
        self._memory("compute advantages", min(peak_gib, 61.9))
        self._memory("ppo update", peak_gib)
        if self._due(step):
            self.checkpoint(step)
        epochs = self._tree.get("total_train_epochs", 1)  # total_train_steps ends it before
        self.line(
            "StatsLogger",
            f"Epoch 1/{epochs} Step {step}/{of} Train step {step}/{epochs * of} done.",
        )
        self.line("StatsLogger", "Stats (1/1):")
        say(f"│ timeperf/rollout │ {seconds / 2:.4e} │ timeperf/train_step │ {seconds / 2:.4e} │")

    def checkpoint(self, step: int) -> None:
        write(self._recover / "step_info.json", json.dumps({"global_step": step - 1}))
        folder = self._recover.parent / "default" / "recover_checkpoint"
        self.line("Recover", f"Saved recover checkpoint to {folder} (with_optim=True)")

    def stuck(self, step: int) -> None:
        """The server is dead; every rollout fails and is submitted again."""
        failed = "HTTP request to 10.0.0.7:31022 failed after 3 retries"
        refused = "Cannot connect to host 10.0.0.7:31022 ssl:default [Connect call failed]"
        self.line("WorkflowExecutor", f"Workflow execution failed: {failed}: {refused}", level="ERROR")
        say("Traceback (most recent call last):")
        say('  File "/opt/areal/areal/infra/workflow_executor.py", line 1071, in _execute_workflow')
        say(f"RuntimeError: {failed}")

    def done(self) -> None:
        self.line("StatsLogger", "Training completes! Total time elapsed 9412.44.")

    def saved(self) -> int:
        file = self._recover / "step_info.json"
        if self._tree.get("recover.mode") not in ("on", "auto", True) or not file.exists():
            return 0
        return int(json.loads(file.read_text())["global_step"]) + 1

    def _due(self, step: int) -> bool:
        every = self._tree.get("recover.freq_steps")
        return bool(every) and self._tree.get("recover.mode") in ("on", "auto", True) and step % every == 0

    def _memory(self, what: str, held_gib: float) -> None:
        self.line(
            "IOStruct",
            f"Memory-Usage {what}: memory allocated (GB): {held_gib * 0.9:.2f}, memory reserved (GB): "
            f"{held_gib:.2f}, device memory used/total (GB): {held_gib:.2f}/{CARD_GIB}",
        )


def failure(phase: str, text: str) -> Iterator[str]:
    """Yield what AReaL prints of a failure in a phase, from the worker's traceback to the end."""
    lines = _REAL.read_text().splitlines()
    lines = lines[lines.index("Traceback (most recent call last):") :]
    message = next(line for line in lines if line.startswith("torch.OutOfMemoryError")).partition(": ")[2]
    method, *frames = _FRAMES[phase]
    other = False  # than in the log
    for line in lines:
        if line.startswith("torch.OutOfMemoryError"):
            other = False
        if not other:
            yield line.replace(message, text).replace("ppo_update", method)
        if frames and "in execute_in_engine_thread" in line:
            other = True
            yield from (f'  File "/opt/venv/areal/{file}", line {at}, in {name}' for file, at, name in frames)
            if phase == "backward":
                yield '  File "/opt/venv/torch/autograd/graph.py", line 841, in _engine_run_backward'


def setup_of(tree: Tree) -> Setup:
    """Return what the tree comes to; the engine has cards of its own."""
    return Setup(
        steps=tree.get("total_train_steps"),
        save_every=0,  # AReaL saves before it logs the step
        tokens=tree.get("actor.mb_spec.max_tokens_per_mb", 65536),
        recompute="full" if tree.get("actor.gradient_checkpointing", False) else "off",
        optimizer_offload=tree.get("actor.fsdp.per_layer_optim_step", False)
        or tree.get("actor.fsdp.offload_params", False),
        fraction=tree.get("sglang.mem_fraction_static", 0.8),
        graphs=not tree.get("sglang.disable_cuda_graph", False),
        concurrency=tree.get("sglang.max_running_requests", None) or 256,
    )


if __name__ == "__main__":
    tree = Tree(sys.argv[1:])
    sys.exit(main(setup_of(tree), Areal(tree)))
