"""Where a framework stands beside its folder, and which of those places do not name it yet."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """A file that names each framework: `{name}`, `{package}` or its class, and what it is for.

    `pattern` is searched in the file; empty: it is enough that a file of that name exists.
    """

    file: str
    pattern: str
    purpose: str
    absent: frozenset[str] = frozenset()  # frameworks that need none


_REALLY_TRAINED = frozenset({"trl"})  # by tests/e2e, without a look-alike
_OF_MEGATRON = frozenset(
    {"slime", "relax", "miles"}
)  # the lines are those of its rows: tests/contracts/reads
_IN_POLICIES = frozenset({"verl", "areal", "slime", "relax"})  # their logs are in tests/policies/logs
_PLACES = (
    Place("launchers/frameworks/__init__.py", '"{name}":', "its folder and class"),
    Place(".importlinter", r"\b{package}\b", "the import directions"),
    Place("launchers/frameworks/{package}/rows.py", "", "its knobs"),
    Place("configs/*.yaml", r"^framework: {name}$", "an example"),
    Place("docs/frameworks/{name}.md", "", "its page"),
    Place("mkdocs.yml", r"frameworks/{name}\.md", "its page in the navigation"),
    Place("mkdocs.yml", r"reference/remedies-{name}\.md", "its remedies in the navigation"),
    Place("README.md", r"frameworks/{name}\.md", "the list of pages"),
    Place("docs/init.md", r"(?i)\b{title}\b", "what `init` reads"),
    Place("orchestrator/cli/shared/SKILL.md", r"(?i)\b{title}\b", "the list for assistants"),
    Place("orchestrator/init/entry_points.py", r'"{name}"', "`framework_of`: its program or its file"),
    Place("orchestrator/init/settings.py", r'"{name}"', "`settings_of`: how its command line is read"),
    Place(
        "orchestrator/init/hardware.py",
        r'"{name}"',
        "`hardware_of`: its GPUs",
        frozenset({"ms-swift"}),  # its GPUs are those of torchrun's
    ),
    Place(
        "policies/diagnosis/software/*.py", r"{trace}", "its frames in a traceback, by phase and component"
    ),
    Place("tests/launchers/frameworks/test_{package}*.py", "", "its settings both ways"),
    Place(
        "tests/contracts/test_*.py",
        r"(?i){package}",
        "what is written for it, against its own code",
    ),
    Place(
        "launchers/frameworks/{package}/rows.py",
        r'read_at=\(?\s*"[^"]+:\d+"',
        "`read_at`: the lines of its code that read the settings of the rows",
        _OF_MEGATRON,
    ),
    Place(
        "tests/launchers/frameworks/test_rehearsals.py",
        r'SAVES = \{[^}]*"{name}":',
        "SAVES: how a rehearsal makes it save",
        _REALLY_TRAINED,
    ),
    Place(
        "tests/launchers/frameworks/test_rehearsals.py",
        r'RELOADS = \{[^}]*"{name}":',
        "RELOADS: how its second start continues",
        _REALLY_TRAINED,
    ),
    Place("tests/lookalikes/jobs.py", r'"{name}"', "a job of its look-alike", _REALLY_TRAINED),
    Place("tests/orchestrator/explain/words/{name}.txt", "", "its logs by phase", _IN_POLICIES),
    Place(
        "tests/golden/lookalikes.txt",
        r"{name}\b",
        "its decisions: python -m benchmarks.golden --write",
        _REALLY_TRAINED,
    ),
    Place("configs/job.schema.json", r'"{name}"', "make schema"),
)


def missing(root: Path, name: str) -> list[str]:
    """Return what is missing of a framework: a file and what it is for, then every TODO in its files."""
    package = name.replace("-", "_")
    words = {
        "name": name,
        "package": package,
        "title": re.sub("-", ".?", name),
        "trace": _trace(root, name, package),
    }
    left = [
        f"{place.file.format_map(words)}: {place.purpose}"
        for place in _PLACES
        if name not in place.absent and not _names(root, place, words)
    ]
    return left + list(_todos(root, name, package))


def _names(root: Path, place: Place, words: dict[str, str]) -> bool:
    files = sorted(root.glob(place.file.format_map(words)))
    pattern = place.pattern
    for word, value in words.items():
        pattern = pattern.replace("{" + word + "}", value)
    return any(not pattern or re.search(pattern, file.read_text(), re.M) for file in files)


def _trace(root: Path, name: str, package: str) -> str:
    """Return a pattern of the modules whose frames a framework's logs hold."""
    table = (root / "launchers" / "frameworks" / "__init__.py").read_text()
    row = re.search(rf'"{name}": Traces\(\((.*?)\)', table, re.DOTALL)
    modules = re.findall(r'"([a-z]\w+)[/.]', row[1]) if row else []
    return "|".join(sorted({package, *modules}))


def _todos(root: Path, name: str, package: str) -> Iterator[str]:
    for pattern in (
        "launchers/frameworks/__init__.py",
        f"launchers/frameworks/{package}/**/*.*",
        f"configs/{name}-*.yaml",
        f"docs/frameworks/{name}.md",
        f"tests/**/test_{package}.py",
        f"tests/lookalikes/{package}_*.py",
        f"tests/orchestrator/explain/words/{name}.txt",
    ):
        for file in sorted(root.glob(pattern)):
            if file.suffix == ".pyc":
                continue
            of_all = file.parent.name == "frameworks" and file.suffix == ".py"
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if "TODO" in line and (not of_all or f'"{name}"' in line):
                    text = line.partition("TODO")[2].strip(': ",')
                    yield f"{file.relative_to(root)}:{number}: {text or line.strip()}"
