"""Progress in the log of any training script, from unambiguous lines only."""

from __future__ import annotations

import ast
import re

from autotune.policies.values.observation import Marker, Resumed, Saved, StepDone, TrainingDone

_COUNT = r"(?P<step>\d+)(?:\s*/\s*(?P<of>\d+))?"
_STEP = re.compile(
    r"(?:^|[\s|\]:(,])(?:train(?:ing)?[ _/])?(?:(?P<plain>step|iteration|iter)|global[ _]step)\s*[:=]?\s*"
    + _COUNT
    + r"(?![\d.%])",
    re.IGNORECASE,
)
# Steps of something other than training, or of the future.
_OTHER = re.compile(
    r"\b(eval|valid|test|infer|warm|load|download|prepro|token|compil|captur|init|denois|decod|prefill|generat|"
    r"rollout|sampl|sub|micro|mini|optim|before|after|every|until|starting|start|from|resum|sav|checkpoint|max)",
    re.IGNORECASE,
)
_DICT = re.compile(r"\{'[^{}]*\}")
_SECONDS = re.compile(r"elapsed time per iteration \(ms\):\s*([\d.]+)")
_SPEED = re.compile(r"\b(?:tokens_per_second|tokens/s(?:ec)?)\s*[:=]\s*([\d.]+)")
_SCORE = re.compile(
    r"(?<![\w/.\-])((?:[\w.\-]+/)*(?:loss|rewards?|scores?)(?:/(?:mean|avg))?)(?:[ \t]*[:=][ \t]*|[ \t]+)"
    r"(-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?![\w%])"
)
_SAVED = re.compile(
    r"successfully saved checkpoint (?:from|at) (?:iteration|step)\s+(\d+)|"
    r"\b(?:saved|wrote) (?:a |the )?checkpoint (?:at|after|of|for) (?:global )?(?:step|iteration)\s+(\d+)|"
    r"\bcheckpoint (?:saved|written) (?:at|after|of|for) (?:global )?(?:step|iteration)\s+(\d+)",
    re.IGNORECASE,
)
_RESUMED = re.compile(
    r"successfully loaded checkpoint from .* at iteration\s+(\d+)|"
    r"continuing training from global step\s+(\d+)|"
    r"\bresum(?:ed|ing) (?:training )?(?:from|at) (?:global )?step\s+(\d+)",
    re.IGNORECASE,
)
_NEEDLES = (b"step", b"iter", b"train_runtime")


def marks(text: bytes) -> bool:
    """Return whether any line of a text may report progress."""
    lower = text.lower()
    return any(needle in lower for needle in _NEEDLES)


def marker(line: str) -> Marker | None:
    """Return the progress that a line reports; None if it may mean something else."""
    lower = line.lower()
    if "step" not in lower and "iter" not in lower and "train_runtime" not in lower:
        return None
    if saved := _SAVED.search(line):
        return Saved(step=_first(saved))
    if resumed := _RESUMED.search(line):
        return Resumed(step=_first(resumed))
    record = _record(line)
    if record is not None:
        return record
    match = _STEP.search(line)
    if match is None or _OTHER.search(line[: match.start("step")]):
        return None
    if match["plain"] and match["of"] is None and ":" not in match[0] and "=" not in match[0]:
        return None  # "step 3" is prose as often as progress
    seconds, speed = _SECONDS.search(line), _SPEED.search(line)
    return StepDone(
        step=int(match["step"]),
        of=int(match["of"]) if match["of"] else None,
        seconds=float(seconds[1]) / 1000 if seconds else None,
        tokens_per_second=float(speed[1]) if speed else None,
        metrics={score[1]: float(score[2]) for score in _SCORE.finditer(line)},
    )


def _record(line: str) -> Marker | None:
    """Return the progress in a logged dictionary, such as the Hugging Face Trainer's."""
    match = _DICT.search(line)
    if match is None:
        return None
    try:
        record = ast.literal_eval(match[0])
    except (ValueError, SyntaxError):
        return None
    if not isinstance(record, dict):
        return None
    if "train_runtime" in record:
        return TrainingDone(step=_whole(record.get("step")) or 0)
    step = _whole(record.get("global_step", record.get("step")))
    if step is None or any(str(key).startswith("eval") for key in record):
        return None
    numbers = {str(k): float(v) for k, v in record.items() if isinstance(v, int | float)}
    return StepDone(step=step, metrics={k: v for k, v in numbers.items() if k not in ("step", "global_step")})


def _whole(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and float(value).is_integer() else None


def _first(match: re.Match[str]) -> int:
    return int(next(group for group in match.groups() if group))
