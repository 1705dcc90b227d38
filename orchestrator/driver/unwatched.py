"""Reconstructs the end of an attempt that no driver watched, from its files."""

from __future__ import annotations

import signal
from collections.abc import Iterable

import msgspec

from autotune.orchestrator.clock import seconds_of
from autotune.orchestrator.driver.context import RunContext
from autotune.orchestrator.driver.log_writer import reread
from autotune.orchestrator.driver.memory import HostMemory
from autotune.orchestrator.run.directory import AttemptFolder
from autotune.orchestrator.run.memory_record import samples_of, so_far
from autotune.policies.diagnosis.scan import Scanner
from autotune.policies.values.diagnosis import Evidence
from autotune.policies.values.events import Ended
from autotune.policies.values.failure import HOST_LIMIT
from autotune.policies.values.observation import Cancelled, Crashed, Hung, Lost, Outcome, Sample
from autotune.policies.values.run.view import AttemptView


def host_share_at_end(samples: Iterable[Sample]) -> float | None:
    """Return the largest share of a node's host memory in the last recorded seconds."""
    memory = HostMemory()
    for sample in samples:
        memory.take(sample, sample.at)
    return memory.share(None)


def unwatched_end(context: RunContext, attempt: AttemptView, *, reason: str) -> Ended:
    """Return the end of an attempt that no driver watched; raises OSError."""
    folder = context.folder.attempt(attempt.number)
    share = host_share_at_end(samples_of(folder.path, strict=True))
    return Ended(
        attempt=attempt.number,
        outcome=_outcome(attempt, reason=reason, host_share=share),
        seconds=observed_s(context, attempt),
        step=attempt.step,
        unwatched=True,
    )


def observed_s(context: RunContext, attempt: AttemptView) -> float | None:
    """Return the seconds up to the last row or sample of an attempt; None if there is none.

    Samples are dated by a node's clock, which may be wrong, so the driver's clock limits the result.
    """
    nodes = so_far(context.folder.attempt(attempt.number).path)
    sampled_s = max((span.until - span.at for span in nodes), default=0.0)
    most_s = context.clock.now() - seconds_of(attempt.started.at)
    return max(context.watched_s(attempt.number), round(min(sampled_s, most_s), 3)) or None


def _outcome(attempt: AttemptView, *, reason: str, host_share: float | None) -> Outcome:
    stop = attempt.stop
    if stop is not None:
        return Hung(silent_s=0.0, reason=stop.reason) if stop.by == "hang" else Cancelled(by=stop.by)
    if attempt.failures:
        return Crashed()
    # A container that exceeds its memory limit is killed with all its processes, including the driver.
    if host_share is not None and host_share >= HOST_LIMIT:
        return Crashed(signal=signal.SIGKILL)
    return Lost(reason=reason)


def evidence_on_record(folder: AttemptFolder, attempt: AttemptView, outcome: Outcome) -> Evidence:
    """Return the evidence of an attempt that another driver watched, from its files and events."""
    scanner = Scanner()
    for line in reread(folder.log):
        scanner.line(line.text, number=line.number, source=line.source)
    read: Evidence = scanner.evidence()
    recorded = tuple(failure.finding for failure in attempt.failures)
    return msgspec.structs.replace(
        read,
        outcome=outcome,
        findings=read.findings or recorded,
        host_peak_share=host_share_at_end(samples_of(folder.path, strict=True)),
    )
