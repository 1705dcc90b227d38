"""ms-swift 4.6.0 and TRL 1.16.0 as published, out of memory in earnest on a processor, and recovered."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.test_driver import marked, until
from tests.real.hugging_face import RELEASES, SAMPLES, STEPS, Outcome, prepare, run, write_material
from tests.real.results import Row, story

pytestmark = pytest.mark.timeout(1800)

Recorder = Callable[..., None]
PLAYED = "the device: the kernel limits the process's memory, and autotune's entry records that as the card's"
# Bytes above the state after the first step with which a pass of all samples fails, by framework and phase.
BUDGETS: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {
    ("ms-swift", "backward"): (100_000_000, {}),
    ("ms-swift", "forward"): (120_000_000, {"gradient_checkpointing": "false"}),
    ("trl", "backward"): (700_000_000, {}),
    ("trl", "forward"): (300_000_000, {}),  # the fused head asks for 440 MiB at once
    ("trl", "log_prob"): (300_000_000, {"beta": 0.04}),  # the reference model scores first
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


def row(framework: str, case: str, outcome: Outcome, *, played: str = PLAYED) -> Row:
    """Return the row of a case."""
    return Row(
        framework=RELEASES[framework],
        case=case,
        outcome=story(outcome.run.parent),
        seconds=outcome.seconds,
        played=played,
    )


@pytest.mark.parametrize(("framework", "phase"), CASES)
def test_a_phase_over_its_budget_is_cured_from_the_checkpoint(
    framework: str, phase: str, tmp_path: Path, material: Path, record: Recorder
) -> None:
    budget, settings = BUDGETS[framework, phase]
    head = prepare(framework, tmp_path, material, budget=budget, settings=settings)
    outcome = run(head, "launch", "job.yaml")
    assert outcome.failures[0] == ("gpu-oom", phase)
    assert {cause for cause, _ in outcome.failures} == {"gpu-oom"}
    for event in outcome.of("diagnosed"):
        assert event["facts"]["capacity_bytes"] == budget and event["facts"]["requested_bytes"] > 0
    first, last = outcome.of("started")[0], outcome.of("started")[-1]
    assert last["knobs"] != first["knobs"] and first["knobs"]["microbatch_size"] == SAMPLES
    steps = [(event["step"], event.get("resumed_from")) for event in outcome.of("progressed")]
    assert [step for step, _ in steps] == list(range(1, STEPS + 1)) and (2, 1) in steps
    # TRL's reference model scores before the rewards, which write down what was generated
    outcome.check_training(
        again=sum((framework, name) != ("trl", "log_prob") for _, name in outcome.failures)
    )
    outcome.check_explanations()
    outcome.check_certificate()
    case = f"{phase} over its budget, cured, resumed from its checkpoint"
    record(row(framework, case, outcome), {f"{framework}-{phase}": outcome.log(1)})


def trainer(run: str) -> int:
    """Return the process that trains, not what starts it; what it forks has the same words."""
    own = {pid for pid in marked(run) if psutil.Process(pid).cmdline()[2:3] == [run]}
    (pid,) = (pid for pid in own if psutil.Process(pid).ppid() not in own)
    return pid


@pytest.mark.e2e_long
@pytest.mark.parametrize("framework", RELEASES)
def test_a_killed_trainer_is_no_memory_failure(
    framework: str, tmp_path: Path, material: Path, record: Recorder
) -> None:
    head = prepare(framework, tmp_path, material, recovery={"infrastructure_retries": 1})
    hold = tmp_path / "hold"
    hold.touch()
    driver, began = head.start("launch", "job.yaml"), time.monotonic()
    generations = tmp_path / "generations"

    def second_step() -> bool:
        assert driver.poll() is None
        return generations.exists() and len(generations.read_text().splitlines()) > 1

    until(second_step, "step 2", 600)
    (folder,) = (tmp_path / "runs").iterdir()
    os.kill(trainer(folder.name), signal.SIGKILL)
    hold.unlink()
    assert driver.wait(timeout=600) == 0
    outcome = Outcome(head, seconds=time.monotonic() - began)
    assert not outcome.failures
    lost = outcome.of("ended")[0]["outcome"]
    assert (lost["outcome"], lost["killed"]) == ("lost", True)
    first, second = outcome.of("started")
    assert first["knobs"] == second["knobs"]
    outcome.check_training(again=1)
    case = row(framework, "the trainer's process is killed (SIGKILL)", outcome, played="")
    record(case, {f"{framework}-killed": outcome.log(1)})


@pytest.mark.e2e_long
@pytest.mark.parametrize("framework", RELEASES)
def test_a_rehearsal_meets_the_failure_before_the_training(
    framework: str, tmp_path: Path, material: Path, record: Recorder
) -> None:
    budget, settings = BUDGETS[framework, "backward"]
    head = prepare(framework, tmp_path, material, budget=budget, settings=settings)
    outcome = run(head, "rehearse", "job.yaml")
    verdict = outcome.events[-1]["verdict"]
    assert verdict["verdict"] == "rehearsed" and verdict["cured"]
    *worst, last = (event["rehearsal"] for event in outcome.of("started"))
    assert (set(worst), last) == ({"worst"}, "reload")  # TRL's first one has longer answers
    assert set(outcome.failures) == {("gpu-oom", "backward")}
    assert not list(tmp_path.glob("out/*/checkpoint-*"))
    outcome.check_explanations()
    record(row(framework, "`rehearse`: the training's failure, before the training", outcome))


@pytest.mark.e2e_long
@pytest.mark.parametrize("framework", RELEASES)
def test_a_search_tries_three_configurations(
    framework: str, tmp_path: Path, material: Path, record: Recorder
) -> None:
    search = {"trials": 3, "probe_steps": 2, "confirm": 1, "vary": ["microbatch_size", "recompute"]}
    settings = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": SAMPLES // 8}
    head = prepare(framework, tmp_path, material, settings=settings, search=search)
    outcome = run(head, "search", "--no-rehearse", "job.yaml")
    assert len({tuple(sorted(event["knobs"].items())) for event in outcome.of("started")}) >= 3, outcome.text
    assert not outcome.failures
    outcome.check_certificate()
    record(row(framework, "`search` of three trials", outcome, played=""))


@pytest.mark.e2e_long
@pytest.mark.parametrize(("framework", "budget"), [("trl", 150_000_000), ("ms-swift", 120_000_000)])
def test_a_setting_that_torch_refuses_is_undone(
    framework: str, budget: int, tmp_path: Path, material: Path, record: Recorder
) -> None:
    mistyped = {
        "gradient_checkpointing": "false",  # the cure turns it on
        "gradient_checkpointing_kwargs": '\'{"use_reentrant": true, "preserve_rng": true}\'',
    }
    head = prepare(framework, tmp_path, material, budget=budget, settings=mistyped)
    outcome = run(head, "launch", "job.yaml")
    (refused,) = (event for event in outcome.of("diagnosed") if event["cause"] != "gpu-oom")
    assert refused["phase"] == "forward"  # where memory ran out before
    assert "Unexpected keyword arguments: preserve_rng" in refused["evidence"][0]["text"]
    reason = next(
        event["reason"] for event in outcome.of("decided") if event["attempt"] == refused["attempt"]
    )
    assert "the job refused" in reason and "recompute off → full" in reason
    first, last = outcome.of("started")[0]["knobs"], outcome.of("started")[-1]["knobs"]
    assert (first["recompute"], last["recompute"]) == ("off", "off")
    assert last["microbatch_size"] < first["microbatch_size"]
    outcome.check_training(again=len(outcome.failures))
    outcome.check_certificate()
    case = row(framework, "torch refuses a setting of the cure: a mistyped name in the job", outcome)
    record(case, {f"{framework}-refused": outcome.log(refused["attempt"])})
