"""A scripted place to run: attempts that write what the built-in job would, under a turned clock."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import yaml

from autotune.launchers.base import OWN_SOURCE, Capacity, Chunk, Drain, Exit, Observed, Unreachable
from autotune.policies.values.command import Command
from autotune.policies.values.job import Cluster
from autotune.policies.values.observation import Sample

GIB = 1024**3
JOB = """\
# my job
name: story
framework: builtin
settings:
  steps: 4
  prompts: 16
  samples: 8
  prompt_tokens: 8
  response_tokens: 24
  tokens_per_microbatch: 4096  # the whole step
  trainer_budget: 100MiB
  save_every: 1
goal: {steps: 3}
"""


class Hands:
    """A clock whose hands move when somebody sleeps, and whose wall clock somebody may set."""

    def __init__(self, at: float = 1_800_000_000.0) -> None:
        self.at = at
        self.set_by = 0.0

    def now(self) -> float:
        return self.at + self.set_by

    def monotonic(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class Killed(BaseException):
    """The driver was killed here, as by SIGKILL."""


def failure(phase: str, step: int, *, component: str = "trainer", cause: str = "gpu-oom") -> str:
    record = {
        "schema": 1, "cause": cause, "device": "cpu-budget", "phase": phase, "component": component,
        "rank": 0, "step": step,
        "requested_bytes": 16 << 20, "used_bytes": 98 << 20, "budget_bytes": 100 << 20,
        "message": "DefaultCPUAllocator: can't allocate memory", "exception": "RuntimeError",
    }  # fmt: skip
    return f"builtin: failure {json.dumps(record)}\n"


def reported(phase: str, step: int, *, component: str = "trainer") -> Observed:
    """A failure as the built-in job shows it: in its log, and as a record of its own."""
    line = failure(phase, step, component=component).encode()
    return Observed(chunks=(Chunk(source="", data=line), Chunk(source=OWN_SOURCE, data=line)))


def phase(name: str, step: int, *, used: int = 50 << 20, budget: int = 100 << 20) -> str:
    return (
        f"builtin: phase start name={name} step={step}\n"
        f"builtin: phase end name={name} step={step} seconds=1.0 component=trainer "
        f"peak_bytes={used} budget_bytes={budget}\n"
    )


def step(number: int, of: int = 4, *, used: int = 50 << 20, saves: bool = True) -> str:
    return (
        phase("rollout", number)
        + phase("forward", number, used=used)
        + f"builtin: step {number}/{of} seconds=2.5 tokens=4096 tokens_per_second=1638.4 reward=0.1\n"
        + (f"builtin: checkpoint step={number} seconds=0.1 path=/c/{number}\n" if saves else "")
    )


Script = list[str | Observed]


@dataclass
class Life:
    """One attempt in the world: what it has written so far and whether its processes run."""

    script: Script
    exit: Exit | None
    written: list[Chunk] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    running: bool = True
    supervised: bool = True
    lost: str = ""
    starts: int = 1


@dataclass
class World:
    """What outlives a driver: attempts, checkpoints, and how many effects there were."""

    play: Callable[[World, Command], tuple[Script, Exit | None]]
    saved: int = 0
    lives: dict[int, Life] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    swept: int = 0
    unknown: str = ""  # which nodes a drain could not ask
    kill_at: int | None = None
    ticks: int = 0
    held: str = ""
    occupied: int = 0  # attempts that run out of a card's memory because others hold some, also after them
    gpus: int = 0
    card_bytes: int = 0
    unreachable: str = ""
    silent: str = ""  # the node that does not answer who asks every node
    undead: tuple[str, ...] = ()  # processes that even SIGKILL leaves
    deaf: bool = False  # nothing of it can be asked to end
    address: str = "local"
    at_once: int = 1  # attempts that may run at the same time
    most_at_once: int = 0
    nodes: Callable[[World], Capacity] | None = None  # of a cluster that grows
    requests: int = 0
    requesting: bool = False
    draining: Callable[[int], None] = lambda _: None  # called with an attempt whose memory is awaited

    def tick(self) -> None:
        """Die here if this is the moment."""
        self.ticks += 1
        if self.ticks == self.kill_at:
            raise Killed


class Place:
    """A runner over the world."""

    note = ""

    def __init__(self, world: World, clock: Hands) -> None:
        self.world, self.clock = world, clock
        self.closed = False

    @property
    def address(self) -> str:
        return self.world.address

    def capacity(self, *, gpus: int | None, joining: bool) -> Capacity | None:
        self.world.requests += 1
        self.world.requesting = True
        return self.world.nodes(self.world) if self.world.nodes is not None else None

    def withdraw(self) -> None:
        self.world.requesting = False

    def cluster(self) -> Cluster:
        return Cluster(
            address=self.world.address,
            nodes=1,
            gpus_per_node=self.world.gpus,
            gpu_memory_bytes=self.world.card_bytes,
            host_memory_bytes=24 * GIB,
        )

    def start(self, command: Command, *, run: str, attempt: int, python: str | None) -> Attempt:
        self.world.tick()
        if self.world.unreachable:
            raise Unreachable(self.world.unreachable, hint="start the cluster")
        assert attempt not in self.world.lives, f"attempt {attempt} was started twice"
        running = sum(life.running for life in self.world.lives.values())
        assert running < self.world.at_once, "too many attempts at once"
        self.world.most_at_once = max(self.world.most_at_once, running + 1)
        script, ended = self.world.play(self.world, command)
        self.world.lives[attempt] = Life(script=list(script), exit=ended)
        self.world.commands.append(command)
        self.world.tick()
        return Attempt(self.world, attempt, self.clock)

    def attach(self, *, run: str, attempt: int, read: Mapping[str, int] = {}) -> Attempt | None:
        life = self.world.lives.get(attempt)
        if life is None or not life.supervised:
            return None
        return Attempt(self.world, attempt, self.clock, read=read)

    def sweep(self, *, run: str) -> tuple[str, ...]:
        self.world.swept += 1
        for life in self.world.lives.values():
            if not life.supervised:
                life.running = False
        return ()

    def end_all(self, *, run: str) -> tuple[str, ...]:
        if self.world.silent:
            raise Unreachable(f"{self.world.silent} did not answer within 120 s")
        for life in self.world.lives.values():
            life.running = False
        return self.world.undead

    def close(self) -> None:
        self.closed = True


class Attempt:
    """A handle: reads the attempt's writing from some offsets; every poll lets it write one more piece."""

    def __init__(self, world: World, number: int, clock: Hands, *, read: Mapping[str, int] = {}) -> None:
        self.world, self.clock, self.number = world, clock, number
        self.life = world.lives[number]
        self.read, self.sampled = dict(read), 0
        self.acknowledged: dict[str, int] = {}
        self._looked_at, self._ends = 0, dict[str, int]()  # chunks, and where those of each source end

    def poll(self) -> Observed:
        life, notes = self.life, tuple[str, ...]()
        if life.running and life.script:
            piece = life.script.pop(0)
            if isinstance(piece, str):
                piece = Observed(chunks=(Chunk(source="", data=piece.encode()),))
            life.written += piece.chunks
            life.samples += piece.samples
            life.lost, notes = piece.lost, piece.notes
            for chunk in piece.chunks:
                for line in chunk.data.decode().splitlines():
                    if line.startswith("builtin: checkpoint step="):
                        self.world.saved = int(line.split("=")[1].split()[0])
        elif life.running and life.exit is not None:
            life.running = False
        chunks = tuple(self.unread())
        samples, self.sampled = tuple(life.samples[self.sampled :]), len(life.samples)
        ended = None if life.running else life.exit or Exit(signal=15)
        return Observed(chunks=chunks, samples=samples, exit=ended, lost=life.lost, notes=notes)

    def unread(self) -> Iterator[Chunk]:
        new, self._looked_at = self.life.written[self._looked_at :], len(self.life.written)
        for chunk in new:
            begin = self._ends.get(chunk.source, 0)
            self._ends[chunk.source] = end = begin + len(chunk.data)
            file = f"machine:/{chunk.source}"
            read = self.read.get(file, 0)
            if read < end:
                data = chunk.data[max(0, read - begin) :]
                self.read[file] = end
                yield Chunk(source=chunk.source, data=data, file=file, end=end)

    def acknowledge(self, recorded: Mapping[str, int]) -> None:
        self.acknowledged = dict(recorded)

    def stop(self, *, grace_s: float) -> float:
        self.world.tick()
        if self.world.deaf:
            raise Unreachable("the head does not answer")
        if self.life.running:
            self.life.running = False
            self.life.exit = self.life.exit if not self.life.script and self.life.exit else Exit(signal=15)
        self.world.tick()
        return 0.5

    def drain(self, *, timeout_s: float) -> Drain:
        self.world.tick()
        if self.world.deaf:
            raise Unreachable("the head does not answer")
        assert not self.life.running, "drained while running"
        self.world.draining(self.number)
        world = self.world
        foreign, world.occupied = world.occupied > 0, max(0, world.occupied - 1)
        clear = not (world.held or world.unknown or foreign)
        held = "n: GPU 0 has 40.0 GiB more in use than before: pid 7 (mia)" if foreign else world.held
        return Drain(clear=clear, seconds=0.2, held=held, foreign=foreign, unknown=world.unknown)

    def release(self) -> None:
        self.world.tick()
        if self.world.deaf:
            raise Unreachable("the head does not answer")
        self.life.supervised = False


