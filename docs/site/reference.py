"""The reference pages, made from the definitions that the program itself uses."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

import click
import msgspec

from autotune.launchers.base import Status
from autotune.launchers.builtin.config.settings import Settings
from autotune.launchers.frameworks import FRAMEWORKS
from autotune.orchestrator.cli import ALIASES, COMMANDS, main
from autotune.orchestrator.cli import remedies as remedy_table
from autotune.orchestrator.config.cards import CARDS
from autotune.orchestrator.config.public_models import public_models
from autotune.orchestrator.explain.rule_page import explain_rule
from autotune.policies.diagnosis.rules.catalogue import RULES
from autotune.policies.diagnosis.rules.rule import ALWAYS, NEVER
from autotune.policies.remedies.catalogue import MOVES, turn_of
from autotune.policies.remedies.ladder import LADDER
from autotune.policies.values.failure import Cause
from autotune.policies.values.knob_table import KNOB_TABLE, Memory, Unit
from docs.site import json_documents
from docs.site.field_comments import knobs
from docs.site.intros import head

_GLOBAL = ("runs_dir", "color", "json", "quiet", "verbose", "version", "help")
_FATAL = {ALWAYS: "ends the job", NEVER: "does not end the job by itself"}
_UNLESS = "ends the job unless it makes progress afterwards"


_WHICH = """\
Of the example jobs and guides; the settings of a job decide, and `autotune plan job.yaml -v` shows them.
`command` has every knob that its command names as a placeholder.
"""


def pages() -> dict[str, str]:
    """Return every reference page by its place on the site."""
    made = {
        "commands": _commands(),
        "knobs": _knobs(),
        "remedies": _remedies(),
        "rules": _rules(),
        "json": _json(),
        "builtin": _builtin(),
        "models": _models(),
    }
    made |= {f"remedies-{name}": _remedies_of(name) for name in FRAMEWORKS}
    return {f"reference/{name}.md": text for name, text in made.items()}


def linked_files() -> tuple[str, ...]:
    """Return the files of the repository that the reference pages link to."""
    return tuple(f"configs/schemas/{name}.schema.json" for name in json_documents.DOCUMENTS)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([" ".join(cell.split()).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


# ---------------------------------------------------------------------- commands


def _commands() -> str:
    group = click.Context(main, info_name="autotune", **main.context_settings)
    every = {name: main.get_command(group, name) for name in COMMANDS}
    aliases = {name: alias for alias, name in ALIASES.items()}
    parts = [
        head("Commands"),
        table(("command", "what it does"), [(f"[{n}](#{n})", text) for n, text in COMMANDS.items()]),
        "## Options of every command\n",
        _options(group, [p for p in main.params if p.name in _GLOBAL]),
        "An option comes before its [variable](../install.md#environment-variables); no other has one.\n",
    ]
    for name, command in every.items():
        assert command is not None
        context = click.Context(command, info_name=name, parent=group)
        text, _, example = inspect.cleandoc(command.help or "").partition("\b\n")
        parts += [f"## {name}\n", text.strip() + "\n"]
        if name in aliases:
            parts.append(f"Alias: `{aliases[name]}`.\n")
        usage = " ".join(["autotune", name, *command.collect_usage_pieces(context)])
        parts.append(f"    {usage}\n")
        own = [p for p in command.params if isinstance(p, click.Option) and p.name not in _GLOBAL]
        if own:
            parts.append(_options(context, own))
        lines = [line.strip() for line in example.splitlines()[1:] if line.strip()]
        if lines:
            parts.append("Examples:\n\n" + "".join(f"    {line}\n" for line in lines))
        codes = re.findall(r"^ +(\d+) +(.+)$", command.epilog or "", re.MULTILINE)
        if codes:
            parts.append(table(("exit code", "meaning"), codes))
    return "\n".join(parts)


def _options(context: click.Context, options: Iterable[click.Parameter]) -> str:
    rows = []
    for each in options:
        assert isinstance(each, click.Option)
        words = "/".join(f"`{name}`" for name in (*each.opts, *each.secondary_opts))
        value = "" if each.is_flag or each.count else f" `{each.make_metavar(context)}`"
        rows.append((words + value, each.help or ""))
    return table(("option", "meaning"), rows)


# ---------------------------------------------------------------------- knobs and remedies


def _knobs() -> str:
    profiles = {name: _settings_of(name) for name in FRAMEWORKS}
    remedies = {knob: [n for n, move in MOVES.items() if knob in move.turns] for knob in KNOB_TABLE}
    rows = []
    for name, kind, meaning in knobs():
        knob = KNOB_TABLE[name]
        values = ", ".join(f"`{mode}`" for mode in knob.modes) or kind
        saves = ", ".join(f"{memory.value}: {knob.turn(memory)}" for memory in Memory if memory in knob.saves)
        links = ", ".join(f"[{each}](remedies.md#{each})" for each in remedies[name])
        unit = "" if knob.unit in (Unit.SWITCH, Unit.MODE) else f" ({knob.unit.value})"
        rows.append((f"`{name}`", f"{values}{unit}", meaning, saves, links))
    have = [
        (f"`{knob}`", *("yes" if knob in profiles[name] else "" for name in FRAMEWORKS))
        for knob in KNOB_TABLE
    ]
    return "\n".join(
        [
            head("Knobs"),
            table(("knob", "values", "meaning", "saves", "remedies"), rows),
            "## Which framework has which\n",
            _WHICH,
            table(("knob", *FRAMEWORKS), have),
        ]
    )


def _settings_of(framework: str) -> set[str]:
    """Return the knobs that a framework's example jobs can turn."""
    adapter = FRAMEWORKS[framework]
    jobs = remedy_table.examples(adapter)
    return {knob for job in jobs for knob in adapter.profile(job, remedy_table.CLUSTER).supported}


