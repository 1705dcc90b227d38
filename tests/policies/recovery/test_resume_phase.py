"""A load of a checkpoint that runs out of memory: told from training, and cured without slowing it down."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autotune.policies.diagnosis.resume import while_loading
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.outlook import outlook
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.events import (
    Accepted,
    CuredInPlace,
    Decided,
    Diagnosed,
    Ended,
    Event,
    Finish,
    Launch,
    Policy,
    Progressed,
    Started,
)
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.job import Preflight, Recovery
from autotune.policies.values.knobs import Knobs, new_values
from autotune.policies.values.observation import Crashed, Lost
from autotune.policies.values.profile import Grid, Support
from tests.policies.jobs import GIB, KNOBS, SUPPORTED, accepted, peaks, profile

LOSS = Ended(attempt=1, outcome=Lost(reason="a node is gone"), saved=10)
# What slows the steps of a job down, or makes its engine smaller.
_TIMID = {
    "tokens_per_microbatch", "logprob_tokens", "concurrency", "recompute", "max_batched_tokens",
}  # fmt: skip
_ALLOCATOR = {
    "allocator": Support(setting="PYTORCH_CUDA_ALLOC_CONF", grid=Grid(values=("default", "expandable")))
}


def trained(
    *, knobs: Knobs = KNOBS, to: int = 12, policy: Policy = Policy.ESTIMATE, **known: Support
) -> list[Event]:
    """Return a run that trained without a load, and then lost a node."""
    begin = accepted(profile(knobs, supported=SUPPORTED | known), recovery=Recovery(preflight=Preflight.OFF))
    used = peaks(backward=60 * GIB, log_prob=50 * GIB, optimizer=55 * GIB)
    rows = [
        Progressed(attempt=1, step=n, of=400, seconds=90.0, peaks=used, saved=10 if n >= 10 else None)
        for n in range(1, to + 1)
    ]
    return [replace(begin, policy=policy), Started(attempt=1, knobs=knobs), *rows]


def oom(phase: Phase, component: Component = Component.TRAINER, cause: Cause = Cause.GPU_OOM) -> Diagnosis:
    return Diagnosis(cause=cause, phase=phase, component=component)


def loads(
    phase: Phase, *, number: int = 2, knobs: Knobs = KNOBS, cause: Cause = Cause.GPU_OOM
) -> list[Event]:
    return [
        Started(attempt=number, knobs=knobs, resume=True),
        Ended(attempt=number, outcome=Crashed(exit_code=1)),
        Diagnosed(attempt=number, cause=cause, phase=phase, component=Component.TRAINER),
    ]


def observed(history: list[Event], diagnosis: Diagnosis) -> Phase:
    begun = [Started(attempt=2, knobs=KNOBS, resume=True), Ended(attempt=2, outcome=Crashed(exit_code=1))]
    return while_loading((*history, *begun), diagnosis, attempt=2).phase


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.CHECKPOINT, Phase.BACKWARD, Phase.OPTIMIZER, Phase.NONE])
def test_only_the_attempt_that_loads_fails(phase: Phase) -> None:
    assert observed([*trained(), LOSS], oom(phase)) is Phase.RESUME


def test_the_engine_s_start_is_no_load() -> None:
    assert observed([*trained(), LOSS], oom(Phase.ROLLOUT_INIT, Component.ROLLOUT)) is Phase.ROLLOUT_INIT


def test_what_no_attempt_got_past_is_a_start() -> None:
    before = [trained()[0], Started(attempt=1, knobs=KNOBS), LOSS]
    assert observed(before, oom(Phase.INIT)) is Phase.INIT


def test_a_pass_under_other_knobs_is_its_own() -> None:
    other = replace(KNOBS, tokens_per_microbatch=49_152)
    assert observed([*trained(knobs=other), LOSS], oom(Phase.BACKWARD)) is Phase.BACKWARD
    assert observed([*trained(knobs=other), LOSS], oom(Phase.INIT)) is Phase.RESUME


def test_a_pass_that_already_ran_out_of_memory_is_its_own() -> None:
    failed = [
        Ended(attempt=1, outcome=Crashed(exit_code=1), saved=10),
        Diagnosed(attempt=1, **_fields(Phase.BACKWARD)),
    ]
    assert observed([*trained(), *failed], oom(Phase.BACKWARD)) is Phase.BACKWARD


def _fields(phase: Phase) -> dict[str, object]:
    return {"cause": Cause.GPU_OOM, "phase": phase, "component": Component.TRAINER}


def test_after_a_cure_in_place_a_load_that_was_followed_by_steps_is_over() -> None:
    cure = CuredInPlace(
        attempt=2,
        cause=Cause.GPU_OOM,
        phase=Phase.BACKWARD,
        step=12,
        knob="tokens_per_microbatch",
        before=KNOBS.tokens_per_microbatch,
        after=KNOBS.tokens_per_microbatch // 2,
    )
    begun, *ended = loads(Phase.CHECKPOINT)
    done = Progressed(attempt=2, step=11, of=400)
    failure = oom(Phase.CHECKPOINT)
    before = [*trained(), LOSS, begun]
    assert while_loading((*before, cure, *ended), failure, attempt=2).phase is Phase.RESUME
    assert while_loading((*before, done, cure, *ended), failure, attempt=2).phase is Phase.CHECKPOINT


def test_other_causes_and_later_steps_are_left_alone() -> None:
    assert observed([*trained(), LOSS], oom(Phase.INIT, cause=Cause.CONFIG)) is Phase.INIT
    done = Progressed(attempt=2, step=11, of=400)
    rows = (*trained(), LOSS, Started(attempt=2, knobs=KNOBS, resume=True), done)
    assert while_loading(rows, oom(Phase.BACKWARD), attempt=2).phase is Phase.BACKWARD


@pytest.mark.parametrize("cause", [Cause.GPU_OOM, Cause.HOST_OOM])
def test_a_job_that_begins_from_a_checkpoint_has_no_attempt_that_loaded_none(cause: Cause) -> None:
    begin, *rest = trained()
    assert isinstance(begin, Accepted)
    resumes = replace(begin, job=replace(begin.job, resume=True))
    assert observed([begin, *rest, LOSS], oom(Phase.INIT, cause=cause)) is Phase.RESUME
    assert observed([resumes, *rest, LOSS], oom(Phase.INIT, cause=cause)) is Phase.INIT


@pytest.mark.parametrize("phase", [Phase.INIT, Phase.BACKWARD])
def test_a_load_that_passed_with_these_knobs_is_not_to_blame(phase: Phase) -> None:
    again = [
        Started(attempt=2, knobs=KNOBS, resume=True),
        Progressed(attempt=2, step=11, of=400),
        Ended(attempt=2, outcome=Lost(reason="a node is gone"), saved=10),
    ]
    third = [Started(attempt=3, knobs=KNOBS, resume=True), Ended(attempt=3, outcome=Crashed(exit_code=1))]
    history = (*trained(), LOSS, *again, *third)
    assert while_loading(history, oom(phase), attempt=3).phase is phase


def test_a_start_that_asks_for_more_than_one_that_passed_is_its_own() -> None:
    less = replace(KNOBS, param_offload=True)
    assert observed([*trained(knobs=less), LOSS], oom(Phase.INIT)) is Phase.INIT
    parallel = replace(KNOBS, tensor_parallel=2)
    assert observed([*trained(knobs=parallel), LOSS], oom(Phase.CHECKPOINT)) is Phase.CHECKPOINT
    more = replace(KNOBS, memory_fraction=0.8)
    assert observed([*trained(knobs=more), LOSS], oom(Phase.INIT)) is Phase.RESUME


def test_a_host_that_fills_under_other_knobs_is_not_the_load_s() -> None:
    other = replace(KNOBS, tokens_per_microbatch=49_152)
    assert observed([*trained(knobs=other), LOSS], oom(Phase.INIT, cause=Cause.HOST_OOM)) is Phase.INIT
    assert observed([*trained(), LOSS], oom(Phase.INIT, cause=Cause.HOST_OOM)) is Phase.RESUME


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("cause", [Cause.GPU_OOM, Cause.HOST_OOM])
def test_no_cure_of_a_load_makes_the_steps_more_timid(policy: Policy, cause: Cause) -> None:
    history = [*trained(policy=policy, **_ALLOCATOR), LOSS]
    knobs, tried = KNOBS, []
    for number in range(2, 9):
        history += loads(Phase.RESUME, number=number, knobs=knobs, cause=cause)
        action = decide(tuple(history))
        if isinstance(action, Finish):
            break
        assert isinstance(action, Launch) and action.remedy is not None
        assert action.knobs not in [KNOBS, *tried]
        assert not _TIMID & new_values(KNOBS, action.knobs).keys()
        history.append(Decided(attempt=number, remedy=action.remedy))
        tried.append(action.knobs)
        knobs = action.knobs
    if cause is Cause.GPU_OOM:
        assert new_values(KNOBS, tried[0]) == {"allocator": "expandable"}
        assert tried[-1].cuda_graphs == "off", "captured graphs stay on the device beside a load"


def test_a_failed_load_changes_nothing_that_is_believed_of_the_steps() -> None:
    before = [*trained(**_ALLOCATOR), LOSS]
    for cause in (Cause.GPU_OOM, Cause.HOST_OOM):
        calm, after = (
            outlook(fold(tuple(before))),
            outlook(fold((*before, *loads(Phase.RESUME, cause=cause)))),
        )
        assert calm is not None and after is not None
        assert (calm.calibration.belief.mean == after.calibration.belief.mean).all()
        assert (calm.calibration.belief.covariance == after.calibration.belief.covariance).all()


def test_after_a_load_that_passes_the_training_goes_on_and_later_failures_are_its_own() -> None:
    history = [*trained(**_ALLOCATOR), LOSS, *loads(Phase.RESUME)]
    first = decide(tuple(history))
    assert isinstance(first, Launch)
    history += [Decided(attempt=2, remedy=first.remedy), Started(attempt=3, knobs=first.knobs, resume=True)]
    history += [
        Progressed(attempt=3, step=n, of=400, seconds=90.0, peaks=peaks(backward=60 * GIB)) for n in (11, 12)
    ]
    history += [
        Ended(attempt=3, outcome=Crashed(exit_code=1)),
        Diagnosed(attempt=3, **_fields(Phase.BACKWARD)),
    ]
    then = decide(tuple(history))
    assert isinstance(then, Launch) and then.remedy is not None
    assert then.remedy.predicted, "the estimate ranks the cures of the passes"
    assert Phase.RESUME not in PHASES
