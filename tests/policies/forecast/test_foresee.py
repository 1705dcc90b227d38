"""What is before ahead of memory that grows, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from msgspec.structs import replace

from autotune.policies.forecast import foresee as foresee_module
from autotune.policies.forecast.foresee import Crossing, Measured, foresee, host_growth
from autotune.policies.values.events import Foreseen
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.observation import HOST, Peak

GIB = 1 << 30
CARD = 80 * GIB


def rows(used: Callable[[int], float], steps: int, *, noise: float = 0.002, seed: int = 1) -> list[Measured]:
    """Return steps of which the backward pass uses a share of the card."""
    rng = Random(seed)
    shares = [used(step) * (1 + rng.gauss(0, noise)) for step in range(1, steps + 1)]
    return [
        Measured(step=n, peaks={"backward": Peak(used_bytes=int(share * CARD), capacity_bytes=CARD)})
        for n, share in enumerate(shares, start=1)
    ]


def first(measured: list[Measured], **facts: float | None) -> Foreseen | None:
    """Return what is before first of growing knowledge."""
    for count in range(1, len(measured) + 1):
        result = foresee(measured[:count], last={}, **facts)  # type: ignore[arg-type]
        if result:
            return next(iter(result.values()))
    return None


def leak(step: int) -> float:
    return 0.6 + 0.004 * step  # full at step 100


def test_a_leak_is_said_long_before_with_its_step_and_figures() -> None:
    before = first(rows(leak, 95), of=200)
    assert before is not None and before.phase is Phase.BACKWARD and before.cause is Cause.GPU_OOM
    assert before.seen_at <= 70 and before.chance >= 0.9
    assert before.earliest is not None and before.step is not None and before.latest is not None
    assert before.earliest <= before.step <= before.latest and 85 <= before.step <= 110
    assert before.per_step_bytes == pytest.approx(0.004 * CARD, rel=0.15)
    assert before.limit_bytes < CARD and before.used_bytes < before.limit_bytes


def test_growth_that_the_end_of_the_training_comes_before_is_not_said() -> None:
    assert first(rows(leak, 80), of=80) is None


@pytest.mark.parametrize(
    "used",
    [
        lambda _: 0.93,
        lambda step: 0.70 + 0.25 * (step >= 40),
        lambda step: 0.5 + 0.2 * (step >= 20) + 0.2 * (step >= 60),
        lambda step: 0.95 - 0.4 * 0.85**step,
        lambda step: 0.94 - 0.3 * 0.97**step,
        lambda step: 0.7 + 0.25 * (step in (30, 31, 77)),
        lambda step: 0.8 + 0.14 * (step % 8) / 8,
        lambda step: 0.95 - 0.002 * step,
    ],
    ids=["flat", "jump", "two jumps", "warm-up", "levels off", "peaks", "sawtooth", "falls"],
)
@pytest.mark.parametrize("seed", range(3))
def test_no_alarm(used: Callable[[int], float], seed: int) -> None:
    assert first(rows(used, 120, seed=seed), of=1000) is None


def test_a_leak_that_begins_late_is_said_by_what_came_since() -> None:
    before = first(rows(lambda step: 0.6 + max(0, step - 60) * 0.008, 108), of=300)
    assert before is not None and before.since is not None and before.since >= 50
    assert before.step is not None and before.step - before.seen_at >= 5


def test_what_no_longer_holds_is_taken_back_once() -> None:
    steps = rows(lambda step: min(leak(step), leak(70)), 120)
    before: dict[str, Foreseen] = {}
    forecasts = []
    for count in range(1, len(steps) + 1):
        result = foresee(steps[:count], last=before, of=1000)
        before |= result
        forecasts += result.values()
    assert forecasts[0].holds and not forecasts[-1].holds
    assert sum(not each.holds for each in forecasts) == 1


def test_the_same_forecast_is_said_once() -> None:
    steps = rows(leak, 90)
    before = foresee(steps[:70], last={}, of=200)
    assert before
    assert not foresee(steps[:71], last=before, of=200)


def test_the_host_counts_to_where_processes_are_killed() -> None:
    steps = [
        Measured(step=n, host=Peak(used_bytes=int((0.5 + 0.005 * n) * GIB), capacity_bytes=GIB))
        for n in range(1, 71)
    ]
    before = foresee(steps, last={}, of=None)[HOST]
    assert before.cause is Cause.HOST_OOM and before.limit_bytes == int(0.95 * GIB)
    assert before.step is not None and 87 <= before.step <= 93


@pytest.mark.parametrize(("steps", "per_step"), [(30, 0.005 * GIB), (8, None)])
def test_growth_of_a_host_is_measured_far_below_its_limit(steps: int, per_step: float | None) -> None:
    rising = [host_at(step, 0.1 + 0.005 * step) for step in range(1, steps + 1)]
    even = [host_at(step, 0.1 + 0.005 * (step % 3)) for step in range(1, steps + 1)]
    assert host_growth(rising) == (None if per_step is None else pytest.approx(per_step, rel=0.01))
    assert host_growth(even) is None


def host_at(step: int, share: float, *, total: int = GIB) -> Measured:
    return Measured(step=step, host=Peak(used_bytes=int(share * total), capacity_bytes=total))


def test_nodes_of_different_size_are_one_series() -> None:
    sizes = (GIB, 2 * GIB)
    steps = [host_at(n, 0.5 + 0.005 * n, total=sizes[n % 2]) for n in range(1, 71)]
    before = foresee(steps, last={}, of=None)[HOST]
    assert before.step is not None and 87 <= before.step <= 93
    assert before.limit_bytes == int(0.95 * GIB)  # of the node that is fullest now
    level = [host_at(n, 0.8, total=GIB if n < 40 else 2 * GIB) for n in range(1, 71)]
    assert foresee(level, last={}, of=None) == {}


def test_a_driver_that_attaches_takes_nothing_back_before_it_has_seen_enough() -> None:
    before = foresee([host_at(n, 0.5 + 0.005 * n) for n in range(1, 61)], last={}, of=None)
    assert before[HOST].holds
    steps = [Measured(step=n) for n in range(1, 61)]
    for n in range(61, 80):
        steps.append(host_at(n, 0.5 + 0.005 * n))
        assert all(each.holds for each in foresee(steps, last=before, of=None).values())
    calm = [*steps[:60], *(host_at(n, 0.6) for n in range(61, 80))]
    assert not foresee(calm, last=before, of=None)[HOST].holds


def test_a_phase_that_is_no_longer_run_is_taken_back() -> None:
    steps = rows(leak, 70)
    before = foresee(steps, last={}, of=200)
    other = {"forward": Peak(used_bytes=GIB, capacity_bytes=CARD)}
    missing = [Measured(step=n, peaks=other) for n in range(71, 79)]
    assert not foresee([*steps, *missing[:7]], last=before, of=200)
    back = foresee([*steps, *missing], last=before, of=200)
    assert [(each.phase, each.holds) for each in back.values()] == [(Phase.BACKWARD, False)]
    unread = [Measured(step=n) for n in range(71, 79)]  # as after an attach: nothing was read of any phase
    assert not foresee([*steps, *unread], last=before, of=200)


def test_a_validation_every_ten_steps_is_not_taken_back_between_two() -> None:
    steps = [
        Measured(step=one.step, peaks=one.peaks if one.step % 10 == 0 else {"forward": one.peaks["backward"]})
        for one in rows(leak, 78)
    ]
    before = {"backward": foresee(rows(leak, 70), last={}, of=200)["backward"]}
    assert "backward" not in foresee(steps, last=before, of=200)


def told_by(chances: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch) -> list[Foreseen]:
    """Return what is before after one step each, where the trend gives these chances and steps."""
    before, forecasts, steps = dict[str, Foreseen](), list[Foreseen](), rows(leak, 70 + len(chances))
    for count, (chance, step) in enumerate(chances, start=70):
        result = Crossing(chance=chance, step=step, earliest=step, latest=step, until=200, at_end=CARD)
        monkeypatch.setattr(foresee_module, "crossing", lambda *_, result=result, **__: result)
        new = foresee(steps[:count], last=before, of=200)
        before |= new
        forecasts += new.values()
    return forecasts


def test_what_becomes_unlikely_is_taken_back_and_what_is_less_sure_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chances = [(0.95, 100), (0.91, 100), (0.85, 100), (0.91, 100), (0.86, 100), (0.96, 100), (0.69, 120)]
    forecasts = told_by([*chances, (0.85, 100), (0.9, 100)], monkeypatch)
    assert [(each.chance, each.holds) for each in forecasts] == [
        (0.95, True), (0.85, True), (0.96, True), (0.96, False), (0.9, True),
    ]  # fmt: skip


def test_what_was_expected_by_now_is_not_said_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    forecasts = told_by([(0.99, 73), *((0.99, step + 1) for step in range(71, 110))], monkeypatch)
    assert [each.step for each in forecasts] == [73]
    earlier = told_by([(0.99, 100), (0.99, 73)], monkeypatch)
    assert [each.step for each in earlier] == [100, 73]


def test_lengths_that_are_missing_now_and_then_still_explain() -> None:
    steps = lengthening(6000, 90)
    some = [replace(one, lengths={}) if one.step in (20, 55, 90) else one for one in steps]
    assert foresee(some, last={}, of=400, longest=6000.0) == {}
    assert foresee([replace(one, lengths={}) for one in steps], last={}, of=400, longest=6000.0)


def lengthening(longest: float, steps: int) -> list[Measured]:
    """Return steps whose responses grow by 40 tokens each to the longest allowed, and peaks with them."""
    rng, result = Random(5), []
    for step in range(1, steps + 1):
        length = min(longest, 2000 + 40 * step) * (1 + rng.gauss(0, 0.004))
        used = int((0.3 + 0.0001 * length) * CARD)
        peak = Peak(used_bytes=used, capacity_bytes=CARD)
        result.append(
            Measured(
                step=step, peaks={"backward": peak}, lengths={"response_length/mean": min(length, longest)}
            )
        )
    return result


def test_lengths_that_end_below_the_limit_are_no_alarm_and_others_are_named() -> None:
    assert first(lengthening(6000, 90), of=400, longest=6000.0) is None  # 0.9 of the card at most
    before = first(lengthening(9000, 115), of=400, longest=9000.0)
    assert before is not None and before.lengths
    assert before.step is not None and 110 <= before.step <= 130


def test_a_memory_without_a_size_says_nothing() -> None:
    unlimited = [
        Measured(step=n, peaks={"backward": Peak(used_bytes=n * GIB, capacity_bytes=0)}) for n in range(1, 60)
    ]
    assert foresee(unlimited, last={}, of=100) == {}


def test_a_sawtooth_that_rises_is_said_before_it_runs_out() -> None:
    def sawtooth(step: int) -> float:
        return 0.55 + 0.0045 * step + 0.02 * (step % 8)  # full at step 67

    before = first(rows(sawtooth, 62), of=140)
    assert before is not None and before.seen_at <= 57


def test_a_few_steps_after_a_jump_prove_no_growth() -> None:
    # Recorded: an optimizer step that takes more from one step on, and wanders.
    after = [1.108, 1.129, 1.091, 1.181, 1.176, 1.181, 1.21, 1.193, 1.151]

    def jumped(step: int) -> float:
        return 0.78 * (1.0 if step <= 80 else after[step - 81])

    measured = rows(jumped, 89, noise=0.02)
    assert max(one.peaks["backward"].used_bytes for one in measured) < 0.985 * CARD
    assert first(measured, of=180) is None
