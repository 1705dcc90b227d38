"""What the plan says of a case, beside what happened."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from autotune.orchestrator.planner import PhasePlan, Plan, any_phase
from autotune.policies.estimate.constants import constant
from benchmarks.published.cases import Case, Truth

_SCOPES = {"trainer": ("init", "log_prob", "train", "checkpoint"), "engine": ("rollout_init", "rollout")}
# A reported phase by the phases of the plan's remedies; any other is one of them itself.
_REMEDIED = {
    "train": ("backward", "optimizer"),
    "rollout": ("rollout_init", "rollout", "weight_sync"),
    "init": ("backward", "optimizer"),
}
_LISTED = 3  # remedies of a phase that count


class Figure(NamedTuple):
    """A measured figure and its prediction; bytes, or tokens of the pool."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """|ln(predicted / measured)|."""
        return abs(math.log(self.predicted / self.measured))


class Judgement(NamedTuple):
    """A case as the plan sees it."""

    truth: Truth
    prediction: Literal["fits", "oom", "nothing"]
    share: float  # of the memory that is shortest, in the phase where it is
    phase: str  # that phase; `host:` before it where the host's memory is the shortest
    chance: float  # that any phase overflows its device, by the plan's own errors
    changed: tuple[str, ...]  # knobs that would be changed before the first launch
    figures: tuple[Figure, ...]
    cure: str  # the confirmed cure's place: `first launch`, `1` to `3`, `-` for none; empty: no cure is known

    @property
    def right(self) -> bool:
        """Whether the plan foresaw what happened."""
        return self.prediction == ("oom" if self.truth.outcome == "oom" else "fits")


def judgement(case: Case, plan: Plan) -> Judgement:
    """Return a case beside its plan."""
    truth = case.truth
    rows = [row for row in plan.phases if row.phase in _SCOPES.get(truth.scope, (row.phase,))]
    share, phase = max(_shares(rows, plan.cluster.host_memory_bytes), default=(0.0, plan.note))
    return Judgement(
        truth=truth,
        prediction="nothing" if not rows else "oom" if share > 1 else "fits",
        share=share,
        phase=phase,
        chance=any_phase(rows) or 0.0,
        changed=tuple(plan.first),
        figures=tuple(_figures(case, plan, rows)) if rows else (),
        cure=_cure(plan, truth),
    )


def _shares(rows: list[PhasePlan], host_bytes: float) -> Iterator[tuple[float, str]]:
    for row in rows:
        if row.capacity_bytes:
            yield row.total_bytes / row.capacity_bytes, row.phase
        if host_bytes:
            yield row.host_bytes / host_bytes, f"host:{row.phase}"


def _figures(case: Case, plan: Plan, rows: list[PhasePlan]) -> Iterator[Figure]:
    process = constant("context") + constant("collectives")  # of a total, what torch does not reserve
    for name, measured in case.truth.figures.items():
        match name:
            case "allocated_bytes":
                predicted = max(row.total_bytes - row.parts["outside"] for row in rows)
            case "reserved_bytes":
                predicted = max(row.total_bytes for row in rows) - process
            case "device_bytes":
                predicted = max(row.total_bytes for row in rows)
            case "host_peak_bytes":
                predicted = max(row.host_bytes for row in rows)
            case "pool_tokens":
                pool = next(row.parts["kv_pool"] for row in rows if row.phase == "rollout")
                predicted = pool / _token_bytes(case, plan)
            case _:
                raise ValueError(f"{case.truth.id}: no such figure as `{name}`")
        yield Figure(name=name, predicted=predicted, measured=measured)


def _token_bytes(case: Case, plan: Plan) -> float:
    """Return the bytes of a token in one device's pool: ordinary keys and values in 16 bits."""
    shape = json.loads((case.folder / "model" / "config.json").read_text(encoding="utf-8"))
    split = next((knob.value for knob in plan.knobs if knob.knob == "rollout_tensor_parallel"), 1)
    heads = max(1.0, shape["num_key_value_heads"] / float(str(split)))
    size = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    return float(shape["num_hidden_layers"] * 2 * heads * size * 2)


def _cure(plan: Plan, truth: Truth) -> str:
    if not truth.cure:
        return ""
    if set(plan.first) & set(truth.cure):
        return "first launch"
    phases = _REMEDIED.get(truth.phase, (truth.phase,))
    places = []
    for phase in dict.fromkeys(rung.phase for rung in plan.ladder):
        if truth.phase and phase not in phases:
            continue
        rungs = [rung for rung in plan.ladder if rung.phase == phase][:_LISTED]
        places += [place for place, rung in enumerate(rungs, 1) if set(rung.changes) & set(truth.cure)]
    return str(min(places)) if places else "-"
