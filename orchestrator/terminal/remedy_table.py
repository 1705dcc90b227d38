"""The ladder of one framework as a table: what may change, where, under which name, and at what price."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autotune import configs
from autotune.launchers.base import Advice, Framework, Status
from autotune.orchestrator.config.loader import load
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.units import show_value
from autotune.policies.remedies.catalogue import MOVES
from autotune.policies.remedies.ladder import LADDER
from autotune.policies.values.types import (
    AtLeast,
    AtMost,
    Cause,
    Cluster,
    Constraint,
    Divides,
    FixedDuringRun,
    Grid,
    Job,
    Phase,
    Profile,
    Requires,
    Value,
)

_MEMORY = {
    Cause.GPU_OOM: "gpu",
    Cause.HOST_OOM: "host",
    Cause.KV_POOL: "pool",
    Cause.POOL_TOO_SMALL: "pool",
    Cause.SHM: "shm",
    Cause.OBJECT_STORE: "object store",
}
# What a table of settings is drawn for when no job is at hand.
_USUAL = Cluster(
    address="auto", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)


class Row(Value, frozen=True, kw_only=True):
    """One way to apply a remedy in one framework."""

    phase: str
    memory: str
    remedy: str
    setting: str
    constraint: str
    effect: str
    cost: str
    status: str
    reason: str = ""


def rows(framework: Framework) -> tuple[Row, ...]:
    """Return the remedies in the order of the ladder, then what the public guides say beyond them."""
    starts = ({}, *framework.presets.values())
    jobs = [
        *_examples(framework),
        *(Job(name="ladder", framework=framework.name, settings=dict(s)) for s in starts),
    ]
    profiles = [framework.profile(job, _USUAL) for job in jobs]
    names = dict.fromkeys(rung.name for rung in LADDER)
    found = [row for name in names for row in _of_remedy(name, profiles)]
    return (*found, *map(_of_guide, framework.advice))


def _examples(framework: Framework) -> Iterator[Job]:
    """Yield the example jobs that come with autotune, which say more than an empty job."""
    for file in sorted(Path(configs.__path__[0]).glob(f"{framework.name}*.yaml")):
        try:
            yield load(file)
        except Failure:
            continue  # it names files of a cluster


def _of_guide(advice: Advice) -> Row:
    return Row(
        phase=advice.phase,
        memory="",
        remedy=advice.remedy,
        setting=advice.setting,
        constraint=advice.constraint,
        effect=advice.effect,
        cost=advice.cost,
        status=advice.status.value,
        reason=f"{advice.reason}; today: {advice.instead}" if advice.instead else advice.reason,
    )


def text(framework: Framework, table: tuple[Row, ...]) -> str:
    """Return the table for people: a remedy's setting and status, and beneath it what it does."""
    head = ("REMEDY", "STATUS", "SETTING")
    cells = [head, *((row.remedy, row.status, row.setting) for row in table)]
    widths = [max(len(row[column]) for row in cells) for column in range(2)]
    lines = [f"{framework.name}: what may change when memory runs out, in the order of the ladder", ""]
    for row, cell in zip((None, *table), cells, strict=True):
        lines.append("  ".join(c.ljust(w) for c, w in zip(cell, (*widths, 0), strict=True)).rstrip())
        if row is None:
            continue
        price = f"{row.effect or '?'}; slows {row.cost or '?'}" if row.effect or row.cost else ""
        for label, note in (
            ("cures", "" if row.status == Status.IMPOSSIBLE.value else row.phase),
            ("frees", price if row.status == Status.WORKS.value else ""),
            ("limits", row.constraint),
            ("note" if row.status == Status.WORKS.value else "why", row.reason),
        ):
            lines += [f"    {label:<7}{note}"] if note else []
    return "\n".join(lines)


def _of_remedy(name: str, profiles: list[Profile]) -> list[Row]:
    """Return a remedy's rows; a knob that only some jobs offer is shown as those jobs have it."""
    move = MOVES[name]
    phase, memory = _where(name, ())
    shared = {"memory": memory, "remedy": name, "effect": move.frees, "cost": move.slows}
    if not move.turns:
        note = "names pid and user of who holds the card; nothing of the job changes"
        return [
            Row(**shared, phase=phase, setting="-", constraint="", status=Status.WORKS.value, reason=note)
        ]
    found = []
    for knob in move.turns:
        profile = next((p for p in profiles if knob in p.supported), profiles[0])
        support = profile.supported.get(knob)
        if support is None:
            why = profile.unsupported.get(knob, "the framework has no such setting")
            found.append(
                Row(
                    **shared,
                    phase=phase,
                    setting=f"({knob})",
                    constraint="",
                    status=Status.IMPOSSIBLE.value,
                    reason=why,
                )
            )
            continue
        limits = [_grid(support.grid), *(_limit(c) for c in profile.constraints if _concerns(c, knob))]
        limits.append("" if support.effect.value == "exact" else "results differ by rounding")
        found.append(
            Row(
                **shared,
                phase=_where(name, support.phases)[0],
                setting=support.setting,
                constraint="; ".join(limit for limit in limits if limit),
                status=Status.WORKS.value,
            )
        )
    return found


def _where(name: str, only: tuple[Phase, ...]) -> tuple[str, str]:
    """Return the failures that a remedy answers, on the devices in these phases `only`, and the memories."""
    phases: dict[Cause, set[Phase]] = {}
    for rung in LADDER:
        for cause in rung.causes if rung.name == name else ():
            phases.setdefault(cause, set()).update(set(rung.phases) - {Phase.NONE})
    answers = []
    for cause, every in phases.items():
        found = every & set(only) if only and cause is Cause.GPU_OOM else every
        if not found:
            continue
        where = (
            "any phase" if len(found) == len(Phase) - 1 else " ".join(p.value for p in Phase if p in found)
        )
        answers.append(f"{cause.value} in {where}")
    return "; ".join(answers), " ".join(dict.fromkeys(_MEMORY[cause] for cause in phases))


def _grid(grid: Grid) -> str:
    if grid.values:
        return "one of " + ", ".join(show_value(value) for value in grid.values)
    bounds = (
        ("at least", grid.minimum),
        ("at most", grid.maximum),
        ("in steps of", None if grid.multiple == 1 else grid.multiple),
    )
    return ", ".join(f"{words} {_number(value)}" for words, value in bounds if value is not None)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _concerns(constraint: Constraint, knob: str) -> bool:
    return constraint.knob == knob


def _limit(constraint: Constraint) -> str:
    match constraint:
        case AtLeast(value=value, why=why):
            return f"at least {_number(value)}: {why}"
        case AtMost(value=value, why=why):
            return f"at most {_number(value)}: {why}"
        case Divides(of=of, why=why):
            return f"divides {of}: {why}"
        case Requires(value=value, other=other, values=values, why=why):
            return f"{show_value(value)} needs {other} = {' or '.join(map(show_value, values))}: {why}"
        case FixedDuringRun(why=why):
            return f"not once a checkpoint exists: {why}"