def _remedies() -> str:
    first = {name: number for number, name in reversed(list(enumerate(rung.name for rung in LADDER)))}
    parts = [
        head("Remedies", frameworks=", ".join(f"[{name}](remedies-{name}.md)" for name in FRAMEWORKS)),
    ]
    for name in sorted(MOVES, key=lambda name: (first.get(name, len(LADDER)), name)):
        move = MOVES[name]
        causes = dict.fromkeys(rung.cause.value for rung in LADDER if rung.name == name)
        phases = dict.fromkeys(phase for rung in LADDER if rung.name == name for phase in rung.phases)
        rows = [("frees", move.frees), ("slows", move.slows), ("for", ", ".join(f"`{c}`" for c in causes))]
        if phases:
            rows.append(("phases", ", ".join(f"`{p.value}`" for p in phases if p.value)))
        rows.append(
            ("turns", ", ".join(f"`{k}` ({turn_of(name, k)})" for k in move.turns) or "nothing of the job")
        )
        parts += [f"## {name}\n", table(("", ""), rows)]
    return "\n".join(parts)


def _remedies_of(framework: str) -> str:
    adapter = FRAMEWORKS[framework]
    rows = remedy_table.rows(adapter)
    own = [
        row for row in rows if row.remedy in MOVES and row.status == Status.WORKS.value and row.setting != "-"
    ]
    declined = [row for row in rows if row.status == Status.IMPOSSIBLE.value and row.setting.startswith("(")]
    guides = [row for row in rows if row not in own and row not in declined and row.setting != "-"]
    parts = [
        head("Remedies for {framework}", framework=framework),
        table(
            ("remedy", "setting", "for", "limits"),
            [(_remedy(r.remedy), f"`{r.setting}`", r.phase, r.constraint) for r in own],
        ),
    ]
    if declined:
        why = [(r.remedy, f"`{r.setting.strip('()')}`", r.reason) for r in declined]
        parts += ["## What the framework does not have\n", table(("remedy", "knob", "why"), why)]
    if guides:
        said = [(r.remedy, f"`{r.setting}`", r.status, r.reason) for r in guides]
        parts += ["## What public guides say\n", table(("advice", "setting", "today", "why"), said)]
    return "\n".join(parts)


def _remedy(name: str) -> str:
    """Return a remedy's name as a link; the words of a guide stay as they are."""
    return f"[{name}](remedies.md#{name})" if name in MOVES else name


# ---------------------------------------------------------------------- rules


def _rules() -> str:
    parts = [
        head("Causes and rules"),
    ]
    for cause in Cause:
        known = json.loads(explain_rule(cause.value, as_json=True))
        parts += [f"## {cause.value}\n", f"{known['meaning'].capitalize()}.\n"]
        remedies = dict.fromkeys(name for names in known["remedies"].values() for name in names)
        if remedies:
            parts.append(f"Remedies: {', '.join(f'[{r}](remedies.md#{r})' for r in remedies)}.\n")
        parts.append(_rule_rows(rule for rule in RULES if rule.cause is cause))
    parts += ["## Consequences\n", "Lines that follow from another failure, and name no cause.\n"]
    parts.append(_rule_rows(rule for rule in RULES if rule.cause is None and not rule.harmless))
    parts += ["## Harmless lines\n", "Lines that only look like a failure.\n"]
    parts.append(_rule_rows(rule for rule in RULES if rule.harmless))
    return "\n".join(parts)


