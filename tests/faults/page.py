"""The tables of docs/measured/reliability.md, written between its markers from what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.faults.scenario import Row, Scenario

GROUPS = {
    "nodes": "Nodes and the cluster",
    "drivers": "The driver",
    "signals": "Signals",
    "disk": "The disk",
    "cards": "Cards",
    "job": "Jobs that fail in silence",
}


def written(rows: list[Row], page: str) -> str:
    """Return the page with its table of scenarios made anew."""
    return placed(page, "faults", table(rows))


def placed(page: str, name: str, text: str) -> str:
    """Return the page with the part between the markers `name` replaced."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)", re.DOTALL)
    if pattern.search(page) is None:
        raise ValueError(f"the page has no part {name}")
    return pattern.sub(lambda result: result[1] + text + result[2], page)


def table(rows: list[Row]) -> str:
    """Return the tables of every scenario, those that were not played included."""
    from tests.faults.scenarios import EVERY

    real = [row for row in rows if row.scale == 1.0]
    parts = []
    if real:
        versions = sorted({row.version for row in real})
        days = sorted({row.at[:10] for row in real})
        survived = sum(_all(rows_of(real, s)) for s in EVERY)
        played = sum(bool(rows_of(real, s)) for s in EVERY)
        parts.append(
            f"Played {' to '.join(dict.fromkeys((days[0], days[-1])))}, version {', '.join(versions)}: "
            f"{len(real)} runs of {played} scenarios of {len(EVERY)}; {survived} of the {played} survived "
            "with every seed."
        )
    for group, title in GROUPS.items():
        scenarios = [s for s in EVERY if s.group == group]
        parts += [f"### {title}", _head(), *(_line(s, rows_of(real, s)) for s in scenarios)]
    lines = "\n".join(f"\n{part}\n" if part.startswith("###") else part for part in parts)
    failed = [row for row in real if not row.survived]
    if failed:
        lines += "\n\n### Not survived\n\n" + "\n".join(
            f"- `{row.scenario}`, seed {row.seed}: {row.reason}" for row in failed
        )
    return lines


def rows_of(rows: Iterable[Row], scenario: Scenario) -> list[Row]:
    """Return the rows of a scenario."""
    return [row for row in rows if row.scenario == scenario.name]


def _all(rows: list[Row]) -> bool:
    return bool(rows) and all(row.survived for row in rows)


def _head() -> str:
    return (
        "| scenario | what goes wrong | survived | attempts | steps repeated | left | verdict "
        "| noticed (s) | why not 1 attempt, 0 steps |\n|---|---|---|---|---|---|---|---|---|"
    )


def _line(scenario: Scenario, rows: list[Row]) -> str:
    fault = f"{scenario.fault} ({scenario.how})" if scenario.how else scenario.fault
    if not rows:
        return f"| `{scenario.name}` | {fault} | not played | | | | | | {scenario.why} |"
    count = sum(row.survived for row in rows)
    survived = f"{count} of {len(rows)}" if count < len(rows) else f"yes, {len(rows)} of {len(rows)}"
    noticed = [row.notice_s for row in rows if row.notice_s is not None]
    verdicts = ", ".join(sorted({row.verdict or "none" for row in rows}))
    return (
        f"| `{scenario.name}` | {fault} | {survived} | {_range([r.attempts for r in rows])} | "
        f"{_range([r.repeated for r in rows])} | {_range([r.left for r in rows])} | {verdicts} | "
        f"{_range(noticed)} | {scenario.why} |"
    )


def _range(values: list[int] | list[float]) -> str:
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
