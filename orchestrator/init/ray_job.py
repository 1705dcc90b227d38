"""What `ray job submit` runs: the program and its runtime environment."""

from __future__ import annotations

import json

import yaml

_SWITCHES = frozenset({"--no-wait", "-v", "--verbose", "--verify"})


def submission(words: list[str]) -> tuple[list[str], dict[str, str], str, list[str]]:
    """Return the program of `ray job submit`, its environment, its folder, and what could not be read."""
    env: dict[str, str] = {}
    workdir, problems, at = "", list[str](), 0
    while at < len(words):
        word = words[at]
        if word == "--":
            return words[at + 1 :], env, workdir, problems
        if not word.startswith("-"):
            return words[at:], env, workdir, problems
        name, equals, value = word.partition("=")
        if not equals and name not in _SWITCHES:
            at += 1
            value = words[at] if at < len(words) else ""
        if name == "--runtime-env-json":
            variables, wrong = variables_of(value)
            env |= variables
            problems += wrong
        elif name == "--runtime-env":
            problems.append(
                f"the variables of the runtime environment `{value}` are not read: add them to `env:`"
            )
        elif name == "--working-dir":
            workdir = value
        at += 1
    return [], env, workdir, problems


def variables_of(text: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables of a runtime environment as JSON or YAML, and what else is in it."""
    try:
        document = json.loads(text)
    except ValueError:
        try:
            document = yaml.safe_load(text)
        except yaml.YAMLError:
            document = None
    if not isinstance(document, dict):
        return {}, ["the JSON of --runtime-env-json cannot be read: add its variables to `env:`"]
    env = {str(name): str(value) for name, value in (document.get("env_vars") or {}).items()}
    rest = sorted(set(document) - {"env_vars", "working_dir"})
    return env, [f"`{name}` of the runtime environment is left out" for name in rest]
