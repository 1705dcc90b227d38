"""The remedies of every framework: the setting of each knob, the line that reads it, and what has none.

`python -m benchmarks.remedies` writes docs/measured/remedies.md from the rows of the frameworks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from autotune.launchers.frameworks import FRAMEWORKS, package_of
from autotune.launchers.frameworks.core.engine_settings import ENGINES
from autotune.launchers.frameworks.megatron.adapter import MegatronRl
from autotune.launchers.frameworks.tabular.adapter import TabularFramework
from autotune.launchers.frameworks.tabular.table import NO_SETTING, Row
from autotune.policies.values.knob_table import KNOB_TABLE
from autotune.policies.values.knobs import KNOBS, KnobName
from tests.faults.page import placed

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "measured" / "remedies.md"
_READS = ROOT / "tests" / "contracts" / "reads"  # of frameworks whose rows are shared


class Hole(NamedTuple):
    """A knob that a framework does not have, although its facts hold a setting of that name elsewhere."""

    framework: str
    knob: KnobName
    setting: str


def frameworks() -> dict[str, TabularFramework[Any]]:
    """Return the frameworks whose knobs are rows of a table."""
    return {name: each for name, each in FRAMEWORKS.items() if isinstance(each, TabularFramework)}


def release(name: str) -> str:
    """Return the newest release on record; of a framework that is known by its commits, the commit."""
    framework = FRAMEWORKS[name]
    if isinstance(framework, MegatronRl):
        return framework.dialect.own
    return str(frameworks()[name].releases[-1])


def rows_of(name: str) -> dict[KnobName, list[Row[Any]]]:
    """Return the rows of a framework by knob, without those that hold of older releases only."""
    result: dict[KnobName, list[Row[Any]]] = {}
    for row in frameworks()[name].table.rows:
        if name not in row.until:
            result.setdefault(row.knob, []).append(row)
    return result


def line_of(name: str, row: Row[Any]) -> str:
    """Return the line that reads a row's setting; empty where another library or the environment does."""
    return row.read_at or _reads(name).get(row.key, "")


def holes() -> Iterator[Hole]:
    """Yield the knobs without a row or a reason of which the framework's facts or engine have a setting.

    A setting of a knob is one whose last name is that of a row of any framework, but for underscores and
    plurals, or of an engine's argument that the framework hands on.
    """
    words: dict[KnobName, set[str]] = {}
    for name in frameworks():
        for knob, rows in rows_of(name).items():
            words.setdefault(knob, set()).update(
                word for row in rows for word in map(_last, row.keys) if word
            )
    for name, framework in frameworks().items():
        present = rows_of(name)
        recorded = {_last(each): each for each in sorted(settings_on_record(name), reverse=True)}
        for node in framework.engine_nodes[:1]:
            handed_on = (each.name for engine in _facts(name)["engines"] for each in ENGINES[engine].values())
            recorded |= {_last(each): f"{node}.{each}" for each in handed_on}
        for knob in KNOBS:
            if knob in present or knob in framework.table.absent:
                continue
            for word in sorted(words.get(knob, set()) & recorded.keys()):
                yield Hole(name, knob, recorded[word])


@cache
def settings_on_record(name: str) -> frozenset[str]:
    """Return the settings that the newest release on record has."""
    framework = FRAMEWORKS[name]
    if isinstance(framework, MegatronRl):
        return frozenset(framework.dialect.flags)
    facts = _facts(name)
    return frozenset(facts.get("types") or facts["flags"])


@cache
def _facts(name: str) -> dict[str, Any]:
    file = resources.files(package_of(name)).joinpath("facts", f"{release(name)}.json")
    return dict(json.loads(file.read_bytes()))


@cache
def _reads(name: str) -> Mapping[str, str]:
    file = _READS / f"{name}.json"
    return json.loads(file.read_text())["reads"] if file.exists() else {}


def _last(key: str) -> str:
    return "" if "[]" in key else re.sub(r"[-_s]", "", key.rpartition(".")[2])


def table() -> str:
    """Return the page's tables: which framework has which knob, then every setting and every reason."""
    names = list(frameworks())
    lines = [f"| knob | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    lines += [f"| `{knob}` | {' | '.join(_mark(name, knob) for name in names)} |" for knob in KNOBS]
    for name in names:
        lines += [
            "",
            f"### {name} {release(name)}",
            "",
            "| knob | setting | line that reads it |",
            "|---|---|---|",
        ]
        present, absent = rows_of(name), frameworks()[name].table.absent
        for knob in KNOBS:
            lines += [
                f"| `{knob}` | {setting} | {line} |" for setting, line in _cells(name, present.get(knob, []))
            ]
        reasons = {knob: absent[knob] for knob in KNOBS if knob in absent}
        lines += ["", *(f"- `{knob}`: {why}." for knob, why in reasons.items())]
        left = [f"`{knob}`" for knob in KNOBS if knob not in present and knob not in reasons]
        lines += [f"- {NO_SETTING.capitalize()}: {', '.join(left)}."] if left else []
    return "\n".join(lines)


def _mark(name: str, knob: KnobName) -> str:
    rows = rows_of(name).get(knob, [])
    if not rows:
        return "–"
    return "●" if any(row.key and not row.stays for row in rows) else "○"


def _cells(name: str, rows: list[Row[Any]]) -> Iterator[tuple[str, str]]:
    cells: dict[str, str] = {}
    for row in rows:
        setting = f"`{row.key}`" if row.key else f"always {row.always}"
        line = line_of(name, row)
        cells.setdefault(f"{setting} ({row.stays})" if row.stays else setting, f"`{line}`" if line else "")
    return iter(cells.items())


if __name__ == "__main__":
    PAGE.write_text(placed(PAGE.read_text(), "remedies", table()))
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(frameworks())} frameworks, {len(KNOB_TABLE)} knobs")
    for hole in holes():
        print(f"{hole.framework} has {hole.setting}, and no row of {hole.knob}")
