"""What the lines of an AReaL log say about progress and memory."""

from __future__ import annotations

import re

from autotune.policies.values.failure import Component, Phase
from autotune.policies.values.observation import (
    Marker,
    Peak,
    PhaseEnded,
    PhaseStarted,
    Resumed,
    Saved,
    StepDone,
    StepTokens,
    TrainingDone,
)

GIB = 1 << 30  # AReaL's "GB"

_STEP = re.compile(r"Epoch \d+/\d+ Step \d+/\d+ Train step (\d+)/(\d+) done\.")
# In the table below the line of a step: what the packed micro-batches of all data-parallel ranks held.
# `ppo_actor/n_tokens` counts the padding too, `n_valid_tokens` the responses alone.
_TOKENS = re.compile(r"│\s*ppo_actor/update/n_tokens\s*│\s*([\d.]+(?:e[+-]?\d+)?)\s*│")
_RECOVERING = re.compile(r"Recovering from StepInfo\(.*global_step=(\d+)")
_SAVED = "Saved recover checkpoint"
_DONE = "Training completes! Total time elapsed"
_MEMORY = re.compile(
    r"Memory-Usage (?P<what>[\w /]+): memory allocated \(GB\): [\d.]+, memory reserved \(GB\): [\d.]+, "
    r"device memory used/total \(GB\): (?P<used>[\d.]+)/(?P<total>[\d.]+)"
)
# rl_trainer.py and the engines log these after the work they name; rank 0 of the role speaks.
_WORK: dict[str, tuple[Phase, Component]] = {
    "critic values": (Phase.LOG_PROB, Component.CRITIC),
    "ref logp": (Phase.LOG_PROB, Component.REF),
    "recompute logp": (Phase.LOG_PROB, Component.TRAINER),
    "ppo update": (Phase.BACKWARD, Component.TRAINER),
    "ppo critic update": (Phase.BACKWARD, Component.CRITIC),
    "after model creation/loading": (Phase.INIT, Component.TRAINER),
}
_STARTS = {
    "Memory-Usage before model creation/loading": Phase.INIT,
    "Waiting for server ready...": Phase.ROLLOUT_INIT,
}
_SERVERS_READY = "Servers are all ready!"
_NEEDLES = (
    "Train step",
    "Memory-Usage",
    "Recovering from",
    "server",
    "Servers",
    "Training completes",
    "update/n_tokens",
    _SAVED,
)


def marker(line: str) -> Marker | None:
    """Return what a line says; steps count what is completed, as the log does."""
    if not any(needle in line for needle in _NEEDLES):
        return None
    if step := _STEP.search(line):
        return StepDone(step=int(step[1]), of=int(step[2]))
    if tokens := _TOKENS.search(line):
        return StepTokens(tokens=float(tokens[1]))
    if recovering := _RECOVERING.search(line):
        # It names the next step, counted from 0: as many are completed.
        return Resumed(step=int(recovering[1]))
    if _SAVED in line:
        return Saved(step=None)  # it is written before the line of the step
    if _DONE in line:
        return TrainingDone(step=0)  # the line does not name the step
    for text, phase in _STARTS.items():
        if text in line:
            return PhaseStarted(phase=phase, step=0)
    if _SERVERS_READY in line:
        return PhaseEnded(phase=Phase.ROLLOUT_INIT, step=0, seconds=0.0)
    return _memory(line)


def _memory(line: str) -> Marker | None:
    match = _MEMORY.search(line)
    if match is None or match["what"] not in _WORK:
        return None
    phase, component = _WORK[match["what"]]
    # What the card holds once the work is done; the allocator's reserve bounds the use from above.
    peak = Peak(
        used_bytes=round(float(match["used"]) * GIB),
        capacity_bytes=round(float(match["total"]) * GIB),
        component=component,
        upper_bound=True,
    )
    return PhaseEnded(phase=phase, step=0, seconds=0.0, peak=peak)
