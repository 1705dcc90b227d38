"""What follows when the job refuses a change that was to cure it."""

import pytest
from msgspec.structs import replace

from autotune.policies.values.diagnosis import Line
from autotune.policies.values.events import (
    Decided,
    Diagnosed,
    GaveUp,
    Infrastructure,
    Launch,
    NeedsHuman,
    Started,
)
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import RESUMED
from autotune.policies.values.job import Recovery
from autotune.policies.values.observation import Completed, Lost
from autotune.policies.values.remedy import Remedy
from tests.policies.stories import KNOBS, SUPPORTED, Story, accepted, diagnosed, profile, support

ERROR = "ValueError: size 12 must be divisible by 5"


def refusal(
    text: str = ERROR, *, cause: Cause = Cause.CODE, phase: Phase = Phase.NONE, rule: str = "python"
) -> Diagnosed:
    return replace(diagnosed(cause, phase), evidence=(Line(line=9, text=text, rule=rule),))


def after_a_cure() -> Story:
    """Return a story whose second attempt runs with the remedy for a failure in backward."""
    story = Story()
    story.launch()
    story.steps(1, 2, 3).fails()  # late: the remedy is one step
    story.launch()
    return story


@pytest.mark.parametrize("cause", [Cause.CODE, Cause.CONFIG, Cause.UNKNOWN])
def test_a_refused_change_is_undone_and_the_next_candidate_follows(cause):
    story = after_a_cure()
    failed, refused = story.events[2].knobs, story.knobs
    assert refused.tokens_per_microbatch == 4096
    launch = story.fails(refusal(cause=cause)).launch()
    assert launch.knobs not in (failed, refused)
    assert launch.knobs.tokens_per_microbatch != refused.tokens_per_microbatch
    assert f"the job refused tokens_per_microbatch 8192 → 4096 in attempt #2 ({ERROR})" in launch.reason


def test_a_loss_before_the_refusal_changes_nothing():
    plain, after_loss = after_a_cure(), after_a_cure()
    after_loss.ends(Lost(reason="node gone")).launch()
    launches = [story.fails(refusal()).launch() for story in (plain, after_loss)]
    assert launches[0].knobs == launches[1].knobs


def test_refusals_before_a_resume_take_no_relaunch_after_it():
    story = Story(accepted(recovery=Recovery(relaunches=2)))
    story.launch()
    story.steps(1).fails().launch()
    story.fails(refusal("ValueError: cannot do this")).launch()
    story.fails(refusal("ValueError: nor that"))
    assert isinstance(story.verdict(), GaveUp)
    story.then(Decided(reason=RESUMED)).launch()
    story.fails().launch()


def test_a_refused_change_never_comes_back():
    story = after_a_cure()
    refused = story.knobs
    story.fails(refusal())
    knobs = []
    for _ in range(4):
        knobs.append(story.launch().knobs)
        story.fails()
    assert all(k.tokens_per_microbatch != refused.tokens_per_microbatch for k in knobs)
    assert len(set(knobs)) == len(knobs)


def test_the_same_error_after_another_change_is_the_jobs_own():
    story = after_a_cure()
    story.fails(refusal()).launch()
    verdict = story.fails(refusal(ERROR.replace("12", "13"))).verdict()
    assert isinstance(verdict, NeedsHuman)


def test_another_error_after_another_change_is_another_refusal():
    story = after_a_cure()
    second = story.fails(refusal()).launch()
    third = story.fails(refusal("KeyError: unknown option")).launch()
    assert second.knobs != third.knobs
    assert "in attempt #2" in third.reason and "in attempt #3" in third.reason


def test_a_knob_of_which_two_values_met_the_same_error_is_not_moved_any_more():
    story = after_a_cure()
    first = story.knobs.tokens_per_microbatch
    story.fails(refusal("tokens_per_microbatch 1 is refused"))
    moved = [first]
    while isinstance(action := story.action(), Launch):
        story.launch()
        if action.knobs.tokens_per_microbatch != 8192:
            moved.append(action.knobs.tokens_per_microbatch)
            story.fails(refusal("tokens_per_microbatch 2 is refused"))
        else:
            story.fails()
    assert len(moved) <= 2 and len(set(moved)) == len(moved)


