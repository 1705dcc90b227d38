"""How much one relaunch changes where the ladder decides."""

from msgspec.structs import replace

from autotune.policies.values.events import Launch
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.job import Recovery
from autotune.policies.values.knobs import changed
from autotune.policies.values.profile import Placement
from autotune.policies.values.remedy import Effect
from tests.policies.stories import KNOBS, Story, accepted, diagnosed, profile, support

GIB = 1 << 30
PATIENT = Recovery(relaunches=99)
RANKS = profile().supported | {"rollout_tensor_parallel": support("rollout_tensor_parallel", 1, 2, 4, 8)}


def begun(**changes) -> Story:
    story = Story(accepted(recovery=PATIENT, **changes))
    story.launch()
    return story


def test_the_first_failure_of_a_pass_is_answered_with_all_that_costs_little():
    remedy = begun().fails().launch().remedy
    assert remedy.name == "reduce_tokens_per_mb"
    assert remedy.changes == {
        "tokens_per_microbatch": 2048,
        "logprob_chunk": 1024,
        "loss_recompute": True,
        "recompute": "full",
    }
    assert remedy.reason.count("; ") == 3


def test_a_pass_that_held_for_some_steps_needs_one_step():
    remedy = begun().steps(1, 2, 3).fails().launch().remedy
    assert remedy.changes == {"tokens_per_microbatch": 4096}


def test_knobs_of_phases_that_did_not_fail_stay():
    engine = {"memory_fraction", "concurrency", "sync_buffer", "sync_mode"}
    for phase in (Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD):
        story = begun()
        for _ in range(3):
            moved = changed(KNOBS, story.fails(diagnosed(phase=phase)).launch().knobs)
            assert not engine & set(moved)


def test_what_saves_more_joins_with_every_failure_of_a_pass():
    story = begun()
    phases = (Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD)
    knobs = [story.fails(diagnosed(phase=phase)).launch().knobs for phase in phases]
    assert [k.activation_offload for k in knobs] == [False, True, True]
    assert [k.optimizer_offload for k in knobs] == [False, False, True]


def test_what_the_host_may_not_hold_is_not_joined():
    job = accepted(recovery=PATIENT)
    small = replace(job.cluster, gpus_per_node=8, gpu_memory_bytes=80 * GIB, host_memory_bytes=64 * GIB)
    story = Story(replace(job, cluster=small))
    story.launch()
    first, second = (story.fails().launch().remedy for _ in range(2))
    assert not {"activation_offload", "optimizer_offload"} & {*first.changes, *second.changes}


def test_a_host_that_an_offload_filled_gives_it_back_first():
    story = begun(of=profile(replace(KNOBS, dataloader_workers=4)))
    moved = story.fails(diagnosed(phase=Phase.OPTIMIZER)).launch().remedy
    assert moved.changes["optimizer_offload"] is True
    back = story.fails(diagnosed(Cause.HOST_OOM, Phase.OPTIMIZER)).launch().remedy
    assert back.changes["optimizer_offload"] is False


def test_exact_remedies_come_before_numeric_ones():
    numeric = support("fused_kernels", False, True, effect=Effect.NUMERIC)
    supported = profile().supported | {"fused_kernels": numeric}
    story = begun(of=profile(replace(KNOBS, fused_kernels=False), supported=supported))
    effects = []
    while isinstance(story.fails().action(), Launch):
        effects.append(story.launch().remedy.effect)
    assert effects.index(Effect.NUMERIC) == len(effects) - 1


def test_a_share_that_the_figures_size_comes_before_fewer_requests():
    engine = {"phase": Phase.ROLLOUT, "component": Component.ROLLOUT}
    blind = begun().fails(diagnosed(**engine)).launch().remedy
    assert blind.changes.keys() == {"concurrency"}
    sized = diagnosed(**engine, requested_bytes=2 * GIB, free_bytes=GIB, capacity_bytes=80 * GIB)
    assert begun().fails(sized).launch().remedy.changes == {"memory_fraction": 0.7}


def test_an_engine_whose_pool_stays_too_small_is_split():
    story = begun(of=profile(replace(KNOBS, rollout_tensor_parallel=1), supported=RANKS))
    small = diagnosed(Cause.POOL_TOO_SMALL, Phase.ROLLOUT_INIT, Component.ROLLOUT)
    first = story.fails(small).launch().remedy
    assert first.name == "increase_mem_fraction"
    assert first.changes == {"memory_fraction": 0.85, "rollout_tensor_parallel": 2}
    assert story.fails(small).launch().knobs.rollout_tensor_parallel == 4


def test_a_woken_engine_is_split_when_smaller_shares_did_not_help():
    story = begun(
        of=profile(replace(KNOBS, rollout_tensor_parallel=1), supported=RANKS, placement=Placement.COLOCATED)
    )
    waking = diagnosed(phase=Phase.WEIGHT_SYNC)
    first, second = (story.fails(waking).launch().remedy for _ in range(2))
    assert first.changes.keys() == {"sync_buffer", "memory_fraction"}
    assert second.changes["rollout_tensor_parallel"] == 2
