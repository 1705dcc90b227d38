"""What cures a failure: with a job known, with a part of it, with nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.orchestrator.messages import figures
from autotune.policies.diagnosis.message_figures import facts_of
from autotune.policies.explain.advice import Cure, Known, prescribe
from autotune.policies.remedies.catalogue import spoken, spoken_for
from autotune.policies.remedies.ladder import LADDER
from autotune.policies.values.diagnosis import Diagnosis, Facts
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.knobs import KNOBS, Knobs
from autotune.policies.values.profile import Grid, Profile, Support

GIB = 1 << 30
FRAGMENTED = Facts(
    requested_bytes=2 * GIB, free_bytes=GIB, capacity_bytes=80 * GIB, reserved_unallocated_bytes=3 * GIB
)
WHOLE = Facts(
    requested_bytes=2 * GIB, free_bytes=GIB, capacity_bytes=80 * GIB, reserved_unallocated_bytes=GIB // 8
)


def oom(phase: Phase, component: Component = Component.TRAINER, **fields: object) -> Diagnosis:
    return Diagnosis(cause=Cause.GPU_OOM, phase=phase, component=component, **fields)  # type: ignore[arg-type]


def names(result: tuple[Cure, ...]) -> list[str]:
    return [cure.name for cure in result]


@pytest.mark.parametrize(
    ("diagnosis", "first"),
    [
        (oom(Phase.BACKWARD), "reduce_micro_batch"),
        (oom(Phase.ROLLOUT, Component.ROLLOUT), "reduce_concurrency"),
        (oom(Phase.ROLLOUT_INIT, Component.ROLLOUT), "reduce_mem_fraction"),
        (oom(Phase.OPTIMIZER), "offload_optimizer"),
        (oom(Phase.COMM), "expandable_segments"),
        (oom(Phase.BACKWARD, facts=FRAGMENTED, fragmentation=True), "expandable_segments"),
        (oom(Phase.ROLLOUT, Component.ROLLOUT, facts=FRAGMENTED, fragmentation=True), "expandable_segments"),
        (Diagnosis(cause=Cause.POOL_TOO_SMALL, phase=Phase.ROLLOUT_INIT), "increase_mem_fraction"),
        (Diagnosis(cause=Cause.POOL_TOO_SMALL, phase=Phase.ROLLOUT), "reduce_concurrency"),
        (Diagnosis(cause=Cause.KV_POOL, phase=Phase.ROLLOUT), "reduce_concurrency"),
        (Diagnosis(cause=Cause.SHM, phase=Phase.DATA), "reduce_workers"),
        (Diagnosis(cause=Cause.HOST_OOM), "drop_weights_backup"),
        (Diagnosis(cause=Cause.HOST_OOM, step=50), "host_allocator"),
        (Diagnosis(cause=Cause.HOST_OOM, step=50, phase=Phase.CHECKPOINT), "save_synchronously"),
    ],
)
def test_without_a_job_the_failed_phase_decides(diagnosis: Diagnosis, first: str) -> None:
    assert names(prescribe(diagnosis, Known()))[0] == first


def test_a_framework_whose_guide_counts_tokens_is_given_tokens_first() -> None:
    result = prescribe(oom(Phase.BACKWARD), Known(counts_tokens=True))
    assert names(result)[:2] == ["reduce_tokens_per_mb", "reduce_micro_batch"]


def test_the_allocator_is_not_offered_where_the_figures_exclude_fragmentation() -> None:
    assert "expandable_segments" not in names(prescribe(oom(Phase.BACKWARD, facts=WHOLE), Known()))
    assert "expandable_segments" in names(prescribe(oom(Phase.BACKWARD), Known()))


def test_what_others_hold_goes_first() -> None:
    facts = Facts(capacity_bytes=80 * GIB, outside_bytes=60 * GIB)
    first = prescribe(oom(Phase.INIT, facts=facts), Known())[0]
    assert first.name == "free_before_relaunch" and "60.0 GiB" in first.reason


VLLM = (
    "ValueError: Free memory on device{} (11.5/79.15 GiB) on startup is less than desired GPU memory "
    "utilization (0.9, 71.24 GiB)."
)


@pytest.mark.parametrize("device", ["", " cuda:3"])
def test_what_is_not_free_when_an_engine_starts_is_held_by_others(device: str) -> None:
    facts = facts_of(VLLM.format(device))
    assert facts.outside_bytes == pytest.approx((79.15 - 11.5) * GIB, abs=2)
    first = prescribe(oom(Phase.ROLLOUT_INIT, Component.ROLLOUT, facts=facts), Known())[0]
    assert first.name == "free_before_relaunch" and "67.7 GiB" in first.reason
    assert figures(facts).endswith("11.50 GiB was free, 67.65 GiB was held outside this process")


def test_weights_that_fill_a_card_need_more_cards() -> None:
    facts = Facts(capacity_bytes=80 * GIB, allocated_bytes=79 * GIB)
    assert (
        names(prescribe(oom(Phase.ROLLOUT_INIT, Component.ROLLOUT, facts=facts), Known()))[0]
        == "tensor_parallel"
    )


@pytest.mark.parametrize("phase", Phase)
def test_host_memory_is_never_cured_by_more_offload(phase: Phase) -> None:
    for cure in prescribe(Diagnosis(cause=Cause.HOST_OOM, phase=phase), Known()):
        assert not cure.name.startswith("offload_"), cure


@pytest.mark.parametrize("cause", [Cause.CODE, Cause.CONFIG, Cause.DISK, Cause.UNKNOWN, Cause.INFRASTRUCTURE])
def test_what_is_no_memory_failure_has_no_cure(cause: Cause) -> None:
    assert prescribe(Diagnosis(cause=cause, phase=Phase.BACKWARD), Known()) == ()


def test_known_values_give_new_values_and_unknown_ones_a_direction() -> None:
    profile = Profile(
        framework="",
        knobs=Knobs(concurrency=512, memory_fraction=0.88),
        supported={
            "concurrency": Support(setting="concurrency", grid=Grid(minimum=1)),
            "memory_fraction": Support(
                setting="memory_fraction", grid=Grid(minimum=0.05, maximum=0.98, multiple=0.01)
            ),
        },
    )
    result = {c.name: c for c in prescribe(oom(Phase.ROLLOUT, Component.ROLLOUT), Known(profile=profile))}
    assert result["reduce_concurrency"].changes == {"concurrency": 256}
    assert result["reduce_concurrency"].action == "lower `concurrency` 512 → 256"
    assert result["reduce_mem_fraction"].changes == {"memory_fraction": 0.78}
    assert result["disable_cuda_graph"].changes == {"cuda_graphs": "off"}
    assert not result["disable_cuda_graph"].exact


def test_what_is_known_to_be_at_its_end_is_not_offered() -> None:
    profile = Profile(framework="", knobs=Knobs(recompute="full", cuda_graphs="off"), supported={})
    assert "recompute" not in names(prescribe(oom(Phase.BACKWARD), Known(profile=profile)))
    assert "recompute" not in names(prescribe(oom(Phase.BACKWARD), Known(fixed=frozenset({"recompute"}))))
    assert "recompute" in names(prescribe(oom(Phase.BACKWARD), Known()))


def test_only_offered_knobs_are_turned() -> None:
    result = prescribe(oom(Phase.BACKWARD), Known(offered=frozenset({"microbatch_size", "recompute"})))
    assert names(result) == ["reduce_micro_batch", "recompute"]


def test_every_remedy_of_the_ladder_has_a_direction_or_needs_the_job() -> None:
    needs_the_job = {"adjust_memory_margin", "engine_sleep"}  # frameworks let engines sleep by themselves
    assert {rung.name for rung in LADDER if not spoken(rung.name)} == needs_the_job
    assert all(
        spoken_for(name, phase, engine=engine)
        for name in {rung.name for rung in LADDER} - needs_the_job
        for phase in Phase
        for engine in (False, True)
    )


@given(
    st.sampled_from(Cause),
    st.sampled_from(Phase),
    st.sampled_from(Component),
    st.frozensets(st.sampled_from(KNOBS)),
    st.booleans(),
)
def test_every_cure_is_named_once_and_explained(
    cause: Cause, phase: Phase, component: Component, offered: frozenset[str], engine: bool
) -> None:
    known = Known(offered=offered, engine=engine)
    result = prescribe(Diagnosis(cause=cause, phase=phase, component=component), known)
    assert len(set(names(result))) == len(result)
    assert all(cure.reason and cure.action and cure.changes for cure in result)