def test_a_change_that_was_made_before_the_first_launch_is_refused_too():
    smaller = Remedy(name="reduce_tokens_per_mb", changes={"tokens_per_microbatch": 4096}, reason="foreseen")

    def refused(phase: Phase) -> Story:
        story = Story().then(Decided(remedy=smaller), Started(knobs=smaller.apply(KNOBS)))
        return story.fails(refusal(phase=phase))

    assert isinstance(refused(Phase.BACKWARD).verdict(), NeedsHuman)
    assert isinstance(refused(Phase.INIT).action(), Launch)


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.ROLLOUT_INIT, Phase.FORWARD, Phase.BACKWARD])
@pytest.mark.parametrize("steps", [(), (1, 2)])
def test_an_error_in_the_phase_that_ran_out_of_memory_is_a_refusal(phase: Phase, steps: tuple[int, ...]):
    story = Story()
    story.launch()
    story.steps(*steps).fails(diagnosed(Cause.GPU_OOM, phase))
    refused = story.launch()
    launch = story.fails(refusal(phase=phase)).launch()
    assert launch.knobs != refused.knobs and "the job refused" in launch.reason


def test_a_setting_of_the_host_may_be_refused_in_any_phase():
    other = Remedy(name="reduce_workers", changes={"dataloader_workers": 1}, reason="memory ran out")
    story = Story()
    story.launch()
    story.fails(diagnosed(phase=Phase.BACKWARD))
    story.then(Decided(remedy=other), Started(knobs=other.apply(KNOBS))).fails(refusal(phase=Phase.BACKWARD))
    assert "the job refused dataloader_workers" in story.launch().reason


def test_an_error_beyond_the_point_that_was_reached_before_is_the_jobs_own():
    story = after_a_cure()
    assert isinstance(story.fails(refusal(phase=Phase.WEIGHT_SYNC)).verdict(), NeedsHuman)
    story = after_a_cure().steps(1, 2)
    assert isinstance(story.fails(refusal()).verdict(), NeedsHuman)


def test_an_error_that_names_the_setting_is_a_refusal_wherever_it_comes():
    story = after_a_cure().steps(1)
    row = refusal("AssertionError: tokens-per-microbatch is too small", phase=Phase.CHECKPOINT)
    assert story.fails(row).launch().knobs.tokens_per_microbatch != 4096


def test_an_error_without_a_change_before_it_is_the_jobs_own():
    story = Story()
    story.launch()
    assert isinstance(story.fails(refusal()).verdict(), NeedsHuman)


def test_a_job_that_starts_over_blames_no_change():
    row = refusal("step 1 after a checkpoint of step 9", cause=Cause.CONFIG, rule="autotune-restarted")
    assert isinstance(after_a_cure().fails(row).verdict(), NeedsHuman)


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.ROLLOUT, Phase.LOG_PROB])
def test_memory_that_runs_out_earlier_after_a_change_is_a_failure_of_its_own(phase: Phase):
    story = after_a_cure()
    row = refusal("CUDA out of memory with tokens_per_microbatch", cause=Cause.GPU_OOM, phase=phase)
    launch = story.fails(row).launch()
    assert "refused" not in launch.reason
    assert launch.knobs.tokens_per_microbatch <= 4096  # the cure stays


def with_smaller_tensor_parallel(row: Diagnosed, *, steps: tuple[int, ...] = ()) -> Story:
    """Return a story whose second attempt splits the trainer over fewer ranks, and fails."""
    sizes = {"tensor_parallel": support("tensor_parallel", 1, 2, 4)}
    story = Story(accepted(profile(replace(KNOBS, tensor_parallel=4), supported=SUPPORTED | sizes)))
    story.launch()
    story.steps(*steps).fails(diagnosed(Cause.GPU_OOM, Phase.LOG_PROB))
    cure = Remedy(
        name="tensor_parallel",
        changes={"tensor_parallel": 1, "tokens_per_microbatch": 4096},
        reason="fits",
    )
    story.then(Decided(remedy=cure, reason=cure.reason), Started(knobs=cure.apply(story.knobs)))
    return story.fails(row)


