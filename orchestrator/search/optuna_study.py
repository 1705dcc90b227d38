"""Optuna's part of a search: proposes values and keeps the record (the only importer of optuna)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.orchestrator.errors import writing
from autotune.policies.search.space import Dimension
from autotune.policies.search.trials import unit_of
from autotune.policies.values.events import Result, Tried
from autotune.policies.values.knobs import Knobs, Setting

_STARTUP_TRIALS = 4  # before the model of good and bad values is used; the start configurations count
# What the sampler sees: its cost grows with the trials, its choice hardly changes after so many.
_BEST_SEEN, _LATEST_SEEN = 60, 40
_MOVED = (1, 1, 2, 3, 64)  # knobs that a proposal moves away from the best: in many dimensions few at a time
_KNOBS = "knobs"


class Study:
    """The study of one search in `study.journal`; its caller holds the run's lock."""

    def __init__(self, path: Path, *, name: str, dimensions: Sequence[Dimension]) -> None:
        # A killed driver leaves its lock; the run's own lock says that nobody else writes.
        path.with_name(path.name + ".lock").unlink(missing_ok=True)
        self._path, self._distributions = path, distributions(dimensions)
        with writing(self._path), _quietly():
            _cut_torn(path)
            self._study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(path))),
                study_name=name,
                direction="maximize",
                sampler=optuna.samplers.RandomSampler(seed=0),  # what is tried is chosen elsewhere
                load_if_exists=True,
            )

    def begin(self, knobs: Knobs, *, why: str) -> int:
        """Record that a trial of a configuration starts; returns its number."""
        written = {name: value for name, value in msgspec.to_builtins(knobs).items() if value is not None}
        asked = create_trial(
            state=TrialState.RUNNING,
            params=parameters(self._distributions, knobs),
            distributions=self._distributions,
            user_attrs={_KNOBS: written, "proposed by": why},
        )
        with writing(self._path):
            self._study.add_trial(asked)
        return len(self._study.get_trials(deepcopy=False)) - 1

    def tell(self, result: Tried) -> None:
        """Record what a proposal led to; out of memory is a result, a lost cluster is none."""
        with writing(self._path):
            self._tell(result)

    def _tell(self, result: Tried) -> None:
        trials = self._study.get_trials(deepcopy=False)
        if result.trial >= len(trials) or trials[result.trial].state.is_finished():
            return
        trial = optuna.trial.Trial(self._study, trials[result.trial]._trial_id)
        trial.set_user_attr("result", result.result.value)
        trial.set_user_attr("reason", result.reason)
        trial.set_user_attr("attempt", result.attempt)
        if result.headroom is not None:
            trial.set_user_attr("headroom", result.headroom)
        if result.result is Result.LOST:
            self._study.tell(result.trial, state=TrialState.FAIL)
            return
        for phase, value in result.constraints.items():
            trial.set_constraint(phase, value)
        if result.result in (Result.GATED, Result.SLOW):
            if result.unit is not None:
                trial.report(result.rate, step=1)
            self._study.tell(result.trial, state=TrialState.PRUNED)
            return
        self._study.tell(result.trial, result.rate)

    def close_zombies(self, results: Sequence[Tried]) -> None:
        """Finish the trials that a killed driver left running: with their result, or as if never asked."""
        told = {result.trial: result for result in results}
        with writing(self._path):
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                if trial.number in told:
                    self._tell(told[trial.number])
                else:
                    self._study.tell(trial.number, state=TrialState.FAIL)

    def importance(self) -> dict[str, float]:
        """Return the share of each knob in what throughput varied by; empty while too little is known."""
        return _importance(self._study)


def importance_of(dimensions: Sequence[Dimension], results: Sequence[Tried]) -> dict[str, float]:
    """Return the share of each knob in what throughput varied by, from results alone, as a study tells it."""
    measured = [r for r in results if r.result not in (Result.LOST, Result.GATED, Result.SLOW)]
    if not dimensions or not measured:
        return {}
    with _quietly():
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0))
        for result in measured:
            study.add_trial(_frozen(distributions(dimensions), result))
    return _importance(study)


def _importance(study: optuna.Study) -> dict[str, float]:
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len({trial.value for trial in finished}) < 3:
        return {}
    with _quietly():
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        importances: Mapping[str, float] = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {name: share for name, share in importances.items() if share > 0}


def _cut_torn(path: Path) -> None:
    """Truncate an incomplete last line, left by a crash or a full disk: the next record would follow it."""
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


class TpeProposals:
    """Proposals of the tree-structured Parzen estimator after the results so far, one after another."""

    def __init__(
        self,
        dimensions: Sequence[Dimension],
        results: Sequence[Tried],
        running: Sequence[Knobs],
        *,
        near: Knobs | None = None,
        seed: int,
    ) -> None:
        """They follow from the arguments alone; with `near` each moves only some knobs away from it."""
        self._distributions = distributions(dimensions)
        self._near = None if near is None else parameters(self._distributions, near)
        self._random = Random(seed)  # noqa: S311 - a choice that can be repeated
        with _quietly():
            self._sampler = optuna.samplers.TPESampler(
                multivariate=True,
                constant_liar=bool(running),
                n_startup_trials=_STARTUP_TRIALS,
                seed=seed,
            )
            self._study = optuna.create_study(direction="maximize", sampler=self._sampler)
        for result in _seen(results):
            self._study.add_trial(_frozen(self._distributions, result))
        for knobs in running:
            params = parameters(self._distributions, knobs)
            self._study.add_trial(
                create_trial(state=TrialState.RUNNING, params=params, distributions=self._distributions)
            )
        self._drawn: optuna.Trial | None = None

    def next(self) -> dict[str, Setting]:
        """Return a proposal; one that is not followed by `refuse` counts as under way."""
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
        """Let the sampler know that the last proposal may not run."""
        assert self._drawn is not None
        self._drawn.set_constraint("refused", violation)
        self._study.tell(self._drawn.number, 0.0)


def _seen(results: Sequence[Tried]) -> list[Tried]:
    """Return what the sampler learns from: the best and the latest."""
    unit = unit_of(results)
    known = [r for r in results if r.result is not Result.LOST and r.unit in (unit, None)]
    if len(known) <= _BEST_SEEN + _LATEST_SEEN:
        return known
    before, latest = known[:-_LATEST_SEEN], known[-_LATEST_SEEN:]
    fastest = sorted(before, key=lambda r: r.rate, reverse=True)
    fitting = (r for r in fastest if all(value <= 0 for value in r.constraints.values()))
    return [*islice(fitting, _BEST_SEEN), *latest]


def _frozen(distributions: Mapping[str, BaseDistribution], result: Tried) -> FrozenTrial:
    return create_trial(
        state=TrialState.COMPLETE,
        value=result.rate,
        params=parameters(distributions, result.knobs),
        distributions=dict(distributions),
        constraints=result.constraints,
    )


def parameters(distributions: Mapping[str, BaseDistribution], knobs: Knobs) -> dict[str, Any]:
    """Return the values of a configuration, those that are not offered by what stands for them."""
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
    """Return what stands for a framework's own default: the most that is offered."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[0]
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return distribution.high


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        yield
