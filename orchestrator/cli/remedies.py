"""`autotune remedies`: the remedies of one framework as a table, with setting, limits, effect and cost."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
from msgspec.structs import replace

from autotune import configs
from autotune.launchers import frameworks
from autotune.launchers.base import Advice, Framework, Status
from autotune.orchestrator.cli.shared.options import framework_names, given, global_options, known_framework
from autotune.orchestrator.config.loader import load
from autotune.orchestrator.errors import Failure
from autotune.orchestrator.terminal.widgets import echo, rendered, table, width_of
from autotune.orchestrator.units import show_setting
from autotune.policies.remedies.catalogue import MOVES
from autotune.policies.remedies.ladder import LADDER
from autotune.policies.values.failure import Cause, Phase
from autotune.policies.values.job import Cluster, Job
from autotune.policies.values.profile import (
    AtLeast,
    AtMost,
    Constraint,
    Divides,
    FixedDuringRun,
    Grid,
    Profile,
    Requires,
)
from autotune.policies.values.value import Value

_CODES = """\b
Exit codes:
  0    the table is printed
  2    there is no such framework, or an option is wrong"""


_MEMORY = {
    Cause.GPU_OOM: "gpu",
    Cause.HOST_OOM: "host",
    Cause.KV_POOL: "pool",
    Cause.POOL_TOO_SMALL: "pool",
    Cause.SHM: "shm",
    Cause.OBJECT_STORE: "object store",
}
_INDENT = " " * 4
# The cluster assumed for profiles, because there is no job.
CLUSTER = Cluster(
    address="auto", nodes=1, gpus_per_node=8, gpu_memory_bytes=80 << 30, host_memory_bytes=1 << 40
)


class Row(Value, frozen=True, kw_only=True):
    """One way to apply a remedy in one framework."""

    phase: str  # failures that it is for, e.g. `gpu-oom in rollout`; of a public guide, a phase or `any`
    # the memory that it frees: gpu, host, pool, shm or object store, separated by spaces; empty: unknown
    memory: str
    remedy: str  # name of the remedy, or the words of a public guide
    # setting in the framework's spelling; a knob in parentheses: it has none; `-`: nothing is set
    setting: str
    constraint: str  # values that are possible, and other limits; empty: none
    effect: str  # what it frees; empty: unknown
    cost: str  # what it slows; `nothing`, or empty: unknown
    status: str  # works | replaced | obsolete | impossible
    reason: str = ""  # why it does not work, or a note; empty: none


class RemedyTable(Value, frozen=True, kw_only=True):
    """The answer of `autotune remedies --json`."""

    schema: int = 1  # version of this document's format; fields are added without changing it
    framework: str  # name of the framework, e.g. `verl`, as in the job file
    rows: tuple[Row, ...]


def rows(framework: Framework) -> tuple[Row, ...]:
    """Return the remedies in the order of the ladder, then other advice of public guides."""
    starts = ({}, *framework.presets.values())
    jobs = [
        *examples(framework),
        *(Job(name="ladder", framework=framework.name, settings=dict(s)) for s in starts),
    ]
    newest = framework.releases[-1] if framework.releases else None
    dated = (replace(job, framework_version=job.framework_version or newest) for job in jobs)
    profiles = [framework.profile(job, CLUSTER) for job in dated]
    names = dict.fromkeys(rung.name for rung in LADDER)
    remedies = [row for name in names for row in _of_remedy(name, profiles)]
    return (*remedies, *map(_of_guide, framework.advice))


def examples(framework: Framework) -> Iterator[Job]:
    """Yield the example jobs shipped with autotune, which set more knobs than an empty job."""
    for file in sorted(Path(configs.__path__[0]).glob(f"{framework.name}*.yaml")):
        try:
            yield load(file)
        except Failure:
            continue  # it refers to files of a cluster


def _of_guide(advice: Advice) -> Row:
    fields = msgspec.structs.asdict(advice) | {"memory": "", "status": advice.status.value}
    if instead := fields.pop("instead"):
        fields["reason"] += f"; today: {instead}"
    return Row(**fields)


def render_remedies(framework: Framework, rows: tuple[Row, ...], *, width: int | None = None) -> str:
    """Return the table as text: each remedy with its setting, and below it what it does.

    Notes are wrapped at `width` columns; None does not wrap them.
    """
    names = [(row.remedy, row.status, row.setting) for row in rows]
    heads = rendered(table(names, head=("REMEDY", "STATUS", "SETTING")), width=None).split("\n")
    if width is not None and max(map(len, heads)) > width:
        narrow = table([name[:2] for name in names], head=("REMEDY", "STATUS"))
        heads = rendered(narrow, width=None).split("\n")
        heads[1:] = [f"{line}\n{_INDENT}{row.setting}" for row, line in zip(rows, heads[1:], strict=True)]
    head, *body = heads
    lines = [f"Remedies for {framework.name} when memory runs out, in the order of their cost", "", head]
    room = None if width is None else width - len(_INDENT)
    for row, line in zip(rows, body, strict=True):
        notes = rendered(table(_notes(row), wrap={1: 40}), width=room)
        lines += [line, *textwrap.indent(notes, _INDENT).split("\n")]
    return "\n".join(lines)


def _notes(row: Row) -> list[tuple[str, str]]:
    works = row.status == Status.WORKS.value
    notes = (
        ("for", "" if row.status == Status.IMPOSSIBLE.value else row.phase),
        ("frees", row.effect if works else ""),
        ("slows", row.cost if works else ""),
        ("limits", row.constraint),
        ("note" if works else "why", row.reason),
    )
    return [(label, note) for label, note in notes if note]


def _of_remedy(name: str, profiles: list[Profile]) -> list[Row]:
    """Return one row per knob of a remedy, from the first profile that supports the knob."""
    move = MOVES[name]
    phase, memory = _where(name, ())
    row = Row(
        phase=phase, memory=memory, remedy=name, setting="-", constraint="",
        effect=move.frees, cost=move.slows, status=Status.WORKS.value,
    )  # fmt: skip
    if not move.turns:
        note = "reports the process that holds the GPU, with its pid and user; the job is not changed"
        return [replace(row, reason=note)]
    rows = []
    for knob in move.turns:
        profile = next((p for p in profiles if knob in p.supported), profiles[0])
        support = profile.supported.get(knob)
        if support is None:
            why = profile.unsupported.get(knob, "the framework has no such setting")
            rows.append(replace(row, setting=f"({knob})", status=Status.IMPOSSIBLE.value, reason=why))
            continue
        limits = [_grid(knob, support.grid)]
        limits += [_limit(knob, c) for c in profile.constraints if c.knob == knob]
        limits.append("" if support.effect.value == "exact" else "results differ by rounding")
        limited = "; ".join(limit for limit in limits if limit)
        reached, _ = _where(name, support.phases)
        rows.append(replace(row, phase=reached, setting=support.setting, constraint=limited))
    return rows


def _where(name: str, only: tuple[Phase, ...]) -> tuple[str, str]:
    """Return the failures that a remedy is for (gpu-oom in the phases `only`), and the memory it frees."""
    phases: dict[Cause, set[Phase]] = {}
    for rung in LADDER:
        if rung.name == name:
            phases.setdefault(rung.cause, set()).update(set(rung.phases) - {Phase.NONE})
    failures = []
    for cause, every in phases.items():
        reached = every & set(only) if only and cause is Cause.GPU_OOM else every
        if not reached:
            continue
        names = " ".join(phase.value for phase in Phase if phase in reached)
        others = [phase for phase in Phase if phase not in (*reached, Phase.NONE)]
        if others in ([], [Phase.RESUME]):
            names = "any phase" + (f" but {Phase.RESUME}" if others else "")
        failures.append(f"{cause.value} in {names}")
    return "; ".join(failures), " ".join(dict.fromkeys(_MEMORY[cause] for cause in phases))


def _grid(knob: str, grid: Grid) -> str:
    if grid.values:
        return "one of " + ", ".join(show_setting(knob, value) for value in grid.values)
    bounds = (
        ("at least", grid.minimum),
        ("at most", grid.maximum),
        ("in steps of", None if grid.multiple == 1 else grid.multiple),
    )
    return ", ".join(f"{bound} {_number(knob, value)}" for bound, value in bounds if value is not None)


def _number(knob: str, value: float) -> str:
    text = show_setting(knob, value)
    return f"{value:,.0f}" if value >= 1000 and text.isdecimal() else text


def _limit(knob: str, constraint: Constraint) -> str:
    match constraint:
        case AtLeast(value=value, why=why):
            return f"at least {_number(knob, value)}: {why}"
        case AtMost(value=value, why=why):
            return f"at most {_number(knob, value)}: {why}"
        case Divides(of=of, why=why):
            return f"divides {of}: {why}"
        case Requires(value=value, other=other, values=values, why=why):
            needed = " or ".join(show_setting(other, value) for value in values)
            return f"{show_setting(knob, value)} needs {other} = {needed}: {why}"
        case FixedDuringRun(why=why):
            return f"fixed once a checkpoint exists: {why}"


@click.command("remedies", epilog=_CODES)
@click.argument("framework", metavar="FRAMEWORK", shell_complete=framework_names)
@global_options
@click.pass_context
def command(context: click.Context, framework: str) -> None:
    """List what autotune may change in a framework's job when memory runs out (alias: ladder).

    \b
    Example:
      autotune remedies verl
    """  # noqa: D301 - click reads the backspace
    adapter = frameworks.find(known_framework(framework))
    lines = rows(adapter)
    if given(context).json:
        click.echo(msgspec.json.encode(RemedyTable(framework=adapter.name, rows=lines)))
    else:
        text = render_remedies(adapter, lines, width=width_of(sys.stdout))
        echo(text, color=given(context).color)