@pytest.mark.parametrize("steps", [(), (1, 2)])
def test_parallel_sizes_with_which_the_host_cannot_hold_the_start_are_undone(steps: tuple[int, ...]):
    launch = with_smaller_tensor_parallel(diagnosed(Cause.HOST_OOM, Phase.INIT), steps=steps).launch()
    assert launch.knobs.tensor_parallel == 4
    assert (launch.knobs.logprob_tokens or 8192) < 8192  # what ran out first is cured in another way
    assert launch.knobs.concurrency == 64
    refused = "the job refused tensor_parallel 4 → 1 in attempt #2 (host memory ran out at the start)"
    assert refused in launch.reason


@pytest.mark.parametrize(
    "row",
    [
        diagnosed(Cause.HOST_OOM, Phase.BACKWARD),
        diagnosed(Cause.GPU_OOM, Phase.INIT),
        diagnosed(Cause.SHM, Phase.INIT),
    ],
    ids=["later", "device", "shm"],
)
def test_memory_that_parallel_sizes_do_not_fill_at_the_start_blames_none(row: Diagnosed):
    story = with_smaller_tensor_parallel(row)
    action = story.action()
    assert "refused" not in getattr(action, "reason", "")


def test_the_first_start_says_nothing_of_the_sizes_before_it():
    sizes = {"tensor_parallel": support("tensor_parallel", 1, 2, 4)}
    story = Story(accepted(profile(replace(KNOBS, tensor_parallel=4), supported=SUPPORTED | sizes)))
    cure = Remedy(name="tensor_parallel", changes={"tensor_parallel": 1}, reason="fits")
    story.then(
        Decided(remedy=cure, reason=cure.reason), Started(knobs=cure.apply(story.events[0].profile.knobs))
    )
    action = story.fails(diagnosed(Cause.HOST_OOM, Phase.INIT)).action()
    assert "refused" not in getattr(action, "reason", "")


def test_a_full_disk_blames_no_change():
    row = refusal("No space left on device", cause=Cause.DISK, phase=Phase.INIT)
    verdict = after_a_cure().fails(row).verdict()
    assert isinstance(verdict, NeedsHuman) and verdict.diagnosis.cause is Cause.DISK


def test_refusals_count_as_relaunches():
    story = Story(accepted(recovery=Recovery(relaunches=2)))
    story.launch()
    story.fails().launch()
    story.fails(refusal()).launch()
    assert story.fails().verdict().reason == "all 2 relaunches are used"


def test_a_run_that_refused_a_change_still_completes():
    story = after_a_cure()
    story.fails(refusal()).launch()
    assert story.ends(Completed()).verdict().marginal is False


def test_a_device_error_is_retried_before_it_is_final():
    story = Story(accepted(recovery=Recovery(infrastructure_retries=1)))
    first = story.launch()
    row = refusal("CUDA error: unknown error", cause=Cause.INFRASTRUCTURE, rule="gpu-unavailable")
    assert story.fails(row).launch().knobs == first.knobs
    verdict = story.fails(row).verdict()
    assert isinstance(verdict, Infrastructure) and "add nodes with GPUs" in verdict.reason


@pytest.mark.parametrize(
    ("phase", "component", "text"),
    [
        (
            Phase.ROLLOUT,
            Component.REWARD,
            "HTTPError: 503 Server Error: Service Unavailable for url: http://r",
        ),
        (Phase.ROLLOUT, Component.UNKNOWN, "HTTP Error 502: Bad Gateway"),
        (Phase.ROLLOUT, Component.ROLLOUT, "KeyError: 'answer'"),
        (Phase.ROLLOUT, Component.REWARD, "KeyError: 'answer'"),
    ],
)
def test_a_change_is_not_blamed_for_an_error_where_it_does_not_act(phase, component, text):
    story = Story()
    story.launch()
    assert story.fails(diagnosed(phase=Phase.BACKWARD)).launch().knobs.tokens_per_microbatch == 2048
    line = (Line(line=1, text=text, rule="python-exception"),)
    row = replace(diagnosed(Cause.CODE, phase, component), evidence=line)
    assert isinstance(story.fails(row).verdict(), NeedsHuman)
