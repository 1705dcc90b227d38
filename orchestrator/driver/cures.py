"""What the job itself cured: its records become events, each once."""

from __future__ import annotations

from autotune.launchers.base import OWN_SOURCE
from autotune.orchestrator.driver.log_writer import LogLines
from autotune.policies.diagnosis.job_records import cure_of
from autotune.policies.values.events import CuredInPlace, Event
from autotune.policies.values.run.view import AttemptView


class Cures:
    """The cures of one attempt that are on record; after an attach all records are read once more."""

    def __init__(self, *, known: AttemptView | None, attempt: int) -> None:
        self._attempt = attempt
        cures = known.cures if known is not None else []
        self._known = {(cure.knob, cure.after) for cure in cures}

    def read(self, lines: LogLines) -> list[Event]:
        """Return the new cures that records by autotune's own code tell; other output is not believed."""
        if lines.source != OWN_SOURCE:
            return []
        events: list[Event] = []
        for line in lines:
            cure = cure_of(line.text)
            if cure is None or (cure.knob, cure.after) in self._known:
                continue
            failure = cure.failure
            if failure.step is None:
                continue
            self._known.add((cure.knob, cure.after))
            events.append(
                CuredInPlace(
                    attempt=self._attempt,
                    cause=failure.cause,
                    phase=failure.phase,
                    component=failure.component,
                    rank=failure.rank,
                    step=failure.step,
                    facts=failure.facts,
                    knob=cure.knob,
                    before=cure.before,
                    after=cure.after,
                )
            )
        return events
