"""How long a search still takes at most: its trials and the proof of the fastest, within search.duration."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.policies.forecast.time_left import Course, TimeLeft, sum_of
from autotune.policies.search import schedule
from autotune.policies.values.events import Purpose, Result, Tried

_ENOUGH = 3  # trials that show how long one takes


def time_left(course: Course, results: Sequence[Tried], *, now: float) -> TimeLeft | None:
    """Return the maximum time left of a search at `now` (Unix seconds), once its trials have started.

    It may end at any time because nothing that is worth a run is left, so there is no lower bound. Until
    some trials have shown how long one takes, what is left of search.duration is all that is known. None:
    no trial has started, or the search is over.
    """
    search = course.job.search
    running = [leg for leg in course.legs if leg.trial is not None]
    passed_s = course.driven_s + (max(0.0, now - course.at) if course.legs else 0.0)
    limit_s = search.duration_s - passed_s
    if course.over or not (running or results) or limit_s <= 0:
        return None
    ran = [r for r in results if r.result not in (Result.GATED, Result.LOST) and r.seconds]
    took = [r.seconds for r in ran if r.purpose is Purpose.PROBE]
    if len(took) < _ENOUGH:
        return TimeLeft(least_s=0.0, most_s=limit_s)
    judged = {r.trial for r in results}
    proofs = sum(r.purpose is Purpose.CONFIRM for r in ran)
    proving = proofs > 0 or any(leg.trial in judged for leg in running)
    begun_s = sum(min(max(0.0, now - leg.begun_at), max(took)) for leg in running)
    longer = max(1.0, course.job.goal.steps / max(1, search.probe_steps))
    proof_s = max(1, schedule.most_proofs(search) - proofs) * longer * max(took) if search.confirm else 0.0
    if proving:
        return TimeLeft(least_s=0.0, most_s=min(limit_s, max(max(took), proof_s - begun_s)))
    waiting = max(0, search.trials - schedule.count(results) - len(running))
    trials_s = (sum_of(waiting + len(running), took).most_s - begun_s) / max(1, search.parallel)
    return TimeLeft(least_s=0.0, most_s=min(limit_s, max(max(took), trials_s) + proof_s))
