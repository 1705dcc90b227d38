"""Recorded GPU measurements against the estimate and the diagnosis: `python -m benchmarks.gpu.replay`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from autotune.launchers.frameworks import FRAMEWORKS
from autotune.orchestrator.run import journal
from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import scan
from autotune.policies.estimate.constants import constant
from autotune.policies.estimate.peaks import PHASES
from autotune.policies.values.architecture.model import Layout, model_from_config
from autotune.policies.values.events import Accepted, CuredInPlace, Progressed, Started
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.observation import Crashed, Peak
from autotune.policies.values.profile import Placement, Profile
from benchmarks.one_estimate import Estimate, estimate

FOLDER = Path(__file__).parent / "measurements"
# Relative errors of allocated peaks that a recorded file may show. Kernels' workspaces differ between cards,
# so a peak below SMALLEST_BYTES proves nothing.
MEAN, P90 = 0.02, 0.05
SMALLEST_BYTES = 1 << 30
_TRAINING = ("forward", "backward")
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
    seconds: float = 0.0  # of a phase in one step
    message: str = ""
    at_failure: dict[str, int | None] = {}


def records(path: Path) -> list[Record]:
    """Return the lines of a measurement file, without the peaks of passes that a failure cut short."""
    result = [msgspec.json.decode(line, type=Record) for line in path.read_bytes().splitlines()]
    cut = [_case(record) for record in result if record.kind == "oom" and record.phase in _TRAINING]
    return [
        record
        for record in result
        if record.kind != "peak" or record.phase not in _TRAINING or _case(record) not in cut
    ]


def _case(record: Record) -> tuple[str, str, dict[str, Any], int | None]:
    return record.model_name, record.layout_name, record.settings, record.budget_bytes


def files(folder: Path = FOLDER) -> list[Path]:
    """Return the measurement files, oldest name first."""
    return sorted(folder.glob("*.jsonl"))


def predicted_bytes(record: Record) -> float:
    """Return what the estimate expects the allocator to hold at the phase's peak."""
    gpu = _expected(record).phases[Phase(record.phase)].gpu
    return gpu.total - gpu.outside + constant("workspaces")


def predicted_seconds(record: Record) -> float:
    """Return what the estimate expects a phase to take in one step."""
    return _expected(record).phases[Phase(record.phase)].seconds


