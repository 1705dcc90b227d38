"""Runs of a scripted world, as a launch and a search leave them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autotune.launchers.base import Exit
from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.run import directory
from autotune.policies.values.command import Command
from autotune.policies.values.events import Policy, Started
from autotune.policies.values.observation import GpuMemory, ProcessMemory, Sample
from tests.orchestrator.driver.test_reconcile import Case
from tests.orchestrator.scripted import GIB, Script, World, tight_memory
from tests.orchestrator.search.test_scheduler import Night, formula

SECRET = "hf_" + "abcdefghijklmnopqrstuvwxyz"
HOSTILE = "</script></code><img src=x onerror=\"document.title='broken'\">"


def recovered(folder: Path, *, policy: Policy = Policy.LADDER) -> directory.RunFolder:
    """A launch that ran out of memory once and completed; the lines around its failure are hostile."""

    def play(world: World, command: Command) -> tuple[Script, Exit | None]:
        script, ended = tight_memory(world, command)
        script = [p.replace(" reward=", " loss=0.5 reward=") if isinstance(p, str) else p for p in script]
        script.insert(1, f"loading with HF_TOKEN={SECRET} {HOSTILE}\n")
        return script, ended

    case = Case(folder, World(play), policy=policy)
    case.drive()
    sampled(case.run)
    return case.run


def searched(folder: Path) -> directory.RunFolder:
    """A search in which some trials run out of memory."""
    night = Night(folder, World(formula))
    night.drive()
    return night.run


def sampled(run: directory.RunFolder) -> None:
    """Record memory of the last attempt, as the samplers of a node with a card do."""
    started = [e for e in run.history() if isinstance(e, Started)][-1]
    begin = seconds_of(started.at)
    samples = [
        Sample(
            at=begin + second,
            node="gpu-01",
            host_used_bytes=8 * GIB,
            host_total_bytes=24 * GIB,
            gpus=(GpuMemory(index=0, used_bytes=second * GIB, total_bytes=80 * GIB, ours_bytes=0),),
            processes=(ProcessMemory(pid=7, name="train", rss_bytes=GIB),),
        )
        for second in range(1, 6)
    ]
    text = b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)
    (run.attempt(started.attempt).path / "samples.jsonl").write_bytes(text)
