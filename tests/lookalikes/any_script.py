"""A training script of nobody's framework: a few arguments, plain lines."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.lookalikes.core import Setup, Shortage, main, number, say, write


class Script:
    """A script that prints its steps and dies with torch's own traceback."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._file = Path(options.save_to) / "step.txt"

    def begin(self) -> None:
        say("loading the model")

    def pool_too_small(self, *, available_gib: float) -> int:
        say("Traceback (most recent call last):")
        say('  File "/opt/vllm/v1/core/kv_cache_utils.py", line 698, in check_enough_kv_cache_memory')
        say(
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` "
            "when initializing the engine."
        )
        return 1

    def ready(self, *, resumed: int) -> None:
        if resumed:
            say(f"resuming training from step {resumed}")

    def out_of_memory(self, short: Shortage) -> int:
        say("Traceback (most recent call last):")
        say('  File "/home/me/train.py", line 88, in <module>')
        if short.phase == "backward":
            say('  File "/home/me/train.py", line 61, in train\n    loss.backward()')
            say('  File "/opt/torch/autograd/graph.py", line 829, in _engine_run_backward')
        elif short.phase == "log_prob":
            say('  File "/home/me/train.py", line 40, in compute_log_prob')
        else:
            say('  File "/home/me/train.py", line 31, in generate')
        say(f"torch.OutOfMemoryError: {short.text}")
        return 1

    def step(self, step: int, *, of: int, seconds: float, tokens: int, peak_gib: float) -> None:
        say(f"step {step}/{of} loss: 0.42 tokens_per_second: {tokens / seconds:.1f}")

    def checkpoint(self, step: int) -> None:
        write(self._file, str(step))
        say(f"saved checkpoint at step {step}")

    def stuck(self, step: int) -> None:
        say("waiting for rollouts")

    def done(self) -> None:
        say("bye")

    def saved(self) -> int:
        return number(self._file) if self._options.resume else 0


def parse(words: list[str]) -> argparse.Namespace:
    """Return the script's options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--fraction", type=float, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--save-to", required=True)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args(words)


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    setup = Setup(
        steps=options.steps,
        save_every=1,
        tokens=options.tokens,
        recompute="full" if options.recompute else "off",
        fraction=options.fraction,
        concurrency=options.concurrency,
    )
    sys.exit(main(setup, Script(options)))
