"""certificate.json: that the stable configuration trains what the job as written trains."""

from __future__ import annotations

import msgspec

from autotune.launchers.base import Framework
from autotune.orchestrator.run import directory
from autotune.policies.certificate.compose import certificate_of
from autotune.policies.certificate.contents import Certificate
from autotune.policies.values.events import History
from autotune.policies.values.history import accepted_of
from autotune.policies.values.knobs import Knobs

NAME = "certificate.json"


def write(run: directory.RunFolder, history: History, framework: Framework, knobs: Knobs) -> None:
    """Write the certificate of a run's stable knobs."""
    text = msgspec.json.format(msgspec.json.encode(compose(history, framework, knobs)))
    directory.write_private(run.path / NAME, text + b"\n")


def compose(history: History, framework: Framework, knobs: Knobs) -> Certificate:
    """Return the certificate of knobs; the job on record has its secrets masked."""
    job = accepted_of(history).job
    return certificate_of(
        history,
        knobs=knobs,
        settings=framework.settings(job, knobs),
        training=framework.training(job),
    )
