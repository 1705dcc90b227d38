"""What the ladder proposes, and how far it goes, where only a profile is known."""

import pytest
from msgspec.structs import replace

from autotune.policies.remedies.ladder import candidates
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.diagnosis import Diagnosis, Facts
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.profile import Placement
from tests.policies.stories import KNOBS, profile, support
from tests.policies.stories import SUPPORTED as OFFERED

HALVES = "optimizer_offload_fraction"
NOTHING = Facts()


def proposed(of, phase, *, cause=Cause.GPU_OOM, component=Component.TRAINER, streak=1, **evidence):
    diagnosis = Diagnosis(cause=cause, phase=phase, component=component, streak=streak, **evidence)
    return list(candidates(of, of.knobs, diagnosis, started=False))


@pytest.mark.parametrize("parks", [True, False])
def test_an_optimizer_on_the_cpu_is_offered_beside_a_switch_that_only_parks_its_state(parks):
    switch = replace(OFFERED["optimizer_offload"], phases=(Phase.ROLLOUT,) if parks else ())
    offered = OFFERED | {"optimizer_offload": switch, HALVES: support("fraction", 0.0, 0.5, 1.0)}
    of = profile(replace(KNOBS, optimizer_offload_fraction=0.0), supported=offered)
    changes = [remedy.changes for remedy in proposed(of, Phase.OPTIMIZER)]
    assert ({HALVES: 1.0} in changes) is parks
    assert ({"optimizer_offload": True} in changes) is not parks


@pytest.mark.parametrize("cause", [Cause.HOST_OOM, Cause.OBJECT_STORE, Cause.KV_POOL])
def test_cuts_of_requests_grow_with_the_failures_in_a_row(cause):
    first, second = (
        next(
            r.changes["concurrency"]
            for r in proposed(profile(), Phase.ROLLOUT, cause=cause, streak=streak)
            if "concurrency" in r.changes
        )
        for streak in (1, 2)
    )
    assert (first, second) == (32, 16)


def test_workers_go_in_few_steps():
    of = profile(replace(KNOBS, dataloader_workers=8))
    cuts = [
        proposed(of, Phase.DATA, cause=Cause.HOST_OOM, streak=streak)[0].changes for streak in (1, 2, 3, 4)
    ]
    assert [cut["dataloader_workers"] for cut in cuts] == [4, 2, 1, 1]


@pytest.mark.parametrize(
    ("requested", "free", "idle", "first"),
    [
        (0.22, 0.20, 1.85, False),  # of 140 GiB on an H200: the next request of the pass failed
        (0.38, 0.09, 9.7, True),
        (10.0, 0.1, 10.5, False),  # it covers the request and nothing more
        (10.0, 0.6, 10.6, True),
    ],
)
def test_the_allocator_is_the_first_cure_where_it_returns_much_more_than_the_request(
    requested, free, idle, first
):
    requested, free, idle, capacity = (round(size * 2**30) for size in (requested, free, idle, 140))
    facts = Facts(
        requested_bytes=requested, free_bytes=free, reserved_unallocated_bytes=idle, capacity_bytes=capacity
    )
    offered = OFFERED | {"allocator": support("allocator", "default", "expandable")}
    of = profile(replace(KNOBS, allocator="default"), supported=offered)
    names = [r.name for r in proposed(of, Phase.FORWARD, facts=facts, fragmentation=True)]
    assert (names[0] == "expandable_segments") is first and "expandable_segments" in names


PASSES = {"reduce_tokens_per_mb", "reduce_micro_batch", "recompute"}


@pytest.mark.parametrize(
    ("facts", "offloaded", "component", "first"),
    [
        (Facts(requested_bytes=47054848), {}, Component.TRAINER, True),
        (NOTHING, {}, Component.TRAINER, False),  # a kill for the node's memory
        (Facts(requested_bytes=47054848), {"param_offload": True}, Component.TRAINER, False),
        (Facts(requested_bytes=47054848), {}, Component.ROLLOUT, False),
    ],
)
@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_passes_that_compute_on_the_host_and_fail_there_are_made_smaller(
    phase, facts, offloaded, component, first
):
    of = profile(replace(KNOBS, activation_offload=False, **offloaded))
    names = [r.name for r in proposed(of, phase, cause=Cause.HOST_OOM, component=component, facts=facts)]
    smaller = [name for name in names if name in PASSES - {"reduce_micro_batch"}]
    assert bool(smaller) is first
    assert not first or names[: len(smaller)] == smaller
    assert "reduce_concurrency" not in names  # no request is in a pass


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.ROLLOUT_INIT, Phase.WEIGHT_SYNC, Phase.CHECKPOINT])
def test_a_host_that_is_full_where_no_request_runs_keeps_the_requests_and_the_batches(phase):
    of = profile(
        replace(KNOBS, microbatch_size=8, dynamic_batching=False),
        supported=OFFERED | {"microbatch_size": support("size", minimum=1, multiple=1)},
    )
    changed = {knob for r in proposed(of, phase, cause=Cause.HOST_OOM) for knob in r.changes}
    assert changed.isdisjoint({"concurrency", "microbatch_size"})


