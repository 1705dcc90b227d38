"""Optuna's part of a search: propose values and write study.journal. No other module imports optuna."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import BaseJournalBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.run.directory import write_private
from autotune.policies.search.space import Dimension
from autotune.policies.search.trials import unit_of
from autotune.policies.values.events import Result, Started, Tried
from autotune.policies.values.knobs import Knobs, Setting, is_number
from autotune.policies.values.run.view import AttemptView, RunView

_STARTUP_TRIALS = 4  # before the sampler's model is used, including the start configurations
# The results passed to the sampler: its cost grows with them, and more hardly change its choice.
_BEST_RESULTS, _LATEST_RESULTS = 60, 40
_MOVED = (1, 1, 2, 3, 64)  # numbers of knobs in which a proposal differs from the best, mostly few
_KNOBS = "knobs"
STUDY = "study.journal"


class _Records(BaseJournalBackend):  # type: ignore[misc]
    """The records of a study in memory, in the format of Optuna's JournalFileBackend."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        return self.logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        self.logs += logs


def write_study(path: Path, view: RunView, dimensions: Sequence[Dimension], *, name: str) -> None:
    """Write the trials of a search as a study for Optuna and its dashboard; raises Failure.

    The file is derived from the run's history alone and is replaced as a whole.
    """
    records, offered = _Records(), distributions(dimensions)
    with _quietly():
        study = optuna.create_study(
            storage=JournalStorage(records),
            study_name=name,
            direction="maximize",
            sampler=optuna.samplers.RandomSampler(seed=0),
        )
        for trial in _trials(view, offered):
            study.add_trial(trial)
    write_private(
        path, b"".join(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in records.logs)
    )


def _trials(view: RunView, offered: Mapping[str, BaseDistribution]) -> Iterator[FrozenTrial]:
    """Yield the trials of a search in order of their numbers, each with its first result."""
    results: dict[int, Tried] = {}
    attempts: dict[int, AttemptView] = {}
    for result in view.tried:
        results.setdefault(result.trial, result)
    for attempt in view.trials:
        attempts.setdefault(attempt.started.trial or 0, attempt)
    for number in range(1 + max((*results, *attempts), default=-1)):
        first = results.get(number)
        of = attempts.get(number) if first is None else view.attempts.get(first.attempt)
        yield _trial(first, of, offered)


def _trial(
    result: Tried | None, attempt: AttemptView | None, offered: Mapping[str, BaseDistribution]
) -> FrozenTrial:
    """Return an Optuna trial; running out of memory is a result, losing the cluster is not."""
    row = result or (attempt.started if attempt is not None else None)
    if row is None:  # an earlier version skipped this number
        return create_trial(state=TrialState.FAIL)
    state = _state(result, is_running=attempt is not None and attempt.ended is None)
    known = state in (TrialState.COMPLETE, TrialState.PRUNED)
    # A trial that ran out of memory has the value 0.
    is_measured = state is TrialState.COMPLETE or (result is not None and result.unit is not None)
    rate = result.rate if result is not None and known and is_measured else None
    trial = create_trial(
        state=state,
        value=rate,
        params=parameters(offered, row.knobs),
        distributions=dict(offered),
        user_attrs=_attributes(row, result),
        intermediate_values={1: rate} if state is TrialState.PRUNED and rate is not None else None,
        constraints=result.constraints if result is not None and known else None,
    )
    trial.datetime_start = _local(attempt.started.at if attempt is not None else row.at)
    if state.is_finished():
        trial.datetime_complete = _local(row.at)
    return trial


def _state(result: Tried | None, *, is_running: bool) -> TrialState:
    if result is None:
        return TrialState.RUNNING if is_running else TrialState.FAIL
    if result.result is Result.LOST:
        return TrialState.FAIL
    return TrialState.PRUNED if result.result in (Result.GATED, Result.SLOW) else TrialState.COMPLETE


def _attributes(row: Started | Tried, result: Tried | None) -> dict[str, Any]:
    knobs = {name: value for name, value in msgspec.to_builtins(row.knobs).items() if value is not None}
    attributes: dict[str, Any] = {_KNOBS: knobs, "attempt": row.attempt}
    if result is not None:
        attributes |= {
            "proposed by": result.proposed_by,
            "result": result.result.value,
            "reason": result.reason,
        }
        if result.headroom is not None:
            attributes["headroom"] = result.headroom
    return attributes


def _local(at: str) -> datetime:
    """Return a time in Optuna's format: local time without a time zone."""
    return datetime.fromtimestamp(seconds_of(at))


