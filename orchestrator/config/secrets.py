"""Secrets of a job: refused as literals, filled in for programs that run, masked everywhere else.

A masked value is `{env: NAME}` under `env` and `settings` in YAML, and `${NAME:?}` in words of a command and
in shell files. `policies.explain.secrets` decides what a secret is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from autotune.orchestrator.config import schema
from autotune.orchestrator.config.yaml_nodes import Path
from autotune.policies.explain.secrets import (
    Grade,
    Secret,
    is_secret_variable,
    is_text,
    looks_random,
    one_line,
    secrets_in,
    secrets_in_words,
    secrets_of,
    variable_of,
)
from autotune.policies.values.command import Command, File
from autotune.policies.values.job import Job, Notify

Lookup = Callable[[str], str | None]

_SHORTEST = 4  # characters; a shorter text occurs in too many others to be masked as a part
_EXCERPT_CHARS = 120  # characters of a command shown in an error
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")  # in settings, `{env: CartPole}` is a game
_WORD = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*):\?\}")
_URLS = (("notify", "webhook"), ("notify", "apprise"))
_HOST = re.compile(r"^(?:https?|jsons?|ntfys?)://[^/]*")  # other schemes have a key here for Apprise
_SHELL, _PYTHON = re.compile(r"\b(?:ba|da|z|k)?sh\b"), re.compile(r"\bpython[\d.]*\b")


class Held(NamedTuple):
    """A literal secret in a job."""

    path: Path
    text: str  # the value at `path`, with continued shell lines joined
    secret: Secret

    @property
    def value(self) -> str:
        """The secret itself."""
        return self.text[self.secret.start : self.secret.end]

    @property
    def is_whole(self) -> bool:
        """Whether the secret is the whole value at `path`."""
        return self.value == self.text

    def replaced(self, by: str) -> str:
        """Return the value at `path` with the secret replaced, as one short line."""
        text = self.text[: self.secret.start] + by + self.text[self.secret.end :]
        return one_line(text, longest=_EXCERPT_CHARS)


class Missing(NamedTuple):
    """A reference to a variable that is not set."""

    path: Path
    variable: str


def reference(value: Any) -> str | None:
    """Return the variable in `{env: NAME}`; None for any other value."""
    if not isinstance(value, dict) or list(value) != ["env"] or not isinstance(value["env"], str):
        return None
    name: str = value["env"]
    return name if _VARIABLE.fullmatch(name) else None


def filled(job: Job, lookup: Lookup = os.environ.get) -> tuple[Job, tuple[Missing, ...]]:
    """Return a job with its variables filled in, and the variables that are not set."""
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
        return word if any(map(str.isspace, word)) else fill_word(word, path)  # a text is left to its shell

    command = tuple(fill_argument(word, ("command", index)) for index, word in enumerate(job.command))
    notify = _each_text(job.notify, lambda text, path: fill_argument(text, ("notify", *path)))
    settings = fill(job.settings, ("settings",))
    filled_in = {"env": env, "command": command, "settings": settings, "notify": notify, "variables": names}
    return msgspec.structs.replace(job, **filled_in), tuple(missing)


def _each_text(notify: Notify, change: Callable[[str, Path], str]) -> Notify:
    """Return `notify` with `change` applied to all its words and URLs."""
    return msgspec.structs.replace(
        notify,
        command=tuple(change(word, ("command", index)) for index, word in enumerate(notify.command)),
        webhook=notify.webhook and change(notify.webhook, ("webhook",)),
        apprise=tuple(change(url, ("apprise", index)) for index, url in enumerate(notify.apprise)),
    )


def written_out(job: Job) -> tuple[Held, ...]:
    """Return the literal secrets of a job, and values that may be secrets."""
    taken = set(job.variables.values())
    out: dict[tuple[Path, int], Held] = {}
    for path, text, secret in _secrets_of(job):
        each = Held(path, text, secret)
        if (
            secret.grade is Grade.LIKELY
            or each.text in taken
            or each.value in taken
            or (path, secret.start) in out
        ):
            continue
        if any(o.secret.variable == secret.variable and o.value != each.value for o in out.values()):
            name = variable_of("_".join(map(str, path)).replace(".", "_"))
            each = each._replace(secret=secret._replace(variable=name)) if path[0] != "env" else each
        out[path, secret.start] = each
    return tuple(out.values())


def _secrets_of(job: Job) -> Iterator[tuple[Path, str, Secret]]:
    for path, value in _values(schema.values_of(job), ()):
        name = ".".join(part for part in path if isinstance(part, str))
        if not isinstance(value, str):
            if path[:2] in _URLS:
                continue
            for index, text, secret in secrets_in_words(value):
                whole = secret._replace(start=0, end=len(text))
                yield (*path, index), text, whole if path[0] == "settings" else secret
        elif path[:2] in _URLS and value and not _WORD.search(value):
            yield path, value, _of_url(path, value)
        elif "command" not in path[:2] and not _WORD.search(value):  # a command is checked as a list above
            for secret in secrets_of(name, value):
                whole = secret._replace(start=0, end=len(value), variable=variable_of(name))
                yield path, value, whole if path[0] == "settings" else secret  # filled in as a whole
    for path, value in _values(job.document, ("document",)):
        if isinstance(value, str):
            result = secrets_of(str(path[-1]), value)
            yield from ((path, value, secret) for secret in result if secret.grade is Grade.CERTAIN)


def _of_url(path: Path, url: str) -> Secret:
    """Return the URL of a notification as a secret: whoever knows it can use it."""
    certain = any(each.grade is Grade.CERTAIN for each in secrets_in(url)) or looks_random(_HOST.sub("", url))
    grade = Grade.CERTAIN if certain else Grade.RANDOM
    return Secret(0, len(url), variable_of("_".join(map(str, path))), grade)


def _values(value: Any, path: Path) -> Iterator[tuple[Path, str | Sequence[str]]]:
    """Yield the texts in a value with their paths, and also each list of texts as a whole."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict) and reference(value) is None:
        for name, item in value.items():
            yield from _values(item, (*path, name))
    elif isinstance(value, (list, tuple)):
        if all(isinstance(each, str) for each in value):
            yield path, value
        for index, item in enumerate(value):
            yield from _values(item, (*path, index))


