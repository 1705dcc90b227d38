"""The comparison of policies: its cluster is consistent, its baselines do what their projects do."""

from __future__ import annotations

import statistics

import pytest
from msgspec.structs import replace

from autotune.policies.recovery import ranking, relief, step_times
from autotune.policies.remedies.legality import objections
from autotune.policies.values.diagnosis import Facts
from autotune.policies.values.events import Diagnosed, Ended, Event, GoalReached, Started
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.observation import Cancelled, Crashed, Peak
from benchmarks.simulation.ablations import no_calibration, no_figures, no_relief, no_speeds
from benchmarks.simulation.baselines import (
    POLICIES,
    accelerate,
    autotune,
    bisect,
    composer,
    fixed_ladder,
    ladder,
)
from benchmarks.simulation.cluster import Failure, diagnosis, peaks, reported, run
from benchmarks.simulation.distance import distance_table, distances
from benchmarks.simulation.everything import everything, everything_then_back
from benchmarks.simulation.jobs import drawn
from benchmarks.simulation.oracle import KNOBS, Best, configurations
from benchmarks.simulation.play import MOST, Day, play
from benchmarks.simulation.summary import share, table
from benchmarks.simulation.world import Perturbation, Stratum, World

SEEDS = (11, 12, 13)


@pytest.fixture(scope="module")
def jobs() -> list[tuple[World, Best]]:
    return [drawn(stratum, seed=seed) for stratum in Stratum for seed in SEEDS]


def history(world: World, *tried: Knobs) -> tuple[Event, ...]:
    """Return the history of a job whose attempts failed one after the other."""
    rows: list[Event] = [world.accepted]
    for knobs in tried:
        failed = Diagnosed(cause=Cause.GPU_OOM, phase=Phase.BACKWARD)
        rows += [Started(knobs=knobs), Ended(outcome=Crashed(exit_code=1)), failed]
    return tuple(rows)


def test_a_seed_gives_the_same_job_again(jobs):
    world, result = jobs[0]
    assert drawn(world.stratum, seed=world.seed) == (world, result)


def test_every_job_fails_as_written_and_the_oracles_configuration_holds(jobs):
    for world, result in jobs:
        written = world.accepted.profile.knobs
        assert run(world, written).failure is not None
        assert run(world, result.knobs).failure is None
        assert 0 < result.feasible <= result.of
        assert set(changed(written, result.knobs)) <= {*KNOBS, "logprob_tokens"}


def test_nothing_on_the_grid_that_holds_is_faster(jobs):
    world, result = min(jobs, key=lambda job: job[1].of)
    holding = [run(world, knobs) for knobs in configurations(world)]
    assert min(r.step_s for r in holding if r.failure is None) == pytest.approx(result.step_s)


def test_a_message_is_true_to_the_failure(jobs):
    for world, _ in jobs:
        written = world.accepted.profile.knobs
        failure = run(world, written).failure
        assert isinstance(failure, Failure)
        answer = diagnosis(world, written, failure)
        assert (answer.cause, answer.phase) == (failure.cause, failure.phase)
        if answer.cause is not Cause.GPU_OOM:
            continue
        facts, capacity = answer.facts, world.accepted.cluster.gpu_memory_bytes
        assert facts.requested_bytes > facts.free_bytes
        assert capacity - facts.free_bytes + facts.requested_bytes <= failure.peak_bytes + 1
        assert reported(world, written, 3) == reported(world, written, 3)


def test_a_weight_sync_fails_in_the_engine_that_wakes_or_in_the_trainer_that_sends(jobs):
    blamed: dict[float, set[Component]] = {0.01: set(), 0.99: set()}
    for world, _ in jobs:
        failure = Failure(phase=Phase.WEIGHT_SYNC, cause=Cause.GPU_OOM, step=3, peak_bytes=1e12)
        for fraction, components in blamed.items():
            knobs = replace(world.accepted.profile.knobs, memory_fraction=fraction)
            components.add(diagnosis(world, knobs, failure).component)
    assert blamed[0.99] == {Component.ROLLOUT}
    assert Component.TRAINER in blamed[0.01]