def settings(command: Command) -> dict[str, object]:
    loaded = yaml.safe_load(command.files[0].text)
    assert isinstance(loaded, dict)
    return loaded


def tight_memory(world: World, command: Command) -> tuple[Script, Exit | None]:
    """The scripted job: more than 2,048 tokens at once do not fit in backward; else it trains to its end."""
    tokens = settings(command)["tokens_per_microbatch"]
    assert isinstance(tokens, int)
    first = world.saved + 1
    opening: Script = ["builtin: phase start name=init step=0\n"]
    if world.saved and settings(command)["resume"] == "auto":
        opening.append(f"builtin: resumed step={world.saved} path=/c/{world.saved}\n")
    if tokens > 2048:
        opening += [
            phase("rollout", first),
            f"builtin: phase start name=backward step={first}\n",
            reported("backward", first),
        ]
        return [*opening, *[""] * 1000], None  # the other ranks wait for ever
    return [*opening, *(step(n) for n in range(first, 5)), "builtin: done steps=4\n"], Exit(code=0)


def crowded(world: World, command: Command) -> tuple[Script, Exit | None]:
    """A job that completes two steps and then runs out of memory while others hold a card of it."""
    first = world.saved + 1
    if not world.occupied:
        return [*(step(n) for n in range(first, 7)), "builtin: done steps=6\n"], Exit(code=0)
    done = [step(n) for n in range(first, first + 2)]
    return [*done, phase("rollout", first + 2), reported("rollout", first + 2), *[""] * 1000], None


def forever(_: World, __: Command) -> tuple[Script, Exit | None]:
    """A job that trains until it is stopped, and whose checkpoints no other process knows."""
    return [step(n, 100_000, saves=False) for n in range(1, 5000)], None


def silent(_: World, __: Command) -> tuple[Script, Exit | None]:
    """A job that starts and says nothing more."""
    return ["builtin: phase start name=init step=0\n"], None
