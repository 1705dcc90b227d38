"""What an attempt's log adds to the journal: the lines around a failure, phases, losses.

Only logs in one part are read, at most 64 MiB per run, because a report is written at the end of every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from autotune.launchers.base import OWN_SOURCE, Framework
from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.report.document import LogLine
from autotune.orchestrator.run import directory, log_parts
from autotune.policies.values.observation import Marker, PhaseEnded, PhaseStarted, StepDone

_MOST_BYTES = 64 << 20  # about 1 million lines per second are searched for markers
_BEFORE, _AFTER = 4, 3  # lines around the line of the failure
_WIDTH = 400
# Loss metrics of frameworks, in order of preference.
_LOSSES = ("loss", "actor/pg_loss", "actor/loss", "train/pg_loss", "train/loss", "policy_loss")


class LogReading:
    """Reads logs of one run, up to a limit of bytes in total."""

    def __init__(self, framework: Framework, *, most_bytes: int = _MOST_BYTES) -> None:
        self._framework, self._left = framework, most_bytes
        self._markers: dict[Path, tuple[Marker, ...]] = {}

    def context(self, attempt: directory.AttemptFolder, number: int) -> tuple[LogLine, ...]:
        """Return the lines around a line; empty if the log is not read. The log after them is not read."""
        last = number + _AFTER
        return tuple(
            LogLine(number=line.number, text=_text(line.data), failed=line.number == number)
            for line in takewhile(lambda line: line.number <= last, self._lines(attempt))
            if line.number >= number - _BEFORE
        )

    def markers(self, attempt: directory.AttemptFolder) -> tuple[Marker, ...]:
        """Return the phases and steps in the log, which is read only once."""
        result = self._markers.get(attempt.path)
        if result is None:
            result = self._markers[attempt.path] = self._read_markers(attempt)
        return result

    def _read_markers(self, attempt: directory.AttemptFolder) -> tuple[Marker, ...]:
        if not attempt.log.is_file() or attempt.log.stat().st_size > self._left:
            return ()
        result = []
        for line in self._lines(attempt):
            if line.source == OWN_SOURCE:
                continue
            marker = self._framework.marker(line.data.decode("utf-8", "replace"))
            if isinstance(marker, (PhaseStarted, PhaseEnded, StepDone)):
                result.append(marker)
        return tuple(result)

    def _lines(self, attempt: directory.AttemptFolder) -> Iterator[log_parts.Line]:
        if not attempt.log.is_file() or any(attempt.path.glob(f"{attempt.log.name}.*")):
            return
        for line in log_parts.read(attempt.log):
            self._left -= len(line.data) + 1
            if self._left < 0:
                return
            yield line


def loss_of(step: StepDone) -> tuple[str, float] | None:
    """Return the loss of a step and the metric's name."""
    names = [name for name in _LOSSES if name in step.metrics]
    names += sorted(name for name in step.metrics if name.rsplit("/", 1)[-1].endswith("loss"))
    return (names[0], step.metrics[names[0]]) if names else None


def _text(data: bytes) -> str:
    text = plain(data[: 4 * _WIDTH].decode("utf-8", "replace"))
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
