"""The trials of a search: configurations, results, speeds and the importance of knobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.launchers.packages import absence, how_to_install, missing
from autotune.orchestrator import messages
from autotune.orchestrator.report.document import SearchStory, TrialRow
from autotune.orchestrator.run import directory
from autotune.orchestrator.units import show_rate
from autotune.policies.search import trials
from autotune.policies.search.space import Dimension, space
from autotune.policies.values.events import Accepted, Result, Tried
from autotune.policies.values.job import Search
from autotune.policies.values.knobs import KNOBS, Knobs
from autotune.policies.values.run.view import RunView


def search_of(view: RunView) -> SearchStory | None:
    """Return the search of a run; None if no trial has a result."""
    results, accepted = tuple(view.tried), view.accepted
    if not results or accepted is None:
        return None
    start = _start(view, accepted)
    front = {result.trial for result in trials.front(results)}
    best = trials.winner(results, accepted.job.search, start=start)
    varied = tuple(k for k in KNOBS if len({getattr(r.knobs, k) for r in results}) > 1)
    unit = trials.unit_of(results)
    rows = tuple(
        TrialRow(
            trial=result.trial,
            attempt=result.attempt,
            purpose=result.purpose.value,
            result=result.result.value,
            fits=result.result is Result.FITS,
            change=messages.setting_changes(accepted.profile.knobs, result.knobs) or "as written",
            knobs={knob: getattr(result.knobs, knob) for knob in varied},
            rate=result.rate if result.unit is not None and result.unit is unit else None,
            noise=result.noise,
            headroom=result.headroom,
            seconds=result.seconds,
            gpu_hours=result.gpu_hours,
            reason=result.reason,
            front=result.trial in front,
            best=best is not None and result.trial == best.trial,
        )
        for result in results
    )
    return SearchStory(
        unit="" if unit is None else unit.value,
        varied=varied,
        trials=rows,
        importance=_importance(space(accepted.job, accepted.profile, start), results),
        goal_headroom=accepted.job.goal.headroom,
        summary=" ".join((_summary(results, best, start, accepted.job.search), *_left_out())),
    )


def write_study(run: directory.RunFolder, view: RunView) -> None:
    """Write study.journal of a search; do nothing for other runs or without Optuna."""
    accepted = view.accepted
    if accepted is None or not view.trial_rows or missing(["optuna"]):
        return
    from autotune.orchestrator.search import optuna_study  # imports optuna

    dimensions = space(accepted.job, accepted.profile, _start(view, accepted))
    optuna_study.write_study(run.path / optuna_study.STUDY, view, dimensions, name=run.id)


def _importance(dimensions: Sequence[Dimension], results: tuple[Tried, ...]) -> dict[str, float]:
    if missing(["optuna"]):
        return {}
    from autotune.orchestrator.search.optuna_study import importance_of  # imports optuna

    return importance_of(dimensions, results)


def _start(view: RunView, accepted: Accepted) -> Knobs:
    """Return the configuration that the search started from."""
    own = [attempt for attempt in view.training if attempt.goal is not None]
    return own[-1].started.knobs if own else accepted.profile.knobs


def _left_out() -> Iterator[str]:
    """Yield what the page lacks because a package is not installed."""
    if absent := missing(["optuna"]):
        yield f"Which setting mattered is left out: the report {absence(absent)} ({how_to_install(absent)})."


def _summary(results: tuple[Tried, ...], best: Tried | None, start: Knobs, search: Search) -> str:
    if best is None or best.knobs == start:
        return f"No trial {trials.BETTER}: the starting configuration is kept."
    compared = trials.gain(results, search, start=start)
    if compared is None:
        return f"Fastest: trial {best.trial}, {show_rate(best.rate, best.unit)}."
    proof = f"{compared.runs} runs of each" if compared.runs > 1 else "one run of each"
    return (
        f"Fastest: trial {best.trial}, {show_rate(compared.fast, best.unit)}, "
        f"{compared.fast / compared.slow:.2f}× the stable start "
        f"({show_rate(compared.slow, best.unit)}; {proof})."
    )
