"""The estimate against PyTorch's MemTracker: `python -m benchmarks.estimate_accuracy`.

Compares with the recorded measurements; `--measure FILE` makes those that the file does not hold yet, half a
minute a model. Every model is measured at 2 and 4 layers and extrapolated to its own depth; 8 layers and
one whole model show that this is a line.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from autotune.policies.estimate.load import load_of
from autotune.policies.estimate.passes import logits_of, pass_of
from autotune.policies.values.architecture.model import Layout, Model, model_from_config
from autotune.policies.values.failure import Phase
from autotune.policies.values.job import Cluster
from autotune.policies.values.knobs import Knobs
from autotune.policies.values.profile import Placement, Profile
from benchmarks.architectures import ARCHITECTURES
from benchmarks.families import FAMILIES, HELD_OUT, cut, depths
from benchmarks.one_estimate import estimate

RECORDED = Path(__file__).parent / "measurements" / "mem-tracker.jsonl"
COMPONENTS = ("parameters", "gradients", "activations", "optimizer", "temporaries")
PEAKS = ("forward", "backward", "update", "step")
FIGURES = (*COMPONENTS, *PEAKS)
LINES = (*COMPONENTS[:4], "forward", "update")  # those of one instant at every depth
DEPTHS = (2, 4)
THIRD = 8
_TIE = 0.999  # as in tracked.py
WHOLE = ("Llama-3.2-1B",)
_NOWHERE = Cluster(address="", nodes=1, gpus_per_node=0, gpu_memory_bytes=0, host_memory_bytes=0)


class Step(msgspec.Struct, frozen=True):
    """One training step: so many sequences of one length, with or without recomputation."""

    sequences: int
    length: int
    recompute: bool


FAMILY_RECORDED = RECORDED.with_name("mem-tracker-families.jsonl")
# Between a short and a long micro-batch.
STEPS = tuple(
    Step(sequences, length, recompute)
    for sequences, length in ((1, 512), (4, 512), (2, 2048))
    for recompute in (False, True)
)


FAMILY_STEPS = (STEPS[0], STEPS[-1])


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What MemTracker counted, in bytes, for a model cut to some layers."""

    name: str
    layers: int
    step: Step
    figures: dict[str, float]


class Case(NamedTuple):
    """One model and step at one depth, predicted and measured (or extrapolated from measurements)."""

    name: str
    layers: int
    how: str
    predicted: dict[str, float]
    measured: dict[str, float]

    def error(self, figure: str) -> float:
        """Return the relative error of a figure; one below 1 % of the peak counts against 1 % of the peak."""
        wanted = self.measured[figure]
        return (self.predicted[figure] - wanted) / max(wanted, 0.01 * self.measured["step"])


def predict(model: Model, step: Step, *, masked: bool = True) -> dict[str, float]:
    """Return the estimate of the step that `tracked.measure` runs, by the names of its figures."""
    layout = Layout(
        parameter_bytes=2,
        compute_bytes=2,
        gradient_bytes=2,
        optimizer_bytes=4,
        logits_bytes=4,
        padded=True,
        masked_attention=masked,  # a mask without values cannot be seen to be causal
        per_tensor_optimizer=True,
        optimizer_temporary_bytes=4,  # a denominator and a quotient in bf16
        sequences=step.sequences,
        prompt_tokens=step.length,
    )
    tokens = step.sequences * step.length
    knobs = Knobs(tokens_per_microbatch=tokens, recompute="full" if step.recompute else "off")
    profile = Profile(
        framework="none",
        knobs=knobs,
        supported={},
        placement=Placement.SEPARATE,
        longest_sequence=step.length,
        layout=layout,
    )
    phases = estimate(profile, _NOWHERE, model, knobs).phases
    totals = {name: part.gpu.total - part.gpu.outside for name, part in phases.items()}
    kept = _kept(profile, model, knobs)
    peak = max((Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER), key=lambda phase: totals[phase])
    peak = Phase.OPTIMIZER if totals[Phase.OPTIMIZER] >= _TIE * totals[peak] else peak
    parts, done = phases[peak].gpu, phases[Phase.OPTIMIZER].gpu
    moving = parts.activations + parts.logits
    return {
        "parameters": done.weights,
        "gradients": done.gradients,
        "activations": kept,
        "optimizer": done.optimizer,
        "temporaries": parts.buffers + moving - min(moving, kept),
        "forward": totals[Phase.FORWARD],
        "backward": max(totals[Phase.FORWARD], totals[Phase.BACKWARD]),
        "update": totals[Phase.OPTIMIZER],
        "step": max(totals[peak], totals[Phase.BACKWARD]),
    }


