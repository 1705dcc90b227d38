"""Several logs of one failure, or a folder of them: which tells the first cause, and what the rest show."""

from __future__ import annotations

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


def rest(reads: list[Read]) -> Iterator[str]:
    """Yield what the other logs show, a line for each kind."""
    lead, *others = reads
    cause, known = lead.explanation.diagnosis.cause, lead.explanation.is_answer
    alike = [read for read in others if known and read.explanation.diagnosis.cause is cause]
    different = [read for read in others if read not in alike and _rank(read.explanation) < _SILENT]
    silent = len(others) - len(alike) - len(different)
    waited = [read for read in different if cause.is_oom and read.explanation.diagnosis.cause is Cause.HANG]
    if alike:
        yield f"info: {_logs(len(alike))} with the same failure ({_named(alike)})"
    if waited:
        yield f"info: {_logs(len(waited))} of ranks that waited for it ({_named(waited)})"
        different = [read for read in different if read not in waited]
    if different:
        causes = sorted({str(read.explanation.diagnosis.cause) for read in different})
        yield f"info: {_logs(len(different))} with other errors ({', '.join(causes)}: {_named(different)})"
    if silent:
        yield f"info: {_logs(silent)} without a failure"


_WEAK, _NONE, _SILENT = 1, 2, 3


def _rank(explanation: Explanation) -> int:
    """Return how much a log explains: a cause, one that others explain, errors of no known kind, nothing."""
    diagnosis = explanation.diagnosis
    if explanation.is_answer:
        return 0 if diagnosis.confidence >= _STRONG else _WEAK
    return _NONE if diagnosis.evidence else _SILENT


def _logs(count: int) -> str:
    return "1 other log" if count == 1 else f"{count} other logs"


def _named(reads: list[Read]) -> str:
    shown = ", ".join(Path(read.explanation.file).name for read in reads[:_SHOWN])
    return f"{shown}, …" if len(reads) > _SHOWN else shown


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
