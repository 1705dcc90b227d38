"""The secrets of a job: found, masked for what is recorded, and filled in for what runs.

A masked value is `{env: NAME}` under `env` and `settings` of YAML, and `${NAME:?}` in words of a command and
in shell files. What a secret is, `policies.explain.secrets` decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from autotune.orchestrator.config import schema
from autotune.orchestrator.config.schema import LITERAL
from autotune.orchestrator.config.yaml_edit import Edit, dumped, edited, with_values
from autotune.orchestrator.config.yaml_nodes import Document, Path, UnreadableError, read_text
from autotune.policies.explain.secrets import (
    has_shape,
    is_secret_setting,
    is_secret_variable,
    random_looking,
)
from autotune.policies.explain.secrets import masked as masked_text
from autotune.policies.values.command import Command, File
from autotune.policies.values.job import Job, Notify

Lookup = Callable[[str], str | None]

_SHORTEST = 4  # characters; a shorter text is part of everything
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")  # in settings: `{env: CartPole}` is a setting of a game
_WORD = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*):\?\}")
_FLAG = re.compile(r"(--?[A-Za-z][\w.-]*|[+~]*[A-Za-z_][\w.@/-]*)=(.+)", re.DOTALL)


class Secret(NamedTuple):
    """A secret that is written out in a job."""

    path: Path
    variable: str
    value: str
    certain: bool = True  # by its name or a known prefix; else it only looks random


class Missing(NamedTuple):
    """A value that no variable fills in."""

    path: Path
    variable: str


def reference(value: Any, *, of_env: bool = False) -> str | None:
    """Return the variable that `{env: NAME}` names, None for any other value."""
    if not isinstance(value, dict) or list(value) != ["env"] or not isinstance(value["env"], str):
        return None
    name: str = value["env"]
    return name if _VARIABLE.fullmatch(name) or (of_env and name.isidentifier()) else None


def filled(job: Job, lookup: Lookup) -> tuple[Job, tuple[Missing, ...]]:
    """Return a job with its variables filled in, and those that are not set."""
    missing: list[Missing] = []
    names: dict[str, str] = {}  # variable -> value

    def value_of(variable: str, path: Path) -> str | None:
        value = lookup(variable)
        if value is None:
            missing.append(Missing(path, variable))
        else:
            names[variable] = value
        return value

    def fill(value: Any, path: Path) -> Any:
        variable = reference(value)
        if variable is not None:
            text = value_of(variable, path)
            return value if text is None else text
        if isinstance(value, dict):
            return {name: fill(item, (*path, name)) for name, item in value.items()}
        if isinstance(value, list):
            return [fill(item, (*path, index)) for index, item in enumerate(value)]
        return value

    def fill_word(word: str, path: Path) -> str:
        return _WORD.sub(lambda match: value_of(match[1], path) or match[0], word)

    env = {name: fill_word(value, ("env", name)) for name, value in job.env.items()}

    def fill_argument(word: str, path: Path) -> str:
        return word if any(map(str.isspace, word)) else fill_word(word, path)  # or a shell does it

    command = tuple(fill_argument(word, ("command", index)) for index, word in enumerate(job.command))
    notify = _each_text(job.notify, lambda text, path: fill_argument(text, ("notify", *path)))
    settings = fill(job.settings, ("settings",))
    filled_in = {"env": env, "command": command, "settings": settings, "notify": notify, "variables": names}
    return msgspec.structs.replace(job, **filled_in), tuple(missing)


def _each_text(notify: Notify, change: Callable[[str, Path], str]) -> Notify:
    """Return `notify` with each of its words and URLs changed."""
    return msgspec.structs.replace(
        notify,
        command=tuple(change(word, ("command", index)) for index, word in enumerate(notify.command)),
        webhook=notify.webhook and change(notify.webhook, ("webhook",)),
        apprise=tuple(change(url, ("apprise", index)) for index, url in enumerate(notify.apprise)),
    )


def written_out(job: Job) -> tuple[Secret, ...]:
    """Return the secrets that a job itself holds, in its settings, environment, commands and `notify`."""
    found: list[Secret] = []
    taken = {value: name for name, value in job.variables.items()}

    def add(path: Path, variable: str, value: str, *, certain: bool = True) -> None:
        other = next((s for s in found if s.variable == variable and s.value != value), None)
        if other is not None and path[0] != "env":
            variable = _name_of("_".join(str(part) for part in path[1:]))
        found.append(Secret(path, variable, value, certain))

    for name, value in job.env.items():
        if value and value not in taken and (found_as := _is_certain(("env", name), value)) is not None:
            add(("env", name), name, value, certain=found_as)
    for path, value in (*_texts(job.settings, ("settings",)), *_texts(job.document, ("document",))):
        if value not in taken and (found_as := _is_certain(path, value)) is not None:
            add(path, _name_of(_last_name(path)), value, certain=found_as)
    for path, variable, value in (
        *_of_words(job.command, ("command",)),
        *_of_words(job.notify.command, ("notify", "command")),
    ):
        if value not in taken:
            add(path, variable, value)
    for path, url in _urls(job.notify):
        if url not in taken and not _WORD.search(url):
            add(path, _name_of("_".join(map(str, path))), url)
    return tuple(found)


def in_shell_texts(job: Job) -> Iterator[tuple[Path, str]]:
    """Yield the words of commands that are texts for a shell and hold secrets, with these masked.

    Nothing can stand for a part of such a text when it runs, so it is not recorded, and refused instead.
    """
    for place, words in ((("command",), job.command), (("notify", "command"), job.notify.command)):
        for index, word in enumerate(words):
            program = index > 0 and re.fullmatch(r"-[a-z]*c", words[index - 1])
            text = re.sub(r"\\\n\s*", "", word)  # what a shell reads of a line that goes on
            if (program or any(map(str.isspace, word))) and (shown := masked_text(text)) != text:
                yield (*place, index), shown


def doubtful(job: Job) -> Iterator[Path]:
    """Yield where values stand that only look like keys."""
    yield from (secret.path for secret in written_out(job) if not secret.certain)
    for index, word in enumerate(job.command):
        if random_looking(word, name=job.command[index - 1] if index else ""):
            yield ("command", index)


def _urls(notify: Notify) -> Iterator[tuple[Path, str]]:
    """Yield where notifications go: who knows such a URL can use it."""
    if notify.webhook:
        yield ("notify", "webhook"), notify.webhook
    for index, url in enumerate(notify.apprise):
        if url:
            yield ("notify", "apprise", index), url


def _of_words(command: tuple[str, ...], place: Path) -> Iterator[tuple[Path, str, str]]:
    for index, word in enumerate(command):
        for variable, value in _of_word(word, command[index - 1] if index else ""):
            yield (*place, index), variable, value


def values_of(job: Job) -> dict[str, str]:
    """Return the values that nothing may show, each with its variable; the longest first."""
    hidden = {value: name for name, value in job.variables.items() if len(value) >= _SHORTEST}
    hidden |= {secret.value: secret.variable for secret in written_out(job) if len(secret.value) >= _SHORTEST}
    return dict(sorted(hidden.items(), key=lambda item: -len(item[0])))


def masked(job: Job) -> Job:
    """Return the job as it may be recorded."""
    hidden = {value: name for name, value in job.variables.items()}
    hidden |= {secret.value: secret.variable for secret in written_out(job)}
    of_env = {secret.path[1]: secret.variable for secret in written_out(job) if secret.path[0] == "env"}

    def mask(value: Any) -> Any:
        if isinstance(value, str) and value in hidden:
            return {"env": hidden[value]}
        if isinstance(value, dict):
            return {name: mask(item) for name, item in value.items()}
        return [mask(item) for item in value] if isinstance(value, list) else value

    longest = values_of(job)
    env = {
        name: f"${{{of_env.get(name) or hidden[value]}:?}}" if value in hidden else value
        for name, value in job.env.items()
    }
    return msgspec.structs.replace(
        job,
        env={name: _without(value, longest) for name, value in env.items()},
        settings=mask(job.settings),
        document=mask(job.document),
        command=tuple(_without(word, longest) for word in job.command),
        notify=_each_text(job.notify, lambda text, _: _without(text, longest)),
        variables={},
    )


def of_file(path: str) -> dict[str, str]:
    """Return the secrets that are written out in a job file, by the variables that stand for them."""
    try:
        text = read_text(path) if path else ""
    except UnreadableError:
        return {}
    values = Document(text, "", literal=LITERAL).value
    values = values if isinstance(values, dict) else {}
    try:
        job = Job(
            name="",
            framework="",
            env=msgspec.convert(values.get("env") or {}, dict[str, Any], strict=False),
            settings=msgspec.convert(values.get("settings") or {}, dict[str, Any]),
            command=msgspec.convert(values.get("command") or (), tuple[str, ...], strict=False),
            notify=_written_notify(values.get("notify")),
        )
    except msgspec.ValidationError:
        return {}
    env = {name: value for name, value in job.env.items() if isinstance(value, str)}
    return {s.variable: s.value for s in written_out(msgspec.structs.replace(job, env=env))}


def _written_notify(values: Any) -> Notify:
    """Return what stands under `notify`, as far as it is text."""
    section = values if isinstance(values, dict) else {}

    def texts(name: str) -> tuple[str, ...]:
        items = section.get(name)
        return tuple(i if isinstance(i, str) else "" for i in items) if isinstance(items, list) else ()

    webhook = section.get("webhook")
    return Notify(
        command=texts("command"),
        webhook=webhook if isinstance(webhook, str) else None,
        apprise=texts("apprise"),
    )


def job_values(recorded: Job) -> dict[str, Any]:
    """Return the values of a job file that states all of a masked job."""
    values = schema.values_of(recorded)
    env = {name: _as_yaml(value) for name, value in recorded.env.items()}
    return values | {"env": env, "notify": values["notify"] | _notify_values(recorded.notify)}


def _notify_values(recorded: Notify) -> dict[str, Any]:
    return {
        "command": list(recorded.command),
        "webhook": recorded.webhook and _as_yaml(recorded.webhook),
        "apprise": [_as_yaml(url) for url in recorded.apprise],
    }


def masked_job_text(text: str, job: Job) -> str:
    """Return the text of a job file with the secrets that are written out in it masked."""
    before = Document(text, "", literal=LITERAL)
    secrets = written_out(job)
    if not secrets or not isinstance(before.value, dict):
        return text
    recorded = masked(job)
    shown = {
        "env": {name: _as_yaml(value) for name, value in recorded.env.items()},
        "settings": recorded.settings,
        "command": list(recorded.command),
    }
    if isinstance(before.value.get("notify"), dict):
        shown["notify"] = before.value["notify"] | {
            name: value
            for name, value in _notify_values(recorded.notify).items()
            if name in before.value["notify"]
        }
    touched = {secret.path[0] for secret in secrets}
    edits = [
        edit
        for section in ("env", "settings", "command", "notify")
        if section in touched and section in before.value
        for edit in _differences(before.value[section], shown[section], (section,))
    ]
    out = edited(text, edits, literal=LITERAL)
    lines = [masked_text(line) if "#" in line else line for line in out.split("\n")]
    if Document("\n".join(lines), "", literal=LITERAL).value == Document(out, "", literal=LITERAL).value:
        out = "\n".join(lines)
    if any(secret.value in out for secret in secrets if len(secret.value) >= _SHORTEST):
        out = dumped(with_values(before.value, edits))
    return out


def shown_command(command: Command, job: Job) -> Command:
    """Return a command as it may be recorded: secrets of the job, of flags and of known shapes masked."""
    hidden = values_of(job)
    hidden |= {v: n for n, v in command.env.items() if len(v) >= _SHORTEST and is_secret_variable(n)}
    of_env = {s.path[1]: s.variable for s in written_out(job) if s.path[0] == "env"}
    argv = [
        _masked_word(word, command.argv[index - 1] if index else "", hidden)
        for index, word in enumerate(command.argv)
    ]
    env = {
        name: f"${{{of_env.get(name, hidden.get(value, name))}:?}}"
        if value and (is_secret_variable(name) or value in hidden)
        else _without(value, hidden)
        for name, value in command.env.items()
    }
    files = tuple(File(name=file.name, text=_without(file.text, hidden)) for file in command.files)
    return msgspec.structs.replace(command, argv=tuple(argv), env=env, files=files)


def _masked_word(word: str, before: str, hidden: Mapping[str, str]) -> str:
    word = _without(word, hidden)
    for variable, value in _of_word(word, before):
        word = word.replace(value, f"${{{variable}:?}}")
    for value in random_looking(word, name=before):
        word = word.replace(value, f"${{{_name_of(before if before.startswith('-') else 'secret')}:?}}")
    return word


def _of_word(word: str, before: str) -> Iterator[tuple[str, str]]:
    """Yield the secret in a word of a command line with the variable that stands for it."""
    if _WORD.search(word):
        return
    flag = _FLAG.fullmatch(word)
    if flag is not None and (is_secret_setting(flag[1]) or has_shape(flag[2], name=flag[1])):
        yield _name_of(flag[1]), flag[2]
    elif before.startswith("-") and "=" not in before and is_secret_setting(before):
        if word.startswith("--"):  # the next flag: the one before it has no value
            return
        yield _name_of(before), word
    elif has_shape(word, name=before) and not any(map(str.isspace, word)):
        yield _name_of(before if before.startswith("-") else "secret"), word


def _is_certain(path: Path, value: str) -> bool | None:
    """Return whether a value is surely a secret, or only looks random; None where it is neither."""
    name = _last_name(path)
    if path[0] == "env":
        certain = is_secret_variable(name) or has_shape(value, name=name) or masked_text(value) != value
    else:
        certain = _is_secret(path, value)
    if certain:
        return True
    return False if path[0] != "document" and random_looking(value, name=name) == (value,) else None


def _is_secret(path: Path, value: str) -> bool:
    name = ".".join(str(part) for part in path[1:] if isinstance(part, str))
    if not value or value.startswith("${") or value.lower() in ("null", "none", "true", "false"):
        return False
    return is_secret_setting(name) or has_shape(value, name=name)


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, (dict, list)) and reference(value) is None:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, (*path, name))


def _last_name(path: Path) -> str:
    return next((str(part) for part in reversed(path) if isinstance(part, str)), "secret").rpartition(".")[2]


def _name_of(key: str) -> str:
    """Return the variable that a key's value is expected in: `trainer.wandb-key` is WANDB_KEY."""
    name = re.sub(r"[^A-Za-z0-9]+", "_", key).strip("_").upper()
    return f"_{name}" if not name or name[0].isdigit() else name


def _without(text: str, hidden: Mapping[str, str]) -> str:
    """Return a text with secrets as `${NAME:?}`, also where they are written as JSON."""
    for value, variable in hidden.items():
        for form in {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}:
            text = text.replace(form, f"${{{variable}:?}}")
    return text


def _as_yaml(value: str) -> Any:
    whole = _WORD.fullmatch(value)
    return {"env": whole[1]} if whole else value


def _differences(old: Any, new: Any, path: Path) -> Iterator[Edit]:
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for name in old:
            yield from _differences(old[name], new[name], (*path, name))
    elif old != new and not (isinstance(old, dict) and reference(old, of_env=True)):
        yield Edit(path, new, "")