def _kept(profile: Profile, model: Model, knobs: Knobs) -> float:
    """Return what is alive between forward and backward."""
    load = load_of(profile, _NOWHERE, (knobs,))
    run = pass_of(model, load, tokens=load.tokens)
    logits = logits_of(model, load, tokens=load.tokens, scored=load.scored)
    return float((run.kept + run.shared + run.ends + logits.kept)[0])


def recorded(path: Path = RECORDED) -> list[Row]:
    """Return the recorded measurements."""
    return [msgspec.json.decode(line, type=Row) for line in path.read_text().splitlines()]


def planned() -> Iterator[tuple[str, int, Step]]:
    """Yield every measurement: model, layers, step."""
    for name, config in ARCHITECTURES.items():
        for step in STEPS:
            yield from ((name, layers, step) for layers in DEPTHS)
            if name in WHOLE:
                yield name, config["num_hidden_layers"], step
        yield name, THIRD, STEPS[2]


def measure(path: Path) -> None:
    """Make the measurements that a file does not hold yet, and add them to it."""
    from benchmarks import tracked

    known = {(row.name, row.layers, row.step) for row in recorded(path)} if path.exists() else set()
    for name, layers, step in planned():
        if (name, layers, step) in known:
            continue
        counted = tracked.measure(
            ARCHITECTURES[name],
            layers=layers,
            sequences=step.sequences,
            length=step.length,
            recompute=step.recompute,
        )
        figures = counted._asdict() | {"step": counted.step}
        row = Row(name=name, layers=layers, step=step, figures=figures)
        with path.open("a") as file:
            file.write(msgspec.json.encode(row).decode() + "\n")


def measure_families(path: Path) -> None:
    """Make the measurements of the families that a file does not hold yet, and add them to it."""
    from benchmarks import tracked

    known = {(row.name, row.layers, row.step) for row in recorded(path)} if path.exists() else set()
    planned = ((name, layers, step) for name in FAMILIES for step in FAMILY_STEPS for layers in depths(name))
    for name, layers, step in planned:
        if (name, layers, step) in known:
            continue
        counted = tracked.measure(
            cut(FAMILIES[name], layers),
            layers=layers,
            sequences=step.sequences,
            length=step.length,
            recompute=step.recompute,
        )
        row = Row(name=name, layers=layers, step=step, figures=counted._asdict() | {"step": counted.step})
        with path.open("a") as file:
            file.write(msgspec.json.encode(row).decode() + "\n")


def family_cases(rows: Iterable[Row]) -> list[Case]:
    """Return the measured cases of the families."""
    from benchmarks.tracked import fused_attention

    result = []
    for row in rows:
        config = cut(FAMILIES[row.name], row.layers)
        predicted = predict(model_from_config(config), row.step, masked=not fused_attention(config))
        result.append(Case(row.name, row.layers, "measured", predicted, row.figures))
    return result


def cases(rows: Iterable[Row]) -> list[Case]:
    """Return every measurement and, for a model's own depth where it was not measured, the extrapolation."""
    rows = list(rows)
    result = []
    for name in dict.fromkeys(row.name for row in rows):
        shape = model_from_config(ARCHITECTURES[name])
        for step in STEPS:
            by_layers = {row.layers: row.figures for row in rows if (row.name, row.step) == (name, step)}
            if not by_layers:
                continue
            how = dict.fromkeys(by_layers, "measured")
            if shape.layers not in by_layers:
                by_layers[shape.layers] = extrapolated(by_layers, layers=shape.layers)
                how[shape.layers] = "extrapolated"
            for layers, measured in by_layers.items():
                model = msgspec.structs.replace(shape, layers=layers)
                result.append(Case(name, layers, how[layers], predict(model, step), measured))
    return result


