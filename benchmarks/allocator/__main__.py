"""`python -m benchmarks.allocator`: what PyTorch's caching allocator cannot use of a trainer's passes.

Each job's allocations are recorded once on fake tensors (FSDP2, transformers' own model, torch's log_softmax
or, as a fused loss leaves them, few logits) and replayed at other lengths, sizes being lines in the tokens.
About a minute a job on one core, no GPU. Exits 1 where a median of a kind is further from the estimate's
constant than 0.03.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict

from autotune.policies.estimate.constants import constant
from benchmarks.allocator.replay import Loss, lengths, loss, pipeline_steps, steps
from benchmarks.allocator.trace import trace_of
from benchmarks.sharded_jobs import MODELS, Job

_BOUND = 0.03
_STAGES = (1, 4, 8)
_PIPELINE_MICRO_BATCHES = 8
_CASES = (
    ("Qwen2.5-0.5B", 24),
    ("Qwen2.5-7B", 28),
    ("Qwen2.5-14B", 24),
)
_COLUMNS = ("reserved", "needed", "reserved, expandable", "needed, expandable")
_STAGE_CASES = (("Qwen2.5-7B", 7), ("Llama-3.1-8B", 8))


def jobs() -> tuple[Job, ...]:
    """Return the jobs that are replayed: with recomputation at two lengths, without at one."""
    kinds = ((8192, True), (32768, True), (8192, False))
    return tuple(
        Job(name=name, layers=layers, logits=logits, tokens=tokens, recompute=recompute)
        for name, layers in _CASES
        for logits in (True, False)
        for tokens, recompute in kinds
    )


def stages() -> tuple[Job, ...]:
    """Return first stages of pipelines, without sharding, in the type that they compute in."""
    return tuple(
        Job(
            name=name, layers=layers, logits=False, tokens=tokens, recompute=recompute,
            shards=1, wrapping="whole", parameter_bytes=2,
        )
        for name, layers in _STAGE_CASES
        for recompute in (True, False)
        for tokens in (4096, 16384)
    )  # fmt: skip


def main() -> int:
    """Print a row per job, the medians of each kind, and a row per stage of a pipeline."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=sorted(MODELS), help="only these")
    options = parser.parse_args()
    kinds: dict[str, list[float]] = defaultdict(list)
    _head("job", "lengths", *_COLUMNS)
    for job in jobs():
        if options.models and job.name not in options.models:
            continue
        trace = trace_of(job)
        for varied in (False, True):
            found = loss(trace, steps(trace, lengths(job.tokens, varied=varied)))
            kinds[_kind(job, varied=varied)].append(found.needed)
            kinds["fragmentation_expandable"].append(found.needed_expandable)
            _row(found, _title(job), "varied" if varied else "equal")
    sys.stdout.write("\n")
    _head("constant", "used", "median", "smallest", "largest")
    off = False
    for name, shares in kinds.items():
        middle, used = statistics.median(shares), constant(name)
        off = off or abs(middle - used) > _BOUND
        sys.stdout.write(f"| {name} | {used:.2f} | {middle:.3f} | {min(shares):.3f} | {max(shares):.3f} |\n")
    sys.stdout.write("\n")
    _head("first stage", "stages", "lengths", *_COLUMNS)
    for job in stages():
        if options.models and job.name not in options.models:
            continue
        trace = trace_of(job)
        for count in _STAGES:
            for varied in (False, True):
                tokens = lengths(job.tokens, varied=varied, micro_batches=_PIPELINE_MICRO_BATCHES)
                found = loss(trace, pipeline_steps(trace, tokens, count))
                _row(found, _title(job), count, "varied" if varied else "equal")
    return int(off and not options.models)


def _head(*columns: str) -> None:
    sys.stdout.write(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|\n")


def _row(found: Loss, *titles: object) -> None:
    cells = [*map(str, titles), *(f"{share:.2f}" for share in found)]
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def _kind(job: Job, *, varied: bool) -> str:
    return "fragmentation" + "_recompute" * job.recompute + "_varied" * varied


def _title(job: Job) -> str:
    logits = "all logits" if job.logits else "few logits"
    again = "" if job.recompute else ", no recomputation"
    return f"{job.name}, {job.layers} layers, {job.tokens:,} tokens, {logits}{again}"


if __name__ == "__main__":
    raise SystemExit(main())
