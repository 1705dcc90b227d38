"""What recovery may take by the ladder's order: how long a failure lasts, what must not come back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.by_ladder import by_ladder, last_failure
from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.permissions import relapse_of, started_before
from autotune.policies.remedies.catalogue import MOVES
from autotune.policies.remedies.ladder import LADDER
from autotune.policies.values.events import Decided, Ended, Event, Launch, Progressed, Started
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import Run, fold
from autotune.policies.values.job import Recovery
from autotune.policies.values.knob_table import ROWS
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Crashed, Lost
from autotune.policies.values.profile import Grid, Placement, Support
from autotune.policies.values.rehearsing import Part
from autotune.policies.values.remedy import Remedy
from tests.policies.stories import KNOBS, accepted, diagnosed, profile

BACKWARD = diagnosed(phase=Phase.BACKWARD)
SYNC = diagnosed(phase=Phase.WEIGHT_SYNC)
HOST = diagnosed(Cause.HOST_OOM, Phase.BACKWARD)
FULL_ENGINE = diagnosed(phase=Phase.ROLLOUT, component=Component.ROLLOUT)
LOST = Ended(outcome=Lost(reason="node gone"))


def failed(
    row, knobs: Knobs = KNOBS, *, remedy: Remedy | None = None, step: int | None = None
) -> list[Event]:
    """Return an attempt that failed, after a step if one is given."""
    done = [] if step is None else [Progressed(step=step)]
    return [Decided(remedy=remedy), Started(knobs=knobs), *done, Ended(outcome=Crashed(exit_code=1)), row]


def run_of(*events: Event, job=None) -> Run:
    return fold((job or accepted(recovery=Recovery(relaunches=99)), *events))


def streak(*events: Event) -> int:
    failure = last_failure(run_of(*events))
    assert failure is not None
    return failure.streak


@pytest.mark.parametrize("between", [SYNC, HOST, FULL_ENGINE])
def test_a_row_of_failures_has_one_cause_and_one_phase(between):
    assert streak(*failed(BACKWARD)) == 1
    assert streak(*failed(BACKWARD), *failed(BACKWARD), *failed(BACKWARD)) == 3
    assert streak(*failed(BACKWARD), *failed(between)) == 1
    assert streak(*failed(between), *failed(BACKWARD)) == 1
    assert streak(*failed(BACKWARD), *failed(between), *failed(BACKWARD)) == 1


def test_what_the_cluster_ended_does_not_interrupt_a_row_and_what_the_user_ended_does():
    lost = [Started(knobs=KNOBS), LOST]
    cancelled = [Started(knobs=KNOBS), Ended(outcome=Cancelled(by="user"))]
    assert streak(*failed(BACKWARD), *lost, *failed(BACKWARD)) == 2
    assert streak(*failed(BACKWARD), *cancelled, *failed(BACKWARD)) == 1
    assert last_failure(run_of(*failed(BACKWARD), *cancelled)) is None


def test_a_row_begins_with_the_last_attempt_that_got_further_than_all_before():
    story = [*failed(BACKWARD, step=3), *failed(BACKWARD, step=3)]
    assert streak(*story) == 2
    assert streak(*story, *failed(BACKWARD, step=4)) == 1
    assert streak(*story, *failed(BACKWARD, step=4), *failed(BACKWARD, step=2)) == 2


def test_a_checkpoint_may_exist_once_a_step_is_done_or_where_the_job_continues_one():
    job = accepted()
    resuming = replace(job, job=replace(job.job, resume=True))
    assert not started_before(run_of())
    assert not started_before(run_of(*failed(BACKWARD)))
    assert started_before(run_of(*failed(BACKWARD, step=1)))
    assert started_before(run_of(job=resuming))
    rehearsal = run_of(*failed(BACKWARD), job=resuming)
    last = replace(rehearsal.attempts[-1], rehearsal=Part.WORST)
    assert not started_before(replace(rehearsal, attempts=(last,)))


def test_what_would_come_back_is_the_latest_failure_that_a_configuration_repeats():
    half = replace(KNOBS, tokens_per_microbatch=4096)
    run = run_of(*failed(BACKWARD), *failed(BACKWARD, half), *failed(SYNC, half))
    assert relapse_of(run, KNOBS) is run.attempts[2]
    assert relapse_of(run, replace(half, sync_buffer=1 << 20)) is run.attempts[1]
    smaller = replace(half, tokens_per_microbatch=2048, sync_buffer=1 << 20)
    assert relapse_of(run, smaller) is None
    # A mistake in the code and what the user ended say nothing of a configuration.
    mistake = run_of(*failed(BACKWARD), *failed(diagnosed(Cause.CODE, Phase.BACKWARD)))
    assert relapse_of(mistake, KNOBS) is mistake.attempts[0]
    stopped = run_of(*failed(BACKWARD), Started(knobs=KNOBS), Ended(outcome=Cancelled(by="user")))
    assert relapse_of(stopped, KNOBS) is stopped.attempts[0]


def test_a_remedy_whose_way_back_would_fail_again_brings_what_keeps_that_from_happening():
    moved = replace(KNOBS, optimizer_offload=True)
    run = run_of(
        *failed(diagnosed(phase=Phase.OPTIMIZER)), *failed(diagnosed(Cause.HOST_OOM, Phase.OPTIMIZER), moved)
    )
    back = [remedy for remedy in by_ladder(run) if remedy.changes.get("optimizer_offload") is False]
    assert back
    for remedy in back:
        assert relapse_of(run, remedy.apply(moved)) is None
        assert len(remedy.changes) > 1
        assert "; so that optimizer still fits: " in remedy.reason


def test_an_offload_that_filled_the_host_is_undone_before_anything_else_of_the_host_moves():
    begun = replace(KNOBS, dataloader_workers=4)
    full = diagnosed(Cause.HOST_OOM, Phase.OPTIMIZER)
    moved = replace(begun, optimizer_offload=True)
    of = profile(begun)
    job = accepted(of, recovery=Recovery(relaunches=99))
    run = run_of(*failed(diagnosed(phase=Phase.OPTIMIZER), begun), *failed(full, moved), job=job)
    assert list(by_ladder(run))
    assert all(remedy.changes.get("optimizer_offload") is False for remedy in by_ladder(run))
    # Not even with fewer workers, an attempt later.
    fewer = replace(moved, dataloader_workers=0)
    assert relapse_of(run, fewer) is run.attempts[-1]
    later = run_of(*failed(SYNC, begun), *failed(full, moved), *failed(full, fewer), job=job)
    assert all(remedy.changes.get("optimizer_offload") is False for remedy in by_ladder(later))
    # What the job itself holds on the host is the user's, and fewer workers may be enough.
    own = accepted(profile(moved), recovery=Recovery(relaunches=99))
    assert relapse_of(run_of(*failed(full, moved), job=own), fewer) is None


# A framework that offers every knob, each at the value that needs most memory.
_MOST = replace(
    KNOBS,
    cuda_graphs="full",
    max_batched_tokens=8192,
    rollout_tensor_parallel=1,
    tensor_parallel=1,
    context_parallel=1,
    sequence_parallel=1,
    microbatch_size=16,
    dynamic_batching=False,
    grad_offload=False,
    fused_kernels=False,
    entropy_chunking=False,
    allocator="default",
    memory_margin=2 << 30,
    memory_efficient_load=False,
    dataloader_workers=8,
    host_allocator="default",
    weights_backup=True,
    layered_sync=False,
    shard_group=1,
    expert_parallel=1,
    pipeline_parallel=1,
    reshard_after_forward=False,
    async_save=True,
    multimodal_cache=4 << 30,
)
_SIZES = (
    "rollout_tensor_parallel",
    "tensor_parallel",
    "context_parallel",
    "sequence_parallel",
    "shard_group",
    "expert_parallel",
    "pipeline_parallel",
)
_OFFERED = {
    row.name: Support(setting=row.name, grid=Grid(values=row.modes or ((False, True) if row.order else ())))
    for row in ROWS
} | {name: Support(setting=name, grid=Grid(values=(1, 2))) for name in _SIZES}


@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: f"{rung.name}-{rung.cause}-{rung.phases[0]}")
def test_every_row_of_the_ladder_leads_to_a_launch_where_the_others_are_denied(rung):
    save = MOVES[rung.name].memory
    most = {row.name: row.towards(save)[0] for row in ROWS if row.order and row.name != "dynamic_batching"}
    if rung.cause is Cause.HOST_OOM:
        most["engine_sleep"] = True  # with its weights on the host
    of = profile(
        replace(_MOST, **most), supported=_OFFERED, placement=(*rung.placements, Placement.COLOCATED)[0]
    )
    deny = tuple({other.name for other in LADDER} - {rung.name})
    first, component = accepted(of, recovery=Recovery(deny=deny)), (*rung.components, Component.TRAINER)[0]
    stories = (
        (first, *failed(diagnosed(rung.cause, p, component, requested_bytes=1), of.knobs))
        for p in rung.phases
    )
    launches = (action for action in map(decide, stories) if isinstance(action, Launch))
    assert any(launch.remedy is not None and launch.remedy.name == rung.name for launch in launches)
