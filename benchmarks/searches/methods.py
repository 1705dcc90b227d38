"""Ways to choose the next configuration: ours, and what others do, all from the same stable start."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import optuna

from autotune.orchestrator.search.optuna_study import TpeProposals, distributions, parameters
from autotune.orchestrator.search.trial import TrialResults
from autotune.policies.remedies.allow_deny import legal
from autotune.policies.remedies.legality import objections
from autotune.policies.search.next_trial import Proposed, SearchSpace, forecast_of, next_trial
from autotune.policies.search.space import PERMIT_ALL, assembled
from autotune.policies.search.trials import keeps_limits
from autotune.policies.values.events import Result, Tried
from autotune.policies.values.knobs import Knobs, Setting
from benchmarks.searches.harness import Book, Choose, Method, Start

# ZeRO's stages become the modes that trade speed for memory, from none to all.
_MODES: tuple[dict[str, Setting], ...] = (
    {"recompute": "off"},
    {"recompute": "full"},
    {"recompute": "full", "optimizer_offload": True},
    {"recompute": "full", "optimizer_offload": True, "param_offload": True},
    {"recompute": "full", "optimizer_offload": True, "param_offload": True, "activation_offload": True},
)


def autotune(start: Start, book: Book, seed: int) -> Choose:
    """Return what this project chooses."""
    propose = proposals(start, book)

    def choose() -> Knobs | None:
        proposed = propose()
        return None if proposed is None else proposed.knobs

    return choose


def proposals(start: Start, book: Book) -> Callable[[], Proposed | None]:
    """Return what proposes this project's next trial after everything that the book holds."""
    ledger = TrialResults(book)
    space = SearchSpace(
        profile=start.profile,
        dimensions=start.dimensions,
        starts=(start.knobs,),
        min_gain=start.world.accepted.job.search.min_gain,
    )

    def propose() -> Proposed | None:
        history = ledger.trials
        return next_trial(history, space=space, forecast=forecast_of(history, space), sampler=TpeProposals)

    return propose


def random(start: Start, book: Book, seed: int) -> Choose:
    """Return legal configurations drawn uniformly from every knob's values."""
    rng = Random(seed)
    first = [start.knobs]

    def choose() -> Knobs | None:
        return (
            first.pop()
            if first
            else _legal(start, lambda: {d.knob: rng.choice(d.values) for d in start.dimensions})
        )

    return choose


def grid(start: Start, book: Book, seed: int) -> Choose:
    """Return micro-batches from the smallest on until one fails, in each mode; then the whole grid."""
    return iter(_grid(start, book)).__next__


def tpe_fail(start: Start, book: Book, seed: int) -> Choose:
    """Optuna's sampler, told that what does not keep the limits is a failed trial."""
    return _tpe(start, book, seed, constrained=False)


def tpe_constrained(start: Start, book: Book, seed: int) -> Choose:
    """Optuna's sampler, told by how much each phase exceeds its limit."""
    return _tpe(start, book, seed, constrained=True)


METHODS: dict[str, Method] = {
    "autotune": autotune,
    "random": random,
    "grid, DeepSpeed's order": grid,
    "TPE, out of memory = FAIL": tpe_fail,
    "TPE, constraint, no gate": tpe_constrained,
}


def _tpe(start: Start, book: Book, seed: int, *, constrained: bool) -> Choose:
    offered = distributions(start.dimensions)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(multivariate=True, seed=seed)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial(parameters(offered, start.knobs))
    waiting: list[optuna.Trial] = []

    def drawn() -> dict[str, Setting]:
        if waiting:  # the last proposal was not legal
            _tell(study, waiting.pop(), None, constrained=constrained)
        waiting.append(study.ask(offered))
        return dict(waiting[0].params)

    def choose() -> Knobs | None:
        last = book.history()[-1]
        if waiting and isinstance(last, Tried):
            _tell(study, waiting.pop(), last, constrained=constrained)
        return _legal(start, drawn)

    return choose


def _tell(study: optuna.Study, trial: optuna.Trial, result: Tried | None, *, constrained: bool) -> None:
    if constrained:
        for phase, value in ({"legal": 1.0} if result is None else result.constraints).items():
            trial.set_constraint(phase, value)
        study.tell(trial, 0.0 if result is None else result.rate)
    elif result is None or not keeps_limits(result):
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    else:
        study.tell(trial, result.rate)


def _legal(start: Start, drawn: Callable[[], dict[str, Any]]) -> Knobs | None:
    for _ in range(200):
        knobs = assembled(start.profile, start.knobs, start.dimensions, drawn())
        if knobs == start.knobs or legal(start.profile, PERMIT_ALL, start.knobs, knobs, started=False):
            return knobs
    return None


def _grid(start: Start, book: Book) -> Iterator[Knobs | None]:
    yield start.knobs
    tried = {start.knobs}
    tokens = next((d.values for d in start.dimensions if d.knob == "tokens_per_microbatch"), ())
    offered = {d.knob: d.values for d in start.dimensions}
    for mode in _MODES:
        changes = {k: v for k, v in mode.items() if v in offered.get(k, ())}
        for value in tokens[::2]:
            both = changes | {"tokens_per_microbatch": value}
            knobs = msgspec.structs.replace(start.knobs, **both)
            if "logprob_tokens" in offered:
                knobs = msgspec.structs.replace(knobs, logprob_tokens=value)
            if knobs in tried or objections(start.profile, start.knobs, knobs, started=False):
                continue
            tried.add(knobs)
            yield knobs
            last = book.history()[-1]
            if isinstance(last, Tried) and last.result is Result.FAILS:
                break
    names = list(offered)
    for values in itertools.product(*offered.values()):
        knobs = assembled(start.profile, start.knobs, start.dimensions, dict(zip(names, values, strict=True)))
        if knobs not in tried and legal(start.profile, PERMIT_ALL, start.knobs, knobs, started=False):
            tried.add(knobs)
            yield knobs
    yield None