def certain(job: Job) -> Iterator[tuple[Path, str, str]]:
    """Yield the path of each secret, its value with the secret masked, and what to write instead."""
    for each in written_out(job):
        if each.secret.grade is Grade.CERTAIN:
            yield each.path, "" if each.is_whole else each.replaced("***"), _instead(each, job)


def doubtful(job: Job) -> Iterator[Path]:
    """Yield the paths of values that look like keys but may not be."""
    result = (each for each in written_out(job) if each.secret.grade is Grade.RANDOM)
    yield from dict.fromkeys(each.path for each in result if each.path[0] != "notify")


def without_secrets(job: Job) -> tuple[Job, tuple[str, ...]]:
    """Return a job with its secrets replaced by variables, and these variables."""
    result = [each for each in written_out(job) if each.secret.grade is Grade.CERTAIN]
    env, command, settings = dict(job.env), list(job.command), msgspec.to_builtins(job.settings)
    for each in reversed(result):  # from the end of a text, so that earlier offsets stay valid
        section, key = each.path[0], each.path[-1]
        if section == "env":
            env[str(key)] = _replaced(env[str(key)], each, job)
        elif section == "command":
            is_begun = command[int(key)] != job.command[int(key)]
            command[int(key)] = _replaced(command[int(key)] if is_begun else each.text, each, job)
            if is_text(job.command, int(key)):
                env[each.secret.variable] = f"${{{each.secret.variable}:?}}"
        elif section == "settings":
            inner = settings
            for part in each.path[1:-1]:
                inner = inner[part]
            inner[key] = {"env": each.secret.variable}
    changed = msgspec.structs.replace(job, env=env, command=tuple(command), settings=settings)
    return changed, tuple(dict.fromkeys(each.secret.variable for each in result))


def _replaced(text: str, held: Held, job: Job) -> str:
    """Return a text of the job with a secret replaced by its variable."""
    by, quotes = _reference_to(held, job)
    return text[: held.secret.start - quotes] + by + text[held.secret.end + quotes :]


def _reference_to(held: Held, job: Job) -> tuple[str, int]:
    """Return the reference that replaces a secret, and how many quotes on each side it also replaces."""
    path, name = held.path, held.secret.variable
    words = {"command": job.command, "notify": job.notify.command}.get(str(path[0]), ())
    if not words or not is_text(words, int(path[-1])):
        return f"${{{name}:?}}", 0
    before = " ".join(words[: int(path[-1])])
    if _PYTHON.search(before) and not _SHELL.search(before):
        return f'os.environ["{name}"]', 1
    return (f"'\"${name}\"'" if _is_single_quoted(held.text, held.secret.start) else f"${name}"), 0


def _instead(held: Held, job: Job) -> str:
    """Return a hint on what to write in place of a secret."""
    path, name = held.path, held.secret.variable
    export = f"and `export {name}=...` where autotune runs"
    by, quotes = _reference_to(held, job)
    if path[0] == "settings" or path[:2] in _URLS or (path[0] == "env" and held.is_whole):
        key = f"{path[-1]}: " if isinstance(path[-1], str) else ""
        return f"write `{key}{{env: {name}}}`, {export}"
    if path[0] not in ("env", "command", "notify"):
        return "leave it out: log in where autotune runs, or let the job read a variable of `env`"
    if by.startswith("${"):
        return f"write `{held.replaced(by)}`, {export}"
    where = "in place of it and its quotes" if quotes else "in its place"
    in_env = f", `env: {{{name}: {{env: {name}}}}}` in the job" if path[0] == "command" else ""
    return f"write `{by}` {where}{in_env}, {export}"


