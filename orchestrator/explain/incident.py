"""Several logs of one failure, or a folder of them: which tells the first cause, and what the rest show."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePath

from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.explain.analyze import Explanation
from autotune.orchestrator.explain.sanitize import plain
from autotune.policies.values.failure import Cause
from autotune.policies.values.value import Value

_LOGS = (".log", ".out", ".err", ".txt")
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
# Of a Ray session: what its services say of themselves, and what repeats the workers' lines.
_SERVICES = re.compile(
    r"(?:dashboard|monitor|log_monitor|runtime_env|agent|gcs_server|debug_state|ray_client|event_)\w*\b[^/]*$"
)
_MOST = 4096  # logs of a folder
_DEPTH = 8
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
_STRONG = 0.8  # confidence of a cause that no other one explains
_SHOWN = 3  # logs named of each kind


class Read(Value, frozen=True, kw_only=True):
    """One log of an incident, and when it failed as far as that is known."""

    explanation: Explanation
    failed_at: datetime


def logs_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the logs that are named, those of a folder in the order of their names.

    Raises Failure for a folder that holds no log.
    """
    result: list[str] = []
    for name in names:
        inside = _inside(Path(name)) if name != "-" and Path(name).is_dir() else [name]
        if not inside:
            hint = f"a log ends with {', '.join(_LOGS)}, and may be compressed"
            raise Failure(f"`{plain(name)}` holds no log", hint=hint, code=ExitCode.USAGE)
        result += inside
    return tuple(dict.fromkeys(result))


def read_of(explanation: Explanation, lines: list[str]) -> Read:
    """Return a log with the time of its failure: of the last line up to it that has one, else of its file."""
    times = [match[0] for line in lines if (match := _TIME.search(line)) is not None]
    if times:
        try:
            at = datetime.fromisoformat(times[-1]).replace(tzinfo=UTC)
            return Read(explanation=explanation, failed_at=at)
        except ValueError:  # no such day
            pass
    path = Path(explanation.file)
    known = path.is_file()
    at = datetime.fromtimestamp(path.stat().st_mtime, tz=UTC) if known else _LONG_AGO
    return Read(explanation=explanation, failed_at=at)


def ordered(reads: Iterable[Read]) -> list[Read]:
    """Return the logs with the one first that tells the first cause."""
    return sorted(reads, key=lambda read: (_rank(read.explanation), read.failed_at))


class Relation(enum.StrEnum):
    """What another log of an incident has to do with its first cause."""

    SAME = "same"  # the same failure
    WAITED = "waited"  # for a rank that failed
    OTHER = "other"  # errors of another cause
    NONE = "none"  # no failure


def others(reads: list[Read]) -> Iterator[tuple[Relation, Explanation]]:
    """Yield the logs behind the one that leads, each with what it has to do with it."""
    lead, *rest = (read.explanation for read in reads)
    cause = lead.diagnosis.cause
    for other in rest:
        if lead.is_answer and other.diagnosis.cause is cause:
            yield Relation.SAME, other
        elif _rank(other) == _SILENT:
            yield Relation.NONE, other
        elif cause.is_oom and other.diagnosis.cause is Cause.HANG:
            yield Relation.WAITED, other
        else:
            yield Relation.OTHER, other


def summary(reads: list[Read]) -> Iterator[str]:
    """Yield what the other logs show, a line for each relation."""
    groups: dict[Relation, list[Explanation]] = {relation: [] for relation in Relation}
    for relation, other in others(reads):
        groups[relation].append(other)
    for relation, logs in groups.items():
        causes = ", ".join(sorted({str(log.diagnosis.cause) for log in logs}))
        words = {
            Relation.SAME: f"with the same failure ({_named(logs)})",
            Relation.WAITED: f"of ranks that waited for it ({_named(logs)})",
            Relation.OTHER: f"with other errors ({causes}: {_named(logs)})",
            Relation.NONE: "without a failure",
        }
        if logs:
            count = "1 other log" if len(logs) == 1 else f"{len(logs)} other logs"
            yield f"info: {count} {words[relation]}"


_WEAK, _NONE, _SILENT = 1, 2, 3


def _rank(explanation: Explanation) -> int:
    """Return how much a log explains: a cause, one that others explain, errors of no known kind, nothing."""
    diagnosis = explanation.diagnosis
    if explanation.is_answer:
        return 0 if diagnosis.confidence >= _STRONG else _WEAK
    return _NONE if diagnosis.evidence else _SILENT


def _named(logs: list[Explanation]) -> str:
    names = ", ".join(Path(log.file).name for log in logs[:_SHOWN])
    return f"{names}, …" if len(logs) > _SHOWN else names


def _inside(folder: Path) -> list[str]:
    result = []
    for path in sorted(folder.rglob("*")):
        if len(path.relative_to(folder).parts) > _DEPTH or not _is_log(path):
            continue
        result.append(str(path))
        if len(result) >= _MOST:
            break
    return result


def is_log_name(path: str) -> bool:
    """Return whether a file of this name is a log of a job, not of a cluster's services."""
    name = PurePath(path).name
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return name.endswith(_LOGS) and not _SERVICES.match(name)


def _is_log(path: Path) -> bool:
    try:
        return is_log_name(path.name) and path.is_file() and path.stat().st_size > 0
    except OSError:
        return False
