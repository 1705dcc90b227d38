"""Render a draft as a commented job.yaml, with environment variables in place of secrets."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import yaml

from autotune.launchers.base import DECIDES_MEMORY
from autotune.orchestrator.config.cards import Gpus
from autotune.orchestrator.config.loader import unfilled
from autotune.orchestrator.config.secrets import as_yaml, without_secrets
from autotune.orchestrator.init.bash.state import Note, Use
from autotune.orchestrator.init.draft import Draft
from autotune.orchestrator.placeholders import is_unfilled
from autotune.policies.explain.secrets import masked
from autotune.policies.values.job import Job

_MOST_NOTES = 60  # notes in the head of the file; the rest is only printed


def job_text(draft: Draft, *, gpus: Gpus | None = None, checked: str = "") -> str:
    """Return the text of the job file, which the user may edit freely.

    `checked` is the framework's release that its settings were checked against; empty: not checked.
    """
    lines = [f"# Made by `autotune init` from {draft.source}; nothing was run."]
    lines += _notes(draft.notes)
    lines += [f"name: {_scalar(draft.name)}"]
    if draft.other or draft.framework == "command":
        lines += _as_command(draft)
    if checked:
        lines.append(f"# Settings checked against {checked}.")
    lines.append(f"framework: {draft.framework}")
    if draft.command:
        lines.append(f"command: {_flow(draft.command)}")
    if draft.server:
        lines.append(f"server: {_flow(draft.server)}")
    if draft.python:
        lines.append(f"python: {_scalar(draft.python)}")
    if draft.config:
        lines.append(f"config: {_scalar(draft.config)}")
    lines.append(f"workdir: {_scalar(draft.workdir)}")
    lines.append(_cluster(draft, gpus))
    if draft.env:
        lines += ["env:"]
        lines += [f"  {name}: {_value(as_yaml(value))}" for name, value in draft.env.items()]
    if draft.settings:
        lines += ["settings:  # under the framework's own names"]
        lines += _settings(draft)
    lines += [
        "# lengths: {prompt: 512, response: 2000}  # mean tokens; with them the prediction is better",
        "goal: {steps: 20, headroom: 5%}  # stable after 20 steps with 5 % of every memory free",
    ]
    text = "\n".join(lines) + "\n"
    edits = sorted({complaint.line + 1 for complaint in unfilled(text)})
    if not edits:
        return text
    places = (
        f"line {', '.join(map(str, edits))}" if len(edits) == 1 else f"lines {', '.join(map(str, edits))}"
    )
    first, rest = text.split("\n", 1)
    marked = [
        f"{line}{'' if '#' in line else '  # edit'}" if number in edits else line
        for number, line in enumerate(rest.splitlines(), start=3)
    ]
    return "\n".join((first, f"# Edit before a launch: {places}.", *marked)) + "\n"


def _settings(draft: Draft) -> list[str]:
    """Return the lines of the settings: those that need an edit, those that affect memory, then the rest."""
    blocks: dict[str, list[str]] = {"needs an edit": [], "decides memory": [], "the rest": []}
    for key, value in draft.settings.items():
        first = (
            "needs an edit"
            if is_unfilled(value)
            else "decides memory"
            if DECIDES_MEMORY.search(key)
            else "the rest"
        )
        blocks[first].append(key)
    lines = []
    for title, names in blocks.items():
        if names and len(names) < len(draft.settings):
            lines.append(f"  # {title}")
        for key in names:
            formula = draft.formulas.get(key)
            comment = f"  # was: {formula}" if formula else ""
            lines.append(f"  {_scalar(key)}: {_value(draft.settings[key])}{comment}")
    return lines


def _as_command(draft: Draft) -> list[str]:
    what = (
        f"{draft.other} has no adapter yet: it" if draft.other else "No framework was recognised: the program"
    )
    return [
        f"# {what} is run as any command is. Put {{knob}} placeholders where autotune may change a value,",
        "# such as '{tokens_per_microbatch}', and the present value under `settings:` (docs/job.md).",
    ]


def _notes(notes: tuple[Note, ...]) -> list[str]:
    if not notes:
        return []
    lines = ["# Please check:"]
    lines += [f"#   {place(note)}: {' '.join(note.message.split())}" for note in notes[:_MOST_NOTES]]
    return lines


def place(note: Note) -> str:
    """Return the place of a note as `FILE:LINE`."""
    return f"{note.file}:{note.line}"


def _cluster(draft: Draft, gpus: Gpus | None) -> str:
    hardware = draft.hardware
    stated = {
        "nodes": hardware.nodes or (gpus.nodes if gpus else None),
        "gpus_per_node": hardware.gpus_per_node or (gpus.per_node if gpus else None),
        "gpu": gpus.card.name if gpus else hardware.gpu,
        "host_memory": hardware.host_memory,
    }
    inside = ", ".join(f"{key}: {value}" for key, value in stated.items() if value is not None)
    hint = "" if stated["gpu"] else "  # gpu: H100-80GB lets `plan` predict away from the cluster"
    return f"cluster: {{{inside}}}{hint}"


def _flow(words: tuple[str, ...]) -> str:
    return "[" + ", ".join(_text(word) for word in words) + "]"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, str):
        return _text(value)
    return _scalar(value)


def _text(value: str) -> str:
    """Return a text that all YAML readers read as text, except numbers such as 1e-6, which stay plain."""
    if re.fullmatch(r"-?\d+(?:\.\d+)?[eE][-+]?\d+", value):
        return value
    if re.fullmatch(r"[-+.\d].*|(?i:true|false|null|yes|no|on|off|none|y|n|~)|", value, re.DOTALL):
        return "'" + value.replace("'", "''") + "'" if "\n" not in value else _scalar(value)
    return _scalar(value)


def _scalar(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True).strip()
    text = text.removesuffix("...").strip()
    if isinstance(value, str) and ("\n" in text or (text[:1] not in "'\"" and re.search(r"[,\[\]{}]", text))):
        text = yaml.safe_dump(value, default_style='"', width=10**9, allow_unicode=True).strip()
    return text


def with_variables(draft: Draft) -> Draft:
    """Return a draft with its secrets replaced by variables, and a note on each of them."""
    job, variables = without_secrets(
        Job(name="", framework="", command=draft.command, settings=draft.settings, env=draft.env)
    )
    notes = [msgspec.structs.replace(note, message=masked(note.message)) for note in draft.notes]
    for name in variables:
        message = f"a secret is left out: `export {name}=...` where autotune runs"
        use = draft.assigned.get(name, Use(file=draft.source, line=1))
        notes.append(Note(file=use.file, line=use.line, message=message))
    return msgspec.structs.replace(
        draft,
        command=job.command,
        settings=job.settings,
        env=job.env,
        formulas={name: masked(formula) for name, formula in draft.formulas.items()},
        notes=tuple(notes),
    )
