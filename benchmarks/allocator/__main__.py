"""`python -m benchmarks.allocator`: what PyTorch's caching allocator cannot use of a trainer's passes.

Each job's allocations are recorded once on fake tensors (FSDP2, transformers' own model, torch's log_softmax
or, as a fused loss leaves them, few logits) and replayed at other lengths, sizes being lines in the tokens.
First stages of pipelines follow, in Megatron's order of micro-batches, whole and cut into interleaved chunks.
About a minute a job on one core, no GPU. Exits 1 where the median of a kind is further from the estimate's
constant than 0.03, or that of pipelines above it by more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable

from autotune.policies.estimate.constants import constant
from benchmarks.allocator.replay import Loss, lengths, loss, pipeline_steps, resident, steps
from benchmarks.allocator.trace import trace_of
from benchmarks.sharded_jobs import MODELS, Job

_Shares = dict[str, list[float]]  # of each kind, by the name of its constant
_BOUND = 0.03
_STAGES = (1, 4, 8)
_PIPELINE_MICRO_BATCHES = 8
_CASES = (
    ("Qwen2.5-0.5B", 24),
    ("Qwen2.5-7B", 28),
    ("Qwen2.5-14B", 24),
)
_COLUMNS = ("reserved", "needed", "reserved, expandable", "needed, expandable")
_CHUNKS = (2, 5)
_CHUNK_LAYERS = 2
_INTERLEAVED = 4  # stages
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


def stages(cases: tuple[tuple[str, int], ...] = _STAGE_CASES) -> tuple[Job, ...]:
    """Return first stages of pipelines, or chunks of them, whole and in the type that they compute in."""
    kinds = ((4096, True), (16384, True), (4096, False), (16384, False))
    return tuple(
        Job(
            name=name,
            layers=layers,
            tokens=tokens,
            recompute=recompute,
            shards=1,
            wrapping="stage",
            parameter_bytes=2,
        )
        for name, layers in cases
        for tokens, recompute in kinds
    )


def main() -> int:
    """Print a row per job and per first stage, and the medians of each kind beside the constant used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allocator", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=sorted(MODELS), help="only these")
    parser.add_argument("--part", choices=("jobs", "stages", "chunks"), help="only this table")
    options = parser.parse_args()
    chosen = set(options.models or MODELS)
    off = False
    if options.part in (None, "jobs"):
        losses = _medians(_replayed(job for job in jobs() if job.name in chosen))
        off = any(abs(middle - used) > _BOUND for used, middle in losses)
    if options.part in (None, "stages"):
        losses = _medians(_staged(job for job in stages() if job.name in chosen))
        off = off or any(middle - used > _BOUND for used, middle in losses)
    if options.part in (None, "chunks"):
        cut = tuple((name, _CHUNK_LAYERS) for name, _ in _STAGE_CASES)
        losses = _medians(_interleaved(job for job in stages(cut) if job.name in chosen))
        off = off or any(middle - used > _BOUND for used, middle in losses)
    return int(off and not options.models)


def _replayed(chosen: Iterable[Job]) -> _Shares:
    """Print a row per job and kind of lengths; return what each kind needs."""
    kinds: _Shares = defaultdict(list)
    _head("job", "lengths", *_COLUMNS)
    for job in chosen:
        trace = trace_of(job)
        for varied in (False, True):
            share = loss(resident(trace), steps(trace, lengths(job.tokens, varied=varied)))
            _note(kinds, job, share, varied=varied)
            _row(share, _title(job), "varied" if varied else "equal")
    return kinds


def _staged(chosen: Iterable[Job]) -> _Shares:
    """Print a row per first stage; return what each kind of them needs in a pipeline of several stages."""
    kinds: _Shares = defaultdict(list)
    _head("first stage", "stages", "lengths", *_COLUMNS)
    for job in chosen:
        trace = trace_of(job)
        for count in _STAGES:
            for varied in (False, True):
                tokens = lengths(job.tokens, varied=varied, micro_batches=_PIPELINE_MICRO_BATCHES)
                share = loss(resident(trace, gradients=True), pipeline_steps(trace, tokens, count))
                _row(share, _title(job), count, "varied" if varied else "equal")
                if count > 1:
                    _note(kinds, job, share, varied=varied)
    return kinds


def _interleaved(chosen: Iterable[Job]) -> _Shares:
    """Print a row per first stage of chunks, and what each kind of them needs; the trace is of one chunk."""
    kinds: _Shares = defaultdict(list)
    _head("chunk", "chunks", "lengths", *_COLUMNS)
    for job in chosen:
        trace = trace_of(job)
        for count in _CHUNKS:
            for varied in (False, True):
                tokens = lengths(job.tokens, varied=varied, micro_batches=_PIPELINE_MICRO_BATCHES)
                events = pipeline_steps(trace, tokens, _INTERLEAVED, count)
                share = loss(resident(trace, gradients=True), events)
                _row(share, _title(job), count, "varied" if varied else "equal")
                _note(kinds, job, share, varied=varied)
    return kinds


def _note(kinds: _Shares, job: Job, lost: Loss, *, varied: bool) -> None:
    kinds["fragmentation" + "_recompute" * job.recompute + "_varied" * varied].append(lost.needed)
    kinds["fragmentation_expandable"].append(lost.needed_expandable)


def _medians(kinds: _Shares) -> list[tuple[float, float]]:
    """Print a row per kind; return the estimate's constants and the medians."""
    sys.stdout.write("\n")
    _head("constant", "used", "median", "smallest", "largest")
    for name, shares in kinds.items():
        middle, used = statistics.median(shares), constant(name)
        sys.stdout.write(f"| {name} | {used:.2f} | {middle:.3f} | {min(shares):.3f} | {max(shares):.3f} |\n")
    sys.stdout.write("\n")
    return [(constant(name), statistics.median(shares)) for name, shares in kinds.items()]


def _head(*columns: str) -> None:
    sys.stdout.write(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|\n")


def _row(lost: Loss, *titles: object) -> None:
    cells = [*map(str, titles), *(f"{share:.2f}" for share in lost)]
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def _title(job: Job) -> str:
    logits = "" if job.wrapping == "stage" else ", all logits" if job.logits else ", few logits"
    again = "" if job.recompute else ", no recomputation"
    return f"{job.name}, {job.layers} layers, {job.tokens:,} tokens{logits}{again}"


if __name__ == "__main__":
    raise SystemExit(main())
