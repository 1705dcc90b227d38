"""Looks like `python -m relax.entrypoints.train`."""

from __future__ import annotations

import sys

from tests.lookalikes.core import Shortage, main, say
from tests.lookalikes.megatron import RANK, Trainer, parse, setup_of

_ACTOR, _ROLLOUT = "(Actor pid=3801)", "(Rollout pid=3802)"


class Relax(Trainer):
    """Relax without its health check: services that report to a controller."""

    package = "Relax"
    actor, model = "megatron/actor.py", "megatron/model.py"

    def info(self, source: str, text: str, *, who: str = RANK) -> None:
        module = source.replace(".py:", ":")
        say(f"{who} 2026-08-22 10:00:12 | INFO | {module} {text}")

    def error(self, source: str, text: str, *, who: str = "") -> None:
        """Say a line at the level of errors."""
        say(f"{who} 2026-08-22 10:00:12 | ERROR | {source} {text}".lstrip())

    def ready(self, *, resumed: int) -> None:
        super().ready(resumed=resumed)
        self.info("actor:79", f"Actor initialized with starting step {resumed}", who=_ACTOR)

    def step(self, step: int, *, of: int, seconds: float, tokens: int, peak_gib: float) -> None:
        rollout = step - 1
        self.info("rollout:141", f"Start rollout {rollout}/{of}", who=_ROLLOUT)
        self.rollout(rollout)
        self.info("rollout:166", f"Finish rollout {rollout}/{of}", who=_ROLLOUT)
        self.info("actor:168", f"Actor training step {rollout}/{of}", who=_ACTOR)
        self.info("memory_utils:53", self.memory_of("before wake_up model"))
        self.trained(rollout, seconds=seconds, tokens=tokens)
        self.info("memory_utils:53", self.memory_of("before update_weights"))
        self.info("memory_utils:53", self.memory_of("after update_weights"))
        self.info("actor:172", f"Actor training completed step {rollout}/{of}", who=_ACTOR)

    def out_of_memory(self, short: Shortage) -> int:
        step, of = short.step - 1, self._flags.num_rollout
        self.info("actor:168", f"Actor training step {step}/{of}", who=_ACTOR)
        self.error("actor:188", f"Actor training failed at step {step}: {self.task()}", who=_ACTOR)
        for line in self.frames(short):
            say(f"{_ACTOR} {line}")
        if self._flags.use_health_check:
            raise SystemExit("the look-alike does not restart itself")
        self.error("controller:512", "Service task failed: RayTaskError(OutOfMemoryError)")
        self.error("train:88", "Training loop failed with error: RayTaskError(OutOfMemoryError)")
        return 1

    def stuck(self, step: int) -> None:
        """A rollout failed; in colocate nobody looks, and the trainer polls for its data for ever."""
        where = "Rollout generation failed at step"
        self.error(
            "rollout:201",
            f"{where} {step - 1}: RayTaskError(ConnectionError): ray::RolloutManager.generate() (pid=4104)",
            who=_ROLLOUT,
        )
        say(f"{_ROLLOUT} ConnectionError: Cannot reach 10.0.0.7:15000/flush_cache")
        self.info(
            "actor:901",
            f"Rollout {step - 1}: still waiting for data system to catch up after 600s, possibly hang",
        )

    def done(self) -> None:
        self.info("actor:160", "All training steps finished", who=_ACTOR)
        say("2026-08-22 10:00:15 | INFO | train:92 Main func successfully")


if __name__ == "__main__":
    flags = parse(sys.argv[1:])
    scoring = flags.log_probs_max_tokens_per_gpu or flags.max_tokens_per_gpu
    sys.exit(main(setup_of(flags, score_tokens=scoring), Relax(flags)))
