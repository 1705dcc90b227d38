"""The estimate of sharded trainers against torch's FSDPMemTracker: `python -m benchmarks.estimate_sharded`.

Compares with the recorded measurements; `--measure FILE` makes those that the file does not hold yet, 2 to 90
seconds a job and no GPU. `--ablate NAME` takes one part of the estimate out, which must show. Exits 1 where
listed or held-out jobs are further off than their limits.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

from autotune.policies.estimate.load import Load
from autotune.policies.estimate.shapes import Parameters
from autotune.policies.estimate.sharded.gathers import Gathers, gathers_of
from autotune.policies.values.architecture.model import Layout, Model, model_from_config
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile
from benchmarks.one_estimate import estimate
from benchmarks.sharded_jobs import HELD_OUT, JOBS, MODELS, Job

RECORDED = Path(__file__).parent / "measurements" / "fsdp-mem-tracker.jsonl"
PHASES = ("scoring", "forward", "backward", "optimizer")
LIMITS = (0.01, 0.04)  # mean and largest error of the listed jobs' phases
GOALS = (0.03, 0.08)  # the same of the held-out ones'
GIB = 1 << 30
_NOWHERE = Cluster(address="", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)
# What can be taken out: fields of the layout, as they are where nothing is known of them.
ABLATIONS: dict[str, dict[str, Any]] = {
    "wrapping": {"head_apart": True, "embedding_apart": True},
    "reshard": {"reshard_after_forward": True},
    "root": {"reshards_root": True},
    "reduce": {"reduce_bytes": 0},
    "sequence-parallel": {"sequence_parallel": False},
    "deferred": {"reduces_last": False},
    "loss": {},  # weights of two layers and the root count at the loss too
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that the tracker counted at most in each phase of a job."""

    job: Job
    peaks: dict[str, float]


class Case(NamedTuple):
    """One job, predicted and measured, bytes by phase."""

    job: Job
    predicted: dict[str, float]
    measured: dict[str, float]

    def error(self, phase: str) -> float:
        """Return the error of a phase as a share of what was measured."""
        return (self.predicted[phase] - self.measured[phase]) / self.measured[phase]

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that can be compared: with several passes forward is measured as a part of backward."""
        left_out = {"forward": self.job.passes > 1, "optimizer": self.job.offload}
        return tuple(phase for phase in PHASES if not left_out.get(phase))


def predict(job: Job, *, without: str = "") -> dict[str, float]:
    """Return the estimate of a job's phases in bytes; `without` names one of `ABLATIONS`."""
    model = model_from_config(MODELS[job.name])
    model = msgspec.structs.replace(model, layers=job.layers or model.layers)
    temporary = {"foreach": job.parameter_bytes, "fused": 0, "single": 2 * job.parameter_bytes}
    copies = job.shards * job.copies
    layout = Layout(
        strategy="fsdp2",
        ranks=copies * job.tensor,
        shards=job.shards,
        parameter_bytes=job.parameter_bytes,
        gradient_bytes=job.parameter_bytes,
        reduce_bytes=job.reduce_bytes,
        optimizer_bytes=2 * job.parameter_bytes,
        logits_bytes=job.loss_bytes,
        logits_share=1.0 if job.logits else 1.0 / job.tokens,
        head_apart=job.wrapping == "verl",
        embedding_apart=job.wrapping != "plain",
        reshard_after_forward=job.reshard,
        reshards_root=not job.keeps_root,
        sequence_parallel=job.sequence_parallel,
        reduces_last=job.deferred,
        padded=True,
        per_tensor_optimizer=job.optimizer == "single",
        optimizer_temporary_bytes=temporary[job.optimizer],
        parameters_stay_offloaded=job.offload,
        optimizer_stays_offloaded=job.offload,
        sequences=copies * job.passes,
        prompt_tokens=job.tokens,
    )
    knobs = Knobs(
        tokens_per_microbatch=job.tokens,
        recompute="full" if job.recompute else "off",
        tensor_parallel=job.tensor,
        param_offload=job.offload,
        grad_offload=job.offload,
        optimizer_offload=job.offload,
    )
    profile = Profile(
        framework="none",
        knobs=knobs,
        supported={},
        placement=Placement.SEPARATE,
        longest_sequence=job.tokens,
        layout=msgspec.structs.replace(layout, **ABLATIONS.get(without, {})),
    )
    with _gathered_at_the_loss() if without == "loss" else nullcontext():
        phases = estimate(profile, _NOWHERE, model, knobs).phases
    totals = {phase: phases[phase].gpu.total - phases[phase].gpu.outside for phase in phases}
    return {
        "scoring": totals[Phase.LOG_PROB],
        "forward": totals[Phase.FORWARD],
        "backward": max(totals[Phase.FORWARD], totals[Phase.BACKWARD]),
        "optimizer": totals[Phase.OPTIMIZER],
    }


