"""The page that lists what no test notices, mutation.md, with the reasons that survivors.yaml gives."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.mutation.results import ROOMS, Verdict

REASONS = Path(__file__).with_name("survivors.yaml")
KINDS = {
    "equivalent": "no caller can tell the two apart",
    "speed": "the result is the same, later or sooner",
    "unreachable": "no value that the project can pass makes a difference",
    "negligible": "a difference that is smaller than any rounding",
    "limited": "only the fastest tests of it were run; slower ones may notice it",
    "gap": "a test is missing",
}
_INTRO = """\
# Mutants of the policies

How many small changes of `policies/recovery`, `estimate` and `diagnosis` the tests of the policies notice:
a sample drawn by a seed, in equal parts of the three folders and, within one, of the kinds of change. How a
mutant is tried: a constant meets the tests of the functions that read it, any other change those that run
the changed statement, the fastest first, until one fails. Functions get their new code in a fork of a
process that has collected all tests; a test that takes far more CPU time than without the mutant has
noticed it. Results are kept in `build/mutation`: the same command continues, and tries an unnoticed mutant
again once sources or tests have changed. A survivor is a missing test or a change without effect.
This page is written by
`python -m benchmarks.mutation --write`; the reasons are in `benchmarks/mutation/survivors.yaml`.
"""
_MARGIN = 12  # characters beside what differs


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why no test notices a change, wherever it is in a module."""

    module: str
    change: str  # the changed lines, before and after
    kind: Literal["equivalent", "speed", "unreachable", "negligible", "limited", "gap"]
    reason: str

    @property
    def key(self) -> tuple[str, str]:
        """The module and the change without its indentation."""
        return self.module, _plain(self.change)


def reasons() -> dict[tuple[str, str], Reason]:
    """Return the known reasons by module and change; msgspec.ValidationError for one that is malformed."""
    rows = msgspec.yaml.decode(REASONS.read_bytes(), type=list[Reason])
    return {row.key: row for row in rows}


def _plain(change: str) -> str:
    return "\n".join(f"{line[:1]}{' '.join(line[1:].split())}" for line in change.strip().splitlines())


def page(verdicts: Sequence[Verdict], known: dict[tuple[str, str], Reason], *, measured: str) -> str:
    """Return the page; `measured`: the date, command and commit."""
    survivors = sorted(
        (v for v in verdicts if not v.by),
        key=lambda v: (ROOMS.index(v.mutant.room), v.mutant.module, v.mutant.line),
    )
    return "\n".join([*_shares(verdicts, measured), *_kinds(survivors, known), *_listed(survivors, known)])


def _shares(verdicts: Sequence[Verdict], measured: str) -> Iterator[str]:
    yield _INTRO
    yield f"{measured}\n"
    yield "| folder | mutants | noticed | share |\n|---|---|---|---|"
    for room in (*ROOMS, ""):
        own = [v for v in verdicts if room in ("", v.mutant.room)]
        noticed = sum(bool(v.by) for v in own)
        name = f"`policies/{room}`" if room else "all"
        yield f"| {name} | {len(own)} | {noticed} | {noticed / max(1, len(own)):.1%} |"


def _kinds(survivors: Sequence[Verdict], known: dict[tuple[str, str], Reason]) -> Iterator[str]:
    met: Counter[str] = Counter(_reason(each, known).kind for each in survivors)
    yield "\n## Not noticed\n"
    yield "| why | mutants |\n|---|---|"
    for kind, meaning in KINDS.items():
        yield f"| {kind}: {meaning} | {met[kind]} |"


def _listed(survivors: Sequence[Verdict], known: dict[tuple[str, str], Reason]) -> Iterator[str]:
    module = ""
    for each in survivors:
        if each.mutant.module != module:
            module = each.mutant.module
            yield f"\n### {module}\n"
            yield "| line | change | why |\n|---|---|---|"
        why = _reason(each, known)
        yield f"| {each.mutant.line} | {_shown(each.change)} | {why.kind}: {why.reason.strip()} |"
    yield ""


def _reason(verdict: Verdict, known: dict[tuple[str, str], Reason]) -> Reason:
    module, change = verdict.mutant.module, verdict.change
    if verdict.limit_s is None:
        unknown = Reason(module, change, "gap", "no reason is known yet")
    else:
        unknown = Reason(module, change, "limited", f"to {verdict.limit_s:g} CPU seconds")
    return known.get((module, _plain(change)), unknown)


def _shown(change: str) -> str:
    """Return what differs between the lines of a change, as a cell of a table."""
    before, after = (
        " ".join(line[1:].strip() for line in change.splitlines() if line[:1] == sign) for sign in "-+"
    )
    parts = [each for each in SequenceMatcher(None, before, after).get_opcodes() if each[0] != "equal"]
    (_, *begin), (_, *end) = parts[0], parts[-1]
    texts = [_window(before, begin[0], end[1]), _window(after, begin[2], end[3])]
    return " → ".join(f"`{text.replace('|', chr(92) + '|')}`" if text else "nothing" for text in texts)


def _window(text: str, begin: int, end: int) -> str:
    """Return a part of a text with the words around it."""
    first = [place.start() for place in re.finditer(r"\S+", text) if place.start() <= max(0, begin - _MARGIN)]
    last = [
        place.end() for place in re.finditer(r"\S+", text) if place.end() >= min(len(text), end + _MARGIN)
    ]
    start, stop = (first or [0])[-1], (last or [len(text)])[0]
    return f"{'… ' if start else ''}{text[start:stop]}{' …' if stop < len(text) else ''}"