def importance_of(dimensions: Sequence[Dimension], results: Sequence[Tried]) -> dict[str, float]:
    """Return each knob's importance for throughput; empty with fewer than three different rates."""
    measured = [r for r in results if r.result not in (Result.LOST, Result.GATED, Result.SLOW)]
    if not dimensions or len({result.rate for result in measured}) < 3:
        return {}
    with _quietly():
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
        for result in measured:
            study.add_trial(_frozen(distributions(dimensions), result))
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        importances: Mapping[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: share for name, share in importances.items() if share > 0}


class TpeProposals:
    """Successive proposals of the tree-structured Parzen estimator, given the results so far."""

    def __init__(
        self,
        dimensions: Sequence[Dimension],
        results: Sequence[Tried],
        running: Sequence[Knobs],
        *,
        near: Knobs | None = None,
        seed: int,
    ) -> None:
        """Proposals depend only on the arguments; with `near` each differs from it in only some knobs."""
        self._distributions = distributions(dimensions)
        self._near = None if near is None else parameters(self._distributions, near)
        self._random = Random(seed)  # noqa: S311 - a reproducible choice
        with _quietly():
            self._sampler = optuna.samplers.TPESampler(
                multivariate=True,
                constant_liar=bool(running),
                n_startup_trials=_STARTUP_TRIALS,
                seed=seed,
            )
            self._study = optuna.create_study(direction="maximize", sampler=self._sampler)
        for result in _selected(results):
            self._study.add_trial(_frozen(self._distributions, result))
        for knobs in running:
            params = parameters(self._distributions, knobs)
            self._study.add_trial(
                create_trial(state=TrialState.RUNNING, params=params, distributions=self._distributions)
            )
        self._drawn: optuna.Trial | None = None

    def next(self) -> dict[str, Setting]:
        """Return a proposal; unless `refuse` follows, it counts as running."""
        with _quietly():
            if self._near is not None:
                moved = self._random.sample(
                    sorted(self._near), min(len(self._near), self._random.choice(_MOVED))
                )
                kept = {name: value for name, value in self._near.items() if name not in moved}
                self._study.sampler = optuna.samplers.PartialFixedSampler(kept, self._sampler)
            self._drawn = self._study.ask(self._distributions)
        return dict(self._drawn.params)

    def refuse(self, *, violation: float) -> None:
        """Tell the sampler that the last proposal is not allowed."""
        assert self._drawn is not None
        self._drawn.set_constraint("refused", violation)
        self._study.tell(self._drawn.number, 0.0)


def _selected(results: Sequence[Tried]) -> list[Tried]:
    """Return the results for the sampler: the best and the latest."""
    unit = unit_of(results)
    known = [r for r in results if r.result is not Result.LOST and r.unit in (unit, None)]
    if len(known) <= _BEST_RESULTS + _LATEST_RESULTS:
        return known
    before, latest = known[:-_LATEST_RESULTS], known[-_LATEST_RESULTS:]
    fastest = sorted(before, key=lambda r: r.rate, reverse=True)
    fitting = (r for r in fastest if all(value <= 0 for value in r.constraints.values()))
    return [*islice(fitting, _BEST_RESULTS), *latest]


def _frozen(distributions: Mapping[str, BaseDistribution], result: Tried) -> FrozenTrial:
    return create_trial(
        state=TrialState.COMPLETE,
        value=result.rate,
        params=parameters(distributions, result.knobs),
        distributions=dict(distributions),
        constraints=result.constraints,
    )


def parameters(distributions: Mapping[str, BaseDistribution], knobs: Knobs) -> dict[str, Any]:
    """Return the values of a configuration; a value outside its distribution is replaced by `_top`."""
    result = {}
    for name, distribution in distributions.items():
        value = getattr(knobs, name)
        result[name] = value if _offers(distribution, value) else _top(distribution)
    return result


def distributions(dimensions: Sequence[Dimension]) -> dict[str, BaseDistribution]:
    """Return Optuna's distributions of a space."""
    return {d.knob: _distribution(d) for d in dimensions}


def _distribution(dimension: Dimension) -> BaseDistribution:
    values: Any = dimension.values
    if not dimension.ordered or values[0] == 0:
        return CategoricalDistribution(values)
    if any(isinstance(value, float) for value in values):
        return FloatDistribution(values[0], values[-1], step=0.01)
    return IntDistribution(values[0], values[-1], log=True)


def _offers(distribution: BaseDistribution, value: Any) -> bool:
    try:
        return bool(distribution._contains(float(distribution.to_internal_repr(value))))
    except (ValueError, TypeError):
        return False


def _top(distribution: BaseDistribution) -> Any:
    """Return the value that stands for a framework's own default: the highest, or the first mode."""
    if isinstance(distribution, CategoricalDistribution):
        numbers = list(filter(is_number, distribution.choices))
        return max(numbers, default=distribution.choices[0])
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return distribution.high


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        yield
