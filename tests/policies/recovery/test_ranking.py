"""The ranking by the calibrated estimate, and what `decide` makes of it."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from autotune.policies.estimate.peaks import PHASES
from autotune.policies.recovery.decide import decide
from autotune.policies.recovery.give_up import gave_up, widened
from autotune.policies.recovery.outlook import outlook, trusted
from autotune.policies.recovery.ranking import assess, best, overflowing
from autotune.policies.recovery.relief import RISK
from autotune.policies.recovery.upgrade import CLIMB, RETURN
from autotune.policies.remedies.legality import objections
from autotune.policies.remedies.neighbours import choices
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.events import (
    Await,
    Decided,
    Ended,
    Event,
    Finish,
    GoalReached,
    Launch,
    Policy,
    Progressed,
    Started,
    Stop,
    StopRequested,
    TrainingCompleted,
)
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.history import fold
from autotune.policies.values.job import Goal, Preflight, Recovery
from autotune.policies.values.knobs import Knobs, changed
from autotune.policies.values.observation import Cancelled, Completed, Lost, Peak
from autotune.policies.values.profile import Grid, Support
from autotune.policies.values.remedy import Effect
from tests.policies.jobs import (
    CLUSTER,
    GIB,
    KNOBS,
    LAYOUT,
    MODEL,
    SUPPORTED,
    accepted,
    diagnosed,
    fails,
    peaks,
    profile,
)

TOO_MUCH = replace(KNOBS, tokens_per_microbatch=49_152, logprob_tokens=49_152)
BACKWARD = fails(Phase.BACKWARD, requested=14 * GIB, free=10 * GIB)


def launch(*events: Event) -> Launch:
    action = decide(events)
    assert isinstance(action, Launch), action
    assert decide(events) == action
    return action


def too_much(**recovery) -> tuple[Event, ...]:
    return (accepted(profile(TOO_MUCH), recovery=Recovery(**recovery)), Started(knobs=TOO_MUCH), *BACKWARD)


@pytest.mark.parametrize(("layers", "split"), [(6, False), (36, True)])
def test_layers_are_split_into_more_stages_only_where_nothing_else_fits(layers, split):
    megatron = replace(LAYOUT, strategy="megatron", parameter_bytes=2, gradient_bytes=4, optimizer_bytes=12)
    stages = Support(setting="pipeline_model_parallel_size", grid=Grid(values=(1, 2, 4)))
    of = profile(
        replace(TOO_MUCH, pipeline_parallel=1),
        layout=megatron,
        supported={
            "pipeline_parallel": stages,
            **{knob: SUPPORTED[knob] for knob in ("tokens_per_microbatch", "logprob_tokens")},
        },
    )
    first = launch(accepted(of, model=replace(MODEL, layers=layers)))
    assert first.knobs.tokens_per_microbatch < TOO_MUCH.tokens_per_microbatch
    assert (first.knobs.pipeline_parallel > 1) is split


def test_a_cure_is_predicted_to_fit_every_phase_and_says_so_in_figures():
    outcome = launch(*too_much())
    remedy = outcome.remedy
    capacity = CLUSTER.gpu_memory_bytes
    assert remedy is not None and remedy.effect is Effect.EXACT
    assert all(size < capacity for size in remedy.predicted.values())
    assert remedy.predicted["backward"] > 0 and remedy.step_s
    assert "backward needed 14.00 GiB more with 10.00 GiB free" in remedy.reason
    assert "→" not in remedy.reason and "predicted peaks" in remedy.reason and "79.19 GiB" in remedy.reason
    assert "as predicted" in remedy.slows
    assert changed(TOO_MUCH, outcome.knobs).keys() == remedy.changes.keys()


def test_only_what_the_framework_allows_is_proposed():
    few = {name: SUPPORTED[name] for name in ("tokens_per_microbatch", "logprob_tokens", "memory_fraction")}
    start = accepted(profile(TOO_MUCH, supported=few))
    outcome = launch(start, Started(knobs=TOO_MUCH), *BACKWARD)
    assert set(outcome.remedy.changes) <= set(few)
    assert objections(start.profile, TOO_MUCH, outcome.knobs, started=True) == ()


def test_what_the_user_denies_is_left_alone():
    denied = launch(*too_much(deny=("tokens_per_microbatch", "reduce_mem_fraction", "numeric")))
    assert not {"tokens_per_microbatch", "memory_fraction", "fused_kernels"} & set(denied.remedy.changes)


def test_exact_comes_before_numeric():
    exact = launch(*too_much())
    assert "fused_kernels" not in exact.remedy.changes
    only = {"fused_kernels": SUPPORTED["fused_kernels"]}
    start = accepted(profile(TOO_MUCH, supported=only))
    assert launch(start, Started(knobs=TOO_MUCH), *BACKWARD).remedy.effect is Effect.NUMERIC


def test_the_fewest_and_smallest_changes_are_taken_where_speed_is_the_same():
    knobs = replace(KNOBS, tokens_per_microbatch=20_480)
    names = ("tokens_per_microbatch", "logprob_tokens")
    of = profile(knobs, supported={name: SUPPORTED[name] for name in names})
    history = (accepted(of), Started(knobs=knobs), *fails(Phase.BACKWARD, requested=3 * GIB, free=2 * GIB))
    view = outlook(fold(history))
    result = best(view, knobs, diagnosis=diagnosed(Phase.BACKWARD), started=True, permitted=lambda _: True)
    options = choices(of, knobs, recovery=Recovery(), started=True)
    every = [assess(view, replace(knobs, **dict(zip(names, values, strict=True))))
             for values in product(*(options[name] for name in names))]  # fmt: skip
    fitting = [one for one in every if one.risk <= RISK and one.knobs != knobs]
    alike = [one for one in fitting if one.step_s <= 1.03 * min(other.step_s for other in fitting)]
    assert len(alike) > 3
    assert any(moved(knobs, one.knobs) > moved(knobs, result.knobs) for one in alike)
    assert moved(knobs, result.knobs) == min(moved(knobs, one.knobs) for one in alike)


def moved(before: Knobs, after: Knobs) -> tuple[int, float]:
    """Return how many knobs differ, and by how many doublings."""
    changes = changed(before, after)
    return len(changes), round(sum(abs(math.log2(new / old)) for old, new in changes.values()), 6)


def test_a_failed_configuration_is_never_proposed_again():
    history: list[Event] = [accepted(profile(TOO_MUCH)), Started(knobs=TOO_MUCH), *BACKWARD]
    items = [TOO_MUCH]
    for number in range(11):
        action = decide(tuple(history))
        if isinstance(action, Finish):
            break
        assert action.knobs not in items
        items.append(action.knobs)
        phase = (Phase.BACKWARD, Phase.LOG_PROB, Phase.ROLLOUT)[number % 3]
        history += [Decided(remedy=action.remedy), Started(knobs=action.knobs), *fails(phase)]
    assert len(items) > 5


def test_after_two_wrong_predictions_of_a_phase_the_ladder_alone_decides():
    history: list[Event] = list(too_much())
    for _ in range(2):
        outcome = launch(*history)
        assert outcome.remedy.predicted
        history += [Decided(remedy=outcome.remedy), Started(knobs=outcome.knobs), *BACKWARD]
    assert not trusted(fold(tuple(history)), diagnosed(Phase.BACKWARD))
    assert trusted(fold(tuple(history)), diagnosed(Phase.LOG_PROB))
    assert launch(*history).remedy.predicted == {}


def test_without_a_model_or_with_the_ladders_policy_nothing_is_predicted():
    start = too_much()
    unknown = replace(start[0], job=replace(start[0].job, shape=None))
    by_choice = replace(start[0], policy=Policy.LADDER)
    for first in (unknown, by_choice):
        outcome = launch(first, *start[1:])
        assert outcome.remedy.name == "reduce_tokens_per_mb" and outcome.remedy.predicted == {}
        assert outlook(fold((first, *start[1:]))) is None


def test_what_is_no_memory_of_the_estimate_stays_the_ladders():
    start = accepted(profile(replace(KNOBS, dataloader_workers=4)))
    assert not trusted(fold((start,)), diagnosed(Phase.ROLLOUT, cause=Cause.SHM))
    assert not trusted(fold((start,)), diagnosed(Phase.NONE))


def test_the_host_is_never_offered_what_it_cannot_hold():
    small = replace(CLUSTER, host_memory_bytes=100 * GIB)
    start = accepted(profile(TOO_MUCH), cluster=small)
    outcome = launch(start, Started(knobs=TOO_MUCH), *BACKWARD)
    assert not outcome.knobs.optimizer_offload and not outcome.knobs.activation_offload


def test_a_host_that_ran_out_gets_less_offload_and_no_change_that_it_does_not_need():
    moved = replace(KNOBS, optimizer_offload=True, param_offload=True, activation_offload=True)
    small = replace(CLUSTER, host_memory_bytes=160 * GIB)
    start = accepted(profile(moved), cluster=small)
    outcome = launch(start, Started(knobs=moved), *fails(Phase.OPTIMIZER, cause=Cause.HOST_OOM))
    view = outlook(fold((start, Started(knobs=moved), *fails(Phase.OPTIMIZER, cause=Cause.HOST_OOM))))
    after = assess(view, outcome.knobs)
    assert after.host < assess(view, moved).host
    for knob in outcome.remedy.changes:
        without = assess(view, replace(outcome.knobs, **{knob: getattr(moved, knob)}))
        assert without.host > after.host or without.risk > after.risk + 0.02


def test_a_pool_that_was_too_small_grows():
    tiny = replace(KNOBS, memory_fraction=0.25)
    history = (
        accepted(profile(tiny)),
        Started(knobs=tiny),
        *fails(Phase.ROLLOUT_INIT, cause=Cause.POOL_TOO_SMALL),
    )
    outcome = launch(*history)
    assert (outcome.knobs.memory_fraction or 0) > 0.25 or outcome.knobs.rollout_tensor_parallel != 1


def test_the_search_offers_only_legal_values():
    options = choices(profile(), KNOBS, recovery=Recovery(), started=True)
    assert "max_model_len" not in options and "sharding" not in options
    for knob, values in options.items():
        assert values[0] == getattr(KNOBS, knob)
        for value in values[1:]:
            assert objections(profile(), KNOBS, replace(KNOBS, **{knob: value}), started=True) == ()
    assert min(options["tokens_per_microbatch"]) >= LAYOUT.prompt_tokens + LAYOUT.response_tokens
    assert max(options["tokens_per_microbatch"]) <= KNOBS.tokens_per_microbatch


# ------------------------------------------------------------------------- before the first launch


def test_what_may_fit_is_launched_as_written():
    outcome = launch(accepted())
    assert (outcome.knobs, outcome.reason, outcome.remedy) == (KNOBS, "as written", None)


def test_phases_that_are_wrong_together_do_not_make_a_launch_hopeless():
    tight = [
        accepted(cluster=replace(CLUSTER, gpu_memory_bytes=size * GIB // 4)) for size in range(200, 300, 2)
    ]
    items = [(start, assess(view, KNOBS)) for start in tight if (view := outlook(fold((start,)))) is not None]
    together = [start for start, result in items if result.least_risk < 0.95 and result.risk > 0.98]
    assert together
    for start in together:
        assert launch(start).reason == "as written"


def hopeless(mode: Preflight) -> Launch:
    knobs = replace(TOO_MUCH, tokens_per_microbatch=196_608, logprob_tokens=196_608, recompute="off")
    return launch(accepted(profile(knobs), recovery=Recovery(preflight=mode)))


def test_what_cannot_fit_starts_from_the_nearest_predicted_fit():
    result = hopeless(Preflight.APPLY)
    assert result.remedy is not None and result.remedy.name == "preflight"
    assert "is predicted to need" in result.reason and "more than the device has" in result.reason
    assert max(result.remedy.predicted.values()) < CLUSTER.gpu_memory_bytes


def test_advice_changes_nothing_and_off_says_nothing():
    advised = hopeless(Preflight.ADVISE)
    assert advised.remedy is None and advised.knobs.tokens_per_microbatch == 196_608
    assert "is predicted to fit" in advised.reason
    assert hopeless(Preflight.OFF).reason == "as written"


# ------------------------------------------------------------------------------- after the goal


SLOW = replace(KNOBS, memory_fraction=0.4, tokens_per_microbatch=5120, concurrency=32)


def stable(*, climb: bool, saved: int | None = 20, knobs: Knobs = SLOW) -> list[Event]:
    written = replace(KNOBS, tokens_per_microbatch=16_384)
    start = accepted(profile(written), recovery=Recovery(climb=climb), goal=Goal(steps=20))
    small = peaks(backward=40 * GIB, log_prob=38 * GIB, rollout=45 * GIB)
    rows = [
        Progressed(step=n, of=400, seconds=200.0, peaks=small, saved=saved if n >= 20 else None)
        for n in range(1, 25)
    ]
    return [start, Started(knobs=knobs), *rows, GoalReached(step=20, marginal=False, headroom=0.4)]


def test_a_faster_neighbour_is_offered_when_all_is_over():
    verdict = decide((*stable(climb=False), Ended(outcome=Completed())))
    assert isinstance(verdict, Finish) and isinstance(verdict.verdict, TrainingCompleted)
    offered = verdict.verdict.faster
    assert offered is not None and offered.effect is Effect.EXACT
    assert "shorter" in offered.slows


def test_a_run_that_works_is_left_alone_unless_the_job_asks_to_climb():
    assert decide(tuple(stable(climb=False))) == Await()
    assert decide(tuple(stable(climb=True, saved=None))) == Await()  # no checkpoint since the goal
    assert decide(tuple(stable(climb=True)[:-1])) == Await()  # the goal is not reached yet
    stop = decide(tuple(stable(climb=True)))
    assert isinstance(stop, Stop) and stop.by == CLIMB


def test_a_climb_that_fails_goes_back_to_what_held():
    history = [*stable(climb=True), StopRequested(by=CLIMB), Ended(outcome=Cancelled(by=CLIMB))]
    up = launch(*history)
    assert up.remedy is not None and up.remedy.name == CLIMB
    history += [Decided(remedy=up.remedy), Started(knobs=up.knobs), *fails(Phase.ROLLOUT)]
    back = launch(*history)
    assert back.knobs == SLOW and back.remedy is not None and back.remedy.name == RETURN


@pytest.mark.parametrize("losses", [1, 2])
def test_a_climb_that_was_lost_before_it_failed_goes_back_too(losses: int):
    history = [*stable(climb=True), StopRequested(by=CLIMB), Ended(outcome=Cancelled(by=CLIMB))]
    up = launch(*history)
    history += [Decided(remedy=up.remedy), Started(knobs=up.knobs)]
    for _ in range(losses):
        history.append(Ended(outcome=Lost(reason="node gone")))
        again = launch(*history)
        assert again.knobs == up.knobs and again.remedy is None
        history += [Decided(), Started(knobs=again.knobs)]
    back = launch(*history, *fails(Phase.ROLLOUT))
    assert back.knobs == SLOW and back.remedy is not None and back.remedy.name == RETURN


def test_what_fails_after_the_way_back_is_cured_and_not_sent_back_again():
    history = [*stable(climb=True), StopRequested(by=CLIMB), Ended(outcome=Cancelled(by=CLIMB))]
    up = launch(*history)
    history += [Decided(remedy=up.remedy), Started(knobs=up.knobs), *fails(Phase.ROLLOUT)]
    back = launch(*history)
    history += [Decided(remedy=back.remedy), Started(knobs=back.knobs), *fails(Phase.ROLLOUT)]
    cure = launch(*history)
    assert cure.knobs not in (SLOW, up.knobs) and cure.remedy is not None and cure.remedy.name != RETURN


# ------------------------------------------------------------------------------------ the end


def test_giving_up_says_what_misses_by_how_much_and_what_would_fit():
    tiny = replace(CLUSTER, gpu_memory_bytes=int(23.6 * GIB), host_memory_bytes=256 * GIB)
    verdict = gave_up(fold((accepted(cluster=tiny), Started(knobs=KNOBS), *BACKWARD)))
    assert "GPU memory short in " in verdict.nearest and "GiB" in verdict.nearest
    assert any("times the GPUs (predicted" in text for text in verdict.would_help)
    # One of each kind, and of that the least.
    kinds = ("times the GPUs (predicted", "responses of ", "LoRA of rank")
    for kind in kinds:
        assert sum(kind in text for text in verdict.would_help) <= 1
    assert not any("billion parameters" in text for text in verdict.would_help)


@pytest.mark.parametrize(
    ("spread", "knobs", "wider"),
    [
        ({"shards": 8}, {}, {"shards": 16}),
        ({"shards": 4}, {}, {"shards": 4}),  # hybrid sharding: more groups of four
        ({"shards": 8, "expert_shards": 4}, {}, {"shards": 16, "expert_shards": 8}),
        ({"shards": 4, "expert_shards": 2}, {}, {}),
        ({"shards": 4}, {"tensor_parallel": 2}, {"shards": 8}),
        ({"strategy": "ddp", "shards": 1}, {}, {"shards": 1}),
        ({"strategy": "ddp", "shards": 8}, {}, {"shards": 16}),  # ZeRO-1
        ({"strategy": "none", "ranks": 1, "shards": 1}, {}, {"strategy": "ddp", "shards": 1, "ranks": 2}),
        ({"strategy": "megatron", "shards": 1}, {"tensor_parallel": 8}, {"shards": 2}),
        ({"strategy": "megatron", "shards": 1}, {"tensor_parallel": 4}, {"shards": 1}),  # no distributed one
        ({"strategy": "megatron", "shards": 2, "pipeline_parallel": 4}, {}, {"shards": 4}),
    ],
)
def test_more_devices_spread_only_what_is_spread_over_all_of_them(
    spread: dict[str, Any], knobs: dict[str, Any], wider: dict[str, Any]
):
    layout = Layout(**{"strategy": "fsdp2", "ranks": 8, "engine_ranks": 8, **spread})
    expected = replace(layout, **{"ranks": 16, "engine_ranks": 16, **wider})
    assert widened(layout, Knobs(**knobs), 2) == expected


def test_overflow_is_told_worst_first():
    view = outlook(fold((accepted(profile(TOO_MUCH)),)))
    misses = overflowing(
        view, assess(view, replace(TOO_MUCH, recompute="off", tokens_per_microbatch=131_072))
    )
    assert misses and misses == sorted(misses, key=lambda item: -item[1])


@pytest.mark.parametrize("phase", [Phase.ROLLOUT_INIT, Phase.LOG_PROB, Phase.FORWARD, Phase.WEIGHT_SYNC])
def test_every_phase_of_the_estimate_has_a_cure(phase: Phase):
    history = (
        accepted(profile(TOO_MUCH)),
        Started(knobs=TOO_MUCH),
        *fails(phase, requested=8 * GIB, free=GIB),
    )
    outcome = launch(*history)
    assert outcome.remedy.predicted[phase.value] < CLUSTER.gpu_memory_bytes


def test_a_pool_that_is_too_small_never_gets_less_of_the_card():
    small = replace(KNOBS, memory_fraction=0.4)
    refused = fails(Phase.ROLLOUT_INIT, cause=Cause.POOL_TOO_SMALL)
    events: tuple[Event, ...] = (accepted(profile(small)),)
    knobs = small
    for _ in range(4):
        events = (*events, Started(knobs=knobs), *refused)
        decision = decide(events)
        if not isinstance(decision, Launch):
            break
        assert decision.knobs.memory_fraction >= knobs.memory_fraction
        events, knobs = (*events, Decided(remedy=decision.remedy)), decision.knobs


def test_a_pool_that_is_too_small_keeps_its_share_where_other_phases_want_room():
    small = replace(KNOBS, memory_fraction=0.5, concurrency=64)
    start = accepted(profile(small), goal=Goal(headroom=0.25), recovery=Recovery(preflight=Preflight.OFF))
    refused = fails(Phase.ROLLOUT_INIT, cause=Cause.POOL_TOO_SMALL)
    outcome = launch(start, Started(knobs=small), *refused)
    assert outcome.remedy.predicted and outcome.knobs.memory_fraction >= 0.5


@pytest.mark.parametrize(
    ("phase", "headroom"),
    [
        *((phase, 0.15) for phase in (Phase.LOG_PROB, Phase.BACKWARD, Phase.ROLLOUT)),
        *((phase, 0.25) for phase in (Phase.LOG_PROB, Phase.ROLLOUT)),
    ],
)
def test_a_cure_leaves_the_goals_headroom_where_exact_changes_can(phase: Phase, headroom: float):
    start = accepted(goal=Goal(headroom=headroom), recovery=Recovery(preflight=Preflight.OFF))
    outcome = launch(start, Started(knobs=KNOBS), *fails(phase, requested=3 * GIB, free=2 * GIB))
    assert max(outcome.remedy.predicted.values()) <= (1 - headroom) * CLUSTER.gpu_memory_bytes
    assert outcome.remedy.effect is Effect.EXACT


def test_a_numeric_change_that_fits_is_taken_even_where_the_goals_headroom_is_out_of_reach():
    only = {"fused_kernels": SUPPORTED["fused_kernels"]}
    for headroom in (0.0, 0.6):
        start = accepted(profile(TOO_MUCH, supported=only), goal=Goal(headroom=headroom))
        outcome = launch(start, Started(knobs=TOO_MUCH), *BACKWARD)
        assert outcome.remedy.changes == {"fused_kernels": True} and outcome.remedy.predicted


def test_a_climb_leaves_the_goals_headroom():
    first, *rows = stable(climb=True)
    tight = replace(first, job=replace(first.job, goal=Goal(steps=20, headroom=0.2)))
    history = (tight, *rows, StopRequested(by=CLIMB), Ended(outcome=Cancelled(by=CLIMB)))
    up = launch(*history)
    if up.remedy is not None:
        assert max(up.remedy.predicted.values()) <= 0.8 * CLUSTER.gpu_memory_bytes


# ------------------------------------------------------------------ where memory really ran out

NARROW = replace(KNOBS, memory_fraction=0.9, tokens_per_microbatch=6144, logprob_tokens=6144)


def test_a_phase_that_cannot_have_filled_the_device_is_not_cured():
    start = accepted(profile(NARROW), recovery=Recovery(preflight=Preflight.OFF))
    story = (start, Started(knobs=NARROW), *fails(Phase.INIT))
    outcome = launch(*story)
    assert outcome.remedy.predicted and "memory_fraction" in outcome.remedy.changes
    assert "the log names init" in outcome.remedy.reason
    # The same name a second time is believed.
    again = (*story, Decided(remedy=outcome.remedy), Started(knobs=outcome.knobs), *fails(Phase.INIT))
    view = outlook(fold(again))
    assert view.run.attempts[-1].diagnosis.phase is Phase.INIT


def test_no_estimate_overrules_a_phase_that_the_log_shows():
    start = accepted(profile(NARROW), recovery=Recovery(preflight=Preflight.OFF))
    view = outlook(fold((start, Started(knobs=NARROW), *fails(Phase.INIT, phase_shown=True))))
    assert view.run.attempts[-1].diagnosis.phase is Phase.INIT


def test_what_an_attempt_had_behind_it_did_not_fill_the_device():
    start = accepted(profile(NARROW), recovery=Recovery(preflight=Preflight.OFF))
    begun, first = (start, Started(knobs=NARROW)), Progressed(step=1)

    def place(*story: Event, **failure: Any) -> Phase:
        view = outlook(fold((*begun, *story, *fails(Phase.CHECKPOINT, **failure))))
        return view.run.attempts[-1].diagnosis.phase

    likely = place()
    assert likely in (Phase.ROLLOUT_INIT, Phase.ROLLOUT, Phase.WEIGHT_SYNC)
    # The engine had started, and with what a log reports of the failing step nothing else is left.
    assert place(first) is not Phase.ROLLOUT_INIT
    size = CLUSTER.gpu_memory_bytes
    behind = {each.value: Peak(used_bytes=size - 1, capacity_bytes=size) for each in PHASES[:-1]}
    assert place(passed=behind) is Phase.CHECKPOINT
    # Nor did what the same knobs trained with before.
    trained = (first, Progressed(step=2), Ended(outcome=Lost(reason="r")), Started(attempt=2, knobs=NARROW))
    assert place(*trained) not in (Phase.ROLLOUT, Phase.BACKWARD, Phase.WEIGHT_SYNC)


def test_a_phase_that_may_have_filled_the_device_is_believed():
    start = accepted(profile(TOO_MUCH), recovery=Recovery(preflight=Preflight.OFF))
    for phase in (Phase.ROLLOUT, Phase.BACKWARD):
        view = outlook(fold((start, Started(knobs=TOO_MUCH), *fails(phase))))
        assert view.run.attempts[-1].diagnosis.phase is phase


def test_offload_that_is_taken_back_is_called_so():
    full = replace(KNOBS, optimizer_offload=True, param_offload=True)
    host = replace(CLUSTER, host_memory_bytes=150 * GIB)
    start = accepted(profile(full), cluster=host, recovery=Recovery(preflight=Preflight.OFF))
    outcome = launch(start, Started(knobs=full), *fails(Phase.OPTIMIZER, cause=Cause.HOST_OOM))
    assert False in outcome.remedy.changes.values()
    assert outcome.remedy.name == "reduce_host_offload"
