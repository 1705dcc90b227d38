"""The log lines of the main program, one each and flushed: an interface that others parse."""

import sys
from typing import Literal, NamedTuple

from autotune.launchers.builtin.process.records import CureRecord

Component = Literal["trainer", "rollout"]


class Usage(NamedTuple):
    """What a phase cost."""

    seconds: float
    peak_bytes: int  # above the baseline, of the worst process
    budget_bytes: int  # of the same process; 0: unlimited

    @property
    def pressure(self) -> tuple[float, int]:
        """Return how close the process came to its budget; processes without one compare by their peaks."""
        return (self.peak_bytes / self.budget_bytes if self.budget_bytes else 0.0, self.peak_bytes)


class StepFigures(NamedTuple):
    """The numbers of a step line."""

    seconds: float
    tokens: int
    reward: float
    loss: float
    kl: float
    clip_fraction: float
    grad_norm: float
    logprob_gap: float


def phase_start(name: str, *, step: int) -> None:
    """Say that a phase starts."""
    say(f"phase start name={name} step={step}")


def phase_end(name: str, *, step: int, component: Component, usage: Usage) -> None:
    """Say that a phase ended, and what it cost."""
    say(
        f"phase end name={name} step={step} seconds={usage.seconds:.3f} component={component} "
        f"peak_bytes={usage.peak_bytes} budget_bytes={usage.budget_bytes}"
    )


def cured(record: CureRecord) -> None:
    """Say that a phase starts again in smaller micro-batches."""
    say(
        f"cured in place phase={record.phase} step={record.step} rank={record.rank} "
        f"knob={record.knob} before={record.before} after={record.after}"
    )


def step_done(step: int, *, of: int, figures: StepFigures) -> None:
    """Say what a step achieved."""
    rate = figures.tokens / figures.seconds
    say(
        f"step {step}/{of} seconds={figures.seconds:.3f} tokens={figures.tokens} "
        f"tokens_per_second={rate:.1f} reward={figures.reward:.6f} "
        f"loss={figures.loss:.9g} kl={figures.kl:.9g} clip_fraction={figures.clip_fraction:.6g} "
        f"grad_norm={figures.grad_norm:.9g} logprob_gap={figures.logprob_gap:.3g}"
    )


def say(text: str) -> None:
    """Write one line of the program."""
    sys.stdout.write(f"builtin: {text}\n")
    sys.stdout.flush()
