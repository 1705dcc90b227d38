"""A job that trains, and runs out of memory only where it loads its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.launchers.base import Exit
from autotune.policies.values.command import Command
from autotune.policies.values.events import (
    Decided,
    Diagnosed,
    Policy,
    Started,
    TrainingCompleted,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.knobs import new_values
from tests.orchestrator.driver.test_reconcile import ROOMY, Case
from tests.orchestrator.scripted import Script, World, reported, settings, step

SIGKILL = 9


def heavy_load(world: World, command: Command) -> tuple[Script, Exit | None]:
    """The first attempt is killed after two steps; a load fits only while the optimizer is on the host."""
    if not world.saved:
        return [step(1), step(2)], Exit(signal=SIGKILL)
    script: Script = ["builtin: phase start name=init step=0\n"]
    if not settings(command).get("optimizer_offload"):
        return [*script, reported("init", 0), *[""] * 1000], None
    script.append(f"builtin: resumed step={world.saved} path=/c/{world.saved}\n")
    return [*script, *(step(n) for n in range(world.saved + 1, 5)), "builtin: done steps=4\n"], Exit(code=0)


@pytest.mark.parametrize("policy", list(Policy))
def test_it_is_cured_there_and_trains_on_as_fast_as_before(tmp_path: Path, policy: Policy) -> None:
    case = Case(tmp_path, World(heavy_load), ROOMY, policy=policy)
    assert isinstance(case.drive(), TrainingCompleted)
    failures = [e for e in case.history if isinstance(e, Diagnosed) and e.cause is Cause.GPU_OOM]
    assert failures and {e.phase for e in failures} == {Phase.RESUME}
    first, *_, last = (e.knobs for e in case.history if isinstance(e, Started))
    assert last.tokens_per_microbatch == first.tokens_per_microbatch
    assert last.logprob_tokens == first.logprob_tokens
    assert last.optimizer_offload and not {"concurrency", "recompute"} & new_values(first, last).keys()
    assert all(e.remedy is None or not e.remedy.predicted for e in case.history if isinstance(e, Decided))