def _is_single_quoted(text: str, position: int) -> bool:
    """Return whether a position of a shell text is inside single quotes, where nothing is expanded."""
    quote = ""
    for each in re.findall(r"\\.|['\"]", text[:position], re.DOTALL):
        if each == quote:
            quote = ""
        elif not quote and each in ("'", '"'):
            quote = each
    return quote == "'"


def values_of(job: Job) -> dict[str, str]:
    """Return the secret values of a job with their variables, longest first."""
    hidden = {value: name for name, value in job.variables.items()}
    hidden |= {each.value: each.secret.variable for each in written_out(job)}
    return dict(sorted(hidden.items(), key=lambda item: -len(item[0])))


def masked_text(text: str, job: Job) -> str:
    """Return a text with a job's secret values replaced by their variables."""
    return _without(text, values_of(job))


def masked(job: Job) -> Job:
    """Return the job with its secrets masked, to be recorded."""
    whole = values_of(job)
    parts = {value: name for value, name in whole.items() if len(value) >= _SHORTEST}
    own = {each.value: each.secret.variable for each in written_out(job)}
    of_env = {each.path[1]: each.secret.variable for each in written_out(job) if each.path[0] == "env"}

    def mask(value: Any) -> Any:
        if isinstance(value, str):
            return {"env": whole[value]} if value in whole else _without(value, own)
        if isinstance(value, dict):
            return {name: mask(item) for name, item in value.items()}
        return [mask(item) for item in value] if isinstance(value, list) else value

    def mask_variable(name: str, value: str) -> str:
        return f"${{{of_env.get(name, whole[value])}:?}}" if value in whole else _without(value, parts)

    return msgspec.structs.replace(
        job,
        env={name: mask_variable(name, value) for name, value in job.env.items()},
        settings=mask(job.settings),
        document=mask(job.document),
        command=tuple(_without(word, parts) for word in job.command),
        notify=_each_text(job.notify, lambda text, _: _without(text, parts)),
        variables={},
    )


def restored(recorded: Job, stated: Job | None) -> Job:
    """Return a masked job with the values of its own file, if masking those gives the same job."""
    if stated is None:
        return recorded
    fields = ("env", "settings", "command", "notify")
    again = msgspec.structs.replace(recorded, **{name: getattr(stated, name) for name in fields})
    return again if masked(again) == recorded else recorded


def job_values(recorded: Job) -> dict[str, Any]:
    """Return the values of a job file that defines a whole masked job."""
    values = schema.values_of(recorded)
    env = {name: as_yaml(value) for name, value in recorded.env.items()}
    notify = {
        "command": list(recorded.notify.command),
        "webhook": recorded.notify.webhook and as_yaml(recorded.notify.webhook),
        "apprise": [as_yaml(url) for url in recorded.notify.apprise],
    }
    return values | {"env": env, "notify": values["notify"] | notify}


def shown_command(command: Command, job: Job) -> Command:
    """Return a command to be recorded: secrets of the job, of flags and of known formats are masked."""
    hidden = {value: name for value, name in values_of(job).items() if len(value) >= _SHORTEST}
    hidden |= {v: n for n, v in command.env.items() if len(v) >= _SHORTEST and is_secret_variable(n)}
    of_env = {each.path[1]: each.secret.variable for each in written_out(job) if each.path[0] == "env"}
    argv = [_without(word, hidden) for word in command.argv]
    for index, text, secret in tuple(secrets_in_words(argv)):
        if secret.grade is not Grade.LIKELY:
            argv[index] = argv[index].replace(text[secret.start : secret.end], f"${{{secret.variable}:?}}")
    env = {
        name: f"${{{of_env.get(name, hidden.get(value, name))}:?}}"
        if value and (is_secret_variable(name) or value in hidden)
        else _without(value, hidden)
        for name, value in command.env.items()
    }
    files = tuple(File(name=file.name, text=_without(file.text, hidden)) for file in command.files)
    return msgspec.structs.replace(command, argv=tuple(argv), env=env, files=files)


def _without(text: str, hidden: Mapping[str, str]) -> str:
    """Return a text with secrets, also JSON-escaped ones, replaced by `${NAME:?}`."""
    for value, variable in hidden.items():
        for form in {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}:
            text = text.replace(form, f"${{{variable}:?}}")
    return text


def as_yaml(value: str) -> Any:
    """Return a masked text as written in a job file: `{env: NAME}` if it is just `${NAME:?}`."""
    whole = _WORD.fullmatch(value)
    return {"env": whole[1]} if whole else value
