"""Orders several logs of one failure, so that the log with the first cause leads, and relates the others."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePath

from autotune.orchestrator.errors import UserError
from autotune.orchestrator.explain.analyze import Explanation
from autotune.orchestrator.explain.sanitize import plain
from autotune.policies.values.failure import Cause
from autotune.policies.values.value import Value

_LOGS = (".log", ".out", ".err", ".txt")
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")
# Logs of a Ray session's services, and those that repeat the workers' lines.
_SERVICES = re.compile(
    r"(?:dashboard|monitor|log_monitor|runtime_env|agent|gcs_server|debug_state|ray_client|event_)\w*\b[^/]*$"
)
_MOST = 4096  # maximum logs read of a folder
_DEPTH = 8  # maximum levels below it
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,]\d{1,9})?(Z|[+-]\d\d:?\d\d)?(?!\d)")
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
_STRONG = 0.8  # minimum confidence of a cause that no other cause explains
_SHOWN = 3  # maximum logs named per relation


class Read(Value, frozen=True, kw_only=True):
    """One log of an incident, and the time of its failure if known."""

    explanation: Explanation
    failed_at: datetime


def logs_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the named logs, with a folder replaced by its logs in the order of their names.

    Raises Failure for a folder without logs.
    """
    result: list[str] = []
    for name in names:
        inside = _inside(Path(name)) if name != "-" and Path(name).is_dir() else [name]
        if not inside:
            hint = f"a log ends with {', '.join(_LOGS)}, and may be compressed"
            raise UserError(f"`{plain(name)}` holds no log", hint=hint)
        result += inside
    return tuple(dict.fromkeys(result))


def read_of(explanation: Explanation, lines: list[str]) -> Read:
    """Return a log with the time of its failure: the last in `lines`, else the file's modification time.

    Times without a time zone are local ones, as Python's logging and other programs write them.
    """
    times = [match for line in lines if (match := _TIME.search(line)) is not None]
    if times:
        try:
            at = datetime.fromisoformat(f"{times[-1][1]}{times[-1][2] or ''}").astimezone(UTC)
            return Read(explanation=explanation, failed_at=at)
        except (ValueError, OverflowError):  # no such day, or too early for a time zone
            pass
    path = Path(explanation.file)
    known = path.is_file()
    at = datetime.fromtimestamp(path.stat().st_mtime, tz=UTC) if known else _LONG_AGO
    return Read(explanation=explanation, failed_at=at)


def ordered(reads: Iterable[Read]) -> list[Read]:
    """Return the logs, beginning with the one that shows the first cause."""
    return sorted(reads, key=lambda read: (_rank(read.explanation), read.failed_at))


class Relation(enum.StrEnum):
    """What another log of an incident has to do with its first cause."""

    SAME = "same"  # shows the same failure
    WAITED = "waited"  # its rank waited for the failed one
    OTHER = "other"  # shows errors of another cause
    NONE = "none"  # shows no failure


def others(reads: list[Read]) -> Iterator[tuple[Relation, Explanation]]:
    """Yield the logs after the first, each with its relation to it."""
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
    """Yield a line for each relation, with the number of other logs and some of their names."""
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
    """Return the rank of a log: 0 for a strong cause, then a weak cause, unknown errors, and no errors."""
    diagnosis = explanation.diagnosis
    if explanation.is_answer:
        return 0 if diagnosis.confidence >= _STRONG else _WEAK
    return _NONE if diagnosis.evidence else _SILENT


def _named(logs: list[Explanation]) -> str:
    """Return the names of the first logs, with as many of their folders as distinguish them."""
    paths = [Path(log.file).parts for log in logs[:_SHOWN]]
    deepest = max(map(len, paths), default=0)
    kept = next((n for n in range(1, deepest) if len({path[-n:] for path in paths}) == len(paths)), deepest)
    names = ", ".join(str(PurePath(*path[-kept:])) for path in paths)
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
    """Return whether a file name is that of a job's log, not of a cluster service's."""
    name = PurePath(path).name
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return name.endswith(_LOGS) and not _SERVICES.match(name)


def _is_log(path: Path) -> bool:
    try:
        return is_log_name(path.name) and path.is_file() and path.stat().st_size > 0
    except OSError:
        return False
