"""What is known of an attempt that no living driver watched to its end."""

from __future__ import annotations

from pathlib import Path

import msgspec

from autotune.orchestrator.driver.log_writer import reread
from autotune.policies.diagnosis.scan import Scanner
from autotune.policies.values.diagnosis import Evidence
from autotune.policies.values.events import Event, FailureSeen, StopRequested
from autotune.policies.values.observation import Cancelled, Crashed, Hung, Lost, Outcome


def unwatched_outcome(rows: tuple[Event, ...], *, reason: str) -> Outcome:
    """Return how an attempt ended that no living driver watched to its end, from what was recorded."""
    stop = next((e for e in rows if isinstance(e, StopRequested)), None)
    if stop is not None:
        return Hung(silent_s=0.0, reason=stop.reason) if stop.by == "hang" else Cancelled(by=stop.by)
    return Crashed() if any(isinstance(e, FailureSeen) for e in rows) else Lost(reason=reason)


def evidence_on_record(log: Path, rows: tuple[Event, ...], outcome: Outcome) -> Evidence:
    """Return the evidence of an attempt that another driver watched, from its run.log and its events."""
    scanner = Scanner()
    for line in reread(log):
        scanner.line(line.text, number=line.number, source=line.source)
    seen: Evidence = scanner.evidence()
    recorded = tuple(e.finding for e in rows if isinstance(e, FailureSeen))
    return msgspec.structs.replace(seen, outcome=outcome, findings=seen.findings or recorded)
