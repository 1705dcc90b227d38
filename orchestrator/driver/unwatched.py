"""What is known of an attempt that no living driver watched to its end."""

from __future__ import annotations

import signal
from collections.abc import Iterable

import msgspec

from autotune.orchestrator.driver.log_writer import reread
from autotune.orchestrator.driver.memory import HostMemory
from autotune.orchestrator.run.directory import AttemptFolder
from autotune.orchestrator.run.memory_record import samples_of
from autotune.policies.diagnosis.scan import Scanner
from autotune.policies.values.diagnosis import Evidence
from autotune.policies.values.events import Ended, Event, FailureSeen, Progressed, StopRequested
from autotune.policies.values.failure import HOST_LIMIT
from autotune.policies.values.observation import Cancelled, Crashed, Hung, Lost, Outcome, Sample


def host_share_at_end(samples: Iterable[Sample]) -> float | None:
    """Return the largest share of a node's host memory in the last seconds that are recorded of it."""
    memory = HostMemory()
    for sample in samples:
        memory.take(sample, sample.at)
    return memory.share(None)


def unwatched_end(attempt: AttemptFolder, rows: tuple[Event, ...], *, reason: str) -> Ended:
    """Return the end of an attempt that no living driver watched to it; raises OSError."""
    steps = [e.step for e in rows if isinstance(e, Progressed)]
    share = host_share_at_end(samples_of(attempt.path, strict=True))
    return Ended(
        attempt=rows[0].attempt,
        outcome=_outcome(rows, reason=reason, host_share=share),
        step=steps[-1] if steps else None,
        unwatched=True,
    )


def _outcome(rows: tuple[Event, ...], *, reason: str, host_share: float | None) -> Outcome:
    stop = next((e for e in rows if isinstance(e, StopRequested)), None)
    if stop is not None:
        return Hung(silent_s=0.0, reason=stop.reason) if stop.by == "hang" else Cancelled(by=stop.by)
    if any(isinstance(e, FailureSeen) for e in rows):
        return Crashed()
    # A container whose memory ran out is killed with all its processes, driver and supervisor among them.
    if host_share is not None and host_share >= HOST_LIMIT:
        return Crashed(signal=signal.SIGKILL)
    return Lost(reason=reason)


def evidence_on_record(attempt: AttemptFolder, rows: tuple[Event, ...], outcome: Outcome) -> Evidence:
    """Return the evidence of an attempt that another driver watched, from its files and events."""
    scanner = Scanner()
    for line in reread(attempt.log):
        scanner.line(line.text, number=line.number, source=line.source)
    seen: Evidence = scanner.evidence()
    recorded = tuple(e.finding for e in rows if isinstance(e, FailureSeen))
    return msgspec.structs.replace(
        seen,
        outcome=outcome,
        findings=seen.findings or recorded,
        host_peak_share=host_share_at_end(samples_of(attempt.path, strict=True)),
    )
