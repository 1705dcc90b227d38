"""The brain, told as stories: what happens, and what follows."""

import pytest
from msgspec.structs import replace

from autotune.policies.recovery.decide import backoff_s, decide
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.events import (
    Await,
    Decided,
    Edited,
    Ended,
    FailureSeen,
    Finished,
    GaveUp,
    Infrastructure,
    Interrupted,
    Launch,
    NeedsHuman,
    Policy,
    Progressed,
    Stable,
    Started,
    Stop,
    StopRequested,
    TrainingCompleted,
)
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import RESUMED
from autotune.policies.values.job import Goal, Recovery, Then
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled, Completed, Crashed, Hung, Lost
from autotune.policies.values.profile import FixedDuringRun, Placement
from autotune.policies.values.remedy import Effect
from tests.policies import jobs
from tests.policies.stories import KNOBS, MIB, Story, accepted, diagnosed, finding, profile, support

GIB = 1 << 30
CRASH = Crashed(exit_code=1)


def test_a_run_begins_as_written_and_ends_when_training_does():
    story = Story()
    assert story.launch().knobs == KNOBS
    assert story.action() == Await()
    story.steps(1, 2).reaches_goal(marginal=True)
    assert story.action() == Await()
    assert story.ends(Completed()).verdict() == TrainingCompleted(marginal=True)
    assert story.verdict() == TrainingCompleted(marginal=True)  # asked again, it stays finished


def test_a_fatal_line_stops_the_job_once():
    story = Story()
    story.launch()
    story.then(FailureSeen(finding=finding()))
    assert story.action() == Stop(by="failure", reason="torch.OutOfMemoryError: CUDA out of memory.")
    story.then(StopRequested(by="failure"))
    assert story.action() == Await()
    story.ends(Cancelled(by="failure"))
    assert story.action() == Await()  # until it is diagnosed
    assert story.then(diagnosed()).launch().remedy.name == "reduce_tokens_per_mb"


def test_the_goal_ends_the_run_only_where_the_job_says_so():
    story = Story(accepted(goal=Goal(then=Then.STOP)))
    story.launch()
    story.reaches_goal()
    assert story.action() == Stop(by="goal", reason="the goal was reached at step 20")
    assert story.then(StopRequested(by="goal")).ends(Cancelled(by="goal")).verdict() == Stable(marginal=False)


def test_an_oom_after_the_goal_is_cured_too():
    story = Story()
    story.launch()
    story.steps(20).reaches_goal().steps(21).fails()
    assert story.launch().knobs.tokens_per_microbatch == 4096
    assert story.ends(Completed()).verdict() == TrainingCompleted(marginal=False)


def test_figures_size_the_cut():
    story = Story()
    story.launch()
    story.fails(diagnosed(requested_bytes=600 * MIB, free_bytes=20 * MIB, capacity_bytes=100 * MIB))
    # 90 of (80 + 600) MiB
    assert story.launch().knobs.tokens_per_microbatch == 1024


def test_the_fraction_moves_by_what_is_missing():
    story = Story(accepted(profile(placement=Placement.COLOCATED)))
    story.launch()
    story.fails(
        diagnosed(
            phase=Phase.WEIGHT_SYNC,
            component=Component.ROLLOUT,
            requested_bytes=20 * GIB,
            free_bytes=10 * GIB,
            capacity_bytes=80 * GIB,
        )
    )
    launch = story.launch()
    assert launch.remedy.name == "reduce_mem_fraction"
    assert launch.knobs.memory_fraction == 0.65  # 10/80, a tenth more, and one step
    assert launch.remedy.frees.startswith("12.00 GiB")


def test_apart_the_engines_share_does_not_help_the_trainer():
    names = []
    story = Story(accepted(recovery=Recovery(relaunches=99)))
    story.launch()
    while isinstance(story.fails(diagnosed(phase=Phase.WEIGHT_SYNC)).action(), Launch):
        names += story.launch().remedy.changes
    assert "memory_fraction" not in names
    assert {"sync_buffer", "sync_mode"} <= set(names)


