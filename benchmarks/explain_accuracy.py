"""How often `explain` is right on labelled failure logs: bare, and buried in noise made here.

`python -m benchmarks.explain_accuracy` reads benchmarks/logs, FOLDER another folder: one JSON file per case
(text, is_oom, resource, phase, component, figures in bytes, remedy_family, strict_cause, strict_phase;
first_helps: what an expert would type first, names of remedies or a `/pattern/` of the text; second_helps:
the same, written another day without a look at the first; holder: a word of the command that holds most of
a host), in folders of their own where there are several kinds. It prints a table for each kind. Where two
labels of a log differ on the help that is printed, the log is not scored by them.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autotune.orchestrator.explain.analyze import Explanation, explain
from autotune.orchestrator.explain.headline import headline
from autotune.orchestrator.explain.reader import read_from
from autotune.orchestrator.explain.text_output import render_explanation
from autotune.policies.values.diagnosis import Diagnosis
from autotune.policies.values.failure import Cause
from benchmarks.noise import PREFIXES, buried, healthy

_FIGURES = (
    "requested_bytes",
    "capacity_bytes",
    "free_bytes",
    "allocated_bytes",
    "reserved_unallocated_bytes",
)
_LOGS = Path(__file__).parent / "logs"
_LEADING = ("held_out", "seen", "rewritten")  # what no rule has seen comes first
_ROUNDING_BYTES = 1  # of sums of decimal figures
_FIRST = 2  # remedies of which one must be what an expert would take
_HELP = re.compile(r"^(?:help|hint): ", re.MULTILINE)
_LABELS = ("first_helps", "second_helps")
_TWICE = "first help, of logs whose two labels agree on it"
_HEALTHY_LOGS, _HEALTHY_LINES = 20, 5000


class Case(NamedTuple):
    """One labelled log."""

    name: str
    text: str
    label: dict[str, Any]


class Score(NamedTuple):
    """Right answers of those asked for, and what went wrong."""

    right: int
    asked: int
    wrong: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Return the share that is right."""
        return self.right / self.asked if self.asked else 1.0


def cases(folder: Path) -> list[Case]:
    """Return the labelled logs of a folder."""
    result = []
    for path in sorted(folder.glob("*.json")):
        label = json.loads(path.read_text())
        if isinstance(label, dict) and "text" in label:
            result.append(Case(name=path.stem, text=label["text"], label=label))
    return result


