"""Progress in OpenRLHF's logs: steps, the beginnings of phases, checkpoints."""

from __future__ import annotations

import re

from autotune.launchers.frameworks.dialects.printed_dicts import numbers_in
from autotune.policies.values.failure import Phase
from autotune.policies.values.observation import Marker, PhaseEnded, PhaseStarted, Resumed, Saved, StepDone

_STEP = re.compile(r"Global step (\d+): (\{.*\})\s*$")
_BEGUN = (
    (re.compile(r"Generate samples:\s+0%"), Phase.ROLLOUT),
    (re.compile(r"Starting experience making with \d+ samples"), Phase.LOG_PROB),
    (re.compile(r"Train epoch \[\d+/\d+\]:\s+0%"), Phase.FORWARD),
)
_SCORED = "Experience making completed in"
# DeepSpeed prints nothing once a checkpoint is complete: one that has begun counts, so that no remedy that
# would not fit it is taken. A relaunch goes on from the tracker file, which is written last.
_SAVING = re.compile(r"\[Torch\] Checkpoint global_step(\d+) is about to be saved")
_RESUMED = re.compile(r"checkpoint_states: \{.*'global_step': (\d+)")


def marker_of(line: str) -> Marker | None:
    """Return what a line of the log says about progress, if anything."""
    if (done := _STEP.search(line)) is not None:
        return _measured(int(done[1]), done[2])
    for pattern, phase in _BEGUN:
        if pattern.search(line) is not None:
            return PhaseStarted(phase=phase, step=0)
    if _SCORED in line:
        return PhaseEnded(phase=Phase.LOG_PROB, step=0, seconds=0.0)
    if (saving := _SAVING.search(line)) is not None:
        return Saved(step=int(saving[1]))
    resumed = _RESUMED.search(line)
    return Resumed(step=int(resumed[1])) if resumed is not None and int(resumed[1]) else None


def _measured(step: int, text: str) -> Marker | None:
    """Return a completed step; its tokens are the mean length times the samples of the rollout."""
    numbers = numbers_in(text)
    if numbers is None:
        return None
    seconds = numbers.get("timing/step_total")
    tokens = numbers.get("total_length", 0.0) * numbers.get("rollout/num_samples", 0.0)
    return StepDone(
        step=step,
        seconds=seconds,
        tokens_per_second=tokens / seconds if tokens and seconds else None,
        metrics=numbers,
    )
