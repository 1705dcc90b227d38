"""What the lines of a verl log say about progress."""

from __future__ import annotations

import re

from autotune.policies.values.failure import Phase
from autotune.policies.values.observation import Marker, PhaseStarted, Resumed, Saved, StepDone, TrainingDone

TRACES = (
    "verl.trainer.main_ppo",
    "verl/trainer/",
    "verl/workers/",
    "verl/single_controller/",
    "(TaskRunnerV1 pid=",
    "(WorkerDict pid=",
    "AgentLoopWorkerTQ",
    "actor_rollout_ref.",
    "rllm/trainer/verl",  # rLLM and verl-agent are verl with an agent's loop around it, and take its settings
    "rllm.trainer.verl",
    "rllm/engine/",
    "rllm.engine.",
    "agent_system/",
)

# A step's line as the console logger prints it; numbers are Python's own or numpy's representation.
_STEP = re.compile(r"(?:^|\s)step:(\d{1,12}) - (.*)")
_METRIC = re.compile(
    r"([A-Za-z_][\w./@-]*):(?:np\.\w+\()?(-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|inf|nan))\)?(?= - |\s*$)"
)
_TRAINED = ("training/global_step", "timing_s/step", "perf/time_per_step")
_RESUMED = re.compile(r"Resuming from .*, setting global step to (\d{1,12})")
_SAVING = re.compile(r"Saving checkpoint to \S*global_step_(\d{1,12})\s*$")
_SAVED = re.compile(
    r"Saved (?:extra_state|Huggingface config and tokenizer) to \S*global_step_(\d{1,12})/actor"
)
_PROGRESS = re.compile(r"Training Progress: 100%.*?\| (\d{1,12})/(\d{1,12}) \[")
# Lines between phases (verl/trainer/ppo/v1/trainer_base.py), each with what begins there.
_TURNS: tuple[tuple[str, Phase], ...] = (
    ("create worker group ", Phase.INIT),
    ("actor and ref model engine initialized", Phase.ROLLOUT_INIT),
    ("reward loop manager initialized", Phase.ROLLOUT_INIT),
    ("checkpoint engine manager initialized", Phase.CHECKPOINT),
    ("Training from scratch", Phase.WEIGHT_SYNC),
    ("all initialize finished, ready to fit", Phase.ROLLOUT),
)
# Literals of which one is in every line that says something: most lines are passed over quickly.
_NEEDLES = (
    "step:",
    "Resuming from",
    "Saving checkpoint to",
    "Saved ",
    "Training Progress: 100%",
    "Final validation metrics",
    *(text for text, _ in _TURNS),
)


def marker_of(line: str) -> Marker | None:
    """Return what one line of a verl log says, if anything."""
    if not any(needle in line for needle in _NEEDLES):
        return None
    line = line.rstrip("\r\n").rsplit("\r", 1)[-1]
    if (match := _STEP.search(line)) is not None:
        return _stepped(int(match[1]), match[2])
    if (match := _RESUMED.search(line)) is not None:
        return Resumed(step=int(match[1]))
    if (match := _SAVING.search(line)) is not None:
        return PhaseStarted(phase=Phase.CHECKPOINT, step=int(match[1]))
    if (match := _SAVED.search(line)) is not None:
        return Saved(step=int(match[1]))
    if (match := _PROGRESS.search(line)) is not None:
        return TrainingDone(step=int(match[1])) if match[1] == match[2] else None
    if "Final validation metrics" in line:
        return TrainingDone(step=0)  # the line does not name the step
    return next((PhaseStarted(phase=phase, step=0) for text, phase in _TURNS if text in line), None)


def _stepped(step: int, text: str) -> Marker | None:
    """Return a step; a line without training metrics is the validation that comes before the first one."""
    metrics = {name: float(value) for name, value in _METRIC.findall(text)}
    if not any(name in metrics for name in _TRAINED):
        return None
    seconds = metrics.get("perf/time_per_step", metrics.get("timing_s/step"))
    tokens = metrics.get("perf/total_num_tokens")
    return StepDone(
        step=step,
        seconds=seconds,
        tokens_per_second=tokens / seconds if tokens and seconds else None,
        metrics=metrics,
        saved="timing_s/save_checkpoint" in metrics,
    )