def test_colocated_the_share_helps_only_while_the_engine_is_resident():
    asleep = profile(placement=Placement.COLOCATED, resident={"optimizer": ("trainer",)})
    story = Story(accepted(asleep))
    story.launch()
    assert story.fails(diagnosed(phase=Phase.OPTIMIZER)).launch().remedy.name == "offload_optimizer"
    awake = profile(placement=Placement.COLOCATED, resident={"optimizer": ("trainer", "rollout")})
    story = Story(accepted(awake))
    story.launch()
    assert story.fails(diagnosed(phase=Phase.OPTIMIZER)).launch().remedy.name == "reduce_mem_fraction"


def test_a_pool_too_small_grows():
    story = Story()
    story.launch()
    story.fails(diagnosed(Cause.POOL_TOO_SMALL, Phase.ROLLOUT_INIT, Component.ROLLOUT))
    assert story.launch().knobs.memory_fraction == 0.85


def test_the_host_never_gets_more_offload():
    full = replace(KNOBS, optimizer_offload=True, activation_offload=True, dataloader_workers=4)
    story = Story(accepted(profile(full)))
    story.launch()
    assert story.fails(diagnosed(Cause.HOST_OOM, Phase.OPTIMIZER)).launch().knobs.dataloader_workers == 0
    assert story.fails(diagnosed(Cause.HOST_OOM, Phase.OPTIMIZER)).launch().knobs.optimizer_offload is False
    assert story.fails(diagnosed(Cause.HOST_OOM, Phase.OPTIMIZER)).launch().knobs.activation_offload is False


def test_offload_that_fills_the_host_is_replaced_by_another_cure_of_the_device():
    story = Story()
    story.launch()
    story.fails(diagnosed(phase=Phase.OPTIMIZER))
    assert story.launch().knobs.optimizer_offload is True
    story.fails(diagnosed(Cause.HOST_OOM, Phase.OPTIMIZER))
    launch = story.launch()
    assert launch.knobs.optimizer_offload is False
    assert launch.knobs.param_offload is True
    assert "so that optimizer still fits" in launch.remedy.reason