def kinds(folder: Path) -> dict[str, list[Case]]:
    """Return the labelled logs of a folder, or of each folder in it, those first that no rule has seen."""
    if own := cases(folder):
        return {folder.name: own}
    inner = (path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else ()
    ordered = sorted(inner, key=lambda path: (*(path.name != name for name in _LEADING), path.name))
    return {path.name: labelled for path in ordered if (labelled := cases(path))}


def explained(log: bytes) -> Explanation:
    """Return what `autotune explain` finds in a log of which nothing else is known."""
    return explain(read_from(io.BytesIO(log), name="log"), framework=None, model=None)


def first_remedies(explanation: Explanation) -> set[str]:
    """Return the names of the remedies that are named first."""
    names = dict.fromkeys(remedied.cure.name for remedied in explanation.remedies)
    return set(list(names)[:_FIRST])


def first_help(explanation: Explanation) -> str:
    """Return the first `help:` or `hint:` of an explanation with the lines below it; empty without one."""
    _, *blocks = _HELP.split(render_explanation(explanation, verbose=True))
    return blocks[0] if blocks else ""


def _is_accepted(explanation: Explanation, accepted: Sequence[str]) -> bool:
    """Return whether the first help is one that an expert would type."""
    name = explanation.remedies[0].cure.name if explanation.remedies else ""
    text = first_help(explanation)
    return any(
        re.search(each.strip("/"), text) is not None if each.startswith("/") else each == name
        for each in accepted
    )


def scores(labelled: Sequence[Case], log_of: Callable[[Case], bytes]) -> dict[str, Score]:
    """Return the score of every row of the table, for one way of showing the logs."""
    explanations = {case.name: explained(log_of(case)) for case in labelled}
    given = {name: explanation.diagnosis for name, explanation in explanations.items()}
    strict = [case for case in labelled if case.label.get("strict_cause")]
    phased = [case for case in labelled if case.label.get("strict_phase")]
    positives = [case for case in strict if given[case.name].cause.is_oom]
    meant = [case for case in strict if case.label["is_oom"]]
    placed = [case for case in phased if case.label.get("component", "unknown") != "unknown"]
    curable = [case for case in strict if set(case.label.get("remedy_family", ["none"])) != {"none"}]
    helped = [case for case in labelled if case.label.get("first_helps")]
    held = [case for case in labelled if case.label.get("holder")]
    rows = {
        "is it an OOM: recall": _score(meant, lambda case: given[case.name].cause.is_oom),
        "is it an OOM: precision": _score(positives, lambda case: bool(case.label["is_oom"])),
        "resource": _score(strict, lambda case: given[case.name].cause.resource == case.label["resource"]),
        "phase": _score(
            phased,
            lambda case: (not case.label["is_oom"] and case.label["phase"] == "none")
            or given[case.name].phase.value == case.label["phase"],
        ),
        "component": _score(placed, lambda case: given[case.name].component.value == case.label["component"]),
        "bytes exact": _figures(labelled, given),
        f"one of the first {_FIRST} remedies": _score(
            curable,
            lambda case: bool(
                (first_remedies(explanations[case.name]) or {"none"}) & set(case.label["remedy_family"])
            ),
        ),
    }  # fmt: skip
    if helped:
        rows["first help as an expert types it"] = _score(
            helped, lambda case: _is_accepted(explanations[case.name], case.label["first_helps"])
        )
    if twice := [case for case in helped if _LABELS[1] in case.label]:
        verdicts = {
            case.name: {_is_accepted(explanations[case.name], case.label[name]) for name in _LABELS}
            for case in twice
        }
        agreed = [case for case in twice if len(verdicts[case.name]) == 1]
        rows[_TWICE] = _score(agreed, lambda case: True in verdicts[case.name])
    if held:
        rows["holder of host memory named"] = _score(
            held, lambda case: case.label["holder"] in headline(explanations[case.name])
        )
    return rows


def _score(asked: Sequence[Case], right: Callable[[Case], bool]) -> Score:
    wrong = tuple(case.name for case in asked if not right(case))
    return Score(right=len(asked) - len(wrong), asked=len(asked), wrong=wrong)


def _figures(labelled: Sequence[Case], diagnoses: dict[str, Diagnosis]) -> Score:
    asked, wrong = 0, []
    for case in labelled:
        for name in _FIGURES:
            if case.label.get(name) is not None:
                asked += 1
                figure = getattr(diagnoses[case.name].facts, name)
                if figure is None or abs(figure - case.label[name]) > _ROUNDING_BYTES:
                    wrong.append(f"{case.name}:{name}")
    return Score(right=asked - len(wrong), asked=asked, wrong=tuple(wrong))


def merged(parts: Iterable[dict[str, Score]]) -> dict[str, Score]:
    """Return the scores of several ways of showing the same logs as one."""
    total: dict[str, Score] = {}
    for part in parts:
        for name, score in part.items():
            old = total.get(name, Score(right=0, asked=0))
            total[name] = Score(
                right=old.right + score.right, asked=old.asked + score.asked, wrong=(*old.wrong, *score.wrong)
            )
    return total


def false_alarms() -> Iterator[str]:
    """Yield what healthy logs with every tempting word were taken for; nothing is right."""
    for seed in range(_HEALTHY_LOGS):
        log = "\n".join(healthy(seed, lines=_HEALTHY_LINES)).encode()
        diagnosis = explained(log).diagnosis
        if diagnosis.cause is not Cause.UNKNOWN:
            yield f"seed {seed}: {diagnosis.cause}: {diagnosis.evidence[0].text[:120]}"


def table(kinds: dict[str, list[Case]], *, seeds: int, details: bool) -> Iterator[str]:
    """Yield the lines of one table: two columns for each kind of log, without seeds one."""
    bare = {kind: scores(labelled, lambda case: case.text.encode()) for kind, labelled in kinds.items()}
    styles = {kind: _noisy(labelled, seeds=seeds) for kind, labelled in kinds.items()} if seeds else {}
    columns: list[tuple[str, dict[str, Score]]] = []
    for kind, labelled in kinds.items():
        columns.append((f"{kind}, {len(labelled)} cases", bare[kind]))
        if seeds:
            columns.append((f"{kind}, buried in noise", merged(styles[kind].values())))
    yield f"| | {' | '.join(head for head, _ in columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for name in dict.fromkeys(name for column in bare.values() for name in column):
        yield f"| {name} | {' | '.join(_cell(column.get(name)) for _, column in columns)} |"
    twice = sum(_LABELS[1] in case.label for labelled in kinds.values() for case in labelled)
    if twice:
        scored = sum(rows[_TWICE].asked for rows in bare.values() if _TWICE in rows)
        yield f"\nlabelled twice: {twice} logs; labels that differ on the first help: {twice - scored}"
    alarms = list(false_alarms())
    yield f"\nfalse alarms on {_HEALTHY_LOGS} healthy logs: {len(alarms)}"
    yield from alarms
    if details:
        for kind, labelled in bare.items():
            yield from _details(kind, {"not buried": labelled, **styles.get(kind, {})})


def _noisy(labelled: Sequence[Case], *, seeds: int) -> dict[str, dict[str, Score]]:
    """Return the scores of logs that are shown in every way."""
    return {
        style: merged(scores(labelled, _hidden(style, seed)) for seed in range(seeds)) for style in PREFIXES
    }


def _details(kind: str, parts: dict[str, dict[str, Score]]) -> Iterator[str]:
    for style, part in parts.items():
        for name, score in part.items():
            if score.wrong:
                counted = Counter(score.wrong)
                names = ", ".join(f"{case} x{n}" for case, n in counted.items())
                yield f"{kind}, {style}: {name}: {names}"


def _hidden(style: str, seed: int) -> Callable[[Case], bytes]:
    return lambda case: buried(
        case.text, seed=seed, style=style, component=case.label.get("component", "unknown")
    )


def _cell(score: Score | None) -> str:
    return "" if score is None else f"{score.right}/{score.asked} = {score.share:.3f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of a folder of labelled logs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=_LOGS,
        help="labelled logs, one JSON file each (benchmarks/logs)",
    )
    parser.add_argument("--seeds", type=int, default=2, help="noisy logs per case and style; 0: none")
    parser.add_argument("--details", action="store_true", help="name the cases that went wrong")
    args = parser.parse_args(argv)
    labelled = kinds(args.folder)
    if not labelled:
        parser.error(f"{args.folder}: no labelled logs")
    for line in table(labelled, seeds=args.seeds, details=args.details):
        print(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
