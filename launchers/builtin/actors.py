"""Starts the job's Ray actors and waits for all of them, failing with the first."""

import os
from collections.abc import Callable
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RayTaskError

from autotune.launchers.builtin.config.settings import Settings, colocated, single_error
from autotune.launchers.builtin.process.records import FailureRecord, PhaseFailure

_PASSED_ON = (
    "AUTOTUNE_",
    "HF_",
    "SGLANG_",
    "MALLOC_",
    "TMPDIR",
    "OMP_NUM_THREADS",
    "NCCL_",
    "PYTORCH_",
    "TORCH_",
)


class ActorFailure(Exception):  # noqa: N818 - the noun of the log line
    """An actor failed; `record` says why where the actor could."""

    def __init__(self, label: str, error: Exception) -> None:
        super().__init__(label)
        self.label = label
        self.error = error
        cause = error.cause if isinstance(error, RayTaskError) else error
        self.record: FailureRecord | None = cause.record if isinstance(cause, PhaseFailure) else None

    @property
    def summary(self) -> str:
        """Return the error in one line."""
        kind = "lost" if isinstance(self.error, RayActorError) else "failed"
        text = f"{self.error}".strip().splitlines() or [""]
        return (
            f"actor {kind} name={self.label} {type(self.error).__name__}: {text[0 if kind == 'lost' else -1]}"
        )


def connect() -> None:
    """Connect to the cluster of RAY_ADDRESS."""
    ray.init(
        address=os.environ.get("RAY_ADDRESS", "auto"),
        log_to_driver=False,
        runtime_env={"env_vars": inherited()},
        logging_level="ERROR",
    )


def inherited() -> dict[str, str]:
    """Return what of this process's environment every worker gets."""
    return {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}


def gpus_per_actor(settings: Settings, *, cards: int) -> float:
    """Return the share of a card that each actor takes, or raise SettingsError where the cards do not suit.

    Actors share cards where each has a budget and there is one rank: NCCL refuses two ranks on one card.
    """
    actors = settings.ranks + (0 if settings.engine == "replay" else settings.engines)
    if settings.placement == "colocated" and cards != 1:
        what = f"colocated, which is for a cluster with one GPU; this one has {cards}"
        raise single_error("placement", what, "use auto or separate")
    if colocated(settings, cards=cards):
        return 1 / actors
    if cards == 0 or actors <= cards:
        return float(cards > 0)
    if settings.ranks > 1:
        what = f"{settings.ranks} ranks and their engines need {actors} GPUs; the cluster has {cards}"
        raise single_error("ranks", what, "use fewer ranks or engines")
    budgets = {"trainer_budget": settings.trainer_budget[0], "engine_budget": settings.engine_budget}
    for key, value in budgets.items():
        if value is None:
            what = f"missing although {actors} actors share {cards} GPU{'s' * (cards > 1)}"
            raise single_error(key, what, "say how much of a card each actor may have, such as 20GiB")
    sharing = -(-actors // cards)
    return 10_000 // sharing / 10_000  # Ray counts ten-thousandths


def start_trainers(settings: Settings, *, on_gpu: bool, gpus_each: float = 1.0) -> dict[str, Any]:
    """Return the trainer ranks' handles by label."""
    from autotune.launchers.builtin.process.device import ALLOCATOR_ENVIRONMENT
    from autotune.launchers.builtin.trainer.rank import TrainerRank

    # Ray would set one thread for an actor that reserves no CPU.
    threads = os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count() or 1)
    environment = {"OMP_NUM_THREADS": threads}
    if not on_gpu:
        environment |= ALLOCATOR_ENVIRONMENT
    elif settings.allocator == "expandable":
        # The second name is the one that torch before 2.9 reads.
        environment |= dict.fromkeys(
            ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True"
        )
    actor = ray.remote(TrainerRank).options(
        num_cpus=0,
        num_gpus=gpus_each if on_gpu else 0,
        max_restarts=0,
        runtime_env={"env_vars": inherited() | environment},
    )
    return {f"trainer-{rank}": actor.remote(settings, rank) for rank in range(settings.ranks)}


def gather(calls: dict[str, Any], *, done: Callable[[str, Any], None] | None = None) -> dict[str, Any]:
    """Return the results of calls by label; the first failure raises ActorFailure while others still run.

    A rank that failed leaves the others waiting in a collective, so waiting for all would wait forever.
    """
    labels = {reference: label for label, reference in calls.items()}
    results: dict[str, Any] = {}
    pending = list(labels)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1)
        for reference in ready:
            label = labels[reference]
            try:
                results[label] = ray.get(reference)
            except (RayTaskError, RayActorError) as error:
                raise ActorFailure(label, cast(Exception, error)) from error
            if done is not None:
                done(label, results[label])
    return {label: results[label] for label in calls}


def end(actors: dict[str, Any], *, engines: dict[str, Any], patience_s: float) -> None:
    """End all actors; engines get a moment to end their own processes first."""
    goodbyes = [engine.shutdown.remote() for engine in engines.values()]
    if goodbyes:
        ray.wait(goodbyes, num_returns=len(goodbyes), timeout=patience_s)
    for actor in (*actors.values(), *engines.values()):
        ray.kill(actor)
