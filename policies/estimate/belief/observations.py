"""Update a belief by one attempt: its peaks, the phases that it passed, and its failure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from autotune.policies.estimate.belief.gaussian import (
    Belief,
    Floats,
    at_least,
    at_most,
    doubted,
    exceeded,
    measured,
    replaced,
)
from autotune.policies.estimate.belief.growth import Growth, growth
from autotune.policies.estimate.belief.prior import (
    HOST_COLUMNS,
    INDEX,
    LATE_ERROR,
    LENGTHS,
    NAMES,
    OPTIMIZER,
    PART_COLUMNS,
    RESIDUE_COLUMNS,
    scaled,
)
from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.lengths import deviation_of, longest_of
from autotune.policies.estimate.parts import PARTS
from autotune.policies.estimate.peaks import PHASES, Estimates
from autotune.policies.values.failure import HOST_LIMIT, Cause, Phase
from autotune.policies.values.history import Attempt
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Peak
from autotune.policies.values.profile import Profile

_DRIFT = 0.2  # standard deviations of the mean length by which later steps differ
_LATE_MOST = 0.5  # share of the capacity that is kept for growth at most; against more only restarts help
_LATE_FAILED = 0.06  # share of the capacity that growth may be if it has already made a run fail
LATE_STEP = 4  # a failure at this step of an attempt or later may be growth
_READING = 0.006  # share by which a reported peak may differ from the next run's
_BEYOND = 0.08  # share of the capacity that a phase needs beyond its first failed request, if unknown
# Share of held-out logs in which the named phase is right (docs/measured/explain-accuracy.md).
_NAMED_RIGHTLY = 0.91
# Standard deviation of the logarithm of a phase's estimate, which may omit something: nothing is impossible,
# but a failure in a phase seven times below its limit nearly is.
_PHASE_SPREAD = 0.35
_SURELY_ANOTHER = 2.0  # times as probable as the named phase before another one is assumed
_MESSAGE = 0.004  # share of the capacity by which a message's figures may be off
_STEP = PHASES[PHASES.index(Phase.ROLLOUT) : PHASES.index(Phase.WEIGHT_SYNC)]
_BEFORE_STATE = frozenset(
    {Phase.INIT, Phase.ROLLOUT_INIT, Phase.ROLLOUT, Phase.LOG_PROB, Phase.FORWARD, Phase.BACKWARD}
)


def growths(attempt: Attempt) -> dict[str, Growth]:
    """Return the growth of the peaks of an attempt's phases, for phases with enough reported peaks."""
    result = {phase.value: growth(attempt.progress, phase.value) for phase in PHASES}
    return {name: grew for name, grew in result.items() if grew is not None}


def settled_peaks(
    attempts: Sequence[Attempt], grown: Sequence[dict[str, Growth]]
) -> dict[Knobs, dict[str, float]]:
    """Return the largest peak of each phase, without growth, that an attempt with the same knobs reported."""
    floors: dict[Knobs, dict[str, float]] = {}
    for attempt, grew_in in zip(attempts, grown, strict=True):
        floor = floors.setdefault(attempt.knobs, {})
        for phase in PHASES:
            name = phase.value
            peak = _largest([e.peaks[name] for e in attempt.progress if name in e.peaks])
            if peak is not None and not peak.upper_bound:
                grew = grew_in.get(name)
                settled = peak.used_bytes - (0.0 if grew is None else grew.grown_bytes)
                floor[name] = max(floor.get(name, 0.0), settled)
    return floors