@contextmanager
def _gathered_at_the_loss() -> Iterator[None]:
    def gathered(model: Model, load: Load, counts: Parameters) -> Gathers:
        gathers = gathers_of(model, load, counts)
        return dataclasses.replace(gathers, loss=gathers.layers)

    with patch("autotune.policies.estimate.training.gathers_of", gathered):
        yield


def recorded(path: Path = RECORDED) -> list[Row]:
    """Return the recorded measurements."""
    return [msgspec.json.decode(line, type=Row) for line in path.read_text().splitlines()]


def measure(path: Path, jobs: Iterable[Job]) -> None:
    """Make the measurements that a file does not hold yet, and add them to it."""
    from benchmarks import sharded_trainer

    known = {row.job for row in recorded(path)} if path.exists() else set()
    for job in jobs:
        if job in known:
            continue
        peaks = sharded_trainer.measure(job, MODELS[job.name])._asdict()
        with path.open("a") as file:
            file.write(msgspec.json.encode(Row(job=job, peaks=peaks)).decode() + "\n")


def cases(rows: Iterable[Row], *, without: str = "") -> list[Case]:
    """Return every measurement beside the estimate of it."""
    return [Case(row.job, predict(row.job, without=without), row.peaks) for row in rows]


def spread(chosen: Sequence[Case], phases: Sequence[str] = PHASES) -> tuple[float, float]:
    """Return mean and largest absolute error of some phases of some cases."""
    errors = [abs(case.error(phase)) for case in chosen for phase in case.phases if phase in phases]
    return statistics.fmean(errors), max(errors)


def beyond(chosen: Sequence[Case], limits: tuple[float, float]) -> bool:
    """Return whether cases are further off than a mean and a largest error."""
    mean, largest = spread(chosen)
    return mean > limits[0] or largest > limits[1]


def main() -> None:
    """Print the table and the errors, the held-out models apart; exits 1 where they are above the limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", default="", metavar="FILE")
    parser.add_argument("--ablate", default="", choices=("", *ABLATIONS))
    options = parser.parse_args()
    path = Path(options.measure) if options.measure else RECORDED
    if options.measure:
        measure(path, JOBS)
    every = cases(recorded(path), without=options.ablate)
    print(f"| job | {' | '.join(PHASES)} |\n{'|---' * (1 + len(PHASES))}|")
    for case in every:
        print(f"| {rendered(case.job)} | {' | '.join(_cell(case, phase) for phase in PHASES)} |")
    print("\n| phase | listed: mean | largest | held out: mean | largest |\n|---|---|---|---|---|")
    listed = [case for case in every if case.job.name not in HELD_OUT]
    unseen = [case for case in every if case.job.name in HELD_OUT]
    for phase in (*PHASES, "all"):
        chosen = PHASES if phase == "all" else (phase,)
        sizes = (*spread(listed, chosen), *spread(unseen, chosen))
        print(f"| {phase} | {' | '.join(f'{100 * size:.2f} %' for size in sizes)} |")
    sys.exit(int(beyond(listed, LIMITS) or beyond(unseen, GOALS)))


def rendered(job: Job) -> str:
    """Return a job in words: what differs from the defaults."""
    depth = f", {job.layers} layers" if job.layers else ""
    logits = "all logits" if job.logits else "few logits"
    differs = {
        f"{job.copies} copies": job.copies > 1,
        f"TP {job.tensor}{' with SP' if job.sequence_parallel else ''}": job.tensor > 1,
        f"{job.tokens:,} tokens": job.tokens != Job(name="").tokens,
        "no recomputation": not job.recompute,
        "loss in bf16": job.loss_bytes == 2,
        f"{8 * job.parameter_bytes}-bit parameters": job.parameter_bytes != 4,
        f"{8 * job.reduce_bytes}-bit reduction": job.reduce_bytes != 4,
        "no resharding": not job.reshard,
        "root not resharded": job.keeps_root,
        "offload policy": job.offload,
        f"{job.passes} passes": job.passes > 1,
        "reduced last": job.deferred,
        f"AdamW {job.optimizer}": job.optimizer != "foreach",
    }
    extra = "".join(f", {words}" for words, there in differs.items() if there)
    mark = " (held out)" if job.name in HELD_OUT else ""
    return f"{job.name}{mark}{depth}, {job.shards} shards, {job.wrapping}, {logits}{extra}"


def _cell(case: Case, phase: str) -> str:
    predicted, measured = case.predicted[phase] / GIB, case.measured[phase] / GIB
    if phase not in case.phases:
        return ""
    return f"{predicted:.2f} / {measured:.2f} ({100 * case.error(phase):+.1f} %)"


if __name__ == "__main__":
    main()
