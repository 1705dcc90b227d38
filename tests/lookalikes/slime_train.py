"""Looks like slime's `train.py`."""

from __future__ import annotations

import sys

from tests.lookalikes.core import Shortage, main, say
from tests.lookalikes.megatron import Trainer, parse, setup_of


class Slime(Trainer):
    """slime 0.3.1: timers at INFO, a plain traceback at the end."""

    package = "slime"

    def step(self, step: int, *, of: int, seconds: float, tokens: int, peak_gib: float) -> None:
        self.rollout(step - 1)
        for timer in ("wake_up", "log_probs", "actor_train"):
            self._timer(timer, seconds / 4)
        self.trained(step - 1, seconds=seconds, tokens=tokens)
        self._timer("update_weights", 0.01)

    def out_of_memory(self, short: Shortage) -> int:
        for timer in ("log_probs", "actor_train")[: 1 + (short.phase == "backward")]:
            self.info("timer.py:24", f"Timer {timer} start")
        say("Traceback (most recent call last):")
        say(f'  File "/root/{self.package}/train.py", line 112, in <module>')
        say(f'  File "/root/{self.package}/train.py", line 75, in train')
        say(f"ray.exceptions.{self.task()}")
        for line in self.frames(short):
            say(line)
        return 1

    def stuck(self, step: int) -> None:
        say("(RolloutManager pid=3805) Rollout generation:  25%|##5       | 64/256 [00:31<01:33,  2.79it/s]")

    def done(self) -> None:
        """slime says nothing at its end."""

    def _timer(self, name: str, seconds: float) -> None:
        self.info("timer.py:24", f"Timer {name} start")
        self.info("timer.py:32", f"Timer {name} end (elapsed: {seconds:.1f}s)")


if __name__ == "__main__":
    flags = parse(sys.argv[1:])
    sys.exit(main(setup_of(flags, score_tokens=flags.max_tokens_per_gpu), Slime(flags)))