def extrapolated(measured: dict[int, dict[str, float]], *, layers: int) -> dict[str, float]:
    """Return the figures of `layers` layers from those of two depths.

    A figure of one fixed instant is a line in the depth. The step's peak is the larger of two such instants,
    the start of backward and the optimizer's step. Backward alone may peak at its end in a deep model, and is
    left out.
    """
    low, high = DEPTHS
    first, second = measured[low], measured[high]

    def line(figure: str) -> float:
        slope = (second[figure] - first[figure]) / (high - low)
        return second[figure] + slope * (layers - high)

    result = {figure: line(figure) for figure in LINES}
    start = result["parameters"] + result["optimizer"] + result["activations"]
    held = result["parameters"] + result["optimizer"] + result["gradients"]
    beginning = line("backward") if _starts(first, second) else 0.0
    result["step"] = max(result["forward"], beginning, result["update"])
    late = result["update"] >= _TIE * result["step"]
    result["temporaries"] = result["step"] - (held if late else start)
    return result


def _starts(first: dict[str, float], second: dict[str, float]) -> bool:
    """Return whether backward peaks at its start, so that it grows as what is alive there does."""
    alive = sum(second[figure] - first[figure] for figure in ("parameters", "optimizer", "activations"))
    return abs(second["backward"] - first["backward"] - alive) <= 0.002 * second["backward"]


def bends(rows: Iterable[Row]) -> list[float]:
    """Return how far figures of more layers, or of a whole model, lie from the line through the first two."""
    rows = list(rows)
    result = []
    for row in rows:
        if row.layers not in DEPTHS:
            same = {r.layers: r.figures for r in rows if (r.name, r.step) == (row.name, row.step)}
            guess = extrapolated(same, layers=row.layers)
            result += [(guess[figure] - row.figures[figure]) / row.figures[figure] for figure in LINES]
    return result


def errors(chosen: Sequence[Case], figure: str) -> list[float]:
    """Return a figure's absolute relative errors in the cases that have it."""
    return [abs(case.error(figure)) for case in chosen if figure in case.measured]


def spread(sizes: Iterable[float]) -> tuple[float, float, float]:
    """Return mean, 90th percentile and largest of absolute errors."""
    ordered = sorted(abs(size) for size in sizes)
    return statistics.fmean(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], ordered[-1]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", default="", metavar="FILE")
    parser.add_argument("--families", action="store_true", help="the families beyond the plain ones")
    options = parser.parse_args()
    path = Path(options.measure) if options.measure else FAMILY_RECORDED if options.families else RECORDED
    if options.families:
        if options.measure:
            measure_families(path)
        _print_families(family_cases(recorded(path)))
        return
    if options.measure:
        measure(path)
    rows = recorded(path)
    every = cases(rows)
    print("Mean absolute errors in %, over the steps " + ", ".join(str(_shown(step)) for step in STEPS))
    print(f"| model | layers | {' | '.join(FIGURES)} |")
    print("|---" * (2 + len(FIGURES)) + "|")
    for name, layers, how in dict.fromkeys((case.name, case.layers, case.how) for case in every):
        chosen = [case for case in every if (case.name, case.layers) == (name, layers)]
        cells = (f"{100 * statistics.fmean(e):.2f}" if (e := errors(chosen, f)) else "" for f in FIGURES)
        print(f"| {name} | {layers} {'' if how == 'measured' else '(line)'} | {' | '.join(cells)} |")
    print("\n| figure | mean | p90 | largest |\n|---|---|---|---|")
    for figure in FIGURES:
        print(f"| {figure} | {' | '.join(f'{100 * size:.2f}' for size in spread(errors(every, figure)))} |")
    if away := bends(rows):
        print(
            "\nLine through 2 and 4 layers against measurements of more layers: "
            f"mean {100 * spread(away)[0]:.3f} %, largest {100 * spread(away)[2]:.3f} %"
        )


def _print_families(selected: Sequence[Case]) -> None:
    names = dict.fromkeys(case.name for case in selected)
    print("Mean absolute errors in %, over the steps " + ", ".join(_shown(step) for step in FAMILY_STEPS))
    print(f"| model | layers | {' | '.join(FIGURES)} |")
    print("|---" * (2 + len(FIGURES)) + "|")
    for name in sorted(names, key=HELD_OUT.__contains__):
        chosen = [case for case in selected if case.name == name]
        cells = (f"{100 * statistics.fmean(errors(chosen, figure)):.2f}" for figure in FIGURES)
        marked = f"{name} (held out)" if name in HELD_OUT else name
        print(f"| {marked} | {', '.join(map(str, depths(name)))} | {' | '.join(cells)} |")


def _shown(step: Step) -> str:
    return f"{step.sequences} x {step.length}{' recomputed' if step.recompute else ''}"


if __name__ == "__main__":
    main()
