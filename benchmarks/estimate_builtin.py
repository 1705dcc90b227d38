"""The estimate against the built-in job's own peaks: `python -m benchmarks.estimate_builtin`.

Compares with the recorded measurements; `--measure FILE` runs the job again (two steps a row, no budget, so
that nothing fails) and adds to the file the rows that it does not hold yet.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from autotune.launchers.frameworks.builtin.adapter import Builtin
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Cluster, Job
from benchmarks.builtin_peaks import JOB, MIB, PHASES, ROWS, cluster, head, run
from benchmarks.one_estimate import estimate

RECORDED = Path(__file__).parent / "measurements" / "builtin-cpu.jsonl"
_SMALL = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 256, "vocab": 2048}
_MIDDLE = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "intermediate": 1024, "vocab": 2048}
_WIDE = {"hidden": 512, "layers": 3, "heads": 8, "kv_heads": 8, "intermediate": 1024, "vocab": 4096}
_LONG = {"model_shape": _MIDDLE, "prompts": 8, "samples": 8, "prompt_tokens": 16, "response_tokens": 112}
OTHERS: dict[str, dict[str, Any]] = {
    "small": {"model_shape": _SMALL},
    "small, loss_recompute": {"model_shape": _SMALL, "loss_recompute": True, "logprob_chunk": 256},
    "middle": {"model_shape": _MIDDLE},
    "middle, 2048 tokens": {"model_shape": _MIDDLE, "tokens_per_microbatch": 2048},
    "middle, logprob_chunk 512": {"model_shape": _MIDDLE, "logprob_chunk": 512},
    "middle, recompute, logprob_chunk 512": {
        "model_shape": _MIDDLE,
        "recompute": "full",
        "logprob_chunk": 512,
    },
    "middle, kl_coef 0.1": {"model_shape": _MIDDLE, "kl_coef": 0.1, "tokens_per_microbatch": 1024},
    "middle, param_offload, kl_coef 0.1": {
        "model_shape": _MIDDLE,
        "kl_coef": 0.1,
        "param_offload": True,
        "tokens_per_microbatch": 1024,
    },
    "long": _LONG | {"tokens_per_microbatch": 2048},
    "long, recompute": _LONG | {"recompute": "full"},
    "wide, 1024 tokens": {"model_shape": _WIDE, "tokens_per_microbatch": 1024},
    "wide, 1024 tokens, optimizer_offload, sync_buffer 4 MiB": {
        "model_shape": _WIDE,
        "tokens_per_microbatch": 1024,
        "optimizer_offload": True,
        "sync_buffer": 4 * MIB,
    },
    "middle, 2 ranks, 1024 tokens": {"model_shape": _MIDDLE, "ranks": 2, "tokens_per_microbatch": 1024},
}
# The formulas were settled with these and ROWS in view; the remaining rows were measured afterwards.
SEEN = frozenset(
    {
        *ROWS,
        "small",
        "small, loss_recompute",
        "middle",
        "middle, 2048 tokens",
        "middle, logprob_chunk 512",
        "middle, recompute, logprob_chunk 512",
    }
)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run of two steps: its settings and the second step's peaks in bytes."""

    title: str
    settings: dict[str, Any]
    peaks: dict[str, int]


def recorded(path: Path = RECORDED) -> list[Row]:
    """Return the recorded measurements."""
    return [msgspec.json.decode(line, type=Row) for line in path.read_text().splitlines()]


def predicted(settings: dict[str, Any]) -> dict[str, float]:
    """Return the estimate's peaks of a job in bytes, by phase."""
    nowhere = Cluster(address="", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)
    job = Job(name="peaks", framework="builtin", settings=settings)
    profile = Builtin().profile(job, nowhere)
    model = Builtin().shape(job)
    assert model is not None
    phases = estimate(profile, nowhere, model, profile.knobs).phases
    return {name: phases[Phase(name)].gpu.total for name in PHASES}


def errors(rows: list[Row]) -> dict[str, list[float]]:
    """Return relative errors by phase."""
    result: dict[str, list[float]] = {name: [] for name in PHASES}
    for row in rows:
        guess = predicted(row.settings)
        for name in PHASES:
            result[name].append((guess[name] - row.peaks[name]) / row.peaks[name])
    return result


def measured(title: str, settings: dict[str, Any], *, address: str, folder: Path) -> Row:
    """Run the job once, on its own rollouts, and return its peaks."""
    settings = JOB | {"engine": "light"} | settings
    measurement = run(settings, address=address, folder=folder)
    return Row(
        title=title,
        settings=settings,
        peaks={name: round(measurement[name, 2] * MIB) for name in PHASES},
    )


def measure(path: Path) -> None:
    """Run every row and record it."""
    with tempfile.TemporaryDirectory() as name, cluster() as address:
        known = {row.title for row in recorded(path)} if path.exists() else set()
        for title, settings in (ROWS | OTHERS).items():
            if title in known:
                continue
            row = measured(title, settings, address=address, folder=Path(name))
            with path.open("a") as file:
                file.write(msgspec.json.encode(row).decode() + "\n")
            print(title, flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", default="", metavar="FILE")
    options = parser.parse_args()
    if options.measure:
        measure(Path(options.measure))
    rows = recorded(Path(options.measure) if options.measure else RECORDED)
    print("Peaks of step 2 in MiB above the process's baseline: predicted / measured (error of the measured)")
    head("job")
    for row in rows:
        guess = predicted(row.settings)
        cells = (
            f"{guess[name] / MIB:.0f} / {row.peaks[name] / MIB:.0f} "
            f"({100 * (guess[name] / row.peaks[name] - 1):+.0f} %)"
            for name in PHASES
        )
        print(f"| {row.title}{' *' if row.title in SEEN else ''} | {' | '.join(cells)} |")
    for title, chosen in (("seen (*)", True), ("others", False)):
        part = [row for row in rows if (row.title in SEEN) is chosen]
        sizes = sorted(abs(error) for by_phase in errors(part).values() for error in by_phase)
        if sizes:
            print(
                f"\n{title}: mean {100 * statistics.fmean(sizes):.1f} %, "
                f"p90 {100 * sizes[int(0.9 * len(sizes))]:.1f} %, largest {100 * sizes[-1]:.1f} %"
            )


if __name__ == "__main__":
    main()
