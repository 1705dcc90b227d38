"""What counts of several failures where the ladder decides: which were in a row, which would come back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.by_ladder import joined, savers
from autotune.policies.recovery.decide import decide
from autotune.policies.values.events import Decided, Ended, Launch, Policy, Progressed, Started
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.job import Preflight, Recovery
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Crashed, Lost
from autotune.policies.values.profile import Placement
from autotune.policies.values.remedy import Remedy
from tests.policies import jobs
from tests.policies.stories import KNOBS, Story, accepted, diagnosed, profile, support

PATIENT = Recovery(relaunches=99)
BACKWARD = diagnosed(phase=Phase.BACKWARD)
SYNC = diagnosed(phase=Phase.WEIGHT_SYNC)
HOST = diagnosed(Cause.HOST_OOM, Phase.BACKWARD)
SMALL_POOL = diagnosed(Cause.POOL_TOO_SMALL, Phase.ROLLOUT_INIT, Component.ROLLOUT)
FULL_ENGINE = diagnosed(phase=Phase.ROLLOUT_INIT, component=Component.ROLLOUT)
RANKS = profile().supported | {"rollout_tensor_parallel": support("rollout_tensor_parallel", 1, 2, 4, 8)}


def begun(**changes) -> Story:
    story = Story(accepted(recovery=PATIENT, **changes))
    story.launch()
    return story


def after(*rows, lost: int | None = None) -> Knobs:
    """Return what follows these failures; before that of the number `lost`, the node is lost once."""
    story = begun(of=profile(replace(KNOBS, dataloader_workers=4)))
    for number, row in enumerate(rows):
        if number == lost:
            story.ends(Lost(reason="node gone")).launch()
        story.fails(row).launch()
    return story.knobs


def test_a_failure_of_other_savers_ends_the_row():
    assert after(BACKWARD, BACKWARD).activation_offload is True
    for between in (SYNC, HOST):
        assert after(BACKWARD, between, BACKWARD).activation_offload is False


def test_a_lost_node_does_not_end_the_row():
    assert after(BACKWARD, BACKWARD, lost=1) == after(BACKWARD, BACKWARD)


def test_a_step_that_no_attempt_had_reached_ends_the_row():
    story = begun()
    for number in (1, 2):
        story.steps(number).fails(replace(BACKWARD, step=number)).launch()
    assert story.knobs.activation_offload is False
    stuck = begun()
    for _ in range(2):
        stuck.steps(1).fails(replace(BACKWARD, step=1)).launch()
    assert stuck.knobs.activation_offload is True


def test_an_engine_whose_pool_was_too_small_for_the_third_time_gets_the_trainers_room():
    of = profile(
        replace(KNOBS, memory_fraction=0.5, rollout_tensor_parallel=1),
        supported=RANKS,
        placement=Placement.COLOCATED,
    )
    story = begun(of=of)
    for _ in range(2):
        assert "optimizer_offload" not in story.fails(SMALL_POOL).launch().remedy.changes
    assert story.fails(SMALL_POOL).launch().knobs.optimizer_offload is True


def test_a_share_without_a_middle_between_its_bounds_gets_the_trainers_room():
    of = profile(replace(KNOBS, memory_fraction=0.5), supported=RANKS, placement=Placement.COLOCATED)
    story = begun(of=of)
    for _ in range(8):
        story.fails(SMALL_POOL).launch()
        if story.knobs.optimizer_offload:
            break
        story.fails(FULL_ENGINE).launch()
    assert story.knobs.optimizer_offload is True


@pytest.mark.parametrize("lost", [None, 1, 2])
def test_a_share_that_failed_before_a_lost_node_is_not_tried_again_from_below(lost: int | None):
    story = begun()
    shares = []
    for number, row in enumerate((FULL_ENGINE, SMALL_POOL, SMALL_POOL)):
        if number == lost:
            story.ends(Lost(reason="node gone")).launch()
        story.fails(row).launch()
        shares.append((story.knobs.memory_fraction, story.knobs.concurrency))
    assert shares[:2] == [(0.7, 64), (0.75, 64)]
    assert shares[2] == (0.77, 64)  # 0.8 failed with 64 requests, 0.75 was too small for them


def test_a_remedy_of_a_knob_that_is_moved_already_keeps_no_other_from_joining():
    moves = [
        ("reduce_tokens_per_mb", "tokens_per_microbatch", 4096, "nothing"),
        ("reduce_micro_batch", "tokens_per_microbatch", 2048, ""),
        ("offload_params", "param_offload", True, "copies"),
        ("recompute", "recompute", "full", "one more forward pass"),
    ]
    remedies = [
        Remedy(name=name, changes={knob: value}, reason=name, slows=slows)
        for name, knob, value, slows in moves
    ]
    names = frozenset({"reduce_tokens_per_mb", "reduce_micro_batch", "recompute"})
    together = joined(remedies, 0, names, lambda _: True)
    assert together.changes == {"tokens_per_microbatch": 4096, "recompute": "full"}
    assert together.reason == "reduce_tokens_per_mb; recompute"
    assert together.slows == "one more forward pass"
    unlike = joined(remedies, 0, names, lambda remedy: "recompute" not in remedy.changes)
    assert unlike == remedies[0]
    assert joined(remedies, 2, names, lambda _: True) == remedies[2]


@pytest.mark.parametrize("policy", Policy)
def test_a_share_between_two_failures_is_halved(policy):
    knobs = replace(jobs.KNOBS, rollout_tensor_parallel=4, param_offload=True, optimizer_offload=True)
    start = jobs.accepted(jobs.profile(knobs), recovery=Recovery(preflight=Preflight.OFF))
    history, tried = [replace(start, policy=policy), Started(knobs=knobs)], []
    least, most = 0.5, 0.53
    for _ in range(9):
        share = knobs.memory_fraction
        if least < share <= most:
            break
        cause = Cause.POOL_TOO_SMALL if share <= least else Cause.GPU_OOM
        phase = Phase.ROLLOUT_INIT if share <= least else Phase.WEIGHT_SYNC
        tried.append((share, cause))
        figures = {} if share <= least else {"requested": 2 * jobs.GIB, "free": jobs.GIB}
        history += jobs.fails(phase, cause=cause, **figures)
        action = decide(tuple(history))
        assert isinstance(action, Launch)
        knobs = action.knobs
        history += [Decided(remedy=action.remedy), Started(knobs=knobs)]
    assert least < knobs.memory_fraction <= most
    assert len(tried) <= 8


def test_a_share_is_halved_only_for_a_failure_that_is_one_of_its_bounds():
    story = begun()
    for row in (FULL_ENGINE, SMALL_POOL):
        story.fails(row).launch()
    share = story.knobs.memory_fraction
    story.fails(diagnosed(phase=Phase.LOG_PROB)).launch()
    assert story.knobs.memory_fraction == share and story.knobs.logprob_tokens is not None


def shares_failed(*shares: float, deny: tuple[str, ...] = (), **moved) -> object:
    """Return what follows where pools of up to a half were too small and larger ones too large by 0.05."""
    offered = profile(KNOBS).supported | {"memory_fraction": support("memory_fraction", multiple=0.01)}
    history = [accepted(profile(KNOBS, supported=offered), recovery=replace(PATIENT, deny=deny))]
    for number, share in enumerate(shares, 1):
        knobs = replace(KNOBS, memory_fraction=share, **(moved if number < len(shares) else {}))
        figures = {"requested_bytes": 5, "free_bytes": 0, "capacity_bytes": 100}
        row = SMALL_POOL if share <= 0.5 else diagnosed(phase=Phase.WEIGHT_SYNC, **figures)
        history += [Started(knobs=knobs), Ended(outcome=Crashed(exit_code=1)), row]
    return decide(tuple(history))


@pytest.mark.parametrize(
    ("shares", "middle"),
    [
        ((0.8, 0.4), 0.57),  # 0.41 to 0.74: what one lacked counts
        ((0.8, 0.4, 0.9, 0.5, 0.3), 0.62),  # 0.51 to 0.74
        ((0.81, 0.4), 0.58),  # 0.41 to 0.75
    ],
)
def test_the_middle_lies_between_the_largest_too_small_and_the_smallest_too_large(shares, middle):
    launch = shares_failed(*shares)
    assert isinstance(launch, Launch) and launch.remedy is not None
    assert launch.remedy.changes == {"memory_fraction": middle}
    denied = shares_failed(*shares, deny=("memory_fraction",))
    assert isinstance(denied, Launch) and denied.knobs.memory_fraction == shares[-1]


def test_a_failure_of_settings_that_asked_for_more_is_no_bound():
    launch = shares_failed(0.8, 0.4, concurrency=128)
    assert isinstance(launch, Launch) and launch.knobs.memory_fraction != 0.57


def test_a_failure_right_after_a_load_is_no_late_one():
    first = (Started(knobs=KNOBS), Progressed(step=100, saved=100), Ended(outcome=Lost(reason="node gone")))
    failed = (Started(knobs=KNOBS), Ended(outcome=Crashed(exit_code=1)), diagnosed(step=101))
    run = fold((accepted(), *first, *failed))
    fresh = fold((accepted(), Started(knobs=KNOBS), Ended(outcome=Crashed(exit_code=1)), diagnosed(step=1)))
    assert savers(run, 1) == savers(fresh, 1) != frozenset()
