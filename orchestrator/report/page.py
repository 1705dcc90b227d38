"""The report as one self-contained HTML file with its data, its style and the code of its charts."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from importlib.resources import files

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autotune.launchers import frameworks
from autotune.orchestrator import messages
from autotune.orchestrator.calls import option_of
from autotune.orchestrator.errors import Failure, UserError, reason_of
from autotune.orchestrator.report.conclusion import conclusion_of
from autotune.orchestrator.report.document import Report
from autotune.orchestrator.report.evidence import evidence_of, training_of
from autotune.orchestrator.report.log_reading import LogReading
from autotune.orchestrator.report.memory import memory_of
from autotune.orchestrator.report.search_story import search_of
from autotune.orchestrator.report.story import Past, story_of
from autotune.orchestrator.report.timeline import timeline_of
from autotune.orchestrator.run import directory
from autotune.orchestrator.units import show_duration, show_gib, show_rate, show_value
from autotune.policies.values.events import Accepted
from autotune.policies.values.history import accepted_of
from autotune.policies.values.run.view import RunView

NAME = "report.html"
_ASSETS = "autotune.orchestrator.report"
# Characters that could end the script or, in JavaScript, a line.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_MARKS = {"good": "✓", "warn": "!", "bad": "✗"}


def write_new(run: directory.RunFolder, *, force: bool) -> Report:
    """Write report.html into a run's folder, readable only by its owner, and return it.

    Raises Failure if the file cannot be read or written, and without `force` also if it is not a report of
    this run.
    """
    path = run.path / NAME
    try:
        own = path.read_bytes().startswith(_head(run.id).encode())
    except FileNotFoundError:
        own = True
    except OSError as error:
        raise Failure(f"cannot read `{path}`: {reason_of(error)}") from None
    if not own and not force:
        raise UserError(f"`{path}` was not written by autotune for this run", hint="--force replaces it")
    report = report_of(run)
    directory.write_private(path, rendered(report).encode())
    return report


def rendered(report: Report) -> str:
    """Return the HTML page; equal reports give equal bytes."""
    environment = Environment(
        loader=PackageLoader(_ASSETS, "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": show_duration,
        "lasted": messages.lasted,
        "gib": show_gib,
        "rate": show_rate,
        "value": show_value,
        "mark": _MARKS.__getitem__,
    }
    scripts = [_asset("plotly-basic.min.js"), _asset("charts.js")]
    page = environment.get_template("page.html").render(
        report=report,
        data=Markup(_json(report)),  # noqa: S704 - escaped, so it cannot end the script
        style=Markup(_asset("page.css")),  # noqa: S704 - our own file
        scripts=[Markup(script) for script in scripts],  # noqa: S704 - our own, and plotly.js
        policy="; ".join(
            (
                "default-src 'none'",
                "style-src 'unsafe-inline'",
                f"script-src {' '.join(map(_digest, scripts))}",
                "img-src data: blob:",
            )
        ),
    )
    return _head(report.run) + page


def _head(run: str) -> str:
    return f"<!doctype html>\n<!-- autotune report of run {run} -->\n"


def _json(report: Report) -> str:
    text = msgspec.json.encode(report).decode()
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _asset(name: str) -> str:
    return files(_ASSETS).joinpath("assets", name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    """Return the source expression that allows one script in the page's content security policy."""
    return f"'sha256-{b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def report_of(run: directory.RunFolder) -> Report:
    """Return the report of a run; raises Failure if its job was never accepted."""
    history = run.history()
    if not history or not isinstance(history[0], Accepted):
        raise UserError(
            f"run {run.id} has nothing to report: its job was never accepted",
            hint=f"`autotune status{option_of(run.path.parent)}` lists the runs",
        )
    accepted = accepted_of(history)
    framework = frameworks.FRAMEWORKS.get(accepted.job.framework)
    if framework is None:
        raise UserError(
            f"run {run.id} uses framework `{accepted.job.framework}`, which this autotune does not support",
            hint="use the version that drove the run",
        )
    logs, past, view = LogReading(framework), Past(history), RunView(history)
    memory = memory_of(past, view)
    # Read this log first, because the bytes of logs are limited and the page shows it first.
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
