"""Memory that grows with the steps of a process: the settings stay, and a fresh process goes on."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from autotune.policies.estimate.belief.calibration import calibrated, learned, predicted
from autotune.policies.estimate.peaks import PHASES, estimates
from autotune.policies.recovery.checkpoint_interval import with_saves
from autotune.policies.recovery.decide import decide_on
from autotune.policies.recovery.growth import describe, restart_now
from autotune.policies.values.architecture.model import Layout
from autotune.policies.values.diagnosis import Facts
from autotune.policies.values.events import (
    Accepted,
    Action,
    Await,
    Decided,
    Diagnosed,
    Ended,
    Event,
    Finish,
    Foreseen,
    GaveUp,
    Launch,
    Policy,
    Progressed,
    Started,
    Stop,
)
from autotune.policies.values.failure import Cause, Component, Phase
from autotune.policies.values.history import Folding, fold
from autotune.policies.values.job import Forecasting, Preflight, Recovery
from autotune.policies.values.observation import Cancelled, Crashed, MemoryGrowth, Peak
from tests.policies.jobs import CLUSTER, GIB, KNOBS, MODEL, accepted, peaks, profile

MIB = 1 << 20
NAME = "restart_every"
Uses = Callable[[int], dict[str, Peak]]


def nothing(_: int) -> dict[str, Peak]:
    return {}


class Night:
    """A run of many steps, told row by row."""

    def __init__(
        self, *, policy: Policy = Policy.ESTIMATE, seconds: float = 60.0, **recovery: object
    ) -> None:
        limits = Recovery(preflight=Preflight.OFF, **recovery)  # type: ignore[arg-type]
        self.rows: list[Event] = [replace(accepted(recovery=limits), policy=policy)]
        self.number = self.step = 0
        self.seconds = seconds

    def action(self) -> Action:
        return decide_on(Folding(tuple(self.rows)))

    def launch(self) -> Launch:
        action = self.action()
        assert isinstance(action, Launch), action
        decided = Decided(
            attempt=self.number, remedy=action.remedy, reason=action.reason, growth=action.growth
        )
        self.number += 1
        self.rows += [decided, Started(attempt=self.number, knobs=action.knobs, resume=self.number > 1)]
        return action

    def runs(self, steps: int, uses: Uses = nothing, *, saves: int = 10) -> Night:
        for age in range(1, steps + 1):
            self.step += 1
            saved = self.step // saves * saves if saves else 0
            self.rows.append(
                Progressed(
                    attempt=self.number,
                    step=self.step,
                    seconds=self.seconds,
                    peaks=uses(age),
                    saved=saved if saved > self.step - age else None,
                )
            )
        return self

    def fails(
        self,
        cause: Cause = Cause.GPU_OOM,
        phase: Phase = Phase.BACKWARD,
        *,
        fragmentation: bool = False,
        validation: bool = False,
    ) -> Night:
        facts = Facts(
            requested_bytes=GIB,
            free_bytes=GIB // 2,
            capacity_bytes=CLUSTER.gpu_memory_bytes,
            validation=validation,
        )
        self.rows += [
            Ended(attempt=self.number, outcome=Crashed(exit_code=1), step=self.step),
            Diagnosed(
                attempt=self.number,
                cause=cause,
                phase=phase,
                component=Component.TRAINER,
                facts=facts,
                fragmentation=fragmentation,
            ),
        ]
        return self


def leaking(age: int) -> dict[str, Peak]:
    return peaks(backward=(58 + age / 16) * GIB, rollout=60 * GIB)


def flat(age: int) -> dict[str, Peak]:
    return peaks(backward=(60 + age % 3 / 8) * GIB, rollout=60 * GIB)


@pytest.mark.parametrize("policy", list(Policy))
@pytest.mark.parametrize("cause", [Cause.GPU_OOM, Cause.HOST_OOM])
def test_a_process_that_fails_again_after_as_many_steps_keeps_its_settings(
    policy: Policy, cause: Cause
) -> None:
    night = Night(policy=policy)
    night.launch()
    for _ in range(20):  # more than a run has relaunches
        launch = night.runs(400).fails(cause).launch()
        assert launch.knobs == KNOBS
        assert launch.growth is not None and launch.growth.steps == 400
        assert launch.remedy is not None and launch.remedy.name == NAME and not launch.remedy.changes


def test_measured_growth_needs_no_second_failure() -> None:
    night = Night(seconds=240.0)
    night.launch()
    launch = night.runs(330, leaking).fails().launch()
    assert launch.knobs == KNOBS and launch.growth is not None
    assert launch.growth.per_step_bytes == pytest.approx(64 * MIB, rel=0.02)
    assert (launch.growth.memory, launch.growth.component) == ("backward", Component.TRAINER)
    assert launch.reason.startswith("GPU memory in backward of the trainer grows by 64.0 MiB a step")


@pytest.mark.parametrize(
    ("uses", "restarts"),
    [
        (lambda age: 72 + age / 16, True),
        (lambda age: 78 - 20 * math.exp(-age / 50), False),  # a cache that fills ever more slowly
        (lambda age: 50 + age / 16, False),  # far from full
        (lambda age: 76 + age / 64, False),  # it grew by less than 2 % of the device
    ],
)
def test_growth_that_explains_no_failure_changes_the_settings(
    uses: Callable[[int], float], *, restarts: bool
) -> None:
    night = Night(seconds=240.0)
    night.step = 1000  # of an earlier run
    night.launch()
    night.runs(90, lambda age: peaks(backward=uses(age) * GIB, rollout=60 * GIB)).fails()
    assert (night.launch().knobs == KNOBS) is restarts


@pytest.mark.parametrize("steps", [5, 40])
def test_a_failure_after_few_steps_changes_the_settings(steps: int) -> None:
    night = Night()
    night.launch()
    assert night.runs(steps).fails().launch().knobs != KNOBS


def test_a_phase_that_did_not_grow_changes_the_settings() -> None:
    night = Night()
    night.launch()
    assert night.runs(400, flat).fails().launch().knobs != KNOBS


@pytest.mark.parametrize("saves", [0, 1000])
def test_without_a_checkpoint_there_is_nothing_to_go_on_from(saves: int) -> None:
    night = Night()
    night.launch()
    assert night.runs(400, saves=saves).fails().launch().growth is None


def test_a_fresh_process_that_fails_much_sooner_refutes_growth() -> None:
    night = Night()
    night.launch()
    assert night.runs(400).fails().launch().growth is not None
    assert night.runs(120).fails().launch().knobs != KNOBS


def test_growth_that_was_refuted_is_not_reported() -> None:
    night = Night()
    night.launch()
    assert night.runs(400).fails().launch().growth is not None
    assert fold(tuple(night.rows)).growth is not None
    night.runs(120).fails().launch()
    assert fold(tuple(night.rows)).growth is None


def test_growth_that_begins_late_ends_the_next_process_sooner() -> None:
    night = Night(seconds=240.0)
    night.launch()
    night.runs(700, lambda age: peaks(backward=(58 + max(0, age - 370) / 16) * GIB, rollout=60 * GIB))
    assert night.fails().launch().growth is not None
    launch = night.runs(330, leaking).fails().launch()
    assert launch.knobs == KNOBS and launch.growth is not None and launch.growth.steps == 330


def test_validations_fail_after_as_many_steps_by_their_interval() -> None:
    night = Night()
    night.launch()
    for _ in range(2):
        assert night.runs(120).fails(phase=Phase.ROLLOUT, validation=True).launch().growth is None


def test_memory_that_an_allocator_strands_is_in_no_peak() -> None:
    night = Night()
    night.launch()
    launch = night.runs(400, flat).fails(fragmentation=True).launch()
    assert launch.growth is not None and launch.knobs == KNOBS


@pytest.mark.parametrize(("uses", "steps", "ends"), [(leaking, 330, True), (nothing, 330, False)])
def test_without_a_checkpoint_a_second_process_that_grew_ends_the_run(
    uses: Uses, steps: int, *, ends: bool
) -> None:
    night = Night(seconds=240.0)
    night.launch()
    first = night.runs(steps, uses, saves=0).fails().launch()
    assert first.growth is None and first.knobs != KNOBS
    night.step = 0
    action = night.runs(steps + (0 if ends else 100), uses, saves=0).fails().action()
    assert isinstance(action, Finish) is ends
    if isinstance(action, Finish):
        assert (
            isinstance(action.verdict, GaveUp) and "no checkpoint to continue from" in action.verdict.reason
        )
        assert action.verdict.nearest.startswith("GPU memory in backward of the trainer grows by")
        assert any("recovery.save_every" in text for text in action.verdict.would_help)


@pytest.mark.parametrize(
    ("recovery", "words"),
    [
        ({"deny": (NAME, *profile().supported)}, "which recovery.deny excludes"),
        ({"relaunches": 0}, "`recovery.relaunches: 0`"),
        ({"duration_s": 60.0}, "`recovery.duration`"),
    ],
)
def test_a_run_that_may_not_restart_says_what_would_let_it(recovery: dict[str, object], words: str) -> None:
    night = Night(seconds=240.0, **recovery)
    night.launch()
    night.runs(330, leaking).fails()
    night.rows[-2] = replace(night.rows[-2], after_s=90_000.0)
    action = night.action()
    assert isinstance(action, Finish) and isinstance(action.verdict, GaveUp)
    assert "grows by 64.0 MiB a step" in action.verdict.nearest
    assert len(action.verdict.would_help) == 1 and words in action.verdict.would_help[0]


@pytest.mark.parametrize(
    ("memory", "component", "words"),
    [
        ("rollout", Component.ROLLOUT, "GPU memory in rollout of the engine ran out"),
        ("none", Component.UNKNOWN, "GPU memory ran out"),
        ("host", Component.TRAINER, "host memory of the trainer ran out"),
        ("shm", Component.DATA, "shared memory of the data workers ran out"),
        ("object_store", Component.DRIVER, "Ray's object store of the driver ran out"),
    ],
)
def test_a_sentence_names_the_memory_and_its_owner(memory: str, component: Component, words: str) -> None:
    grown = MemoryGrowth(memory=memory, steps=150, component=component)
    assert describe(grown).startswith(f"{words} after 150 good steps of a process")


@pytest.mark.parametrize(("cause", "memory"), [(Cause.SHM, "shm"), (Cause.OBJECT_STORE, "object_store")])
def test_other_memories_of_a_node_grow_too(cause: Cause, memory: str) -> None:
    night = Night(seconds=240.0)
    night.launch()
    launch = night.runs(150).fails(cause, Phase.DATA).launch()
    assert launch.knobs == KNOBS and launch.growth is not None and launch.growth.memory == memory
    assert stops_after(night, 150) == 130


def test_an_allocator_that_costs_nothing_comes_first() -> None:
    night = Night()
    written = profile()
    first = night.rows[0]
    grid = replace(written.supported["recompute"].grid, values=("default", "expandable"))
    support = replace(written.supported["recompute"], setting="allocator", grid=grid)
    offered = replace(
        written,
        knobs=replace(KNOBS, allocator="default"),
        supported=written.supported | {"allocator": support},
    )
    night.rows[0] = replace(first, profile=offered)  # type: ignore[type-var]
    night.launch()
    assert night.runs(400).fails(fragmentation=True).launch().growth is None


def test_restarts_that_cost_much_are_weighed_against_a_change_of_the_settings() -> None:
    """A process trains for 75 minutes, and a start takes ten."""
    night = Night(seconds=15.0)
    night.launch()
    assert night.runs(300, leaking).fails().launch().knobs != KNOBS
    night = Night(seconds=15.0, deny=tuple(profile().supported))
    night.launch()
    assert night.runs(300, leaking).fails().launch().growth is not None


def test_no_setting_is_tried_against_a_host_that_fills() -> None:
    night = Night(seconds=15.0)
    night.launch()
    night.runs(100)
    message = ahead(110, seen_at=90, cause=Cause.HOST_OOM)
    night.rows.append(replace(message, attempt=1))
    launch = night.fails(Cause.HOST_OOM, Phase.ROLLOUT).launch()
    assert launch.knobs == KNOBS and launch.growth is not None and launch.growth.process == "ray::Worker"


@pytest.mark.parametrize(("share", "restarts"), [(0.2, True), (0.97, False)])
def test_a_process_that_grew_to_a_limit_of_its_own_keeps_its_settings(share: float, restarts: bool) -> None:
    night = Night(seconds=60.0)
    night.launch()
    night.runs(30).fails(Cause.HOST_OOM, Phase.FORWARD)
    night.rows[-1] = replace(night.rows[-1], host_share=share, host_growth=90 * MIB)
    launch = night.launch()
    assert (launch.growth is not None) is restarts
    assert launch.growth is None or launch.growth.per_step_bytes == 90 * MIB


def test_a_limit_that_no_forecast_knows_is_met_at_the_checkpoint_before() -> None:
    night = Night()
    night.launch()
    night.runs(100).fails(Cause.HOST_OOM, Phase.FORWARD)
    night.rows[-1] = replace(night.rows[-1], host_share=0.2, host_growth=90 * MIB)
    night.launch()
    assert stops_after(night, 100) == 90  # with a tenth to spare


def test_a_script_that_grew_and_cannot_continue_is_told_what_lets_it() -> None:
    night = Night()
    first = night.rows[0]
    assert isinstance(first, Accepted)
    own = replace(first.profile, supported={}, resumable=False, layout=Layout())
    night.rows[0] = replace(first, profile=own)
    night.launch()
    night.runs(30, saves=0).fails(Cause.HOST_OOM, Phase.NONE)
    night.rows[-1] = replace(night.rows[-1], host_share=0.2, host_growth=90 * MIB)
    action = night.action()
    assert isinstance(action, Finish) and isinstance(action.verdict, GaveUp)
    assert "grows by 90.0 MiB a step" in action.verdict.nearest
    assert "only 20% of the host's memory was in use" in action.verdict.nearest
    grew, limit = action.verdict.would_help
    assert "`settings.resume`" in grew and limit.startswith("a higher limit")


def test_a_run_that_would_give_up_tries_its_settings_again_after_many_steps() -> None:
    night = Night(deny=tuple(profile().supported))
    night.launch()
    assert night.runs(30).fails().launch().growth is not None
    assert isinstance(night.runs(14).fails().action(), Finish)  # it gained less than half
    sudden = Night(deny=tuple(profile().supported))
    sudden.launch()
    assert isinstance(sudden.runs(15).fails().action(), Finish)


# ------------------------------------------------------------------ before it runs out


def ahead(step: int, *, seen_at: int, cause: Cause = Cause.GPU_OOM, lengths: bool = False) -> Foreseen:
    return Foreseen(
        cause=cause, phase=Phase.BACKWARD, seen_at=seen_at, step=step, earliest=step - 5, latest=step + 5,
        chance=0.98, since=3, used_bytes=70 * GIB, limit_bytes=78 * GIB, per_step_bytes=64 * MIB,
        upper_bound=cause is Cause.HOST_OOM, lengths=lengths, process="ray::Worker",
    )  # fmt: skip


def test_memory_may_run_out_from_the_earliest_likely_step_on() -> None:
    foreseen = ahead(300, seen_at=200)
    assert foreseen.soonest == 295 and replace(foreseen, earliest=None).soonest == 300


def stops_after(night: Night, steps: int, wording: Foreseen | None = None) -> int | None:
    """Return after how many of the steps of an attempt it is stopped for a fresh process."""
    for age in range(1, steps + 1):
        night.runs(1)
        row = night.rows[-1]
        assert isinstance(row, Progressed)
        saved = night.step // 10 * 10
        night.rows[-1] = replace(row, saved=saved if saved > night.step - age else None)
        if wording is not None and night.step == wording.seen_at:
            night.rows.append(replace(wording, attempt=night.number))
        action = night.action()
        if isinstance(action, Stop):
            assert action.by == "restart"
            return age
        assert isinstance(action, Await)
    return None


def test_what_ran_out_before_is_restarted_at_the_checkpoint_before() -> None:
    night = Night()
    night.launch()
    night.runs(400).fails().launch()
    assert stops_after(night, 400) == 360  # nothing measures it: with a tenth to spare
    night.rows.append(Ended(attempt=2, outcome=Cancelled(by="restart"), step=night.step))
    assert night.launch().growth is not None
    assert stops_after(night, 400) == 360


@pytest.mark.parametrize(
    ("earliest", "of", "restarts"),
    [(300, None, True), (301, None, False), (295, 295, True), (296, 295, False)],
)
def test_a_process_goes_on_to_its_next_checkpoint_or_its_end_if_memory_lasts(
    earliest: int, of: int | None, *, restarts: bool
) -> None:
    night = Night(forecast=Forecasting.ACT, seconds=240.0)
    night.launch()
    night.runs(290).rows.append(replace(ahead(310, seen_at=200), attempt=1, earliest=earliest))
    rows = [replace(row, of=of) if isinstance(row, Progressed) else row for row in night.rows]
    run = fold(tuple(rows))
    assert (restart_now(run, run.attempts[-1]) is not None) is restarts


@pytest.mark.parametrize(("phase", "restarts"), [(Phase.BACKWARD, True), (Phase.ROLLOUT, False)])
def test_a_memory_that_ran_out_with_other_settings_needs_no_long_record(
    phase: Phase, *, restarts: bool
) -> None:
    night = Night()
    night.launch()
    night.runs(330, leaking).fails().launch()
    night.rows[-1] = replace(night.rows[-1], knobs=replace(KNOBS, concurrency=128))
    night.runs(60).rows.append(replace(ahead(395, seen_at=390), attempt=2, phase=phase))
    run = fold(tuple(night.rows))
    assert (restart_now(run, run.attempts[-1]) is not None) is restarts


@pytest.mark.parametrize(
    ("uses", "steps", "of", "restarts"),
    [
        (nothing, 350, None, False),
        (nothing, 360, None, True),
        (nothing, 360, 780, True),
        (nothing, 360, 779, False),  # the job ends before
        (lambda age: peaks(backward=(58 + age / 20) * GIB), 350, None, False),
        (lambda age: peaks(backward=(58 + age / 20) * GIB), 360, None, True),
    ],
)
def test_a_process_is_restarted_at_nine_tenths_of_the_one_that_ran_out(
    uses: Uses, steps: int, of: int | None, *, restarts: bool
) -> None:
    """The second process starts at step 411, and nine tenths of 410 steps later is step 780."""
    night = Night()
    night.launch()
    night.runs(410, uses).fails().launch()
    night.runs(steps)
    if uses is not nothing:
        cautious = ahead(785, seen_at=700)
        night.rows.append(replace(cautious, attempt=2, earliest=760, per_step_bytes=MIB))
    rows = [
        replace(row, of=of) if isinstance(row, Progressed) and row.attempt == 2 else row for row in night.rows
    ]
    run = fold(tuple(rows))
    assert (restart_now(run, run.attempts[-1]) is not None) is restarts


@pytest.mark.parametrize("lengths", [True, False])
def test_a_failure_by_longer_responses_is_none_by_growth(lengths: bool) -> None:
    for steps in (90, 200):
        night = Night(seconds=240.0)
        night.launch()
        foreseen = ahead(steps + 5, seen_at=steps - 10, lengths=lengths)
        night.runs(steps).rows.append(replace(foreseen, attempt=1))
        assert (night.fails().launch().growth is None) is lengths


def test_the_first_rise_of_what_may_be_a_sawtooth_changes_nothing() -> None:
    night = Night(forecast=Forecasting.ACT, seconds=240.0)
    night.launch()
    assert stops_after(night, 60, ahead(62, seen_at=40)) is None


def test_a_planned_restart_comes_before_a_planned_change_of_the_settings() -> None:
    night = Night(forecast=Forecasting.ACT, seconds=20.0)  # a restart takes 9 % of the time
    night.launch()
    assert stops_after(night, 300, ahead(300, seen_at=200)) == 290


@pytest.mark.parametrize("forecast", [Forecasting.TELL, Forecasting.ACT])
@pytest.mark.parametrize("cause", [Cause.GPU_OOM, Cause.HOST_OOM])
def test_a_forecast_restarts_a_job_that_acts_on_it_or_failed_so_before(
    forecast: Forecasting, cause: Cause
) -> None:
    night = Night(forecast=forecast, seconds=240.0)
    night.launch()
    first = stops_after(night, 300, ahead(300, seen_at=200, cause=cause))
    assert first == (290 if forecast is Forecasting.ACT else None)
    if first is None:
        night.fails(cause)
    else:
        night.rows.append(Ended(attempt=1, outcome=Cancelled(by="restart"), step=night.step))
    launch = night.launch()
    assert launch.knobs == KNOBS and launch.growth is not None
    assert (launch.growth.process, launch.growth.steps) == ("ray::Worker", 300)
    began = night.step
    assert stops_after(night, 300, ahead(began + 300, seen_at=began + 200, cause=cause)) == 290


def test_who_denies_such_restarts_gets_a_change_of_the_settings_before_memory_runs_out() -> None:
    night = Night(forecast=Forecasting.ACT, seconds=240.0, deny=(NAME,))
    night.launch()
    night.runs(290, leaking)
    night.rows.append(replace(ahead(300, seen_at=200), attempt=1))
    action = night.action()
    assert isinstance(action, Stop) and action.by == "forecast"
    night.rows.append(Ended(attempt=1, outcome=Cancelled(by="forecast"), step=night.step))
    launch = night.launch()
    assert launch.knobs != KNOBS and launch.growth is None
    night.runs(290, leaking).fails()
    assert night.launch().growth is None


@pytest.mark.parametrize(("times", "restarted"), [(1, 290), (2, 140)])
def test_a_forecast_waits_until_memory_ran_out_before_unless_it_grows_faster(
    times: int, restarted: int
) -> None:
    night = Night()
    night.launch()
    night.runs(330, leaking).fails().launch()
    message = ahead(night.step + 150, seen_at=night.step + 100)
    assert (
        stops_after(night, 400, replace(message, per_step_bytes=times * message.per_step_bytes)) == restarted
    )


@pytest.mark.parametrize("other", [ahead(800, seen_at=9), ahead(400, seen_at=9, lengths=True)])
def test_a_memory_that_lasts_longer_hides_no_other(other: Foreseen) -> None:
    night = Night(forecast=Forecasting.ACT, seconds=240.0)
    night.launch()
    night.rows.append(replace(other, attempt=1, phase=Phase.ROLLOUT))
    assert stops_after(night, 300, ahead(300, seen_at=200)) == 290


def test_a_memory_whose_forecast_was_too_early_before_hides_no_other() -> None:
    night = Night(forecast=Forecasting.ACT, seconds=240.0)
    night.launch()
    night.runs(330, leaking).fails().launch()
    cautious, other = (ahead(night.step + lasts, seen_at=night.step + 100) for lasts in (150, 200))
    night.rows.append(replace(cautious, attempt=2))
    assert stops_after(night, 330, replace(other, phase=Phase.ROLLOUT)) == 190


def test_growth_that_only_the_whole_process_shows_keeps_the_settings() -> None:
    night = Night()
    night.launch()
    assert night.runs(380, lambda age: leaking(min(age, 270))).fails().launch().knobs == KNOBS


def test_lengths_that_grow_are_no_reason_to_restart() -> None:
    night = Night(forecast=Forecasting.ACT, seconds=240.0)
    night.launch()
    for _ in range(250):
        night.runs(1)
    night.rows.append(ahead(262, seen_at=250, lengths=True))
    action = night.action()
    assert not isinstance(action, Stop) or action.by != "restart"


def test_a_job_without_forecasts_is_never_stopped_in_good_health() -> None:
    night = Night(forecast=Forecasting.OFF)
    night.launch()
    night.runs(400).fails().launch()
    assert stops_after(night, 400) is None


# ------------------------------------------------------------------ what it leaves


def test_bytes_that_grew_are_no_part_of_what_the_settings_need() -> None:
    night = Night(seconds=240.0)
    night.launch()
    calm = tuple(night.rows) + tuple(
        Progressed(attempt=1, step=step, seconds=240.0, peaks=leaking(0), saved=step)
        for step in range(1, 331)
    )
    night.runs(330, leaking).fails().launch()
    night.runs(3, leaking)
    believed = []
    for history in (calm, tuple(night.rows)):
        run = fold(history)
        estimate = estimates(run.accepted.profile, CLUSTER, MODEL, [KNOBS], steps=20)
        believed.append(predicted(calibrated(run, MODEL), estimate, late=False).gpu[:, 0])
    places = [PHASES.index(Phase.BACKWARD), PHASES.index(Phase.ROLLOUT)]
    assert np.allclose(believed[0][places], believed[1][places], atol=0.6 * GIB)
    assert learned(fold(tuple(night.rows))) is None and learned(fold(calm)) is not None


def test_a_process_saves_several_times_before_its_memory_runs_out() -> None:
    night = Night(seconds=1.0)
    night.launch()
    job = accepted().job
    before = with_saves(job, tuple(night.runs(200).rows), KNOBS).recovery.save_every
    grown = Decided(growth=MemoryGrowth(memory="host", steps=240))
    after = with_saves(job, (*night.rows, grown), KNOBS).recovery.save_every
    assert (before, after) == (1200, 30)
    foreseen = (*night.rows, ahead(323, seen_at=200))
    assert with_saves(job, foreseen, KNOBS).recovery.save_every == 40
    withdrawn = (*foreseen, replace(ahead(323, seen_at=210), holds=False))
    assert with_saves(job, withdrawn, KNOBS).recovery.save_every == 1200
    own = replace(job, recovery=Recovery(save_every=500))
    assert with_saves(own, (*night.rows, grown), KNOBS) == own


def test_the_process_that_gains_most_is_named() -> None:
    grown = MemoryGrowth(memory="host", steps=300, per_step_bytes=GIB, process="ray::Reward")
    assert describe(grown).startswith("host memory of process ray::Reward grows by 1.00 GiB a step")
