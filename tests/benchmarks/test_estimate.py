"""Recorded measurements replayed: the estimate stays as near to them as docs/measured/estimate.md says."""

import pytest

from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Cluster, Job
from benchmarks import estimate_accuracy, estimate_builtin, estimate_speed
from benchmarks.estimate_accuracy import (
    FAMILY_RECORDED,
    FAMILY_STEPS,
    FIGURES,
    STEPS,
    Row,
    Step,
    bends,
    cases,
    errors,
    family_cases,
    planned,
    spread,
)
from benchmarks.families import FAMILIES, depths
from benchmarks.one_estimate import estimate


@pytest.fixture(scope="module")
def tracked():
    return estimate_accuracy.recorded()


def test_every_measurement_is_recorded(tracked):
    assert {(row.name, row.layers, row.step) for row in tracked} == set(planned())
    assert len({row.name for row in tracked}) >= 14


def test_the_estimate_agrees_with_mem_tracker(tracked):
    compared = cases(tracked)
    for figure in FIGURES:
        mean, p90, _ = spread(errors(compared, figure))
        assert mean <= 0.01, figure
        assert p90 <= 0.01, figure


def test_depth_is_a_line(tracked):
    mean, _, largest = spread(bends(tracked))
    assert mean <= 0.001
    assert largest <= 0.005


@pytest.mark.parametrize("name", FAMILIES)
def test_further_families_agree_with_mem_tracker(name):
    rows = [row for row in estimate_accuracy.recorded(FAMILY_RECORDED) if row.name == name]
    result = family_cases(rows)
    assert {(row.layers, row.step) for row in rows} == {
        (d, step) for d in depths(name) for step in FAMILY_STEPS
    }
    assert max(errors(result, "parameters")) <= 0.0001
    assert max(errors(result, "activations")) <= 0.025
    # Experts of two matrices of one size: a temporary of the optimizer outlives its step (estimate.md).
    assert max(errors(result, "step")) <= (0.08 if name.startswith("Nemotron") else 0.005)


def test_the_estimate_agrees_with_the_built_in_job():
    rows = estimate_builtin.recorded()
    fitted = [row for row in rows if row.title in estimate_builtin.SEEN]
    others = [row for row in rows if row.title not in estimate_builtin.SEEN]
    assert len(fitted) >= 12
    assert len(others) >= 4
    for chosen, mean_limit, p90_limit in ((fitted, 0.05, 0.12), (others, 0.05, 0.12)):
        mean, p90, _ = spread(
            error for result in estimate_builtin.errors(chosen).values() for error in result
        )
        assert mean <= mean_limit
        assert p90 <= p90_limit


def test_the_estimate_agrees_with_sglang_on_the_cpu():
    # SGLang 0.5.23, 2026-11-21: max_total_num_tokens=132672 and peaks of 708, 737 and 715 MiB.
    written = {
        "model_shape": estimate_builtin.JOB["model_shape"],
        "prompts": 16,
        "samples": 12,
        "prompt_tokens": 8,
        "response_tokens": 24,
        "trainer_budget": "116MiB",
        "engine_budget": "768MiB",
        "memory_fraction": 0.89,
        "concurrency": 128,
        "sync_buffer": "16MiB",
        "optimizer_offload": True,
    }
    job = Job(name="demo", framework="builtin", settings=written)
    nowhere = Cluster(address="", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)
    profile = Builtin().profile(job, nowhere)
    result = estimate(profile, nowhere, Builtin().shape(job), profile.knobs)
    assert result.pool_tokens == pytest.approx(132_672, rel=0.005)
    for phase, measured in ((Phase.ROLLOUT_INIT, 708), (Phase.ROLLOUT, 737), (Phase.WEIGHT_SYNC, 715)):
        assert result.phases[phase].gpu.total / 2**20 == pytest.approx(measured, rel=0.03)
        assert result.phases[phase].component == "rollout"


def test_a_wrong_count_is_detected(tracked):
    one = tracked[0]
    wrong = Row(
        name=one.name,
        layers=one.layers,
        step=one.step,
        figures=one.figures | {"activations": one.figures["activations"] * 1.2},
    )
    same = [row for row in tracked if (row.name, row.step) == (one.name, one.step) and row is not one]
    result = [case for case in cases([wrong, *same]) if case.layers == one.layers]
    assert abs(result[0].error("activations")) > 0.1


def test_all_candidates_of_the_speed_benchmark_differ():
    result = estimate_speed.candidates(10_000)
    assert len(set(result)) == 10_000
    assert estimate_speed.ranked(100)


def test_mem_tracker_still_counts_the_same():
    pytest.importorskip("transformers")
    from benchmarks import tracked

    step = Step(1, 512, False)
    assert step in STEPS
    recorded = next(
        row
        for row in estimate_accuracy.recorded()
        if (row.name, row.layers, row.step) == ("Qwen2.5-0.5B", 2, step)
    )
    config = estimate_accuracy.ARCHITECTURES["Qwen2.5-0.5B"]
    result = tracked.measure(config, layers=2, sequences=1, length=512, recompute=False)
    # A new torch or transformers may keep a tensor more; then the rows are recorded anew.
    assert result.step == pytest.approx(recorded.figures["step"], rel=0.01)
    assert result.activations == pytest.approx(recorded.figures["activations"], rel=0.01)
