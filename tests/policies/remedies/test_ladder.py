"""What the ladder proposes, and how far it goes, where only a profile is known."""

import pytest
from msgspec.structs import replace

from autotune.policies.remedies.ladder import candidates
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.profile import Placement
from tests.policies.stories import KNOBS, profile, support
from tests.policies.stories import SUPPORTED as OFFERED

HALVES = "optimizer_offload_fraction"


def proposed(of, phase, *, cause=Cause.GPU_OOM, component=Component.TRAINER, streak=1):
    diagnosis = Diagnosis(cause=cause, phase=phase, component=component, streak=streak)
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