def likely_phase(
    belief: Belief, estimate: Estimates, column: int, attempt: Attempt, *, before: Sequence[Attempt] = ()
) -> Phase | None:
    """Return the phase in which an attempt most probably ran out of device memory; None: the named one.

    A phase that the log shows is accepted: an estimate far below the limit may omit what the phase needs. One
    that is only named near the failure is doubted if, by the estimate, it needs a small part of its device
    while another phase, the first to reach its limit, needs nearly all of it or more. This applies before a
    second completed step, because later failures come from growth. Phases that the attempt completed, or for
    which one of `before` with the same knobs had enough memory, are excluded.
    """
    diagnosis = attempt.diagnosis
    if diagnosis is None or diagnosis.cause is not Cause.GPU_OOM or diagnosis.phase not in PHASES:
        return None
    if diagnosis.phase_shown or len(attempt.progress) > 1:
        return None
    held = _held(attempt, before)
    fresh = not attempt.continued and not attempt.progress
    wrong = 1 - _NAMED_RIGHTLY * max(0.5, diagnosis.confidence)
    passed, chances = 1.0, {}
    for place, phase in enumerate(PHASES):
        if phase in held and phase is not diagnosis.phase:
            continue
        capacity = float(estimate.gpu_capacity[place, column])
        state = not (fresh and phase in _BEFORE_STATE)
        row = _row(estimate, place, column, 0.0, late=False, state=state)
        mean, error = belief.about(row)
        needed = _total(estimate, place, column, state=state) + mean
        if not np.isfinite(capacity) or needed <= 0:
            chances[phase] = 0.0
            continue
        spread = max(_PHASE_SPREAD, error / needed)
        over = float(exceeded(np.array([math.log(capacity / needed) / spread]))[0])
        named = 1 - wrong if phase is diagnosis.phase else wrong / (len(PHASES) - 1)
        chances[phase] = named * passed * over
        passed = min(passed, 1 - over)  # errors of the phases are correlated
    likely = max(chances, key=lambda phase: chances[phase])
    return likely if chances[likely] > _SURELY_ANOTHER * chances[diagnosis.phase] else None


def _held(attempt: Attempt, before: Sequence[Attempt]) -> frozenset[Phase]:
    """Return the phases for which this or earlier attempts show that the knobs leave enough memory."""
    result = frozenset({Phase.INIT, Phase.ROLLOUT_INIT}) if attempt.progress else frozenset()
    reported = {} if attempt.ended is None else attempt.ended.peaks
    result |= {phase for phase in PHASES if phase.value in reported and not reported[phase.value].upper_bound}
    if any(_proves(each, attempt) for each in before):
        result |= {*_STEP, Phase.WEIGHT_SYNC}
    return result


def _proves(earlier: Attempt, attempt: Attempt) -> bool:
    """Return whether an earlier attempt, equal and with as long sequences, trained with optimizer state."""
    as_long = earlier.longest or not attempt.longest
    return earlier.knobs == attempt.knobs and as_long and len(earlier.progress) > 1


def shown_by(
    belief: Belief,
    estimate: Estimates,
    column: int,
    attempt: Attempt,
    unit: float,
    floor: dict[str, float],
    grown: dict[str, Growth],
    filled: bool = True,
) -> Belief:
    """Return the belief after one attempt: its peaks, the phases that it passed, and its failure.

    `floor`: phase -> bytes that an attempt with the same knobs needed, which shorter batches do not lower.
    Completed forward and backward phases bound their memory only if steps `filled` a micro-batch.
    """
    diagnosis = attempt.diagnosis
    if diagnosis is not None and diagnosis.facts.asleep_bytes is not None:
        belief = _slept(belief, estimate.asleep[:, column], diagnosis.facts.asleep_bytes)
    steady = [event for event in attempt.progress if event.step > 1 or attempt.continued]
    failing = diagnosis is not None and diagnosis.phase in PHASES
    for place, phase in enumerate(PHASES):
        name, capacity = phase.value, float(estimate.gpu_capacity[place, column])
        peak = _largest([e.peaks[name] for e in steady if name in e.peaks])
        if peak is None and attempt.progress and attempt.ended is not None:
            peak = attempt.ended.peaks.get(name)
        if peak is not None:
            belief = _read(belief, estimate, place, column, peak, unit, floor.get(name, 0.0), grown.get(name))
        elif not filled and phase in (Phase.FORWARD, Phase.BACKWARD):
            continue
        elif steady:
            row = _row(estimate, place, column, unit, late=False)
            belief = _under(belief, row, capacity - _total(estimate, place, column), capacity)
        else:
            state = attempt.continued or phase not in _BEFORE_STATE
            first = _row(estimate, place, column, unit, late=False, state=state)
            peak = _first_peak(attempt, name)
            if peak is not None and not peak.upper_bound:
                value = peak.used_bytes - _total(estimate, place, column, state=state)
                belief = measured(belief, first, value, error=3 * _READING * peak.used_bytes)
            elif attempt.progress or (failing and _passed(attempt, phase)):
                base = _total(estimate, place, column, state=state)
                belief = _under(belief, first, capacity - base, capacity)
    if diagnosis is not None and diagnosis.cause is Cause.GPU_OOM and diagnosis.phase in PHASES:
        belief = _overflowed(belief, estimate, column, attempt, unit)
    return _host_shown(belief, estimate, column, attempt)


