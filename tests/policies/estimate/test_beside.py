"""What a whole job holds beside what is counted: it scales with what it comes from, and a chance shows it."""

from dataclasses import replace as changed
from unittest.mock import patch

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.beside import of_job, overflow, scales, spread
from autotune.policies.estimate.constants import TABLE
from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.failure import Phase
from autotune.policies.values.profile import Placement

from .toy import GIB, LAYOUT, TOY, estimated, job

ENGINES = {Phase.ROLLOUT_INIT, Phase.ROLLOUT, Phase.WEIGHT_SYNC}
OF_TRAINER, OF_ENGINE = ("weights", "gradients", "optimizer"), ("weights", "graphs")


def test_less_is_left_where_nothing_shares_a_device_and_nothing_without_an_engine():
    shared = job(LAYOUT, placement=Placement.COLOCATED, engine="vllm")
    estimate = estimated(LAYOUT, engine="vllm")
    assert (scales(shared, estimate)[1:] > 0).all()
    assert not scales(shared, estimate)[PHASES.index(Phase.INIT)].any()
    apart = scales(replace(shared, placement=Placement.SEPARATE), estimate)
    assert (apart[1:] > 0).all()
    assert (apart[1:] < scales(shared, estimate)[1:]).all()
    assert not scales(replace(shared, engine="none"), estimate).any()


@pytest.mark.parametrize("part", sorted({*OF_TRAINER, *OF_ENGINE}))
def test_each_term_that_is_20_percent_larger_raises_the_chance_of_the_other_sides_phases(part):
    shared = job(LAYOUT, placement=Placement.COLOCATED, engine="vllm")
    estimate = estimated(LAYOUT, engine="vllm")
    parts = np.full_like(estimate.gpu_parts, 4.0 * GIB)
    before = scales(shared, changed(estimate, gpu_parts=parts))
    parts[:, PARTS.index(part)] *= 1.2
    after = scales(shared, changed(estimate, gpu_parts=parts))
    for place, phase in enumerate(PHASES):
        raised = part in (OF_TRAINER if phase in ENGINES else OF_ENGINE) and phase is not Phase.INIT
        assert (after[place] > before[place]).all() == raised
        assert (
            overflow(8.0 * GIB, GIB, float(after[place, 0]))
            > overflow(8.0 * GIB, GIB, float(before[place, 0]))
        ) == raised


@pytest.mark.parametrize(
    ("layout", "knobs", "share"),
    [
        (LAYOUT, {}, TABLE["left_of_pass"].value),
        (LAYOUT, {"allocator": "expandable"}, TABLE["fragmentation_expandable"].value),
        (replace(LAYOUT, expandable_segments=True), {}, TABLE["fragmentation_expandable"].value),
        (replace(LAYOUT, trainer_sleeps=True), {}, 0.0),
    ],
)
def test_what_micro_batches_leave_reserved_follows_how_the_trainer_allocates(
    layout: Layout, knobs: dict[str, str], share: float
):
    estimate = estimated(layout, engine="vllm", **knobs)
    parts = np.zeros_like(estimate.gpu_parts)
    shared = job(layout, placement=Placement.COLOCATED, engine="vllm")
    before = scales(shared, changed(estimate, gpu_parts=parts))
    parts[PHASES.index(Phase.BACKWARD), [PARTS.index("activations"), PARTS.index("logits")]] = 10.0 * GIB
    rise = (scales(shared, changed(estimate, gpu_parts=parts)) - before)[:, 0]
    after_the_first_step = {Phase.ROLLOUT, Phase.WEIGHT_SYNC}
    expected = [share * 20.0 * GIB * (phase in after_the_first_step) for phase in PHASES]
    assert rise == pytest.approx(expected)


# What neither an engine's share nor its pool can absorb, by the engine whose phases hold it.
OUTSIDE = {
    "vllm": ("context", "vllm_graphs", "modules", "workspaces", "collectives", "residue"),
    "sglang": ("graph_base", "graph_per_batch", "engine_base", "modules", "workspaces", "residue"),
}


@pytest.mark.parametrize(("engine", "name"), [(key, name) for key in OUTSIDE for name in OUTSIDE[key]])
def test_a_term_that_is_20_percent_larger_raises_the_total_of_the_phases_that_hold_it(engine, name):
    before = estimated(LAYOUT, engine=engine, engine_sleep=True).gpu
    wider = TABLE[name]._replace(value=TABLE[name].value * 1.2)
    with patch.dict(TABLE, {name: wider}):
        after = estimated(LAYOUT, engine=engine, engine_sleep=True).gpu
    rose = {phase for place, phase in enumerate(PHASES) if after[place, 0] > before[place, 0]}
    assert rose >= ({Phase.BACKWARD} if name == "residue" else {Phase.ROLLOUT})


def test_a_trainer_that_is_20_percent_larger_raises_the_total_of_the_engines_phases():
    resident = replace(LAYOUT, parameter_bytes=4)
    shape = replace(TOY, layers=4000, hidden=2000)
    before = estimated(resident, engine="vllm", model=shape).gpu
    after = estimated(resident, engine="vllm", model=replace(shape, layers=4800)).gpu
    for phase in ENGINES:
        assert after[PHASES.index(phase), 0] > before[PHASES.index(phase), 0]


def test_a_constant_that_reaches_up_to_more_has_a_distribution():
    reaching = {name for name, row in TABLE.items() if " up to " in row.source}
    assert reaching == {"residue"}  # the scale of the skewed term while an engine sleeps
    shared = job(LAYOUT, placement=Placement.COLOCATED, engine="vllm")
    estimate = estimated(LAYOUT, engine="vllm")
    before = scales(shared, estimate)
    with patch.dict(TABLE, residue=TABLE["residue"]._replace(value=2 * TABLE["residue"].value)):
        assert (scales(shared, estimate) > before).any()


def test_a_fraction_that_leaves_more_room_has_the_lower_chance():
    chances = [overflow(room * GIB, 3.0 * GIB, 4.0 * GIB) for room in (-20, 0, 8, 16, 32, 64)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == pytest.approx(1, abs=0.01)
    assert chances[2] > 2 * chances[4]
    assert chances[-1] > 0.01  # the tail is heavy: no job is sure


def test_without_the_term_the_error_is_normal():
    assert overflow(2.0 * GIB, GIB, 0.0) == pytest.approx(0.0228, abs=0.0095)
    assert spread(0.8, 0.0) == spread(1.2, 0.3) == spread(0.8, 0.6) == 0.0


def test_the_spread_of_a_phase_is_that_of_a_normal_error_with_its_chance():
    for share, chance in ((0.6, 0.05), (0.9, 0.3)):
        deviations = -np.log(share) / spread(share, chance)
        assert overflow(deviations, 1.0, 0.0) == pytest.approx(chance, abs=0.0095)


def test_of_whole_jobs_a_share_fails_for_what_no_term_contains():
    unforeseen = TABLE["unforeseen"].value
    assert of_job([0.2]) == pytest.approx(0.2)
    assert of_job([0.0, 0.0]) == pytest.approx(unforeseen)
    assert of_job([0.5, 0.2]) == pytest.approx(1 - (1 - unforeseen) * 0.5 * 0.8)
    assert of_job([1.0, 0.0]) == 1.0
