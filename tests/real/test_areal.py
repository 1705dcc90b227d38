"""AReaL 1.0.4's own trainer, scheduler and workers on a processor, out of memory, and recovered."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.areal_job import PROMPTS, RELEASE, SAMPLES, STEPS, prepare, write_material
from tests.real.hugging_face import run
from tests.real.results import Row, story

pytestmark = [pytest.mark.e2e_long, pytest.mark.timeout(1800)]

BUDGET = 100_000_000  # bytes above what the trainer has after its first step


def test_a_pass_over_its_budget_is_cured_from_areals_own_checkpoint(
    tmp_path: Path, record: Callable[..., None]
) -> None:
    material = tmp_path / "material"
    write_material(material)
    outcome = run(prepare(tmp_path, material, budget=BUDGET), "launch", "job.yaml")
    assert outcome.failures[0] == ("gpu-oom", "forward")
    assert {cause for cause, _ in outcome.failures} == {"gpu-oom"}
    assert all(event["facts"]["requested_bytes"] > 0 for event in outcome.of("diagnosed"))
    first, last = outcome.of("started")[0]["knobs"], outcome.of("started")[-1]["knobs"]
    assert last["tokens_per_microbatch"] < first["tokens_per_microbatch"] == 4096
    steps = [(event["step"], event["resumed_from"]) for event in outcome.of("progressed")]
    assert [step for step, _ in steps] == list(range(1, STEPS + 1)) and (2, 1) in steps
    logs = [outcome.log(event["attempt"]).read_text() for event in outcome.of("started")]
    counts = re.findall(r"ppo_actor/n_seqs\s*│\s*([\d.e+]+)", "\n".join(logs))
    assert [float(count) for count in counts] == [PROMPTS * SAMPLES] * STEPS
    outcome.check_explanations()
    outcome.check_certificate()
    row = Row(
        framework=RELEASE,
        case="forward over its budget, cured, resumed from its checkpoint",
        outcome=story(outcome.run.parent),
        seconds=outcome.seconds,
        played="class and text of the error",
    )
    record(row, {"areal-forward": outcome.log(1)})