def _slept(belief: Belief, parts: Floats, used: int) -> Belief:
    """Return the belief after `used` bytes of a device stayed in use when its engine first slept.

    `parts`: those of the sleeping engine and of a trainer beside it, which may not have existed yet. The
    residue becomes the value nearest to the estimate that both cases allow.
    """
    residue = float(parts[PARTS.index("residue")])
    if not residue:
        return belief
    least = residue + used - float(parts.sum())
    most = used - float(parts[PARTS.index("graphs")]) - constant("context")
    kept = min(max(residue, least), max(least, most, 0.0))
    error = min(abs(most - least) / math.sqrt(12), residue / 2)
    return replaced(belief, RESIDUE_COLUMNS, kept / residue - 1, error=error / residue)


def fills_microbatch(profile: Profile, attempt: Attempt) -> bool:
    """Return whether each replica had the tokens of a full micro-batch in an update; True if unknown."""
    tokens, layout, knobs = step_tokens(attempt), profile.layout, attempt.knobs
    if not tokens or not knobs.tokens_per_microbatch:
        return True
    inside = int(knobs.sequence_parallel or 1) if layout.strategy != "megatron" else 1
    split = inside * int(knobs.context_parallel or 1)
    model = split * int(knobs.tensor_parallel or 1) * layout.pipeline_parallel
    updates = max(1, layout.sequences // layout.mini_batch) if layout.mini_batch else 1
    full = knobs.tokens_per_microbatch * (1 if layout.tokens_before_split else split)
    return max(tokens) / updates / max(1, layout.ranks // model) >= full


def step_tokens(attempt: Attempt) -> list[float]:
    """Return the tokens of each step that reported its speed."""
    rates = [(event.tokens_per_second or 0.0) * (event.seconds or 0.0) for event in attempt.progress]
    return [tokens for tokens in rates if tokens > 0]


def lengths_seen(belief: Belief, profile: Profile, attempt: Attempt) -> Belief:
    """Return the belief after observing the mean length of an attempt's sequences: tokens per sample."""
    layout = profile.layout
    tokens = step_tokens(attempt)
    if not tokens or not layout.sequences:
        return belief
    mean = sorted(tokens)[len(tokens) // 2] / layout.sequences
    deviation = deviation_of(layout, longest=longest_of(profile), mean=mean)
    if deviation is None:
        return belief
    row = np.zeros(len(NAMES))
    row[INDEX[LENGTHS]] = 1.0
    return measured(belief, row, deviation, error=_DRIFT)


def _read(
    belief: Belief,
    estimate: Estimates,
    place: int,
    column: int,
    peak: Peak,
    unit: float,
    floor: float,
    grew: Growth | None,
) -> Belief:
    """Return the belief after a reported peak of a phase."""
    row = _row(estimate, place, column, unit, late=False)
    total = _total(estimate, place, column)
    if peak.upper_bound:
        return _under(belief, row, peak.used_bytes - total, float(peak.used_bytes))
    used = max(floor, float(peak.used_bytes) if grew is None else grew.settled_bytes)
    belief = measured(belief, row, used - total, error=_READING * used)
    if grew is not None and grew.expected_bytes > LATE_ERROR * unit:
        column = INDEX[f"{PHASES[place].value}.late"]
        expected = min(grew.expected_bytes, max(_LATE_MOST * unit, grew.grown_bytes))
        late = np.zeros(len(NAMES))
        late[column] = unit
        belief = doubted(belief, column, expected / unit)
        belief = measured(belief, late, expected, error=min(grew.error_bytes, 0.3 * expected) + 0.002 * unit)
    return belief


def _overflowed(belief: Belief, estimate: Estimates, column: int, attempt: Attempt, unit: float) -> Belief:
    """Return the belief after a phase ran out: the memory in use plus the request did not fit."""
    diagnosis = attempt.diagnosis
    assert diagnosis is not None
    place, facts = PHASES.index(diagnosis.phase), diagnosis.facts
    capacity = float(estimate.gpu_capacity[place, column])
    bound = float(facts.limit_bytes or capacity)
    if not np.isfinite(capacity):
        return belief
    if facts.room_bytes is not None and facts.requested_bytes is not None:
        bound += max(0, facts.requested_bytes - facts.room_bytes)
    if diagnosis.fragmentation:  # reserved and unused memory is not needed
        bound -= facts.reserved_unallocated_bytes or 0
    done = len(attempt.progress)
    fresh = not attempt.continued and not done
    state = not (fresh and diagnosis.phase in _BEFORE_STATE)
    late = done + 1 >= LATE_STEP
    if late:  # a failure after several steps is growth, or a batch that had not occurred before
        belief = doubted(belief, INDEX[f"{diagnosis.phase.value}.late"], _LATE_FAILED)
    row = _row(estimate, place, column, unit, late=late, state=state)
    value = bound - _total(estimate, place, column, state=state)
    return at_least(belief, row, value, error=_MESSAGE * bound, beyond=_BEYOND * capacity)


def _host_shown(belief: Belief, estimate: Estimates, column: int, attempt: Attempt) -> Belief:
    totals = estimate.host[:, column]
    limit = HOST_LIMIT * estimate.host_capacity
    diagnosis = attempt.diagnosis
    if not np.isfinite(limit) or (diagnosis is not None and diagnosis.own_limit):
        return belief
    place = int(totals.argmax())
    if diagnosis is not None and diagnosis.cause is Cause.HOST_OOM:
        if diagnosis.phase in PHASES and diagnosis.phase is not Phase.INIT:
            place = PHASES.index(diagnosis.phase)
        row = _host_row(estimate, place, column)
        return at_least(belief, row, limit - totals[place], error=0.02 * limit, beyond=_BEYOND * limit)
    if not attempt.progress and diagnosis is not None and diagnosis.phase in PHASES:
        # The phases before the failure fitted on the host too.
        passed = [p for p, phase in enumerate(PHASES) if phase is diagnosis.phase or _passed(attempt, phase)]
        place = max(passed, key=lambda p: float(totals[p]))
    elif not attempt.progress:
        return belief
    return at_most(belief, _host_row(estimate, place, column), limit - totals[place], error=0.02 * limit)


def _under(belief: Belief, row: Floats, value: float, scale: float) -> Belief:
    if not np.isfinite(scale):
        return belief
    return at_most(belief, row, value, error=_MESSAGE * scale)


def _passed(attempt: Attempt, phase: Phase) -> bool:
    """Return whether an attempt that failed in its first step had certainly completed this phase.

    Weights are synced before the first rollout or after the update, checkpoints are saved before or after.
    """
    diagnosis = attempt.diagnosis
    if diagnosis is None or diagnosis.phase not in PHASES or phase in (Phase.WEIGHT_SYNC, Phase.CHECKPOINT):
        return False
    if diagnosis.phase is Phase.WEIGHT_SYNC and phase in _STEP:
        return False
    return PHASES.index(phase) < PHASES.index(diagnosis.phase)


def _first_peak(attempt: Attempt, name: str) -> Peak | None:
    """Return the peak of a phase that occurred only in the first step."""
    peaks = [event.peaks[name] for event in attempt.progress if name in event.peaks]
    if not attempt.progress and attempt.ended is not None and name in attempt.ended.peaks:
        peaks.append(attempt.ended.peaks[name])
    return _largest(peaks)


def _largest(peaks: Sequence[Peak]) -> Peak | None:
    return max(peaks, key=attrgetter("used_bytes")) if peaks else None


def _row(
    estimate: Estimates, place: int, column: int, unit: float, *, late: bool, state: bool = True
) -> Floats:
    """Return what each deviation adds to one phase's peak of one configuration, in bytes."""
    row = np.zeros(len(NAMES))
    parts = estimate.gpu_parts[place][:, column].copy()
    if not state:
        parts[OPTIMIZER] = 0.0
    row[PART_COLUMNS[place]] = parts
    row[INDEX[f"{PHASES[place].value}.scale"]] = float(scaled(parts))
    row[INDEX[LENGTHS]] = estimate.lengths[place, column]
    if late:
        row[INDEX[f"{PHASES[place].value}.late"]] = unit
    return row


def _host_row(estimate: Estimates, place: int, column: int) -> Floats:
    row = np.zeros(len(NAMES))
    row[HOST_COLUMNS] = estimate.host_parts[place][:, column]
    return row


def _total(estimate: Estimates, place: int, column: int, *, state: bool = True) -> float:
    parts = estimate.gpu_parts[place][:, column]
    return float(parts.sum() - (0.0 if state else parts[OPTIMIZER]))
