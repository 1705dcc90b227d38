"""A report from a run's folder alone: the same folder gives the same report."""

from __future__ import annotations

from autotune.launchers import frameworks
from autotune.orchestrator import messages
from autotune.orchestrator.calls import option_of
from autotune.orchestrator.errors import ExitCode, Failure
from autotune.orchestrator.report.conclusion import conclusion_of
from autotune.orchestrator.report.document import Report
from autotune.orchestrator.report.evidence import evidence_of
from autotune.orchestrator.report.log_reading import LogReading
from autotune.orchestrator.report.memory import memory_of
from autotune.orchestrator.report.past import Past
from autotune.orchestrator.report.search_story import search_of
from autotune.orchestrator.report.story import story_of
from autotune.orchestrator.report.timeline import timeline_of
from autotune.orchestrator.report.training import training_of
from autotune.orchestrator.run import directory
from autotune.policies.values.events import Accepted
from autotune.policies.values.history import accepted_of
from autotune.policies.values.run.view import RunView


def report_of(run: directory.RunFolder) -> Report:
    """Return what a run has to tell; raises Failure for one that was not accepted."""
    history = run.history()
    if not history or not isinstance(history[0], Accepted):
        raise Failure(
            f"run {run.id} has nothing to report: its job was never accepted",
            hint=f"`autotune status{option_of(run.path.parent)}` lists the runs",
            code=ExitCode.USAGE,
        )
    accepted = accepted_of(history)
    framework = frameworks.FRAMEWORKS.get(accepted.job.framework)
    if framework is None:
        raise Failure(
            f"run {run.id} uses framework `{accepted.job.framework}`, which this autotune does not support",
            hint="use the version that drove the run",
            code=ExitCode.USAGE,
        )
    logs, past, view = LogReading(framework), Past(history), RunView(history)
    memory = memory_of(past, view)
    # The share of logs that is read goes to what the page shows first.
    markers = logs.markers(run.attempt(memory.chosen)) if memory.chosen else ()
    story, left_out = story_of(run, past, view, logs)
    return Report(
        run=run.id,
        name=accepted.job.name,
        framework=accepted.job.framework,
        cluster=messages.cluster(accepted.cluster),
        mode=accepted.mode,
        submitted=accepted.at,
        conclusion=conclusion_of(run, view, framework),
        story=story,
        story_left_out=left_out,
        memory=memory,
        timeline=timeline_of(run, view.attempts[memory.chosen], markers) if memory.chosen else None,
        search=search_of(view),
        training=training_of(run, view, logs),
        evidence=evidence_of(run, history, view),
    )
