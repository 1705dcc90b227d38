"""Where every claim of a report comes from: commands, environment, samples, journal."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from pathlib import Path

import msgspec

from autotune.orchestrator.explain.sanitize import plain
from autotune.orchestrator.report.document import AttemptEvidence, Evidence, Fact
from autotune.orchestrator.run import directory
from autotune.policies.values.events import History, Started
from autotune.policies.values.history import accepted_of
from autotune.policies.values.run.view import RunView

_FIRST, _LAST = 10, 50  # attempts that are listed
_PAGE = "report.html"
_LONGEST = 16 << 10  # characters of a command


def evidence_of(run: directory.RunFolder, history: History, view: RunView) -> Evidence:
    """Return what the run's folder holds; the report itself and locks left out."""
    accepted = accepted_of(history)
    started = [attempt.started for attempt in view.attempts.values()]
    listed = started if len(started) <= _FIRST + _LAST else [*started[:_FIRST], *started[-_LAST:]]
    environment = [Fact(name=name, value=plain(value)) for name, value in sorted(accepted.job.env.items())]
    environment.append(Fact(name="working directory", value=accepted.job.workdir))
    return Evidence(
        folder=path_text(run.path.resolve()),
        files=tuple(
            sorted(
                path_text(path.name)
                for path in run.path.iterdir()
                if path.is_file()
                and not path.name.startswith(".")
                and path.name not in (_PAGE, "lock", "stop")
            )
        ),
        events=dict(sorted(Counter(msgspec.to_builtins(e)["type"] for e in history).items())),
        attempts=tuple(_attempt(run, event) for event in listed),
        left_out=len(started) - len(listed),
        environment=tuple(environment),
        unsupported=tuple(Fact(name=n, value=why) for n, why in sorted(accepted.profile.unsupported.items())),
    )


def path_text(path: str | Path) -> str:
    """Return a path as text; what is no UTF-8 in it is replaced."""
    return os.fsencode(path).decode("utf-8", "replace")


def _attempt(run: directory.RunFolder, started: Started) -> AttemptEvidence:
    folder = run.attempt(started.attempt).path
    names = (
        sorted(path_text(path.name) for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    )
    whole = shlex.join(started.command)
    command = plain(whole[: 4 * _LONGEST])  # a secret that is cut lies far behind what is shown
    if len(whole) > _LONGEST:
        command = f"{command[:_LONGEST]}… ({len(whole)} characters; command.sh has all of them)"
    return AttemptEvidence(
        number=started.attempt,
        trial=started.trial,
        command=command,
        files=tuple(f"attempts/{folder.name}/{name}" for name in names if not name.startswith(".")),
    )