def _expected(record: Record) -> Estimate:
    layout = Layout(**record.layout)
    knobs = Knobs(**record.settings)
    knobs = msgspec.structs.replace(knobs, logprob_tokens=knobs.tokens_per_microbatch)
    profile = Profile(
        framework="none",
        knobs=knobs,
        supported={},
        placement=Placement.SEPARATE,
        engine="none",
        trainer_budget_bytes=record.hardware.total_bytes,  # of which only PyTorch's allocator is compared
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
    return estimate(profile, cluster, model_from_config(record.model), knobs)


def comparable(record: Record) -> bool:
    """Return whether a line holds a peak of a card at which the trainer's whole state existed.

    Not where a tied model was built without weights: transformers then builds a head before it ties it.
    """
    peak = record.allocated_bytes or 0
    built = record.phase == "init" and not record.model.get("tie_word_embeddings")
    settled = record.step == 2 or built
    return record.kind == "peak" and record.device == "cuda" and settled and peak >= SMALLEST_BYTES


def error(record: Record) -> float:
    """Return the estimate's relative error; negative is too low."""
    measured = record.allocated_bytes or 0
    return predicted_bytes(record) / measured - 1.0


def misread(record: Record) -> list[str]:
    """Return what a recorded failure's diagnosis says otherwise than the failure does; nothing when exact."""
    text = f"Traceback (most recent call last):\n{record.message}\n"
    diagnosis = diagnose(scan((text.encode(),), outcome=Crashed(exit_code=1)))
    if "Tried to allocate" not in record.message:
        # The driver's or a library's own words, which give no figures; pinned memory is the host's.
        return [] if diagnosis.cause.is_oom else [f"cause {diagnosis.cause.value}"]
    wrong = [] if diagnosis.cause is Cause.GPU_OOM else [f"cause {diagnosis.cause.value}"]
    facts, stated = diagnosis.facts, figures(record.message)
    for name, read in (
        ("requested", facts.requested_bytes),
        ("capacity", facts.capacity_bytes),
        ("free", facts.free_bytes),
        ("allocated", facts.allocated_bytes),
        ("reserved", facts.reserved_unallocated_bytes),
    ):
        if stated.get(name) != read:
            wrong.append(f"{name} {read}, printed {stated.get(name)}")
    rounding = (1 << 30) / 100  # two decimals of a GiB
    if facts.capacity_bytes is None or abs(facts.capacity_bytes - record.hardware.total_bytes) > rounding:
        wrong.append(f"capacity {facts.capacity_bytes}, the card has {record.hardware.total_bytes}")
    return wrong


def figures(message: str) -> dict[str, int]:
    """Return a message's sizes by the words around them, read independently of the product's patterns."""
    result: dict[str, int] = {}
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
                result.setdefault(name, size)
    return result


def summary(measured: list[Record]) -> tuple[float, float, int]:
    """Return mean and 90th percentile of the absolute errors, and how many lines were compared."""
    return _figures(_errors(measured))


def _errors(measured: list[Record]) -> list[float]:
    return sorted(abs(error(record)) for record in measured if comparable(record))


def _figures(sizes: list[float]) -> tuple[float, float, int]:
    if not sizes:
        return 0.0, 0.0, 0
    return statistics.fmean(sizes), sizes[int(0.9 * (len(sizes) - 1))], len(sizes)


def _print_summary(name: str, measured: list[Record]) -> None:
    sizes = _errors(measured)
    mean, p90, count = _figures(sizes)
    largest = max(sizes, default=0.0)
    shares = f"mean {100 * mean:.1f} %, p90 {100 * p90:.1f} %, largest {100 * largest:.1f} %"
    print(f"{name}: {count} peaks, {shares}")


def _pass(record: Record) -> tuple[str, int]:
    return record.layout_name, record.settings["tokens_per_microbatch"]


class RunPeak(NamedTuple):
    """The largest peak of a phase in a recorded run of the built-in job, beside the estimate."""

    attempt: int
    phase: Phase
    used_bytes: int
    predicted_bytes: float


def run_peaks(path: Path) -> Iterator[RunPeak]:
    """Yield the peaks of a run's attempts without those of allocators' caches, which no reading has.

    Of an attempt that made its micro-batches smaller itself, the sizes after the last cut count.
    """
    history = list(journal.read(path))
    accepted = next(event for event in history if isinstance(event, Accepted))
    builtin = FRAMEWORKS["builtin"]
    profile, model = builtin.profile(accepted.job, accepted.cluster), builtin.shape(accepted.job)
    assert model is not None
    attempt, knobs, peaks = 0, profile.knobs, dict[str, Peak]()
    for event in [*history, None]:
        match event:
            case Started() | None:
                expected = estimate(profile, accepted.cluster, model, knobs).phases
                for name, peak in peaks.items():
                    gpu = expected[Phase(name)].gpu
                    settled = gpu.total - gpu.outside + min(gpu.outside, constant("workspaces"))
                    yield RunPeak(attempt, Phase(name), peak.used_bytes, settled)
                if event is not None:
                    knobs, peaks, attempt = event.knobs, {}, event.attempt
            case CuredInPlace():
                knobs, peaks = msgspec.structs.replace(knobs, **{event.knob: event.after}), {}
            case Progressed():
                peaks |= {name: peak for name, peak in event.peaks.items() if peak.capacity_bytes}
            case _:
                pass


class RealPeak(NamedTuple):
    """The allocated peak of a phase of a real framework's trainer, beside the estimate."""

    step: int
    phase: Phase
    tokens: int  # of the longest sequence
    allocated_bytes: int
    predicted_bytes: float


def real_peaks(path: Path) -> Iterator[RealPeak]:
    """Yield the peaks that `NAME-peaks.jsonl` holds of the job whose events `NAME.jsonl` has.

    The estimate is told how many sequences the step had, and their lengths, which are all alike.
    """
    events = path.with_name(path.name.replace("-peaks", ""))
    accepted = next(event for event in journal.read(events) if isinstance(event, Accepted))
    model = accepted.job.shape
    assert model is not None
    profile = FRAMEWORKS[accepted.job.framework].profile(accepted.job, accepted.cluster)
    for line in path.read_bytes().splitlines():
        row = msgspec.json.decode(line)
        prompt, response = row["prompt_tokens"], row["response_tokens"]
        lengths = {"prompt_tokens": prompt, "response_tokens": response}
        lengths |= {"prompt_mean": float(prompt), "response_mean": float(response)}
        lengths |= {"sequences": row["sequences"], "mini_batch": row["sequences"]}
        readings = msgspec.structs.replace(
            profile,
            layout=msgspec.structs.replace(profile.layout, **lengths),
            longest_sequence=prompt + response,
        )
        knobs = msgspec.structs.replace(profile.knobs, **row["knobs"])
        phase = Phase(row["phase"])
        gpu = estimate(readings, accepted.cluster, model, knobs).phases[phase].gpu
        predicted = gpu.total - gpu.outside - gpu.residue + constant("workspaces")
        predicted -= 0.0 if row["with_optimizer"] else gpu.optimizer
        yield RealPeak(row["step"], phase, prompt + response, row["allocated_bytes"], predicted)


def main() -> None:
    """Print a line per measurement, and the errors of each file."""
    if not files():
        print(f"no measurement yet: python benchmarks/gpu/measure.py --out {FOLDER}/NAME.jsonl")
    for path in files():
        every = records(path)
        print(f"{path.name}: {every[0].hardware.name}, torch {every[0].versions['torch']}")
        for record in every:
            words = " ".join(f"{name}={value}" for name, value in record.settings.items() if value)
            where = f"{record.model_name} {record.layout_name} {words} {record.phase}"
            if comparable(record):
                measured = (record.allocated_bytes or 0) / (1 << 30)
                print(f"{where}: measured {measured:.2f} GiB, estimate {100 * error(record):+.1f} %")
            elif record.kind == "oom":
                idle = re.search(r"[0-9.]+ [KMG]iB(?= is reserved by PyTorch but)", record.message)
                read = "; ".join(misread(record)) or "read exactly"
                unused = f"{idle[0]} reserved and unused, " if idle else ""
                print(f"{where}: out of memory, {unused}{read}")
        for phase in [phase.value for phase in PHASES]:
            peaks = [record for record in every if record.phase == phase]
            _print_summary(phase, peaks)
        _print_summary("all", every)
        for layout, tokens in sorted({_pass(record) for record in every}):
            steps = [r for r in every if _pass(r) == (layout, tokens) and r.step == 2 and r.kind == "peak"]
            ratios = {
                phase: statistics.median(predicted_seconds(r) / r.seconds for r in steps if r.phase == phase)
                for phase in ("log_prob", "forward", "backward")
                if any(r.phase == phase for r in steps)
            }
            phases = ", ".join(f"{phase} {ratio:.2f}" for phase, ratio in ratios.items())
            print(f"seconds of {layout}, {tokens} tokens a pass, estimate / measured: {phases}")
    for path in sorted((FOLDER / "recoveries").glob("*.jsonl")):
        print(f"\n{path.name}")
        for peak in run_peaks(path):
            share = peak.predicted_bytes / peak.used_bytes - 1.0
            measured = peak.used_bytes / (1 << 30)
            print(f"#{peak.attempt} {peak.phase}: measured {measured:.2f} GiB, estimate {100 * share:+.1f} %")
    for path in sorted(FOLDER.glob("*-real/*-peaks.jsonl")):
        print(f"\n{path.parent.name}/{path.name}")
        for step, phase_name, tokens, measured, predicted in real_peaks(path):
            share = 100 * (predicted / measured - 1.0)
            size = f"measured {measured / (1 << 30):.2f} GiB, estimate {share:+.1f} %"
            print(f"step {step}, {tokens} tokens a sequence, {phase_name}: {size}")


if __name__ == "__main__":
    main()
