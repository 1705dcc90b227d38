"""ms-swift 4.6.0 as published, out of memory in earnest on a processor, and recovered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.real.hugging_face import RELEASES, SAMPLES, STEPS, Outcome, prepare, write_material
from tests.real.results import Row, story

pytestmark = pytest.mark.timeout(1800)

Recorder = Callable[[Row], None]
PLAYED = "the device: the kernel limits the process's memory, and autotune's entry records that as the card's"
# Bytes above the state after the first step with which a pass of all samples fails, by framework and phase.
BUDGETS: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {
    ("ms-swift", "backward"): (100_000_000, {}),
    ("ms-swift", "forward"): (120_000_000, {"gradient_checkpointing": "false"}),
    ("ms-swift", "log_prob"): (40_000_000, {}),  # what scores then fails in backward, and is cured again
}
CASES = [
    pytest.param(*case, marks=pytest.mark.e2e if case == ("ms-swift", "backward") else pytest.mark.e2e_long)
    for case in BUDGETS
]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    write_material(folder)
    return folder


@pytest.mark.parametrize(("framework", "phase"), CASES)
def test_a_phase_over_its_budget_is_cured_from_the_checkpoint(
    framework: str, phase: str, tmp_path: Path, material: Path, record: Recorder
) -> None:
    budget, settings = BUDGETS[framework, phase]
    head = prepare(framework, tmp_path, material, budget=budget, settings=settings)
    outcome = Outcome(head, "launch", "job.yaml")
    assert outcome.failures[0] == ("gpu-oom", phase)
    assert {cause for cause, _ in outcome.failures} == {"gpu-oom"}
    for event in outcome.of("diagnosed"):
        assert event["facts"]["capacity_bytes"] == budget and event["facts"]["requested_bytes"] > 0
    first, last = outcome.of("started")[0], outcome.of("started")[-1]
    assert last["knobs"] != first["knobs"] and first["knobs"]["microbatch_size"] == SAMPLES
    steps = [(event["step"], event.get("resumed_from")) for event in outcome.of("progressed")]
    assert [step for step, _ in steps] == list(range(1, STEPS + 1)) and (2, 1) in steps
    outcome.check_training(again=len(outcome.failures))
    outcome.check_explanations()
    outcome.check_certificate()
    record(
        Row(
            framework=RELEASES[framework],
            case=f"{phase} over its budget, cured, resumed from its checkpoint",
            outcome=story(outcome.run.parent),
            seconds=outcome.seconds,
            played=PLAYED,
        )
    )
