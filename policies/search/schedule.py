"""Decide when trials of a search start, wait and end, and which configurations are confirmed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from autotune.policies.forecast.time_left import TimeLeft, seconds_of_more, step_seconds, unix_seconds
from autotune.policies.recovery.decide import backoff_s
from autotune.policies.search import trials
from autotune.policies.values.events import GaveUp, Progressed, Purpose, Result, Stable, Tried
from autotune.policies.values.job import Cluster, Search
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile
from autotune.policies.values.run.view import AttemptView, RunView
from autotune.policies.values.value import Value

_LEAST_PATIENCE, _PATIENCE_SHARE = 8, 0.3  # trials without gain before a search ends
_FEWEST_STEPS = 3  # of a trial, including a warm-up step, before it may count as slow
_SLOW_SHARE = 0.8  # of the best speed: a trial that is certainly below it is stopped
_SIGMAS = 3.0
_PAIRS = 2  # runs each of the stable start and the winner under the same conditions
_FASTEST = 2.0  # times the speed of the stable start; a trial that would have to be faster is not begun
_PROOF_SHARE = 0.5  # of search.duration that is kept for confirmation runs, at most

_WITHOUT_RESULT = {
    Result.FAILS: "out of memory",
    Result.REFUSED: "refused by the job",
    Result.LOST: "lost",
    Result.GATED: "predicted not to fit",
}


def count(results: Iterable[Tried]) -> int:
    """Return how many trials of the budget are spent; confirmation runs and the stable start are none."""
    return len({r.trial for r in _made(results) if r.purpose is Purpose.PROBE})


def _made(results: Iterable[Tried]) -> list[Tried]:
    """Return the results of trials that ran and were not lost with the cluster."""
    return [r for r in results if r.result not in (Result.GATED, Result.LOST)]


class Pace(Value, frozen=True, kw_only=True):
    """How fast an attempt ran."""

    start_s: float  # until the end of the first step
    step_s: float  # the fastest step

    def seconds(self, steps: int) -> float:
        """Return the seconds of an attempt of so many steps."""
        return self.start_s + max(0, steps - 1) * self.step_s


def pace_of(attempt: AttemptView) -> Pace | None:
    """Return how fast an attempt ran; None if it completed too few steps."""
    steps = [s for s in step_seconds(attempt) if s > 0]
    if not steps or not attempt.stepped_s:
        return None
    return Pace(start_s=max(0.0, attempt.stepped_s[0] - attempt.started_s), step_s=min(steps))


def shortest_s(trial_s: float) -> float:
    """Return the seconds below which no trial ends, if one takes `trial_s` at the speed of the start."""
    return trial_s / _FASTEST


def why_end(
    results: Sequence[Tried],
    search: Search,
    *,
    goal_steps: int,
    elapsed_s: float,
    running: int = 0,
    trial_s: float = 0.0,
) -> str:
    """Return the reason for starting no further trial; empty while the search continues.

    `trial_s`: the seconds of a trial at the speed of the stable start, if known.
    """
    run = _made(results)
    if count(run) + running >= search.trials:
        return f"all {search.trials} trials are used" if search.trials > 1 else "the only trial is used"
    if elapsed_s >= search.duration_s:
        return "`search.duration` is used up"
    patience = max(_LEAST_PATIENCE, round(_PATIENCE_SHARE * search.trials))
    if len(run) > patience:
        before, after = trials.fastest(run[:-patience]), trials.fastest(run)
        old, new = (0.0 if best is None else best.rate for best in (before, after))
        if not new:
            return f"none of {len(run)} trials ran within the limits"
        if old and new < old * (1.0 + search.min_gain):
            return f"no gain of {search.min_gain:.0%} in {patience} trials"
    if elapsed_s + _proof_s(results, search, goal_steps=goal_steps) >= search.duration_s:
        return "the remaining time is reserved for the confirmation runs"
    if elapsed_s + shortest_s(trial_s) >= search.duration_s:
        return "the rest of `search.duration` is too short for a trial"
    return ""


def _proof_s(results: Sequence[Tried], search: Search, *, goal_steps: int) -> float:
    """Return the seconds kept for confirmation: goal.steps of the fastest, start-ups included."""
    timed = [r.seconds for r in results if r.purpose is Purpose.PROBE and r.seconds]
    if not timed or not search.confirm:
        return 0.0
    longer = max(1.0, goal_steps / max(1, search.probe_steps))
    return min(
        (search.confirm + 1) * longer * sorted(timed)[len(timed) // 2], _PROOF_SHARE * search.duration_s
    )


def too_slow(steps: Sequence[Progressed], *, best: Tried | None) -> bool:
    """Return whether the first steps show that a trial certainly stays well below the best."""
    speed = trials.speed(steps)
    if best is None or speed is None or len(steps) < _FEWEST_STEPS or speed.unit is not best.unit:
        return False
    return speed.per_second * (1.0 + _SIGMAS * speed.noise) < _SLOW_SHARE * best.rate


def next_proof(results: Sequence[Tried], search: Search, *, start: Knobs) -> Knobs | None:
    """Return what runs next for goal.steps: the fastest that has not, then start and winner in turn.

    None if enough is confirmed.
    """
    proofs = [r for r in results if r.purpose is Purpose.CONFIRM and r.result is not Result.LOST]
    compared = {r.knobs for r in proofs}
    proven = compared - {r.knobs for r in proofs if not trials.keeps_limits(r)} - {start}
    held = trials.fastest(results, confirmed=True)
    waiting = trials.fastest(results, besides=compared)
    if waiting is not None and len(proven) < search.confirm and (held is None or waiting.rate > held.rate):
        return waiting.knobs
    if not search.confirm or held is None or held.knobs == start:
        return None
    runs = {knobs: sum(r.knobs == knobs for r in proofs) for knobs in (start, held.knobs)}
    fewest = min(runs, key=lambda knobs: runs[knobs])  # the start if both have as many
    return fewest if runs[fewest] < _PAIRS else None


def most_proofs(search: Search) -> int:
    """Return the most confirmation runs: those of the fastest configurations, and the rest of the pairs."""
    return search.confirm + 2 * _PAIRS - 1 if search.confirm else 0


class Losses(Value, frozen=True, kw_only=True):
    """What the cluster took away of one configuration."""

    count: int
    wait_s: float  # before the next trial starts
    too_many: bool


def losses(results: Iterable[Tried], knobs: Knobs, *, retries: int) -> Losses:
    """Return how often a configuration was lost with the cluster, and whether that exceeds `retries`."""
    lost = sum(r.knobs == knobs and r.result is Result.LOST for r in results)
    return Losses(count=lost, wait_s=backoff_s(lost), too_many=lost > retries)


def tried_besides(results: Iterable[Tried], *, began_with: int) -> bool:
    """Return whether a configuration ran besides the attempt that made the job stable."""
    return any(r.attempt != began_with and r.result is not Result.GATED for r in results)


def verdict_of(
    results: Sequence[Tried],
    search: Search,
    *,
    start: Knobs,
    began_with: int,
    exhausted: bool = False,
    cut: int = 0,
) -> Stable | GaveUp:
    """Return the verdict of a finished search.

    It is a success if a trial was measured, or if none was started because, with time and trials left, no
    configuration is predicted to be faster than the start (`exhausted`). `began_with` is the attempt that
    made the job stable, which is no trial; the end of search.duration stopped `cut` trials. A success is
    marginal if the stable start leaves too little headroom and nothing better was confirmed.
    """
    made = [r for r in results if r.attempt != began_with]
    complete = exhausted and not tried_besides(results, began_with=began_with)
    if not complete and not any(r.result in (Result.FITS, Result.SLOW) for r in made):
        counts = Counter(r.result for r in made)
        why = ", ".join(
            f"{counts[result]} {word}" for result, word in _WITHOUT_RESULT.items() if counts[result]
        )
        stopped = f"{cut} stopped at the end of search.duration" if cut else ""
        why = ", ".join(part for part in (why, stopped) if part)
        why = why or "none was started: raise search.duration or search.trials"
        reason = f"no trial of the search succeeded ({why})"
        return GaveUp(reason=f"{reason}; `stable.yaml` is the configuration that it started from")
    tight = any(trials.exceeds(r) for r in results if r.knobs == start)
    return Stable(marginal=tight and trials.winner(results, search, start=start) is None)


# ---- how the trials of a search share a cluster when several run at once


def gpus_of(profile: Profile) -> int:
    """Return the number of GPUs that one trial uses."""
    trainers = max(1, profile.layout.ranks)
    if profile.placement is Placement.COLOCATED:
        return trainers
    return trainers + max(0, profile.layout.engine_ranks)


def trials_on_a_node(profile: Profile, cluster: Cluster, *, parallel: int) -> int:
    """Return how many of `parallel` trials can share one node and its host memory.

    Ray fills nodes one after the other; a trial that needs all GPUs of a node shares it with no other.
    """
    if not cluster.gpus_per_node:
        return -(-parallel // max(1, cluster.nodes))
    return max(1, min(parallel, cluster.gpus_per_node // gpus_of(profile)))


# ---- the most time left of a search: its trials and confirmation runs, within search.duration

_ENOUGH = 3  # trials from which the duration of one is estimated


def time_left(view: RunView, *, now: float) -> TimeLeft | None:
    """Return the maximum time left of a search at `now` (Unix seconds), once its trials have started.

    There is no lower bound, because a search may end at any time when nothing is worth a run. Before _ENOUGH
    trials have ended, the rest of search.duration is returned. None if no trial has started or the search is
    over.
    """
    assert view.accepted is not None and view.last is not None
    job, results = view.accepted.job, view.tried
    search = job.search
    running = [each for each in view.trials if each.ended is None]
    since_s = max(0.0, now - unix_seconds(view.last.at)) if view.unended else 0.0
    limit_s = search.duration_s - view.driven_s - since_s
    if view.finished or not (running or results) or limit_s <= 0:
        return None
    ran = [r for r in results if r.result not in (Result.GATED, Result.LOST) and r.seconds]
    took = [r.seconds for r in ran if r.purpose is Purpose.PROBE]
    if len(took) < _ENOUGH:
        return TimeLeft(least_s=0.0, most_s=limit_s)
    with_result = {r.trial for r in results}
    proofs = sum(r.purpose is Purpose.CONFIRM for r in ran)
    proving = proofs > 0 or any(each.started.trial in with_result for each in running)
    begun_s = sum(min(max(0.0, now - unix_seconds(each.started.at)), max(took)) for each in running)
    longer = max(1.0, job.goal.steps / max(1, search.probe_steps))
    proof_s = max(1, most_proofs(search) - proofs) * longer * max(took) if search.confirm else 0.0
    if proving:
        return TimeLeft(least_s=0.0, most_s=min(limit_s, max(max(took), proof_s - begun_s)))
    waiting = max(0, search.trials - count(results) - len(running))
    trials_s = (seconds_of_more(waiting + len(running), took)[1] - begun_s) / max(1, search.parallel)
    return TimeLeft(least_s=0.0, most_s=min(limit_s, max(max(took), trials_s) + proof_s))
