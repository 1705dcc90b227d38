"""Looks like transformers' Trainer: callbacks, phases as methods, checkpoints, and memory by formula."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.lookalikes.core import Setup, Shortage, main, say, write


class TrainerCallback:
    """What the entry's callback derives from."""


class _Worker:
    """Something with a method that is a phase."""

    def step(self) -> None:
        """Of an optimizer."""

    def backward(self) -> None:
        """Of the accelerator."""


class Trainer:
    """A trainer of GRPO; a framework says what the sizes are and how it dies."""

    def __init__(self, setup: Setup, args: SimpleNamespace) -> None:
        self.setup = setup
        self.args = args
        self.state = SimpleNamespace(global_step=0, max_steps=setup.steps, num_input_tokens_seen=0)
        self.accelerator, self.optimizer = _Worker(), _Worker()
        self._control = SimpleNamespace(should_training_stop=False)
        self._callbacks: list[Any] = []
        self._resumed = 0

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        """Train as the settings say, and exit."""
        if resume_from_checkpoint:
            state = Path(resume_from_checkpoint, "trainer_state.json")
            self._resumed = int(state.read_text())
        sys.exit(main(self.setup, self))

    def training_step(self, model: Any, inputs: Any) -> None:
        """One pass; the formula knows of none."""

    def add_callback(self, callback: Any) -> None:
        self._callbacks.append(callback)

    def _tell(self, event: str) -> None:
        for callback in self._callbacks:
            hook = getattr(callback, event, None)
            if hook is not None:
                hook(self.args, self.state, self._control)

    # Phases, in the order of a step; the entry puts itself around them.

    def _generate(self) -> None: ...

    def _get_per_token_logps_and_entropies(self) -> None: ...

    def compute_loss(self) -> None: ...

    def _save_checkpoint(self) -> None:
        write(self._checkpoint / "trainer_state.json", str(self.state.global_step))

    @property
    def _checkpoint(self) -> Path:
        return Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"

    def _until(self, phase: str) -> None:
        """Go through the phases of a step up to one."""
        for name, call in (
            ("rollout", self._generate),
            ("log_prob", self._get_per_token_logps_and_entropies),
            ("forward", self.compute_loss),
            ("backward", self.accelerator.backward),
            ("optimizer", self.optimizer.step),
        ):
            call()
            if name == phase:
                return

    # How it says what happens; see Voice.

    def begin(self) -> None:
        say("Loading checkpoint shards: 100%|##########| 4/4 [00:05<00:00,  1.31s/it]")

    def ready(self, *, resumed: int) -> None:
        self.state.global_step = resumed
        self._tell("on_train_begin")

    def step(self, step: int, *, of: int, seconds: float, tokens: int, peak_gib: float) -> None:
        self._tell("on_step_begin")
        self._until("optimizer")
        self.state.global_step = step
        self.state.num_input_tokens_seen += tokens
        self._tell("on_step_end")
        say(f"{{'loss': '0.0123', 'reward': '0.5', 'global_step/max_steps': '{step}/{of}'}}")

    def checkpoint(self, step: int) -> None:
        self._save_checkpoint()
        self._tell("on_save")

    def done(self) -> None:
        self._tell("on_train_end")

    def saved(self) -> int:
        return self._resumed

    def stuck(self, step: int) -> None:
        self._generate()
        say("INFO 09-03 10:02:11 [loggers.py:127] Engine 000: Running: 0 reqs, Waiting: 8 reqs")

    def out_of_memory(self, short: Shortage) -> int:
        raise NotImplementedError

    def pool_too_small(self, *, available_gib: float) -> int:
        raise NotImplementedError
