"""Every change that autotune may make of a job, and the record of those that a framework itself accepted.

`pytest tests/contracts -m e2e --checked FILE` writes a row per setting once the test has passed that hands
its values to the framework; `python -m tests.contracts.changes` makes the page of the rows on record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from autotune.policies.remedies.legality import completed, highest, lowest, objections
from autotune.policies.values.formatting import show_setting
from autotune.policies.values.knobs import KnobName, Knobs, Setting
from autotune.policies.values.profile import Profile
from tests.faults.page import placed

ROOT = Path(__file__).parents[2]
CHECKED = ROOT / "tests" / "contracts" / "checked.jsonl"
PAGE = ROOT / "docs" / "measured" / "settings.md"


def legal(profile: Profile, *, steps: int = 4) -> Iterator[tuple[KnobName, Setting, Knobs]]:
    """Yield each knob at each value of its grid, of a range at some, with what has to go with it.

    `steps`: in how many a range is divided.
    """
    for knob, support in profile.supported.items():
        for value in support.grid.values or _of_range(profile, knob, steps):
            changes = completed(profile, profile.knobs, {knob: value})
            knobs = msgspec.structs.replace(profile.knobs, **changes)
            if changes and not objections(profile, profile.knobs, knobs, started=False):
                yield knob, value, knobs


def _of_range(profile: Profile, knob: KnobName, steps: int) -> tuple[Setting, ...]:
    grid, present = profile.supported[knob].grid, getattr(profile.knobs, knob)
    step = grid.multiple or 1
    bound = lowest(profile, knob)
    low = step if bound is None else -(-bound // step) * step
    high = highest(profile, knob) or max(low * 64, low + steps * step)
    kind = float if isinstance(present, float) else int
    values = (low + step * round(n / steps * (high - low) / step) for n in range(steps + 1))
    return tuple(dict.fromkeys(kind(round(value, 6)) for value in values))


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, and the values of it that a framework took."""

    framework: str
    by: str  # what of the framework took them
    setting: str
    knob: str
    values: tuple[str, ...]


def keep(path: Path, profile: Profile, moves: Iterable[tuple[KnobName, Setting]], by: str) -> None:
    """Add the moves of a job, which the framework took, to the rows of a file."""
    rows = {(row.framework, row.by, row.setting, row.knob): row for row in read(path)}
    for knob, value in moves:
        setting = profile.supported[knob].setting
        key = (profile.framework, by, setting, knob)
        old = rows[key].values if key in rows else ()
        values = tuple(dict.fromkeys((*old, show_setting(knob, value))))
        rows[key] = Checked(framework=profile.framework, by=by, setting=setting, knob=knob, values=values)
    path.write_bytes(b"".join(msgspec.json.encode(rows[key]) + b"\n" for key in sorted(rows)))


def read(path: Path) -> list[Checked]:
    """Return the rows of a file."""
    return msgspec.json.Decoder(Checked).decode_lines(path.read_bytes()) if path.exists() else []


def table(rows: list[Checked]) -> str:
    """Return the rows as tables, one a framework."""
    lines: list[str] = []
    for head in dict.fromkeys((row.framework, row.by) for row in rows):
        lines += [
            f"### {head[0]}",
            "",
            f"Checked by {head[1]}.",
            "",
            "| setting | knob | values |",
            "|---|---|---|",
        ]
        own = [row for row in rows if (row.framework, row.by) == head]
        lines += [f"| `{row.setting}` | `{row.knob}` | {_listed(row.values)} |" for row in own]
        lines.append("")
    return "\n".join(lines[:-1])


def _listed(values: tuple[str, ...], most: int = 8) -> str:
    output = values if len(values) <= most else (*values[: most - 1], values[-1])
    return ", ".join(output) + (f" ({len(values)} values)" if len(values) > most else "")


if __name__ == "__main__":
    PAGE.write_text(placed(PAGE.read_text(), "checked", table(read(CHECKED))))
