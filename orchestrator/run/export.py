"""The stable configuration as files: the user's own job with what changed, and a script without autotune."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import msgspec

from autotune.launchers.base import Framework
from autotune.orchestrator.config.loader import parse
from autotune.orchestrator.config.yaml_nodes import Document, Path, scalar
from autotune.orchestrator.errors import JobErrors
from autotune.orchestrator.messages import arrow
from autotune.orchestrator.run import directory
from autotune.orchestrator.run.command import command_of
from autotune.policies.search import trials
from autotune.policies.values.events import Accepted, Decided, Ended, GoalReached, History, Started
from autotune.policies.values.evidence import Cancelled, Completed
from autotune.policies.values.types import Job, Knobs, changed


class Edit(NamedTuple):
    """A value to write at a path of a YAML text, with the reason."""

    path: Path
    value: Any
    why: str


def stable_knobs(history: History) -> Knobs | None:
    """Return the knobs of the last attempt that completed or reached the goal, or of a search's best."""
    own = {e.attempt: e.knobs for e in history if isinstance(e, Started) and e.trial is None}
    good = [
        own[e.attempt]
        for e in history
        if e.attempt in own
        and (
            isinstance(e, GoalReached)
            or (isinstance(e, Ended) and isinstance(e.outcome, Completed))
            or (isinstance(e, Ended) and e.outcome == Cancelled(by="goal"))
        )
    ]
    start = good[-1] if good else None
    best = trials.winner(trials.tried(history), start=start)
    return start if best is None else best.knobs


def changes(history: History, framework: Framework, knobs: Knobs) -> list[tuple[str, str, str]]:
    """Return what differs from the job as written: the knob, the change, the framework's own setting."""
    accepted = _accepted(history)
    offered = accepted.profile.supported
    before = accepted.profile.knobs
    rows = []
    for name, (old, new) in changed(before, knobs).items():
        setting = offered[name].setting if name in offered else ""
        rows.append(
            (name, arrow(name, old, new).removeprefix(f"{name} "), "" if setting == name else setting)
        )
    return rows


def write(run: directory.Run, framework: Framework, job: Job, knobs: Knobs) -> None:
    """Write stable.yaml and launch.sh of a run."""
    history = run.history()
    text = stable_text(run.job_text, history, framework, job, knobs)
    directory.write_private(run.path / "stable.yaml", text.encode())
    command = command_of(
        framework, job, knobs, history=history, run=f"{run.id}-stable", attempt=1, resume=False
    )
    script = directory.script(command, python=job.python)
    directory.write_private(run.path / "launch.sh", script.encode(), executable=True)


def stable_text(job_text: str, history: History, framework: Framework, job: Job, knobs: Knobs) -> str:
    """Return the user's job with the changed settings in place; it loads as the stable job."""
    settings = framework.settings(job, knobs)
    reasons = _reasons(history)
    by_setting = {support.setting: name for name, support in _accepted(history).profile.supported.items()}
    edits = [
        Edit(
            ("settings", key),
            value,
            reasons.get(by_setting.get(key, key), "part of the stable configuration"),
        )
        for key, value in settings.items()
    ]
    written = parse_or_none(job_text)
    wanted = msgspec.structs.replace(
        job,
        settings={**job.settings, **settings},
        cluster=job.cluster if written is None else written.cluster,  # what was measured is not the user's
    )
    if written is None or _written_workdir(job_text) != job.workdir:
        edits.append(Edit(("workdir",), job.workdir, "where the job was launched"))
    text = edited(job_text, edits)
    return text if parse_or_none(text) == wanted else _dumped(wanted, edits)


def edited(text: str, edits: list[Edit]) -> str:
    """Return a YAML text with values replaced or inserted, everything else untouched."""
    text = text.removeprefix("\ufeff")
    for edit in edits:
        text = _apply(text, edit)
    return text


def parse_or_none(text: str) -> Job | None:
    """Return the job in a text, if it is one."""
    try:
        return parse(text)
    except JobErrors:
        return None


_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_YAML_1_1 = {"on", "off", "yes", "no", "y", "n"}  # which other readers take for booleans


