"""The documents that `--json` prints, by command, and their JSON Schemas, generated from their types.

`python -m docs.site.json_documents configs/schemas` writes them all.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from autotune.orchestrator.annotate.annotation import Annotation
from autotune.orchestrator.certificate import VerificationDocument
from autotune.orchestrator.cli.init import JobDraft
from autotune.orchestrator.cli.logs import LogLine
from autotune.orchestrator.cli.plan import Comparison, StartingJob
from autotune.orchestrator.cli.remedies import RemedyTable
from autotune.orchestrator.cli.shared.fix_text import FixDocument
from autotune.orchestrator.cli.shared.run_status import RunStatus
from autotune.orchestrator.cli.shared.start import Begun, Submitted
from autotune.orchestrator.cli.skill import SkillDocument
from autotune.orchestrator.doctor.check import Examined
from autotune.orchestrator.errors import ErrorDocument
from autotune.orchestrator.explain.json_output import ExplanationDocument
from autotune.orchestrator.explain.rule_page import CauseDocument, RuleDocument
from autotune.orchestrator.explain.snapshot import SnapshotDocument
from autotune.orchestrator.notify.notification import Notification
from autotune.orchestrator.other_release import OtherRelease
from autotune.orchestrator.planner import Plan
from autotune.orchestrator.report.document import Report
from autotune.policies.values.command import Command
from autotune.policies.values.events import Row
from docs.site.field_comments import describe

# File name -> what is printed, and its type.
DOCUMENTS: Mapping[str, tuple[str, Any]] = {
    "init": ("`autotune init --json`", JobDraft),
    "events": ("a line of `launch`, `search`, `rehearse` and `resume` with --json, and of events.jsonl", Row),
    "command": ("`launch`, `search` and `rehearse` with -n --json", Command),
    "begun": ("`launch`, `search` and `rehearse` with --detach --json", Begun),
    "submitted": ("`launch`, `search` and `rehearse` with --submit URL --json", Submitted),
    "plan": ("`autotune plan job.yaml --json`", Plan),
    "plan-clusters": ("`autotune plan job.yaml --gpus 4xH100,8xH100 --json`", Comparison),
    "plan-release": ("`autotune plan job.yaml --against verl==0.8.0 --json`", OtherRelease),
    "fix": ("`autotune fix LOG FILE --json`", FixDocument),
    "starting-job": ("`autotune plan --model NAME --gpus 8xH100 --json`", StartingJob),
    "doctor": ("`autotune doctor --json`", Examined),
    "explain": ("a line of `autotune explain LOG... --json`", ExplanationDocument),
    "explain-snapshot": ("a line of `autotune explain SNAPSHOT.pickle --json`", SnapshotDocument),
    "explain-rule": ("`autotune explain --rule ID --json`", RuleDocument),
    "explain-cause": ("`autotune explain --rule CAUSE --json`", CauseDocument),
    "status": ("`autotune status --json`", list[RunStatus]),
    "status-run": ("`autotune status RUN --json`", RunStatus),
    "report": ("`autotune report RUN --json`", Report),
    "logs": ("a line of `autotune logs --json`", LogLine),
    "verify": ("`autotune verify FILE --json`", VerificationDocument),
    "remedies": ("`autotune remedies FRAMEWORK --json`", RemedyTable),
    "skill": ("`autotune skill --json`", SkillDocument),
    "error": ("the last line of a command that fails, with --json", ErrorDocument),
    "annotation": ("what `annotate` logs of an attempt in MLflow and SwanLab", Annotation),
    "notification": ("what `notify` gives to a command and sends to a webhook", Notification),
}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a document; raises KeyError for an unknown one."""
    title, type_ = DOCUMENTS[name]
    made = msgspec.json.schema(type_)
    describe(made, type_)
    # Recorded events may be from an older autotune with fewer fields; other documents have all fields.
    _complete(made, required=name != "events")
    return {"$schema": _DIALECT, "title": title, **made}


def _complete(node: Any, *, required: bool) -> None:
    """Clean docstrings as all Pythons do; with `required`, require all fields of all objects."""
    if isinstance(node, list):
        for each in node:
            _complete(each, required=required)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("description"), str):
        node["description"] = inspect.cleandoc(node["description"])
    if required and "properties" in node:
        node["required"] = list(node["properties"])
    for each in node.values():
        _complete(each, required=required)


def files() -> dict[str, str]:
    """Return the texts of all schemas by file name."""
    return {f"{name}.schema.json": json.dumps(schema(name), indent=1) + "\n" for name in DOCUMENTS}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text)
