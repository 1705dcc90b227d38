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
from benchmarks.allocator.replay import lengths, loss
from benchmarks.allocator.trace import trace_of
from benchmarks.sharded_jobs import MODELS, Job

_BOUND = 0.03
_CASES = (
    ("Qwen2.5-0.5B", 24),
    ("Qwen2.5-7B", 28),
    ("Qwen2.5-14B", 24),
)


def jobs() -> tuple[Job, ...]:
    """Return the jobs that are replayed: with recomputation at two lengths, without at one."""
    kinds = ((8192, True), (32768, True), (8192, False))
    return tuple(
        Job(name=name, layers=layers, logits=logits, tokens=tokens, recompute=recompute)
        for name, layers in _CASES
        for logits in (True, False)
        for tokens, recompute in kinds
    )


def main() -> int:
    """Print a row per job and the medians of each kind."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=sorted(MODELS), help="only these")
    options = parser.parse_args()
    kinds: dict[str, list[float]] = defaultdict(list)
    columns = ("job", "lengths", "reserved", "needed", "reserved, expandable", "needed, expandable")
    sys.stdout.write(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|\n")
    for job in jobs():
        if options.models and job.name not in options.models:
            continue
        trace = trace_of(job)
        for varied in (False, True):
            found = loss(trace, lengths(job.tokens, varied=varied))
            kinds[_kind(job, varied=varied)].append(found.needed)
            kinds["fragmentation_expandable"].append(found.needed_expandable)
            cells = " | ".join(f"{share:.2f}" for share in found)
            sys.stdout.write(f"| {_title(job)} | {'varied' if varied else 'equal'} | {cells} |\n")
            sys.stdout.flush()
    sys.stdout.write("\n| constant | used | median | smallest | largest |\n" + "|---" * 5 + "|\n")
    off = False
    for name, shares in kinds.items():
        middle, used = statistics.median(shares), constant(name)
        off = off or abs(middle - used) > _BOUND
        sys.stdout.write(f"| {name} | {used:.2f} | {middle:.3f} | {min(shares):.3f} | {max(shares):.3f} |\n")
    return int(off and not options.models)


def _kind(job: Job, *, varied: bool) -> str:
    return "fragmentation" + "_recompute" * job.recompute + "_varied" * varied


def _title(job: Job) -> str:
    logits = "all logits" if job.logits else "few logits"
    again = "" if job.recompute else ", no recomputation"
    return f"{job.name}, {job.layers} layers, {job.tokens:,} tokens, {logits}{again}"


if __name__ == "__main__":
    raise SystemExit(main())
