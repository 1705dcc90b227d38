"""What the look-alikes have in common: memory as a formula of the settings, steps, checkpoints, faults."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, Protocol

from tests.lookalikes.card import FOLDER, Card

CARD_GIB = 79.11
LONGEST_AT = 3  # the step whose sequences are as long as the job allows
FAULT = "LOOKALIKE_FAULT"  # in the environment of a job: what goes wrong, such as hang@2
PACE = "LOOKALIKE_STEP_S"  # the seconds of a step at its fastest
_SHORTER = 0.5  # of the budget is filled by the steps before
_NOTICED_S = 3.0  # after which a new process has been sampled
_BUSY_S = 0.05  # half of the time a peer works: that is enough to be seen
_STATE_GIB = {"weights": 7.0, "gradients": 7.0, "optimizer": 21.0}
_ENGINE_GIB, _GRAPHS_GIB, _LEAST_POOL_GIB = 8.0, 2.0, 1.75
_LOGITS_MIB = 0.58  # of a token, in the loss and in scoring
_ACTIVATIONS_MIB = {"off": 2.4, "selective": 1.2, "full": 0.35}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a framework's settings come to."""

    steps: int
    save_every: int  # 0: never
    tokens: int  # of one training pass
    score_tokens: int = 0  # of one scoring pass; 0: as in training
    critic_tokens: int = 0  # of one pass of a critic whose state is as large as the actor's; 0: there is none
    recompute: str = "full"
    activation_offload: bool = False
    optimizer_offload: bool = False
    fraction: float = 0.5
    engine_on_card: bool = False  # while the trainer works
    trainer_on_card: bool = False  # while the engine works
    graphs: bool = True
    concurrency: int = 128


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """An allocation that does not fit."""

    phase: str
    step: int
    asked_gib: float
    held_gib: float

    @property
    def text(self) -> str:
        """torch's own sentence, with figures that add up."""
        free = CARD_GIB - self.held_gib
        cached, outside = 0.62, 0.55
        return (
            f"CUDA out of memory. Tried to allocate {self.asked_gib:.2f} GiB. GPU 0 has a total capacity of "
            f"{CARD_GIB:.2f} GiB of which {free:.2f} GiB is free. Including non-PyTorch memory, this process "
            f"has {self.held_gib:.2f} GiB memory in use. Of the allocated memory "
            f"{self.held_gib - cached - outside:.2f} GiB is allocated by PyTorch, and {cached:.2f} GiB is "
            "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
            "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


class Voice(Protocol):
    """How one framework says what happens to it, and where it keeps its checkpoints."""

    def begin(self) -> None:
        """Say what comes before anything is loaded."""

    def pool_too_small(self, *, available_gib: float) -> int:
        """Die because the pool cannot hold one sequence; returns the exit code."""

    def ready(self, *, resumed: int) -> None:
        """Say that training begins after step `resumed`."""

    def out_of_memory(self, short: Shortage) -> int:
        """Die as the framework does; returns the exit code."""

    def step(self, step: int, *, of: int, seconds: float, tokens: int, peak_gib: float) -> None:
        """Say that a step is complete."""

    def checkpoint(self, step: int) -> None:
        """Write a checkpoint and say so."""

    def stuck(self, step: int) -> None:
        """Say what a run says again and again that makes no step any more."""

    def done(self) -> None:
        """Say that the training is complete."""

    def saved(self) -> int:
        """Return the step of the checkpoint that the settings say to continue; 0 where there is none."""


def main(setup: Setup, voice: Voice) -> int:
    """Train as the settings say; returns the exit code."""
    fault, at = _fault()
    voice.begin()
    card = Card() if FOLDER in os.environ else None
    if card is not None:
        say(f"card {card.index}")
    if card is not None and fault == "card" and card.index == at:  # it is broken
        setup = replace(setup, tokens=1_000_000)
    pool = CARD_GIB * setup.fraction - _ENGINE_GIB - (_GRAPHS_GIB if setup.graphs else 0.0)
    if pool < _LEAST_POOL_GIB:
        return voice.pool_too_small(available_gib=pool)
    engine = CARD_GIB * setup.fraction
    resumed = 0 if fault == "forget" else voice.saved()
    short = _load(setup, engine_gib=engine, step=resumed) if fault == "load" and resumed else None
    if short is not None:
        return voice.out_of_memory(short)
    voice.ready(resumed=resumed)
    for step in range(resumed + 1, setup.steps + 1):
        if fault == "hang" and step == at and not resumed:  # once: a server died
            _hang(voice, step)
        if fault == "early" and step == at:
            return 0
        share = (step - resumed) / at if fault == "leak" else 0.0  # of what the process may leak
        full = fault == "optimizer" and step == at
        short, peak = _passes(setup, engine_gib=engine, step=step, leaked=share, full=full)
        if card is not None:
            card.fill(peak)
        if short is not None and fault == "rank":
            _wait_for_failed_rank(short)
        if short is not None:
            code = voice.out_of_memory(short)
            return 0 if fault == "swallow" else code
        seconds = _seconds(setup)
        time.sleep(seconds)
        voice.step(step, of=setup.steps, seconds=seconds, tokens=4096, peak_gib=peak)
        if setup.save_every and (step % setup.save_every == 0 or step == setup.steps):
            voice.checkpoint(step)
    voice.done()
    return 0


def _hang(voice: Voice, step: int) -> NoReturn:
    while True:
        voice.stuck(step)
        time.sleep(0.5)


def _wait_for_failed_rank(short: Shortage) -> NoReturn:
    """Let a rank of its own process print why it failed and live on, idle, and wait for it in a busy loop."""
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    time.sleep(_NOTICED_S)
    for line in (
        "Traceback (most recent call last):",
        '  File "/opt/venv/lib/python3.11/site-packages/torch/_tensor.py", line 648, in backward',
        "    torch.autograd.backward(",
        f"torch.OutOfMemoryError: {short.text}",
    ):
        say(f"(WorkerDict pid={rank.pid}) {line}")
    while True:
        busy_until = time.monotonic() + _BUSY_S
        while time.monotonic() < busy_until:
            pass
        time.sleep(_BUSY_S)


def _load(setup: Setup, *, engine_gib: float, step: int) -> Shortage | None:
    """Return what does not fit of a checkpoint whose tensors pass through the card, beside a new engine."""
    held = _STATE_GIB["weights"] + (0.0 if setup.optimizer_offload else _STATE_GIB["optimizer"])
    if engine_gib + 2 * held <= CARD_GIB:
        return None
    return Shortage(phase="load", step=step, asked_gib=0.62, held_gib=CARD_GIB - 0.4)


def _passes(
    setup: Setup, *, engine_gib: float, step: int, leaked: float = 0.0, full: bool = False
) -> tuple[Shortage | None, float]:
    """Return the first pass of a step that does not fit, and the most memory that the passes need.

    `leaked` is the share of what a backward pass leaves free that the trainer has leaked. With `full` the
    card has room for an optimizer's step only where its state is offloaded.
    """
    peak = 0.0
    for phase, held, asked in _demands(setup, engine_gib=engine_gib, step=step):
        held += leaked * (CARD_GIB - held - asked) if phase == "backward" else 0.0
        if held + asked > CARD_GIB:
            # The pass fails at its last large tensor: the others are held by then.
            last = asked * 0.15
            held_gib = min(held + asked - last, CARD_GIB - min(0.4 * last, 1.0))
            return Shortage(phase=phase, step=step, asked_gib=last, held_gib=held_gib), CARD_GIB
        peak = max(peak, held + asked)
    if full and not setup.optimizer_offload:
        return Shortage(phase="optimizer", step=step, asked_gib=0.62, held_gib=CARD_GIB - 0.4), CARD_GIB
    return None, peak


def _demands(setup: Setup, *, engine_gib: float, step: int) -> Iterator[tuple[str, float, float]]:
    filled = 1.0 if step >= LONGEST_AT else _SHORTER
    state = dict(_STATE_GIB)
    if setup.optimizer_offload:
        state["optimizer"] = 0.0
    resident = (state["weights"] + state["optimizer"]) * (2 if setup.critic_tokens else 1)
    engine = engine_gib if setup.engine_on_card else 0.0
    yield "rollout", (resident if setup.trainer_on_card else 0.0), engine_gib + 1.0
    scored = (setup.score_tokens or setup.tokens) * filled * (_LOGITS_MIB + 0.1) / 1024
    yield "log_prob", resident + engine, scored
    if setup.critic_tokens:  # its head has one output: no logits
        kept = setup.critic_tokens * filled * _ACTIVATIONS_MIB["full"] / 1024
        yield "critic", resident + state["gradients"] + engine, kept
    activations = _ACTIVATIONS_MIB[setup.recompute] * (0.4 if setup.activation_offload else 1.0)
    trained = setup.tokens * filled * (activations + 2 * _LOGITS_MIB) / 1024
    yield "backward", resident + state["gradients"] + engine, trained


def _seconds(setup: Setup) -> float:
    """Return what a step takes: small passes, recomputation, offload and a short queue cost time."""
    slower = 1.0 + 8192 / setup.tokens
    slower += {"off": 0.0, "selective": 0.15, "full": 0.3}[setup.recompute]
    slower += (0.4 if setup.optimizer_offload else 0.0) + (0.3 if setup.activation_offload else 0.0)
    slower += 32 / max(1, setup.concurrency) + max(0.0, 0.6 - setup.fraction)
    return float(os.environ.get(PACE, "0.05")) * slower


def _fault() -> tuple[str, int]:
    name, _, at = os.environ.get(FAULT, "").partition("@")
    return name, int(at or 0)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def write(path: Path, text: str) -> None:
    """Write a small file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def number(path: Path) -> int:
    """Return the number that a file holds; 0 where there is no file."""
    return int(path.read_text()) if path.exists() else 0