def _rule_rows(rules: Iterable[Any]) -> str:
    rows = [
        (
            f"`{rule.name}`",
            f"`{_code(rule.example)}`",
            "" if rule.harmless else _FATAL.get(rule.fatal, _UNLESS),
        )
        for rule in rules
    ]
    return table(("rule", "such a line", "effect"), rows) if rows else ""


def _code(text: str, limit: int = 160) -> str:
    """Return a line as inline code can hold it."""
    plain = " ".join(text.replace("`", "'").split())
    return plain if len(plain) <= limit else f"{plain[:limit]}…"


# ---------------------------------------------------------------------- JSON


def _json() -> str:
    parts = [
        head("JSON documents"),
    ]
    for name, (title, _) in json_documents.DOCUMENTS.items():
        schema = json_documents.schema(name)
        file = f"{name}.schema.json"
        parts += [
            f"## {name}\n",
            f"{title[0].upper()}{title[1:]}. Schema: [{file}](../repository/configs/schemas/{file}).\n",
        ]
        variants = schema.get("anyOf") or [schema.get("items", schema)]
        for variant in variants:
            shown = _definition(schema, variant)
            if len(variants) > 1:
                kind = next(iter(shown["properties"]["type"]["enum"]))
                parts.append(f"### `{kind}` {{: #{name}-{kind} }}\n")
            if shown.get("description"):
                parts.append(f"{shown['description']}\n")
            rows = [(f"`{field}`", _type(of)) for field, of in shown["properties"].items()]
            parts.append(table(("field", "type"), rows))
    return "\n".join(parts)


def _definition(schema: Mapping[str, Any], node: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = node.get("$ref")
    found: Mapping[str, Any] = schema["$defs"][reference.rsplit("/", 1)[1]] if reference else node
    return found


def _type(node: Mapping[str, Any]) -> str:
    """Return a field's type in a few words."""
    if "$ref" in node:
        return str(node["$ref"]).rsplit("/", 1)[1]
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type(each) for each in node["anyOf"]))
    if "enum" in node:
        return ", ".join(f"`{json.dumps(each)}`" for each in node["enum"])
    if node.get("type") == "array":
        items = node.get("items") or {}
        return f"list of {_type(items)}" if items else "list"
    if node.get("type") == "object" and isinstance(node.get("additionalProperties"), Mapping):
        return f"object of {_type(node['additionalProperties'])}"
    return str(node.get("type", "any"))


# ---------------------------------------------------------------------- the built-in job, models and cards


def _builtin() -> str:
    hints = get_type_hints(Settings, include_extras=True)
    rows = [
        (f"`{field.name}`", _annotation(hints[field.name]), f"`{_default(field.default)}`")
        for field in msgspec.structs.fields(Settings)
    ]
    return "\n".join(
        [
            head("Settings of the built-in job"),
            table(("setting", "type", "default"), rows),
        ]
    )


def _annotation(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = re.sub(r"typing\.Annotated\[(\w+), msgspec\.Meta\(([^)]*)\)\]", r"\1 (\2)", text)
    text = re.sub(r"typing\.Literal\[(.*?)\]", lambda found: found[1].replace("', '", "' or '"), text)
    return text.replace(" | ", " or ").replace("NoneType", "None") if get_args(hint) else text


def _default(value: object) -> str:
    return (
        json.dumps(value) if value is None or isinstance(value, bool | int | float | str | tuple) else "{…}"
    )


def _models() -> str:
    models = [
        (", ".join(f"`{name}`" for name in model.names), f"{model.parameters / 1e9:.2f}")
        for model in public_models()
    ]
    cards = [
        (f"`{card.name}`", ", ".join(f"`{name}`" for name in card.also), f"{card.memory_bytes / 2**30:.1f}")
        for card in CARDS
    ]
    return "\n".join(
        [
            head("Models and cards"),
            "## Cards\n",
            table(("card", "also", "GiB"), cards),
            "## Models\n",
            table(("hub names", "billion parameters"), models),
        ]
    )
