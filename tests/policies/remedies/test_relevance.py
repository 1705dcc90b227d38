"""A remedy is offered only where it can act on what failed, by `explain` and by a launch alike."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.diagnosis.memory_users import largest
from autotune.policies.explain.advice import Known, prescribe
from autotune.policies.remedies.ladder import candidates
from autotune.policies.values.diagnosis import Diagnosis, Facts, Holder, Line
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Grid, Placement, Profile, Support

GIB = 1 << 30
KNOBS = Knobs(
    memory_fraction=0.8, concurrency=64, cuda_graphs="on", max_batched_tokens=8192, rollout_tensor_parallel=1,
    host_allocator="default", optimizer_offload=True, dataloader_workers=8, weights_backup=True,
)  # fmt: skip
PROFILE = Profile(
    framework="any",
    knobs=KNOBS,
    placement=Placement.COLOCATED,
    supported={
        "memory_fraction": Support(setting="a", grid=Grid(minimum=0.1, maximum=0.9)),
        "concurrency": Support(setting="b", grid=Grid(minimum=1)),
        "max_batched_tokens": Support(setting="c", grid=Grid(minimum=256)),
        "rollout_tensor_parallel": Support(setting="d", grid=Grid(values=(1, 2, 4))),
        "host_allocator": Support(setting="e", grid=Grid(values=("default", "jemalloc"))),
        "optimizer_offload": Support(setting="f", grid=Grid(values=(False, True))),
        "dataloader_workers": Support(setting="g", grid=Grid(minimum=0)),
        "weights_backup": Support(setting="h", grid=Grid(values=(False, True))),
    },
)


def both(diagnosis: Diagnosis) -> tuple[list[str], list[str]]:
    """Return the names that `explain` offers without settings, and those that a launch may take."""
    reported = [cure.name for cure in prescribe(diagnosis, Known(engine=True))]
    taken = [remedy.name for remedy in candidates(PROFILE, KNOBS, diagnosis, started=False)]
    return reported, taken


def started(facts: Facts, rule: str = "torch-cuda-oom") -> Diagnosis:
    return Diagnosis(
        cause=Cause.GPU_OOM,
        phase=Phase.ROLLOUT_INIT,
        component=Component.ROLLOUT,
        facts=facts,
        evidence=(Line(line=1, text="", rule=rule),),
    )


def test_a_request_larger_than_the_card_is_answered_with_what_makes_it_smaller() -> None:
    facts = Facts(requested_bytes=192 * GIB, capacity_bytes=48 * GIB, free_bytes=44 * GIB)
    for names in both(started(facts)):
        assert {"reduce_concurrency", "reduce_tokens_per_mb"} <= set(names)
        assert not {"reduce_mem_fraction", "disable_cuda_graph", "expandable_segments"} & set(names)


def test_an_engine_that_loads_its_weights_has_no_pool_to_cut() -> None:
    facts = Facts(requested_bytes=GIB, capacity_bytes=24 * GIB, free_bytes=0, loading=True)
    for names in both(started(facts)):
        assert "tensor_parallel" in names
        assert not {"reduce_mem_fraction", "reduce_concurrency", "disable_cuda_graph"} & set(names)


@pytest.mark.parametrize(
    ("sampling", "first"), [(False, "reduce_tokens_per_mb"), (True, "reduce_concurrency")]
)
def test_an_engine_that_measures_its_largest_batch_has_no_pool_to_cut_and_a_batch_to_shrink(
    sampling: bool, first: str
) -> None:
    """The most tokens of one prefill fill it, and its sampler a row for each request."""
    facts = Facts(
        requested_bytes=10 * GIB,
        capacity_bytes=16 * GIB,
        free_bytes=7 * GIB,
        profiling=True,
        sampling=sampling,
    )
    for names in both(started(facts)):
        assert names[0] == first
        assert not {"reduce_mem_fraction", "disable_cuda_graph"} & set(names)


def test_an_engine_of_no_named_phase_gives_up_a_part_of_its_share_first() -> None:
    failed = Diagnosis(cause=Cause.GPU_OOM, phase=Phase.NONE, component=Component.ROLLOUT)
    for names in both(failed):
        assert names[0] == "reduce_mem_fraction"


def test_an_engine_that_finds_no_room_is_given_room() -> None:
    facts = Facts(
        requested_bytes=120 * GIB, capacity_bytes=140 * GIB, free_bytes=7 * GIB, outside_bytes=133 * GIB
    )
    reported, taken = both(started(facts, "vllm-startup-memory"))
    assert reported == ["free_before_relaunch"]
    assert taken == []  # no setting of the job is the cure, and a launch waits or ends


@pytest.mark.parametrize("rule", ["shm-refused", "shm-engine-refused"])
def test_a_start_refused_for_shared_memory_changes_nothing_of_the_job(rule: str) -> None:
    line = Line(line=1, text="", rule=rule)
    assert both(Diagnosis(cause=Cause.SHM, phase=Phase.INIT, evidence=(line,))) == ([], [])


def host(*commands: str, step: int | None = None) -> Diagnosis:
    holders = tuple(Holder(pid=at, held_bytes=50 * GIB, command=name) for at, name in enumerate(commands))
    return Diagnosis(cause=Cause.HOST_OOM, phase=Phase.ROLLOUT, step=step, facts=Facts(holders=holders))


@pytest.mark.parametrize(
    ("diagnosis", "first"),
    [
        (host(*["ray::WorkerDict.actor_rollout_generate_sequences"] * 4), {"drop_weights_backup"}),
        (host("pt_data_worker", "pt_data_worker"), {"reduce_workers"}),
        (host("ray::TaskRunner.run"), {"host_allocator"}),
        (host(step=60), {"host_allocator"}),
    ],
)
def test_what_acts_on_the_holder_of_host_memory_comes_first(diagnosis: Diagnosis, first: set[str]) -> None:
    for names in both(diagnosis):
        assert names[0] in first


def test_smaller_passes_come_before_less_offload_where_activations_fill_the_host() -> None:
    tokens = Support(setting="i", grid=Grid(minimum=256))
    profile = replace(
        PROFILE, supported=PROFILE.supported | {"tokens_per_microbatch": tokens, "activation_offload": tokens}
    )
    knobs = replace(KNOBS, tokens_per_microbatch=8192, activation_offload=True)
    killed = replace(host("ray::TrainerRank.train"), phase=Phase.FORWARD, component=Component.TRAINER)
    first = next(candidates(profile, knobs, killed, started=True))
    assert (first.name, first.changes) == ("reduce_tokens_per_mb", {"tokens_per_microbatch": 4096})


def test_a_program_that_is_none_of_the_jobs_is_no_growth_of_the_job() -> None:
    reported, taken = both(host("java", "java", step=60))
    assert not reported  # no setting of the job returns what another program holds
    assert taken[0] == "drop_weights_backup"
    assert largest(host("java").facts).foreign
    assert not any(
        largest(host(name).facts).foreign
        for name in (
            "python3",
            "ray::WorkerDict.x",
            "pt_main_thread",
            "VLLM::Worker_TP",
            "container trainer",
            "step 7.0",
        )
    )


def test_offload_of_workers_frees_nothing_of_the_driver() -> None:
    for names in both(host("ray::TaskRunner.run")):
        assert "reduce_host_offload" not in names and "reduce_workers" in names
