"""The estimate of sharded trainers and of the frameworks' loss code."""

from __future__ import annotations

import pytest

from benchmarks import estimate_sharded, loss_code
from benchmarks.sharded_jobs import HELD_OUT, JOBS, MODELS, Job

ROWS = estimate_sharded.recorded()


def test_every_job_is_recorded_once_and_within_the_limits_on_held_out_models_too():
    assert [row.job for row in ROWS if row.job in JOBS] == [row.job for row in ROWS]
    assert {row.job for row in ROWS} == set(JOBS)
    assert len(ROWS) == len(JOBS)
    result = estimate_sharded.cases(ROWS)
    listed = [case for case in result if case.job.name not in HELD_OUT]
    assert not estimate_sharded.beyond(listed, estimate_sharded.LIMITS)
    unseen = [case for case in result if case.job.name in HELD_OUT]
    assert not estimate_sharded.beyond(unseen, estimate_sharded.GOALS)


@pytest.mark.parametrize("part", estimate_sharded.ABLATIONS)
def test_an_estimate_without_one_of_its_parts_is_beyond_the_limits(part):
    result = estimate_sharded.cases(ROWS, without=part)
    listed = [case for case in result if case.job.name not in HELD_OUT]
    assert estimate_sharded.beyond(listed, estimate_sharded.LIMITS)


@pytest.mark.parametrize(
    "job",
    [
        Job(name="Qwen3-0.6B", layers=2, shards=4, tokens=512),
        Job(name="Llama-3.2-1B", layers=2, shards=16, tokens=2048, reduce_bytes=2, recompute=False),
        Job(name="Mistral-7B-v0.3", layers=2, wrapping="verl", tokens=1024, optimizer="single"),
        Job(name="Mistral-7B-v0.3", layers=2, shards=2, tensor=2, sequence_parallel=True, tokens=1024),
    ],
    ids=estimate_sharded.rendered,
)
def test_the_tracker_agrees_with_the_estimate_on_small_jobs(job):
    from benchmarks import sharded_trainer

    measured = sharded_trainer.measure(job, MODELS[job.name])._asdict()
    case = estimate_sharded.Case(job, estimate_sharded.predict(job), measured)
    assert {phase: case.error(phase) for phase in case.phases} == pytest.approx(
        dict.fromkeys(case.phases, 0.0), abs=estimate_sharded.GOALS[1]
    )


@pytest.mark.parametrize(
    "row", loss_code.recorded(), ids=lambda row: f"{loss_code.rendered(row.code)}, {row.code.bytes}"
)
def test_bytes_per_logit_of_the_frameworks_loss_code_are_as_measured(row):
    predicted = loss_code.predict(row.code)
    for figure in loss_code.FIGURES:
        assert predicted[figure] == pytest.approx(row.figures[figure], rel=0.06, abs=0.1), figure


def test_every_way_of_the_loss_is_recorded():
    assert {row.code for row in loss_code.recorded()} == set(loss_code.planned())
