"""The samples of one step, their advantages, and their recording."""

from pathlib import Path
from typing import NamedTuple

import msgspec

# GRPO divides by the group's deviation; the constant keeps a group without spread at zero advantage.
_EPSILON = 1e-6


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with one answer, as the trainer consumes it."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]  # the engine's
    reward: float
    advantage: float

    @property
    def tokens(self) -> int:
        """Return the length of the sequence."""
        return len(self.prompt) + len(self.response)


class Answer(NamedTuple):
    """What an engine returned for one request, with its reward."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    reward: float


def grouped(answers: list[Answer], *, group: int) -> list[Sample]:
    """Return samples with group-relative advantages; answers to one prompt are neighbours."""
    samples: list[Sample] = []
    for start in range(0, len(answers), group):
        members = answers[start : start + group]
        mean = sum(member.reward for member in members) / len(members)
        variance = sum((member.reward - mean) ** 2 for member in members) / max(1, len(members) - 1)
        scale = variance**0.5 + _EPSILON
        samples += [
            Sample(**member._asdict(), advantage=(member.reward - mean) / scale) for member in members
        ]
    return samples


def record(samples: list[Sample], *, folder: Path, step: int) -> None:
    """Write the samples of a step, for `engine: replay`."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".step-{step:06d}.json"
    temporary.write_bytes(msgspec.json.encode(samples))
    temporary.replace(_path(folder, step))


def replay(*, folder: Path, step: int) -> list[Sample]:
    """Return the recorded samples of a step."""
    return msgspec.json.decode(_path(folder, step).read_bytes(), type=list[Sample])


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.json"
