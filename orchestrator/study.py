"""Optuna's part of a search: proposes values and is told what they led to (the only importer of optuna)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
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
from optuna.trial import TrialState

from policies.events import Result, Tried
from policies.space import Dimension
from policies.types import Knobs, Setting, Value

_STARTUP_TRIALS = 4  # before the model of good and bad values is used; the start configurations count
_KNOBS = "knobs"


class Asked(Value, frozen=True, kw_only=True):
    """A configuration that Optuna proposes."""

    trial: int
    values: dict[str, Setting]
    knobs: Knobs | None = None  # of a start configuration: exactly these


class Study:
    """The study of one search in `study.journal`; its caller holds the run's lock."""

    def __init__(self, path: Path, *, name: str, dimensions: Sequence[Dimension], parallel: int) -> None:
        # A killed driver leaves its lock; the run's own lock says that nobody else writes.
        path.with_name(path.name + ".lock").unlink(missing_ok=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._parallel = parallel
        self._distributions = {d.knob: _distribution(d) for d in dimensions}
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(path))),
            study_name=name,
            direction="maximize",
            load_if_exists=True,
        )

    def begin_with(self, knobs: Knobs) -> None:
        """Propose a configuration before any other, unless it was proposed and not lost."""
        params = {}
        for name, distribution in self._distributions.items():
            value = getattr(knobs, name)
            params[name] = (
                value if distribution._contains(_internal(distribution, value)) else _top(distribution)
            )
        attributes = {_KNOBS: msgspec.to_builtins(knobs)}
        known = self._study.get_trials(deepcopy=False)
        if not any(
            t.user_attrs.get(_KNOBS) == attributes[_KNOBS] and t.state != TrialState.FAIL for t in known
        ):
            self._study.enqueue_trial(params, user_attrs=attributes)

    def ask(self, *, seed: int) -> Asked:
        """Return the next proposal; it follows from what was told and the seed alone."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.sampler = optuna.samplers.TPESampler(
                multivariate=True,
                constant_liar=self._parallel > 1,
                n_startup_trials=_STARTUP_TRIALS,
                seed=seed,
            )
        trial = self._study.ask(self._distributions)
        exact = trial.user_attrs.get(_KNOBS)
        return Asked(
            trial=trial.number,
            values=dict(trial.params),
            knobs=None if exact is None else msgspec.convert(exact, Knobs),
        )

    def tell(self, result: Tried) -> None:
        """Record what a proposal led to; out of memory is a result, a lost cluster is none."""
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
            if result.tokens_per_second is not None:
                trial.report(result.tokens_per_second, step=1)
            self._study.tell(result.trial, state=TrialState.PRUNED)
            return
        self._study.tell(result.trial, result.tokens_per_second or 0.0)

    def close_zombies(self, results: Sequence[Tried]) -> None:
        """Finish the trials that a killed driver left running: with their result, or as if never asked."""
        told = {result.trial: result for result in results}
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if trial.number in told:
                self.tell(told[trial.number])
            else:
                self._study.tell(trial.number, state=TrialState.FAIL)

    def waiting(self) -> bool:
        """Return whether a start configuration has not been proposed yet."""
        return bool(self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def importance(self) -> dict[str, float]:
        """Return the share of each knob in what throughput varied by; empty while too little is known."""
        finished = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len({trial.value for trial in finished}) < 3:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found: Mapping[str, float] = optuna.importance.get_param_importances(self._study, evaluator=evaluator)
        return dict(found)


def _distribution(dimension: Dimension) -> BaseDistribution:
    values: Any = dimension.values
    if not dimension.ordered or values[0] == 0:
        return CategoricalDistribution(values)
    if any(isinstance(value, float) for value in values):
        return FloatDistribution(values[0], values[-1], step=0.01)
    return IntDistribution(values[0], values[-1], log=True)


def _internal(distribution: BaseDistribution, value: Any) -> float:
    try:
        return float(distribution.to_internal_repr(value))
    except (ValueError, TypeError):
        return float("nan")


def _top(distribution: BaseDistribution) -> Any:
    """Return what stands for a framework's own default: the most that is offered."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices[0]
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return distribution.high
