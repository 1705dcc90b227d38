"""Recorded GPU measurements against the estimate and the diagnosis: `python -m benchmarks.gpu.replay`."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import msgspec

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import scan
from autotune.policies.values.architecture.model import Layout, model_from_config
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Crashed
from autotune.policies.values.profile import Placement, Profile
from benchmarks.one_estimate import estimate

FOLDER = Path(__file__).parent / "measurements"
# Relative errors of allocated peaks that a recorded file may show; the workspaces of cuBLAS (32 MiB on
# Hopper) are no part of the estimate, so a peak below SMALLEST_BYTES proves nothing.
MEAN, P90 = 0.05, 0.10
SMALLEST_BYTES = 1 << 30
_SIZE = re.compile(r"([0-9.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


class Hardware(msgspec.Struct, frozen=True):
    """The card of a measurement."""

    name: str
    total_bytes: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a measurement file: what the replay needs of it."""

    kind: str  # peak | oom | error
    device: str  # cuda | cpu
    hardware: Hardware
    versions: dict[str, str]
    model_name: str
    model: dict[str, Any]
    layout_name: str
    layout: dict[str, Any]
    settings: dict[str, Any]
    phase: str
    step: int
    budget_bytes: int | None = None
    allocated_bytes: int | None = None
    message: str = ""
    at_failure: dict[str, int | None] = {}


def records(path: Path) -> list[Record]:
    """Return the lines of a measurement file."""
    return [msgspec.json.decode(line, type=Record) for line in path.read_bytes().splitlines()]


def files(folder: Path = FOLDER) -> list[Path]:
    """Return the measurement files, oldest name first."""
    return sorted(folder.glob("*.jsonl"))


def predicted_bytes(record: Record) -> float:
    """Return what the estimate expects the allocator to hold at the phase's peak."""
    layout = Layout(**record.layout)
    knobs = Knobs(**record.settings)
    knobs = msgspec.structs.replace(knobs, logprob_tokens=knobs.tokens_per_microbatch)
    profile = Profile(
        framework="none",
        knobs=knobs,
        supported={},
        placement=Placement.SEPARATE,
        longest_sequence=layout.prompt_tokens + layout.response_tokens,
        layout=layout,
    )
    cluster = Cluster(
        address="",
        nodes=1,
        gpus_per_node=1,
        gpu_memory_bytes=record.hardware.total_bytes,
        host_memory_bytes=0,
        gpu_name=record.hardware.name,
    )
    found = estimate(profile, cluster, model_from_config(record.model), knobs).phases[Phase(record.phase)].gpu
    return found.total - found.outside


def comparable(record: Record) -> bool:
    """Return whether a line holds a peak of a card at which the trainer's whole state existed."""
    peak = record.allocated_bytes or 0
    settled = record.step == 2 or record.phase == "init"
    return record.kind == "peak" and record.device == "cuda" and settled and peak >= SMALLEST_BYTES


def error(record: Record) -> float:
    """Return the estimate's relative error; negative is too low."""
    measured = record.allocated_bytes or 0
    return predicted_bytes(record) / measured - 1.0


def misread(record: Record) -> list[str]:
    """Return what a recorded failure's diagnosis says otherwise than the failure does; nothing when exact."""
    text = f"Traceback (most recent call last):\n{record.message}\n"
    found = diagnose(scan((text.encode(),), outcome=Crashed(exit_code=1)))
    if "Tried to allocate" not in record.message:
        # The driver's or a library's own words, which give no figures; pinned memory is the host's.
        return [] if found.cause.is_oom else [f"cause {found.cause.value}"]
    wrong = [] if found.cause is Cause.GPU_OOM else [f"cause {found.cause.value}"]
    facts, shown = found.facts, figures(record.message)
    for name, read in (
        ("requested", facts.requested_bytes),
        ("capacity", facts.capacity_bytes),
        ("free", facts.free_bytes),
        ("allocated", facts.allocated_bytes),
        ("reserved", facts.reserved_unallocated_bytes),
    ):
        if shown.get(name) != read:
            wrong.append(f"{name} {read}, printed {shown.get(name)}")
    rounding = (1 << 30) / 100  # two decimals of a GiB
    if facts.capacity_bytes is None or abs(facts.capacity_bytes - record.hardware.total_bytes) > rounding:
        wrong.append(f"capacity {facts.capacity_bytes}, the card has {record.hardware.total_bytes}")
    return wrong


def figures(message: str) -> dict[str, int]:
    """Return a message's sizes by the words around them, read independently of the product's patterns."""
    found: dict[str, int] = {}
    for match in _SIZE.finditer(message):
        size = round(float(match[1]) * _UNITS[match[2]])
        before, after = message[: match.start()], message[match.end() :]
        for name, is_it in (
            ("requested", before.endswith("Tried to allocate ")),
            ("capacity", before.endswith("total capacity of ")),
            ("free", after.startswith(" is free")),
            ("allocated", after.startswith(" is allocated by PyTorch")),
            ("reserved", after.startswith(" is reserved by PyTorch but unallocated")),
        ):
            if is_it:
                found.setdefault(name, size)
    return found


def summary(found: list[Record]) -> tuple[float, float, int]:
    """Return mean and 90th percentile of the absolute errors, and how many lines were compared."""
    sizes = sorted(abs(error(record)) for record in found if comparable(record))
    if not sizes:
        return 0.0, 0.0, 0
    return statistics.fmean(sizes), sizes[int(0.9 * (len(sizes) - 1))], len(sizes)


def main() -> None:
    """Print a line per measurement, and the errors of each file."""
    if not files():
        print(f"no measurement yet: python benchmarks/gpu/measure.py --out {FOLDER}/NAME.jsonl")
    for path in files():
        found = records(path)
        print(f"{path.name}: {found[0].hardware.name}, torch {found[0].versions['torch']}")
        for record in found:
            words = " ".join(f"{name}={value}" for name, value in record.settings.items() if value)
            where = f"{record.model_name} {record.layout_name} {words} {record.phase}"
            if comparable(record):
                measured = (record.allocated_bytes or 0) / (1 << 30)
                print(f"{where}: measured {measured:.2f} GiB, estimate {100 * error(record):+.1f} %")
            elif record.kind == "oom":
                print(f"{where}: out of memory, {'; '.join(misread(record)) or 'read exactly'}")
        mean, p90, count = summary(found)
        print(f"{count} peaks: mean {100 * mean:.1f} %, p90 {100 * p90:.1f} %")


if __name__ == "__main__":
    main()