@pytest.mark.parametrize(("cause", "least"), [(Cause.HOST_OOM, 8), (Cause.KV_POOL, 1)])
def test_an_engine_stays_busy_where_it_is_not_its_own_memory_that_ran_out(cause, least):
    present, cuts = KNOBS, []
    for _ in range(9):
        offered = proposed(profile(present), Phase.ROLLOUT, cause=cause)
        fewer = next((r.changes["concurrency"] for r in offered if "concurrency" in r.changes), None)
        if fewer is None:
            break
        cuts.append(fewer)
        present = replace(present, concurrency=fewer)
    assert cuts[-1] == least


def test_an_update_that_fails_keeps_the_passes():
    offered = OFFERED | {"fused_kernels": support("fused", False, True), "allocator": OFFERED["sync_mode"]}
    of = profile(replace(KNOBS, fused_kernels=False, recompute="off"), supported=offered)
    changed = {knob for r in proposed(of, Phase.OPTIMIZER) for knob in r.changes}
    assert "optimizer_offload" in changed
    of_passes = {"tokens_per_microbatch", "recompute", "fused_kernels", "logprob_chunk", "loss_recompute"}
    assert changed.isdisjoint(of_passes)


def test_a_loaded_copy_of_the_model_that_fills_the_host_leaves_it():
    loading = OFFERED | {"memory_efficient_load": support("load", False, True)}
    of = profile(replace(KNOBS, memory_efficient_load=True, param_offload=True), supported=loading)
    first = next(r for r in proposed(of, Phase.INIT, cause=Cause.HOST_OOM) if r.name == "reduce_host_offload")
    assert first.changes == {"memory_efficient_load": False}


@pytest.mark.parametrize(("phase", "cause"), [(Phase.ROLLOUT_INIT, Cause.POOL_TOO_SMALL)])
def test_a_share_that_is_the_engines_own_choice_can_be_raised(phase, cause):
    offered = OFFERED | {"memory_fraction": support("share", minimum=0.1, maximum=0.95, multiple=0.01)}
    of = profile(replace(KNOBS, memory_fraction=None), supported=offered)
    assert {"memory_fraction": 0.95} in [r.changes for r in proposed(of, phase, cause=cause)]


def test_a_share_that_is_the_engines_own_choice_can_be_lowered():
    of = profile(replace(KNOBS, memory_fraction=None))
    lower = [r.changes for r in proposed(of, Phase.ROLLOUT_INIT, component=Component.ROLLOUT)]
    assert {"memory_fraction": 0.8} in lower  # the highest that may be told is 0.9


@pytest.mark.parametrize(
    ("engine", "held", "offered"),
    [("vllm", False, True), ("sglang", False, False), ("sglang", True, True)],
)
def test_graphs_are_dropped_where_they_are_on_the_card_while_training_runs(engine, held, offered):
    components = (Component.TRAINER, *((Component.ROLLOUT,) if held else ()))
    of = profile(
        replace(KNOBS, cuda_graphs="full"),
        placement=Placement.COLOCATED,
        supported=OFFERED | {"cuda_graphs": support("graphs", "full", "off")},
        resident={Phase.CHECKPOINT.value: components},
    )
    names = {remedy.name for remedy in proposed(replace(of, engine=engine), Phase.CHECKPOINT)}
    assert ("disable_cuda_graph" in names) is offered


def test_an_engine_that_sleeps_keeps_its_share_while_the_trainer_works():
    offered = OFFERED | {"memory_fraction": support("share", minimum=0.1, maximum=0.95, multiple=0.01)}
    of = profile(replace(KNOBS, memory_fraction=0.6), supported=offered, placement=Placement.COLOCATED)
    asleep = replace(of, layout=replace(of.layout, engine_sleeps=True))
    for phase, sleeping in ((Phase.OPTIMIZER, True), (Phase.WEIGHT_SYNC, False)):
        assert "memory_fraction" in {knob for r in proposed(of, phase) for knob in r.changes}
        assert ("memory_fraction" in {k for r in proposed(asleep, phase) for k in r.changes}) is not sleeping


@pytest.mark.parametrize(
    ("graphs", "missing_gib", "offered"),
    [("full", None, True), ("full", 0.3, True), ("full", 2.0, False), ("limited", None, False)],
)
def test_graphs_that_an_engine_keeps_asleep_are_dropped_once_and_for_no_more_than_they_hold(
    graphs, missing_gib, offered
):
    cuda_graphs = {"cuda_graphs": support("graphs", "full", "limited", "off")}
    of = profile(replace(KNOBS, cuda_graphs=graphs), placement=Placement.COLOCATED, supported=cuda_graphs)
    of = replace(of, engine="vllm", resident={Phase.OPTIMIZER.value: (Component.TRAINER,)})
    free = 1 << 30
    missing = None if missing_gib is None else round(missing_gib * free)
    facts = NOTHING if missing is None else Facts(requested_bytes=free + missing, free_bytes=free)
    assert bool(proposed(of, Phase.OPTIMIZER, facts=facts)) is offered


def test_a_program_without_named_phases_may_change_every_knob_it_has_against_host_memory():
    offered = {name: OFFERED[name] for name in ("tokens_per_microbatch", "concurrency", "recompute")}
    unknown = replace(profile(KNOBS, supported=offered), layout=Layout())
    modelled = replace(unknown, layout=Layout(ranks=8))
    knobs = [
        {
            knob
            for remedy in proposed(of, Phase.NONE, cause=Cause.HOST_OOM, component=Component.UNKNOWN)
            for knob in remedy.changes
        }
        for of in (unknown, modelled)
    ]
    assert knobs == [offered.keys(), {"concurrency"}]