def test_cuts_grow_with_a_streak_of_equal_failures():
    story = Story()
    written = story.launch().knobs.tokens_per_microbatch
    first = story.fails().launch().knobs.tokens_per_microbatch
    second = story.fails().launch().knobs.tokens_per_microbatch
    assert (first, second) == (written // 4, written // 32)


def test_a_new_step_ends_the_streak():
    story = Story()
    story.launch()
    taken = [story.steps(n + 1).fails().launch().remedy.name for n in range(3)]
    assert taken == ["reduce_tokens_per_mb"] * 3


def test_fragmentation_is_the_allocators():
    supported = profile().supported | {"allocator": support("allocator", "default", "expandable")}
    story = Story(accepted(profile(supported=supported)))
    story.launch()
    assert story.fails(diagnosed(fragmentation=True)).launch().remedy.changes == {"allocator": "expandable"}


def test_denied_remedies_knobs_and_effects_are_not_used():
    supported = profile().supported | {
        "fused_kernels": support("liger", False, True, effect=Effect.NUMERIC),
    }
    recovery = Recovery(
        deny=("reduce_tokens_per_mb", "logprob_chunk", "loss_recompute", "recompute"), allow=(Effect.EXACT,)
    )
    story = Story(accepted(profile(supported=supported), recovery=recovery))
    story.launch()
    assert story.fails().launch().remedy.name == "offload_activations"
    assert story.fails().launch().remedy.name == "offload_optimizer"
    assert story.fails().launch().remedy.name == "offload_params"
    verdict = story.fails().verdict()
    assert isinstance(verdict, GaveUp)
    assert any("fused_kernels" in text for text in verdict.would_help)


def test_giving_up_says_by_how_much_and_what_would_help():
    only = {"concurrency": profile().supported["concurrency"]}
    story = Story(accepted(replace(profile(supported=only), layout=Layout(strategy="fsdp"))))
    story.launch()
    figures = {"requested_bytes": 50 * GIB, "free_bytes": 9 * GIB, "capacity_bytes": 80 * GIB}
    verdict = story.fails(diagnosed(phase=Phase.WEIGHT_SYNC, **figures)).verdict()
    assert verdict.reason == "no remedy is left for gpu-oom in weight_sync"
    assert verdict.nearest == "closest: attempt #1, 41.00 GiB of GPU memory short"
    assert "a smaller model" in verdict.would_help


@pytest.mark.parametrize(
    ("share", "nearest", "would_help"),
    [
        (0.14, "only 14% of the host's memory was in use", "a higher limit of the process"),
        (0.97, "how much memory was missing is not known", "more host memory or more nodes"),
    ],
)
def test_a_program_without_a_model_is_advised_as_one(share, nearest, would_help):
    story = Story(accepted(profile(supported={})))
    story.launch()
    verdict = story.fails(replace(diagnosed(cause=Cause.HOST_OOM), host_share=share)).verdict()
    assert verdict.nearest.startswith(nearest) and verdict.would_help[1:] == (would_help,)
    assert "{tokens_per_microbatch}" in verdict.would_help[0]


def test_giving_up_without_figures_claims_no_distance():
    story = Story(accepted(profile(supported={})))
    story.launch()
    verdict = story.fails(diagnosed(phase=Phase.WEIGHT_SYNC)).verdict()
    assert verdict.nearest == "how much memory was missing is not known"


def test_budgets_end_it():
    story = Story(accepted(recovery=Recovery(relaunches=1)))
    story.launch()
    story.fails().launch()
    verdict = story.fails().verdict()
    assert verdict.reason == "its only relaunch is used"
    assert "leaves untried: " in verdict.nearest and verdict.would_help == ()
    first = accepted(recovery=Recovery(duration_s=60))
    story = Story(replace(first, at="2026-11-21T00:00:00.000+00:00"))
    story.then(Started(knobs=KNOBS, at="2026-11-21T00:00:00.000+00:00"))
    story.then(FailureSeen(finding=finding(), at="2026-11-21T00:02:00.000+00:00"))
    story.ends(CRASH).then(diagnosed())
    assert "recovery.duration" in story.verdict().reason
    lost = Story(replace(first, at="2026-11-21T00:00:00.000+00:00"))
    lost.then(Started(knobs=KNOBS, at="2026-11-21T00:00:00.000+00:00"))
    lost.then(Ended(outcome=Lost(reason="node gpu-2 left"), at="2026-11-21T00:02:00.000+00:00"))
    verdict = lost.verdict()
    assert isinstance(verdict, Infrastructure)
    assert verdict.reason.startswith("node gpu-2 left; the time limit of 60 s")


def test_what_a_checkpoint_depends_on_is_fixed_once_there_may_be_one():
    supported = {"tensor_parallel": support("tp", 1, 2, 4)}
    fixed = (FixedDuringRun(knob="tensor_parallel", why="checkpoints are sharded by it"),)
    knobs = Knobs(tensor_parallel=1)
    before = Story(accepted(profile(knobs, supported=supported, constraints=fixed)))
    before.launch()
    assert before.fails().launch().knobs.tensor_parallel == 2
    after = Story(accepted(profile(knobs, supported=supported, constraints=fixed)))
    after.launch()
    verdict = after.steps(1).fails().verdict()
    assert any("tensor_parallel = 2" in text for text in verdict.would_help)


def test_what_a_checkpoint_fixes_stays_after_an_edit_of_the_training():
    fixed = profile(constraints=(FixedDuringRun(knob="recompute", why="checkpoints are written with it"),))
    story = Story(accepted(fixed))
    first = story.events[0]
    story.launch()
    story.then(Progressed(step=10, saved=10)).fails(diagnosed(Cause.CODE)).verdict()
    story.then(Edited(job=first.job, profile=first.profile, cluster=first.cluster, forgets=True)).launch()
    after = story.fails().launch().knobs
    assert after != KNOBS and after.recompute == KNOBS.recompute


def test_the_wait_after_many_losses_is_bounded():
    assert backoff_s(1) < backoff_s(2) < backoff_s(20) == backoff_s(5_000)


def test_what_is_not_memory_is_the_users():
    for cause in (Cause.CONFIG, Cause.CODE, Cause.DISK, Cause.UNKNOWN):
        story = Story()
        story.launch()
        verdict = story.fails(diagnosed(cause)).verdict()
        assert isinstance(verdict, NeedsHuman)
        assert verdict.diagnosis.cause is cause
        assert type(verdict.diagnosis).__name__ == "Diagnosis"


def test_a_lost_cluster_costs_no_remedy_and_waits_longer_each_time():
    story = Story()
    story.launch()
    waits = []
    for _ in range(3):
        launch = story.ends(Lost(reason="node 10.0.0.2 is gone")).launch()
        assert launch.knobs == KNOBS
        assert launch.remedy is None
        waits.append(launch.not_before_s)
    assert waits == [30.0, 60.0, 120.0]
    verdict = story.ends(Lost(reason="node 10.0.0.2 is gone")).verdict()
    assert isinstance(verdict, Infrastructure)
    assert "node 10.0.0.2" in verdict.reason


def test_losses_count_and_waits_grow_only_until_new_steps_are_saved():
    story = Story(accepted(recovery=Recovery(infrastructure_retries=2)))
    story.launch()
    for done in range(1000, 9000, 1000):
        story.then(Progressed(step=done, saved=done))
        assert story.ends(Lost(reason="node 10.0.0.2 was preempted")).launch().not_before_s == 30.0
    story.then(Progressed(step=8001, saved=8000))  # a step that no checkpoint holds is lost again
    assert story.ends(Lost(reason="node 10.0.0.2 was preempted")).launch().not_before_s == 60.0
    assert "lost 3 times" in story.ends(Lost(reason="node 10.0.0.2 was preempted")).verdict().reason


@pytest.mark.parametrize("gains", [True, False])
def test_relaunches_count_since_the_last_attempt_that_saved_new_steps(gains: bool):
    story = Story(accepted(recovery=Recovery(relaunches=2)))
    story.launch()
    for attempt in range(4):
        done = 100 * (attempt if gains else 1)
        story.then(Progressed(step=done + 1, saved=done)).fails()
        if attempt < 2 or gains:
            story.launch()
        else:
            assert story.verdict().reason == "all 2 relaunches are used"
            break


def test_infrastructure_in_the_log_is_a_loss_too():
    story = Story()
    story.launch()
    assert story.fails(diagnosed(Cause.INFRASTRUCTURE)).launch().not_before_s == 30.0


def test_a_bare_kill_is_a_loss_once_and_unknown_when_it_repeats_at_the_same_step():
    story = Story()
    story.launch()
    story.steps(1, 2).ends(Lost(reason="killed by SIGKILL", killed=True))
    story.launch()
    verdict = story.steps(2).ends(Lost(reason="killed by SIGKILL", killed=True)).verdict()
    assert isinstance(verdict, NeedsHuman)
    assert verdict.diagnosis.cause is Cause.UNKNOWN
    assert verdict.diagnosis.step == 2
    story = Story()
    story.launch()
    story.steps(1, 2).ends(Lost(reason="killed by SIGKILL", killed=True))
    story.launch()
    assert story.steps(3).ends(Lost(reason="killed by SIGKILL", killed=True)).launch().knobs == KNOBS


def test_a_hang_gets_one_relaunch():
    story = Story()
    story.launch()
    assert story.ends(Hung(silent_s=900)).then(diagnosed(Cause.HANG)).launch().knobs == KNOBS
    assert isinstance(story.ends(Hung(silent_s=900)).then(diagnosed(Cause.HANG)).verdict(), NeedsHuman)


@pytest.mark.parametrize(("between", "again"), [(Cause.GPU_OOM, True), (Cause.INFRASTRUCTURE, True)])
def test_only_hangs_one_after_the_other_end_a_run(between, again):
    story = Story()
    story.launch()
    story.ends(Hung(silent_s=900)).then(diagnosed(Cause.HANG)).launch()
    story.ends(CRASH).then(diagnosed(between)).launch()
    action = story.ends(Hung(silent_s=900)).then(diagnosed(Cause.HANG)).action()
    assert isinstance(action, Launch) is again


def test_memory_that_does_not_come_back_names_its_holder():
    story = Story()
    story.launch()
    story.then(FailureSeen(finding=finding())).ends(CRASH, held="GPU 0: 12 GiB by pid 4711 of alice")
    verdict = story.verdict()
    assert isinstance(verdict, Infrastructure)
    assert "pid 4711 of alice" in verdict.reason


def test_the_user_stops_and_resumes():
    story = Story()
    story.launch()
    story.steps(1, 2).then(StopRequested(by="user")).ends(Cancelled(by="user"))
    assert story.verdict() == Interrupted(by="user")
    story.then(Decided(reason=RESUMED))
    assert story.launch().knobs == KNOBS
    assert story.fails().launch().knobs.tokens_per_microbatch == 2048


def test_resuming_renews_the_budgets():
    story = Story(accepted(recovery=Recovery(infrastructure_retries=0)))
    story.launch()
    assert isinstance(story.ends(Lost(reason="head node lost")).verdict(), Infrastructure)
    story.then(Decided(reason=RESUMED))
    assert story.launch().not_before_s == 0
    assert isinstance(story.ends(Lost(reason="head node lost")).verdict(), Infrastructure)


def test_resuming_after_a_full_disk_tries_the_same_again():
    story = Story()
    story.launch()
    assert isinstance(story.fails(diagnosed(Cause.DISK)).verdict(), NeedsHuman)
    assert story.then(Decided(reason=RESUMED)).launch().knobs == KNOBS


def test_resuming_does_not_repeat_an_oom():
    story = Story()
    story.launch()
    story.then(FailureSeen(finding=finding()), StopRequested(by="user")).ends(Cancelled(by="user")).then(
        diagnosed()
    )
    assert story.verdict() == Interrupted(by="user")
    assert story.then(Decided(reason=RESUMED)).launch().knobs.tokens_per_microbatch == 2048


def test_a_driver_that_died_between_decision_and_start_decides_the_same_again():
    story = Story()
    story.launch()
    story.fails()
    first = story.action()
    story.then(Decided(remedy=first.remedy, reason=first.reason))
    assert story.action() == first
    story.then(Started(knobs=first.knobs))
    assert story.action() == Await()


def test_a_history_begins_with_its_job():
    with pytest.raises(ValueError, match="Accepted"):
        decide((Finished(verdict=Interrupted(by="user")),))


@pytest.mark.parametrize("policy", Policy)
def test_an_engine_without_places_for_its_requests_gets_fewer_requests(policy):
    start = replace(jobs.accepted(), policy=policy)
    failed = (start, Started(knobs=jobs.KNOBS), *jobs.fails(Phase.ROLLOUT, cause=Cause.POOL_TOO_SMALL))
    action = decide(failed)
    assert isinstance(action, Launch) and action.remedy is not None
    assert action.remedy.changes.keys() == {"concurrency"}
    assert action.knobs.concurrency < jobs.KNOBS.concurrency
