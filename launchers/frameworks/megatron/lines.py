"""Progress in the logs of slime, Relax and miles: timers, metric lines, checkpoints."""

from __future__ import annotations

import re

from autotune.launchers.frameworks.dialects.printed_dicts import numbers_in
from autotune.policies.values.failure import Phase
from autotune.policies.values.observation import (
    Marker,
    PhaseEnded,
    PhaseStarted,
    Resumed,
    Saved,
    StepDone,
    TrainingDone,
    UpdateDone,
)

# Peaks are printed by none: their `Memory-Usage` lines are taken at quiet moments, between the phases.
_TIMER = re.compile(r"Timer (?P<name>\w+) (?:(?P<start>start)\b|end \(elapsed: (?P<seconds>[\d.]+)s\))")
_TIMERS = {
    "init_actor": Phase.INIT,
    "data_preprocess": Phase.DATA,
    "train_get_data": Phase.DATA,
    "ref_log_probs": Phase.LOG_PROB,
    "teacher_log_probs": Phase.LOG_PROB,
    "log_probs": Phase.LOG_PROB,
    "actor_train": Phase.FORWARD,  # with backward and the optimizer's step
    "wake_up": Phase.WEIGHT_SYNC,
    "update_weights": Phase.WEIGHT_SYNC,
    "update_weights_fully_async": Phase.WEIGHT_SYNC,
    "save_model": Phase.CHECKPOINT,
}
_METRICS = re.compile(r"\bperf (?P<step>\d+): (?P<values>\{.*\})\s*$")
# Of an actor's update; a step has as many as batches of --global-batch-size in its rollout.
_UPDATE = re.compile(r"\bstep \d+: \{.*?'train/loss': (?P<loss>-?\d[\d.]*(?:e[+-]?\d+)?)[,}]")
_SYNC = re.compile(r"Memory-Usage (?P<end>before|after) update_weights\b")
_TRAINING = re.compile(r"\bActor training (?:(?P<end>completed) )?step (?P<step>\d+)/\d+")
_GENERATION = re.compile(r"Rollout generation:\s+0%|\bStart rollout (?P<step>\d+)/\d+")
_GENERATED = re.compile(r"\bFinish rollout(?: (?P<step>\d+)/\d+|:)")
# Iterations count from 0; a start from other weights, as for the reference, is loaded as iteration 0.
_SAVED = re.compile(r"successfully saved checkpoint from iteration\s+(?P<step>\d+)")
_LOADED = re.compile(
    r"successfully loaded checkpoint from .* at iteration (?P<step>\d+)|"
    r"Actor initialized with starting step (?P<next>\d+)"
)
_DONE = re.compile(r"All training steps finished")


def marker_of(line: str) -> Marker | None:
    """Return what a line of the log says about progress, if anything."""
    if (timed := _TIMER.search(line)) is not None:
        return _timed(timed)
    if (metrics := _METRICS.search(line)) is not None:
        return _measured(int(metrics["step"]), metrics["values"])
    if (updated := _UPDATE.search(line)) is not None:
        return UpdateDone(loss=float(updated["loss"]))
    if (synced := _SYNC.search(line)) is not None:
        return _border(Phase.WEIGHT_SYNC, 0, ends=synced["end"] == "after")
    if (trained := _TRAINING.search(line)) is not None:
        return _border(Phase.FORWARD, int(trained["step"]) + 1, ends=trained["end"] is not None)
    if (begun := _GENERATION.search(line)) is not None:
        return PhaseStarted(phase=Phase.ROLLOUT, step=int(begun["step"] or -1) + 1)
    if (ended := _GENERATED.search(line)) is not None:
        return PhaseEnded(phase=Phase.ROLLOUT, step=int(ended["step"] or -1) + 1, seconds=0.0)
    if (saved := _SAVED.search(line)) is not None:
        return Saved(step=int(saved["step"]) + 1)
    if (loaded := _LOADED.search(line)) is not None:
        step = int(loaded["next"]) if loaded["next"] else int(loaded["step"]) + 1
        return Resumed(step=step) if step > 1 or loaded["next"] == "1" else None
    return TrainingDone(step=0) if _DONE.search(line) else None


def _border(phase: Phase, step: int, *, ends: bool) -> Marker:
    return PhaseEnded(phase=phase, step=step, seconds=0.0) if ends else PhaseStarted(phase=phase, step=step)


def _timed(match: re.Match[str]) -> Marker | None:
    phase = _TIMERS.get(match["name"])
    if phase is None:
        return None
    if match["start"]:
        return PhaseStarted(phase=phase, step=0)
    return PhaseEnded(phase=phase, step=0, seconds=float(match["seconds"]))


def _measured(step: int, text: str) -> Marker | None:
    """Return the end of a rollout or of a step: both sides print a line of the same kind."""
    values = numbers_in(text)
    if values is None:
        return None
    numbers = {name.removeprefix("perf/"): value for name, value in values.items()}
    if "train_time" not in numbers and "step_time" not in numbers:
        if "rollout_time" not in numbers:
            return None
        return PhaseEnded(phase=Phase.ROLLOUT, step=step + 1, seconds=numbers["rollout_time"])
    seconds = numbers.get("step_time")
    return StepDone(
        step=step + 1, seconds=seconds, tokens_per_second=_throughput(numbers, seconds), metrics=numbers
    )


def _throughput(numbers: dict[str, float], seconds: float | None) -> float | None:
    """Return tokens per second of the whole step, where its tokens can be told."""
    rate, trained = numbers.get("actor_train_tok_per_s"), numbers.get("actor_train_time")
    if rate is not None and trained is not None and seconds:
        return rate * trained / seconds
    return numbers.get("step_token_per_s")