def flow(value: Any) -> str:
    """Return a value on one line of YAML that every reader understands the same way."""
    if isinstance(value, str):
        return (
            value
            if _PLAIN.fullmatch(value) and scalar(value) == value and value.lower() not in _YAML_1_1
            else _quoted(value)
        )
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(k)}: {flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(flow(item) for item in value) + "]"
    return "null" if value is None else repr(value) if isinstance(value, float) else json.dumps(value)


def _quoted(text: str) -> str:
    """Return a text in double quotes, with what YAML does not allow as escapes."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escapes.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'


def _apply(text: str, edit: Edit) -> str:
    document = Document(text, "job.yaml")
    if document.root is None or document.root.id != "mapping":
        return text
    *parents, name = edit.path
    node = document.root
    for depth, part in enumerate(parents):
        entry = next((v for k, v in node.value if k.value == part), None)
        if entry is None:
            return _insert(text, node, str(part), _nested(edit, depth + 1), "")
        if entry.id != "mapping":
            return (
                _replace(text, entry, " " + flow({str(name): edit.value}), edit.why)
                if not entry.value
                else text
            )
        node = entry
    found = next(((k, v) for k, v in node.value if k.value == str(name)), None)
    if found is None:
        return _insert(text, node, str(name), flow(edit.value), edit.why)
    key, value = found
    old = text[value.start_mark.index : value.end_mark.index].strip()
    return _replace(text, value, flow(edit.value), f"was {' '.join(old.split())}: {edit.why}", key=key)


def _nested(edit: Edit, depth: int) -> str:
    value: Any = edit.value
    for part in reversed(edit.path[depth:]):
        value = {str(part): value}
    return flow(value)


def _replace(text: str, node: Any, new: str, why: str, *, key: Any = None) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    if text[start:end].endswith("\n"):
        new += "\n"
    if key is not None and start <= key.end_mark.index + 1 and text[key.end_mark.index : start].endswith(":"):
        new = f" {new}"
    at = (key or node).start_mark
    return _commented(text[:start] + new + text[end:], at.index - at.column, why)


def _insert(text: str, mapping: Any, name: str, value: str, why: str) -> str:
    """Put a new key behind the last one of a mapping; a flow mapping gets it in front."""
    entry = f"{flow(name)}: {value}"
    if mapping.flow_style:
        brace = mapping.start_mark.index + 1
        separator = ", " if mapping.value else ""
        line = mapping.start_mark.index - mapping.start_mark.column
        return _commented(text[:brace] + entry + separator + text[brace:], line, why)
    first = mapping.value[0][0].start_mark
    indent = text[first.index - first.column : first.index]
    key, last = mapping.value[-1]
    end = _last_leaf(last).end_mark.index
    if indent.strip() or end < key.start_mark.index:  # an alias: its marks are those of its anchor
        return text
    line = end if text[:end].endswith("\n") else text.find("\n", end) + 1
    if not line:
        text, line = text + "\n", len(text) + 1
    return _commented(f"{text[:line]}{indent}{entry}\n{text[line:]}", line, why)


def _last_leaf(node: Any) -> Any:
    while node.id != "scalar" and node.value and not node.flow_style:
        node = node.value[-1] if node.id == "sequence" else node.value[-1][1]
    return node


def _commented(text: str, line: int, why: str) -> str:
    if not why:
        return text
    body = text[line:]
    indent = body[: len(body) - len(body.lstrip(" "))]
    return f"{text[:line]}{indent}# {' '.join(why.split())}\n{body}"


def _reasons(history: History) -> dict[str, str]:
    """Return why each knob has its last value."""
    out: dict[str, str] = {}
    for event in history:
        if isinstance(event, Decided) and event.remedy is not None:
            for name in event.remedy.changes:
                out[name] = f"{event.remedy.name}: {event.remedy.reason}"
    return out


def _accepted(history: History) -> Accepted:
    assert isinstance(history[0], Accepted)
    return history[0]


def _written_workdir(text: str) -> str:
    _, node = Document(text, "job.yaml").find(("workdir",))
    return str(node.value) if node is not None and node.id == "scalar" else ""


def _dumped(job: Job, edits: list[Edit]) -> str:
    """Return a whole job anew, for a text that cannot be edited in place."""
    spec, goal, recovery, search = job.cluster, job.goal, job.recovery, job.search
    whole: dict[str, Any] = {
        "name": job.name,
        "framework": job.framework,
        "command": list(job.command),
        "python": job.python,
        "settings": job.settings,
        "config": job.config,
        "model": job.model,
        "cluster": {
            "address": spec.address,
            "nodes": spec.nodes,
            "gpus_per_node": spec.gpus_per_node,
            "gpu_memory": spec.gpu_memory_bytes,
            "host_memory": spec.host_memory_bytes,
        },
        "env": job.env,
        "workdir": job.workdir,
        "resume": job.resume,
        "goal": {"steps": goal.steps, "headroom": goal.headroom, "then": goal.then.value},
        "recovery": {
            "relaunches": recovery.relaunches,
            "infrastructure_retries": recovery.infrastructure_retries,
            "silence": recovery.silence_s or "auto",
            "allow": [effect.value for effect in recovery.allow],
            "deny": list(recovery.deny),
            "preflight": recovery.preflight.value,
            "climb": recovery.climb,
            "save_every": recovery.save_every or "auto",
            "duration": recovery.duration_s,
        },
        "search": {
            "trials": search.trials,
            "duration": search.duration_s,
            "probe_steps": search.probe_steps,
            "confirm": search.confirm,
            "parallel": search.parallel,
            "vary": None if search.vary is None else list(search.vary),
            "min_gain": search.min_gain,
        },
    }
    comments = "".join(f"# {'.'.join(map(str, e.path))}: {' '.join(e.why.split())}\n" for e in edits)
    return comments + "".join(f"{key}: {flow(value)}\n" for key, value in whole.items())
