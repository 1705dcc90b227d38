"""Jobs that train, and whose output quotes failures: every signature, at every place, in every format."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from autotune.launchers import frameworks
from autotune.launchers.base import Chunk, Exit, Observed
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.driver.monitor import AttemptMonitor
from autotune.orchestrator.run.directory import AttemptFolder
from autotune.policies.diagnosis.rules.catalogue import RULES
from autotune.policies.diagnosis.rules.rule import Rule
from autotune.policies.values.events import Event
from autotune.policies.values.observation import ProcessMemory, Sample
from tests.orchestrator.scripted import JOB

STEPS = 3
STEP_S = 150.0
LONG_STEP_S = 500.0  # of the last one, with a validation
_PERIOD_S = 4.0
_STARTUP_S = 120.0
MAIN, TRAINER, REWARD, SCORE = 40, 1234, 77, 88
_ROOT = Path(__file__).parents[3]
_LOGS = _ROOT / "tests" / "policies" / "logs"

JOBS = {
    "verl": "name: q\nframework: verl\nsettings:\n  trainer.total_training_steps: 3\n"
    "  actor_rollout_ref.rollout.name: vllm\n  actor_rollout_ref.actor.use_dynamic_bsz: true\n",
    "areal": f"name: q\nframework: areal\nconfig: {_ROOT}/configs/areal/gsm8k.yaml\n"
    "command: [python, train.py]\n",
    "slime": "name: q\nframework: slime\nsettings: {colocate: true, num-rollout: 3}\n",
    "relax": "name: q\nframework: relax\nsettings: {colocate: true, num-rollout: 3}\n",
    "builtin": JOB,
    "command": "name: q\nframework: command\ncommand: [python, train.py]\n",
}
PLACES = (
    "line start",
    "ray prefix",
    "response",
    "verdict",
    "prompt",
    "tool output",
    "json",
    "traceback",
    "ray summary",
)


@dataclass(frozen=True)
class Format:
    """How one framework prints: a line of its logger, what begins a step and what ends it."""

    logged: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    ends: str


_VERL = "\x1b[36m(TaskRunnerV1 pid=412807)\x1b[0m "
_SLIME = "(MegatronTrainRayActor pid=2301) "
_AREAL = "(AReaL) 20260301-10:00:00.123 "
_KILLED = (
    "(raylet) 4 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other "
    "reasons at node (ID: 5d1a, IP: 10.0.0.2) over the last time period."
)
_RETRY = (
    "(raylet) Task compute_score failed. There are 2 retries remaining, so the task will be retried. Error: "
    "The worker died unexpectedly while executing this task."
)
FORMATS = {
    "verl": Format(
        _VERL + "{}",
        (),
        (
            _VERL + "step:{step} - training/global_step:{step} - timing_s/step:{seconds} - "
            "perf/time_per_step:{seconds} - perf/total_num_tokens:90000",
        ),
        _VERL + "Training Progress: 100%|##########| 3/3 [12:30<00:00]",
    ),
    "areal": Format(
        _AREAL + "RolloutController INFO: {}",
        (),
        (_AREAL + "PPOTrainer INFO: Epoch 1/1 Step {step}/3 Train step {step}/3 done.",),
        _AREAL + "PPOTrainer INFO: Training completes! Total time elapsed 800.0.",
    ),
    "slime": Format(
        "(RolloutManager pid=2201) [2026-03-01 10:00:00] rollout.py:120 - {}",
        ("(RolloutManager pid=2201) Rollout generation:   0%|          | 0/256 [00:00<?, ?it/s]",),
        (
            _SLIME + "Timer actor_train start",
            _SLIME + "Timer actor_train end (elapsed: 60.0s)",
            _SLIME + "perf {index}: {{'perf/train_time': 60.0, 'perf/step_time': {seconds}}}",
        ),
        _SLIME + "All training steps finished",
    ),
    "relax": Format(
        "(Rollout pid=2201) 2026-03-01 10:00:00.000 | INFO | rollout:generate:77 - {}",
        ("(Rollout pid=2201) Start rollout {index}/3",),
        (
            "(Rollout pid=2201) Finish rollout {index}/3",
            "(Actor pid=2301) Actor training step {index}/3",
            "(Actor pid=2301) Actor training completed step {index}/3",
            "(Actor pid=2301) perf {index}: {{'perf/train_time': 60.0, 'perf/step_time': {seconds}}}",
        ),
        "(Actor pid=2301) All training steps finished",
    ),
    "builtin": Format(
        "{}",
        ("builtin: phase start name=rollout step={step}",),
        (
            "builtin: phase end name=rollout step={step} seconds=80.0 component=rollout peak_bytes=1",
            "builtin: step {step}/3 seconds={seconds} tokens=4096 tokens_per_second=27.3 reward=0.1",
        ),
        "builtin: done steps=3",
    ),
    "command": Format("[rank0]: {}", (), ("step {step}/3 loss=0.123 lr=1e-6",), "done"),
}
SOURCES = ("", f"worker-{REWARD}.out")
CASES = [(name, place, source) for name in FORMATS for place in PLACES for source in SOURCES]


def fatal_rules() -> list[Rule]:
    """Return every signature that could end a job."""
    return [rule for rule in RULES if rule.fatal != "never"]


def quotations(place: str, rule: Rule, form: Format) -> list[str]:
    """Return the lines that quote a signature at a place."""
    text = rule.example
    match place:
        case "line start":
            return [text]
        case "ray prefix":
            return [f"(RewardWorker pid={REWARD}) {text}", f"(RewardWorker pid=31337, ip=10.0.0.9) {text}"]
        case "response":
            return [form.logged.format(f"[response] It says: {text}"), f"[response] {text}", text]
        case "verdict":
            failed = form.logged.format("[verdict] test 7 failed:")
            return [failed, f"stderr: {text}", f"  {text}", "score=0.0"]
        case "prompt":
            return [form.logged.format(f"[prompt] My run died with `{text}`. What can I do?"), f"> {text}"]
        case "tool output":
            return ["<tool_response>", text, "</tool_response>", f"Observation: {text}"]
        case "json":
            return [
                json.dumps({"prompt": "why?", "response": f"Look at the log:\n{text}\nIt is full."}),
                json.dumps({"messages": [{"role": "tool", "content": text}]}),
            ]
        case "traceback":
            log = (_LOGS / rule.name / "run.log").read_text()
            frames = [
                "Traceback (most recent call last):",
                '  File "verl/workers/fsdp_workers.py", line 782, in update_actor',
                '  File "torch/autograd/graph.py", line 841, in _engine_run_backward',
                text,
            ]
            return [*frames, *(f"(RewardWorker pid={REWARD}) {line}" for line in frames), *log.splitlines()]
        case "ray summary":
            return [
                f"(raylet) {text}",
                f"(raylet, ip=10.0.0.2) [2026-03-01 10:00:00,000 E 1 1] node_manager.cc:3069: {text}",
                _KILLED,
                f"(compute_score pid={SCORE}) MemoryError: Unable to allocate 3.2 GiB for an array",
                _RETRY,
                f"(raylet) {text} [repeated 7x across cluster]",
            ]
    raise KeyError(place)


parsed = cache(parse)


class Player:
    """An attempt whose output and samples come as a clock turns."""

    def __init__(self, folder: Path, framework: str) -> None:
        job = parsed(JOBS[framework])
        attempt = AttemptFolder(folder / "attempts" / "0001")
        attempt.path.parent.parent.mkdir(parents=True, exist_ok=True)
        attempt.create()
        self.now = 1000.0
        self.events: list[Event] = []
        self.monitor = AttemptMonitor(
            framework=frameworks.find(framework), job=job, attempt=1, folder=attempt, now=self.now
        )

    def show(self, *lines: str, source: str = "", samples: tuple[Sample, ...] = ()) -> tuple[Event, ...]:
        """Let the monitor see lines and samples at this time."""
        data = "".join(f"{line}\n" for line in lines).encode()
        chunks = (Chunk(source=source, data=data),) if lines else ()
        events = self.monitor.feed(Observed(chunks=chunks, samples=samples), now=self.now)
        self.events += events
        return events

    def lines(self, form: tuple[str, ...], *, step: int, seconds: float) -> list[str]:
        """Return the lines of a step."""
        return [line.format(step=step, index=step - 1, seconds=seconds) for line in form]

    def turn(self, seconds: float, *, samples: Iterator[Sample] | None = None) -> tuple[Event, ...]:
        """Let time pass, with a sample every two seconds."""
        events: tuple[Event, ...] = ()
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + _PERIOD_S)
            events += self.show(samples=() if samples is None else (next(samples),))
        return events

    def end(self, code: int) -> Exit:
        """Let the program end."""
        ended = Exit(code=code, at=self.now)
        self.events += self.monitor.feed(Observed(exit=ended), now=self.now)
        self.events += self.monitor.finish(now=self.now)
        return ended


def sampled(
    *, working: tuple[int, ...], alive: tuple[int, ...] = (MAIN, TRAINER, REWARD), gpu: float = 0.0
) -> Sample:
    """Return a sample in which some of the processes work; the trainer is the one on a card."""
    names = {TRAINER: "ray::WorkerDict", REWARD: "ray::RewardWork", SCORE: "ray::compute_sc"}
    return Sample(
        at=0.0,
        node="10.0.0.1",
        host_used_bytes=1 << 30,
        host_total_bytes=64 << 30,
        processes=tuple(
            ProcessMemory(
                pid=pid,
                name=names.get(pid, "python"),
                rss_bytes=1 << 30,
                cpu_share=1.0 if pid in working else 0.01,
                gpu=pid == TRAINER,
            )
            for pid in alive
        ),
        cpu_share=float(len(working)),
        gpu_share=gpu,
    )


def busy() -> Iterator[Sample]:
    """Yield the samples of a job that trains: a worker scores now and then, a task's process is replaced."""
    number = 0
    while True:
        number += 1
        scoring = number % 60 < 10
        working = (TRAINER, *((REWARD,) if scoring else ()))
        alive = (MAIN, TRAINER, REWARD, *((SCORE,) if number % 60 < 20 else ()))
        yield sampled(working=working, alive=alive, gpu=0.9)


