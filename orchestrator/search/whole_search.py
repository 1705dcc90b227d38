"""A whole search: make the job stable, try faster configurations, and confirm the winner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from autotune.orchestrator.driver import reconcile
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.errors import Failure, UserError
from autotune.orchestrator.run import directory
from autotune.orchestrator.search.earlier_run import same_hardware
from autotune.orchestrator.search.optuna_study import STUDY, importance_of, write_study
from autotune.orchestrator.search.presets import presets
from autotune.orchestrator.search.scheduler import TrialScheduler
from autotune.orchestrator.search.trial import TrialContext
from autotune.orchestrator.units import counted, gpu_unit, show_duration, show_rate
from autotune.policies.search import schedule, trials
from autotune.policies.search.feasibility import Forecast
from autotune.policies.search.next_trial import SearchSpace, forecast_of
from autotune.policies.search.schedule import gpus_of
from autotune.policies.search.space import space
from autotune.policies.search.trial_history import TrialHistory, stable_start, start_result
from autotune.policies.values.events import (
    Accepted,
    Finished,
    Infrastructure,
    Interrupted,
    Purpose,
    Stable,
    TrainingCompleted,
    Tried,
    Verdict,
)
from autotune.policies.values.history import accepted_of
from autotune.policies.values.job import Job, Search
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Cancelled
from autotune.policies.values.run.view import AttemptView, RunView

_STEADY = 1.25  # ratio between runs of one configuration above which the summary warns
_FIRST = "base"  # folder name of the attempts that make the job stable


def search(
    context: RunContext,
    *,
    exported: Callable[[], None],
    forecasts: Callable[[TrialHistory], Forecast] | None = None,
) -> Verdict:
    """Run or continue the search of a journal; returns the verdict, which is also the journal's last row.

    Without `forecasts` the calibrated estimate decides which trials are allowed and worth a run.
    """
    journal, job, clock, observer = context.journal, context.job, context.clock, context.observer
    accepted = accepted_of(journal.history())
    check(job, accepted)
    bench = TrialContext(context, cluster=accepted.cluster)
    if journal.view.trial_rows:
        _reopen(context)
    elif (failed := _made_stable(context, bench)) is not None:
        return failed
    began_with = stable_start(journal.view)
    base = began_with.started.knobs
    dimensions = space(job, accepted.profile, base)
    varied = SearchSpace(
        profile=accepted.profile,
        dimensions=dimensions,
        starts=(base, *presets(context.framework, job, accepted, base, dimensions)),
        min_gain=job.search.min_gain,
        started=job.resume,
        recovery=job.recovery,
    )
    start_known = start_result(journal.view, headroom=job.goal.headroom)
    pace = schedule.pace_of(began_with)
    trial_s = 0.0 if pace is None else pace.seconds(job.search.probe_steps)
    scheduler = TrialScheduler(
        bench,
        space=varied,
        forecasts=forecasts or (lambda history: forecast_of(history, varied)),
        exported=exported,
        on_progress=lambda running: observer.watch(running, now=clock.now()),
        known=None if len(bench.parts(Purpose.CONFIRM)) > 1 else start_known,
        trial_s=trial_s,
    )
    names = ", ".join(f"{d.knob} ({len(d.values)})" for d in dimensions)
    observer.say(f"searching over {names}")
    if scheduler.elapsed_s < job.search.duration_s:
        each = f"; a trial takes about {show_duration(trial_s)}" if trial_s else ""
        observer.say(f"time left for trials: {_left(job.search.duration_s, scheduler)}{each}")
    reason = scheduler.drive()
    if reason:
        observer.say(f"no more trials: {reason}")
        scheduler.confirm()
    exported()
    study = context.folder.path / STUDY
    observer.write_view(STUDY, lambda: write_study(study, journal.view, dimensions, name=context.folder.id))
    results = bench.ledger.trials.results
    if context.interrupts.by:
        observer.say(so_far(results, job.search, start=base))
        return _finish(context, context.interrupts.verdict)
    left = max(0, job.search.trials - schedule.count(results))
    left_of_time = _left(job.search.duration_s, scheduler)
    if left < job.search.trials:
        observer.say(f"budget left: {left} of {counted(job.search.trials, 'trial')}, {left_of_time}")
    summary(journal.view, importance_of(dimensions, results), say=observer.say)
    bench.clear()
    verdict = schedule.verdict_of(
        results,
        job.search,
        start=base,
        began_with=began_with.number,
        exhausted=scheduler.exhausted,
        cut=len(_cut(journal.view)),
    )
    return _finish(context, verdict)


def _made_stable(context: RunContext, bench: TrialContext) -> Verdict | None:
    """Make the job stable; returns the verdict if that fails or is interrupted."""
    job = context.job
    limit = f"{counted(job.search.trials, 'trial')} in {show_duration(job.search.duration_s)}"
    context.observer.say(f"search: at most {limit}; making the job stable counts towards the time")
    first = bench.trial_job(_FIRST, longest=bench.forced, steps=_steps_to_prove(context, bench))
    verdict = reconcile.run(msgspec.structs.replace(context, job=first, rehearses=job), conclude=False)
    if isinstance(verdict, TrainingCompleted | Stable):
        return None
    if not isinstance(verdict, Interrupted | Infrastructure):
        bench.clear()
    return verdict


def _steps_to_prove(context: RunContext, bench: TrialContext) -> int:
    """Return the steps that make the job stable: those of a trial if an earlier run just proved it here."""
    steps, proof = context.job.goal.steps, context.folder.request.proven_by
    if not proof:
        return steps
    try:
        earlier = RunView(directory.find(context.folder.path.parent, proof).history()).accepted
    except (Failure, OSError):
        return steps
    if earlier is None or not same_hardware(earlier.cluster, bench.cluster):
        return steps
    steps = min(steps, context.job.search.probe_steps)
    context.observer.say(f"run {proof} proved this job: {counted(steps, 'step')} measure its speed")
    return steps


def _left(duration_s: float, scheduler: TrialScheduler) -> str:
    return show_duration(max(0.0, duration_s - scheduler.elapsed_s))


def so_far(results: Sequence[Tried], search: Search, *, start: Knobs) -> str:
    """Return a summary of an interrupted search: the trials, the fastest, and what `stable.yaml` has."""
    text = f"measured so far: {schedule.count(results)} of {counted(search.trials, 'trial')}"
    best, kept = trials.fastest(results), trials.winner(results, search, start=start)
    if best is not None:
        text = f"{text}; the fastest is trial {best.trial}, {show_rate(best.rate, best.unit)}"
    if kept is None or kept.knobs == start:
        return f"{text}; `stable.yaml` holds the starting configuration: nothing faster is confirmed yet"
    return f"{text}; `stable.yaml` holds trial {kept.trial}, the fastest that is confirmed"


def check(job: Job, accepted: Accepted) -> None:
    """Raise Failure for a search without knobs to vary or without enough GPUs for its trials."""
    profile = accepted.profile
    for name in job.search.vary or ():
        if name not in profile.supported:
            raise UserError(
                f"search.vary: {profile.framework} does not offer `{name}`",
                hint=profile.unsupported.get(name, f"see `autotune remedies {profile.framework}`"),
            )
    varied = space(job, profile, profile.knobs)
    if not varied and job.search.vary:
        raise UserError(
            f"search.vary: none of {', '.join(job.search.vary)} can be varied",
            hint="choose knobs with at least two allowed values that `recovery.allow`/`deny` do not exclude",
        )
    if not varied:
        raise UserError(
            "the search has no knob to vary",
            hint="list some in `search.vary`, e.g. `vary: [tokens_per_microbatch, memory_fraction]`",
        )
    gpus = accepted.cluster.gpus
    own = gpus_of(profile)
    if gpus and job.search.parallel * own > gpus:
        raise UserError(
            f"search.parallel: {job.search.parallel} trials need {own} GPUs each; the cluster has {gpus}",
            hint=f"set `search.parallel: {max(1, gpus // own)}`",
        )


def summary(view: RunView, importance: dict[str, float], *, say: Callable[[str], None]) -> None:
    """Print a summary with `say`: the winner, the Pareto front, each knob's importance and the cost."""
    results = tuple(view.tried)
    began_with = stable_start(view)
    start = began_with.started.knobs
    accepted = view.accepted
    assert accepted is not None
    cluster, job = accepted.cluster, accepted.job
    best = trials.winner(results, job.search, start=start)
    compared = trials.gain(results, job.search, start=start)
    if not schedule.tried_besides(results, began_with=began_with.number):
        which = "ended in time" if _cut(view) else "was started"
        say(f"no trial {which}; the starting configuration is kept")
    elif best is None or best.knobs == start:
        say(f"no trial {trials.BETTER}; the starting configuration is kept")
    elif compared is None:
        say(f"fastest: trial {best.trial}, {show_rate(best.rate, best.unit)}")
    else:
        proof = f"{compared.runs} runs of each" if compared.runs > 1 else "one run of each"
        say(
            f"fastest: trial {best.trial}, {show_rate(compared.fast, best.unit)}, "
            f"{compared.fast / compared.slow:.2f}x the stable start "
            f"({show_rate(compared.slow, best.unit)}; {proof})"
        )
        if compared.apart > _STEADY:
            say(
                f"  runs of the same configuration differed by up to {compared.apart:.1f}x: "
                "the machine was busy: trust the ranking, not the absolute figures"
            )
    for result in trials.front(results):
        say(
            f"  trial {result.trial:3}  {show_rate(result.rate, result.unit):>16}  "
            f"{result.headroom or 0:6.1%} free"
        )
    if importance:
        worth = ", ".join(f"{name} {share:.0%}" for name, share in importance.items() if share >= 0.005)
        say(f"importance of each knob: {worth}")
    gpus = cluster.gpus
    parts = {}
    for what, seconds in trials.spent(view).items():
        share = gpus if what == "becoming stable" else gpus / max(1, job.search.parallel)
        parts[what] = share * seconds / 3600 if gpus else seconds
    if parts and gpus:
        unit, per_hour = gpu_unit(sum(parts.values()))
        words = ", ".join(f"{what} {hours * per_hour:,.1f}" for what, hours in parts.items())
        say(f"{unit}: {sum(parts.values()) * per_hour:,.1f} ({words})")
    elif parts:
        words = ", ".join(f"{what} {show_duration(seconds)}" for what, seconds in parts.items())
        say(f"time in attempts: {show_duration(sum(parts.values()))} ({words})")


def _cut(view: RunView) -> list[AttemptView]:
    """Return the attempts at trials that the end of search.duration stopped."""
    ended = [each for each in view.trials if each.ended is not None]
    return [each for each in ended if each.ended and each.ended.outcome == Cancelled(by="deadline")]


def _reopen(context: RunContext) -> None:
    """Record that the user continues an interrupted search."""
    last = context.journal.history()[-1]
    if isinstance(last, Finished) and isinstance(last.verdict, Interrupted):
        context.record(reconcile.resumed(last.attempt))


def _finish(context: RunContext, verdict: Verdict) -> Verdict:
    if not context.journal.view.unended:  # attempts that may still run must be ended first
        context.record(Finished(verdict=verdict))
    return verdict