def test_less_of_a_knob_needs_no_more_memory(jobs):
    for world, result in jobs:
        tokens = result.knobs.tokens_per_microbatch
        fewer = replace(result.knobs, tokens_per_microbatch=tokens // 2, logprob_tokens=None)
        more = replace(result.knobs, logprob_tokens=None)
        for phase, size in peaks(world, fewer, 3).items():
            assert size <= peaks(world, more, 3)[phase] + 1


def test_accelerate_takes_nine_tenths_and_composer_half(jobs):
    world = next(w for w, _ in jobs if _room(w))
    written = world.accepted.profile.knobs
    tokens = written.tokens_per_microbatch
    assert accelerate(history(world, written)).tokens_per_microbatch == tokens * 9 // 10 // 256 * 256
    assert composer(history(world, written)).tokens_per_microbatch == tokens // 2 // 256 * 256
    floor = -(-world.accepted.profile.longest_sequence // 256) * 256
    least = replace(written, tokens_per_microbatch=floor)
    if written.logprob_tokens is not None:
        least = replace(least, logprob_tokens=floor)
    assert composer(history(world, written, least)) is None


def test_bisect_profiles_the_smallest_batch_and_narrows_down(jobs):
    world = next(w for w, _ in jobs if _room(w))
    written = world.accepted.profile.knobs
    first = bisect(history(world, written))
    floor = -(-world.accepted.profile.longest_sequence // 256) * 256
    assert first.tokens_per_microbatch == floor
    capacity = world.accepted.cluster.gpu_memory_bytes
    peak = Peak(used_bytes=capacity // 2, capacity_bytes=capacity)
    passed = (
        *history(world, written),
        Started(knobs=first),
        GoalReached(step=20, marginal=False, headroom=0.5, peaks={"backward": peak}),
        Ended(outcome=Cancelled(by="goal")),
    )
    second = bisect(passed).tokens_per_microbatch
    assert floor <= second < written.tokens_per_microbatch
    assert bisect(history(world, written, first)) is None


def test_the_fixed_ladder_does_not_look_at_the_phase(jobs):
    for world, _ in jobs:
        written = world.accepted.profile.knobs
        first = fixed_ladder(history(world, written))
        other = (*history(world, written)[:-1], Diagnosed(cause=Cause.HOST_OOM, phase=Phase.OPTIMIZER))
        assert fixed_ladder(other) == first
        assert not objections(world.accepted.profile, written, first, started=True)


def test_the_ladder_plays_without_the_estimate(jobs):
    world, _ = jobs[0]
    written = world.accepted.profile.knobs
    assert ladder(history(world, written)).knobs != written


def test_everything_that_saves_is_on_after_the_first_failure(jobs):
    for world, _ in jobs:
        profile, written = world.accepted.profile, world.accepted.profile.knobs
        saving = everything(history(world, written))
        assert not objections(profile, written, saving, started=False)
        assert saving.recompute == "full" and saving.memory_fraction == written.memory_fraction
        assert saving.tokens_per_microbatch - profile.longest_sequence < 256
        second = everything(history(world, written, saving))
        assert second.memory_fraction < saving.memory_fraction
    failed = Diagnosed(cause=Cause.HOST_OOM, phase=Phase.OPTIMIZER)
    world = next(w for w, _ in jobs if w.accepted.profile.knobs.optimizer_offload is False)
    written = world.accepted.profile.knobs
    saving = everything(history(world, written))
    back = everything((*history(world, written, saving)[:-1], failed))
    assert changed(saving, back)


def test_what_was_saved_is_restored_once_it_is_stable(jobs):
    for world, _ in jobs:
        written = world.accepted.profile.knobs
        saving = everything(history(world, written))
        stable = (
            *history(world, written),
            Started(knobs=saving),
            GoalReached(step=20, marginal=False, headroom=0.5, peaks={}),
            Ended(outcome=Cancelled(by="goal")),
        )
        after = everything_then_back(stable)
        assert after is None or all(
            getattr(after, knob) == getattr(written, knob) for knob in changed(saving, after)
        )


def test_a_structural_error_is_the_truths_alone(jobs):
    result = {p: drawn(p, seed=11)[0] for p in Perturbation}
    near, _ = drawn(Stratum.NEAR, seed=11)
    assert result[Perturbation.SILENT].figures is False and near.figures
    assert result[Perturbation.PHASE].misplaced == 0.2 and not near.misplaced
    assert result[Perturbation.ALL].coefficients.context_bytes > 0
    world, _ = jobs[0]
    written = world.accepted.profile.knobs
    wider = replace(world.coefficients, context_bytes=float(2 << 30), fragmented=0.1)
    for phase, size in peaks(replace(world, coefficients=wider), written, 2).items():
        assert size == pytest.approx(1.1 * peaks(world, written, 2)[phase] + (2 << 30), rel=0.02)


def test_a_silent_message_has_no_figures_and_a_wrong_phase_is_another_one(jobs):
    for world, _ in jobs:
        written = world.accepted.profile.knobs
        failure = run(world, written).failure
        if failure.cause is not Cause.GPU_OOM:
            continue
        assert diagnosis(replace(world, figures=False), written, failure).facts == Facts()
        assert diagnosis(replace(world, misplaced=1.0), written, failure).phase is not failure.phase


def test_an_ablation_leaves_out_just_its_part(jobs):
    world, _ = next(job for job in jobs if run(job[0], job[0].accepted.profile.knobs).failure.step)
    written = world.accepted.profile.knobs
    failed = history(world, written)
    assert no_figures(failed) == autotune(failed), "these messages have none"
    for without in (no_calibration, no_relief, no_speeds):
        assert without(failed) is not None
    assert ranking.relieving is relief.relieving and step_times.expected_s.__module__ == step_times.__name__


def test_a_day_of_our_own_policy(jobs):
    days = [play(world, result, "autotune") for world, result in jobs]
    assert all(day.stable and day.repeats == 0 and day.forbidden == 0 for day in days)
    assert sorted(day.relaunches for day in days)[len(days) // 2] <= 2
    assert play(*jobs[0], "autotune") == days[0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_comes_to_an_end(jobs, policy: str):
    for world, result in jobs[::4]:
        day = play(world, result, policy)
        assert 0 <= day.relaunches <= MOST
        assert day.share_of_day >= 0
        assert day.stable or day.relaunches == MOST


DAY = Day(
    world="w",
    stratum="near",
    policy="autotune",
    stable=True,
    relaunches=1,
    injected=0,
    first_stable=0.9,
    repeats=0,
    forbidden=0,
    regret_gpu_hours=4.0,
    share_of_day=0.98,
)


def test_the_table_counts_a_failure_as_twelve():
    lost = replace(DAY, stable=False, relaunches=MOST, first_stable=None, regret_gpu_hours=192.0)
    text = table([DAY, DAY, lost], seed=1)
    assert "| near | autotune | 66.7% | 1 / 12 / 12 | 0.90 / 0.90 | 0 | 0 | 67 (4) | 67 |" in text


def test_a_regret_below_zero_counts_as_zero_where_it_is_clipped():
    day = replace(DAY, first_stable=1.1, regret_gpu_hours=-4.0, share_of_day=1.1)
    better, worse = replace(day, policy="a"), replace(day, regret_gpu_hours=8.0, policy="a")
    assert "| 2 (-4) | 4 |" in table([better, worse], seed=1)


def test_percentiles_are_values_that_occurred():
    assert share([1, 2, 3, 4], 0.5) == 2
    assert share([1, 2, 3, 4], 0.9) == 4
    assert share([5], 0.1) == 5


def test_the_estimate_is_not_the_truth(jobs):
    rows = [row for world, result in jobs for row in distances(world, result)]
    assert 0.01 < statistics.median(abs(row.off) for row in rows) < 0.2
    assert all(sum(sign * row.off > 0.02 for row in rows) > len(rows) // 10 for sign in (-1, 1))
    assert distance_table(rows).count("\n") == 2 + len(Stratum)


def _room(world: World) -> bool:
    knobs, longest = world.accepted.profile.knobs, world.accepted.profile.longest_sequence or 0
    return (knobs.tokens_per_microbatch or 0) > 2 * longest + 512