def spinning() -> Iterator[Sample]:
    """Yield the samples of a job whose cards are busy while every process that prints is idle.

    As in a container, no process is known to be on a card.
    """
    sample = sampled(working=(MAIN,), alive=(MAIN, TRAINER, REWARD, SCORE), gpu=1.0)
    processes = tuple(msgspec.structs.replace(process, gpu=False) for process in sample.processes)
    yield from itertools.repeat(msgspec.structs.replace(sample, processes=processes))


def play(
    folder: Path, framework: str, place: str, source: str, *, samples: Iterator[Sample] | None = None
) -> Player:
    """Play a job to its end whose output quotes every signature in every step."""
    form, rules = FORMATS[framework], fatal_rules()
    samples = busy() if samples is None else samples
    player = Player(folder, framework)

    def quote(some: list[Rule]) -> None:
        player.show(*(line for rule in some for line in quotations(place, rule, form)), source=source)

    player.show(form.logged.format("starting"))
    player.turn(10, samples=samples)
    quote(rules[::4])
    player.turn(_STARTUP_S, samples=samples)
    for step in range(1, STEPS + 1):
        seconds = LONG_STEP_S if step == STEPS else STEP_S
        player.show(*player.lines(form.opens, step=step, seconds=seconds))
        player.turn(seconds / 5, samples=samples)
        quote(rules[step::4])
        player.turn(seconds * 4 / 5, samples=samples)
        player.show(*player.lines(form.closes, step=step, seconds=seconds))
    player.show(form.ends)
    return player
