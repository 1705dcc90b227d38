"""Which rows of a history a person is to be notified of, and has not been yet."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.orchestrator.notify.document import Due
from autotune.orchestrator.run_states import display_of
from autotune.policies.values.events import Notified
from autotune.policies.values.job import Occasion
from autotune.policies.values.run.view import RunView


def due(view: RunView, notified: Sequence[Notified]) -> tuple[Due, ...]:
    """Return what a person is to be notified of.

    The goal counts once per configuration, so that a relaunch of a stable one, or of what the job itself made
    of it, is no news; trials of a search do not count. An end counts unless the run continued since.
    """
    known = {row.of for row in notified}
    knobs = {attempt.number: attempt.knobs for attempt in view.training}
    goals = [goal for goal in view.goals if goal.attempt in knobs]
    proven = {knobs[goal.attempt] for goal in goals if goal.at in known}
    news = [
        Due(occasion=Occasion.STABLE, about=goal)
        for goal in goals[-1:]
        if goal.at not in known and knobs[goal.attempt] not in proven
    ]
    last = view.finished
    if last is not None and last.at not in known:
        occasion = display_of(last.verdict).occasion
        if occasion is not None:
            news.append(Due(occasion=occasion, about=last))
    return tuple(news)
